"""The wire format of `protocol.DataProto`."""

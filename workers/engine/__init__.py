"""Training engines: FSDP2, packing, checkpoint input and output."""

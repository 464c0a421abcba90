"""The training engine: FSDP2 sharding, sequence packing, optimizer, checkpoints."""

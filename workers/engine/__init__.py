"""The training engine: FSDP2 sharding, sequence packing, sequence parallelism, optimizer and checkpoints.

Read `fsdp.py` first, then `update.py`: the loop over mini-batches and micro-batches, which every role shares.
`packing.py` turns rows into model inputs without padding, `checkpoint.py` saves and loads, and `phase.py` decides
which engine occupies the device.

The engine knows a network only through `network.py`; the networks are in `workers/policy/` and `workers/diffusion/`.
"""

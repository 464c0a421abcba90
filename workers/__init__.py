"""Code that runs in worker processes: one process per device, which holds the engines of all roles.

Read `roles/actor_rollout.py` first, the policy's worker. `losses.py` has the losses of a micro-batch, `engine/`
trains, `policy/` has the networks, `engines/` sample tokens, `rollout/` and `agents/` turn tokens into answers and
episodes, `supervised/` has the workers of SFT, DPO and reward models, `diffusion/` those of diffusion models, and
`pool/` runs code of others in supervised processes.

This folder imports `verl_lite`, never `trainer`.
"""

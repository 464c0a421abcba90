"""The workers, one class for each role of a training: their methods are what the driver calls.

Read `actor_rollout.py` first: training engine and rollout engine on one device. It is built from `training_worker.py`
and `sampling_worker.py`, as are `critic.py` and `rollout_worker.py` (an engine on a device of its own).
`frozen_models.py` has the reference model, teachers and reward models.

Imports all other folders of `workers/` except `diffusion/` and `supervised/`.
"""

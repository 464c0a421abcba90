"""The parts of a PPO step that do not sample: roles, advantages, metrics and teachers.

Read `roles.py` first: the driver's side of the worker groups, which plans a batch, dispatches it and restores the
order of its rows. `requirements.py` derives from the options which models and passes a step needs. `advantage.py`
turns scores into advantages, `step_metrics.py` computes the metrics of a step, and `teachers.py` serves on-policy
distillation.

Imports `loop/`, `rewards/` and `data/`; `trainer/ray_trainer.py` puts the parts together.
"""

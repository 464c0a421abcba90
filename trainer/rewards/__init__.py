"""Scores of a batch on the driver: reward functions, reward models, failures, and adjustments of scores.

Read `scores.py` first. `groups.py` joins the scores of a group, `failures.py` masks failed rewards and stops the run
if they are too many, and `model_inputs.py` builds the inputs of a reward model. The guide is
verl_lite/rewards/README.md.

Imports `validation/` for samples. The functions run in `workers/rewards/`, in processes of their own.
"""

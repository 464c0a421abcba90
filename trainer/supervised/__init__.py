"""Training without a rollout: supervised fine-tuning, DPO and reward models.

Read `loop.py` first: the job and the trainer that the three share. `sft.py` and `reward_training.py` read the rows of
each. The workers and losses are in `workers/supervised/`. The guide is trainer/SFT.md.

Imports `launch/`, `loop/` and `data/`.
"""

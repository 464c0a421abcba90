"""Training without a rollout: supervised fine-tuning, DPO and reward models.

Read `loop.py` first: the job, the trainer and the worker that the three share. `sft.py`, `dpo.py` and
`reward_training.py` add data and loss of each. The guide is trainer/SFT.md.

Imports `launch/`, `loop/` and `data/`.
"""

"""The workers of supervised training, and their losses: fine-tuning, DPO and reward models.

Read `worker.py` first: the class that the three share. `sft.py`, `dpo.py` and `reward_model.py` add the loss and the
network of each. The driver's side is in `trainer/supervised/`.

Imports `workers/roles/`, `engine/` and `policy/`.
"""

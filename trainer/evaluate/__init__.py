"""Commands on finished runs: they validate a policy, write its answers to a file, or score saved answers again.

Start with `answering.py`, the trainer that only answers; `evaluation.py` and `generation.py` differ in what they do
with its answers, and `scoring.py` reads answers from files instead. This folder is above the training loop; the parts
that the loop uses, too, are in `trainer/validation/`.
"""

"""Predicts batches, memory and time of a run before it starts, and finds options that fit.

Read `memory.py` first: the bytes of each phase of a step, term by term. `batch.py` counts micro-batches,
`step_time.py` predicts seconds, `fit.py` changes options until the run fits, `launched.py` decides which devices the
plan is for, and `printed.py` prints the tables of `trainer.plan` and of a dry run. The guide is trainer/PLANNING.md.

Imports `trainer/ppo/requirements.py`, so that plan and run agree on the models and passes of a step.
"""

"""The frame of every training loop, independent of what is trained.

Read `training_loop.py` first: restore, validate, run the steps, log, save and finish. `steps.py` counts the steps,
and `saving.py` writes and prunes checkpoints in the foreground or in the background.

Imports `checkpoint/`, `observe/`, `validation/` and the callbacks of the user, but no trainer.
"""

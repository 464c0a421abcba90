"""From the options of a command to its exit status.

Read `run.py` first: a command provides a `Job`, and `run` checks it, acquires its resources, runs it and releases them.
`ppo_job.py` is the job of `trainer.main_ppo`: `ppo_data.py` reads its data, and `build.py` creates worker groups and
trainer. `model_checks.py` and `engine_checks.py` refuse, before any worker starts, what a worker would refuse.
`resources.py` acquires devices and Ray, and `start.py` parses the command line before heavy modules are imported.

Imports the trainers and everything below them; commands and `trainer.train` import this folder.
"""

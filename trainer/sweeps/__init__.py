"""Parts of `python -m trainer.sweep`: see `trainer/SWEEPS.md`; `command.py` is all of it, `runner.py` the loop."""

"""Parts of `python -m trainer.sweep`: see `trainer/SWEEPS.md`, and `runner.py` for the loop."""

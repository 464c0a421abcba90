"""A rollout engine of your own, in one file: `engine.py`."""

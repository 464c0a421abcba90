"""Validation of a run: answers to the validation prompts, their samples, files of samples, and metrics.

Start with `answers.py`, which generates and finishes the answers in chunks. The training loop uses this folder; the
commands that evaluate a finished run are in `trainer/evaluate/`, above the loop.
"""

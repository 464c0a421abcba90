"""Faults put into the core files on purpose, and which tests notice: `python -m tests.mutation`."""

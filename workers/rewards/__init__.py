"""Runs reward functions in supervised processes."""

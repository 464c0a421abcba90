"""Runs the environments of agents in supervised processes."""

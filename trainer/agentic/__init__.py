"""Agents that act in environments: the driver."""

"""Environments of agents beside the rollout engine: the pool, its processes, and what goes between them."""

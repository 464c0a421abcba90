"""Reward functions in processes of their own: the pool, its supervisor, and the inside of a process."""

"""Rollout engines behind one protocol: submit, step, load_weights, reset_cache, sleep, wake."""

"""Decides on the driver which samples are generated, for which step, on which engine and under which weights.

Read `scheduler.py` first: it starts groups of samples, runs ahead of training within the allowed staleness, and hands
complete groups to the step. `group_sources.py` draws the groups, `dynamic_sampling.py` filters them, `weight_sync.py`
decides when engines receive the trained weights, and `engine_pool.py` serves engines on devices of their own.

Imports `ppo/`, `loop/`, `rewards/` and `data/`. The engines themselves are in `workers/engines/`.
"""

"""Samplers of flow-matching models: pure functions of tensors.

Read `flow_match.py` first: noise levels, experts and deterministic Euler steps. `flow_sde.py` has the stochastic
sampler, whose steps are actions with a known probability. Rewards of clips are in `verl_lite/visual_rewards/`.
"""

"""Rollout engines behind one interface: submit requests, step, load weights, sleep and wake.

Read `base.py` first, the interface and its promises. `vllm_engine.py` runs vLLM, `hf_engine.py` runs transformers
with a cache of its own (the default on a CPU). `sampling.py` draws tokens, and `weight_transfer.py` brings weights to
engines in other processes.

Imports `workers/policy/`; knows nothing about answers, episodes or rewards.
"""

"""Policy, value and reward networks: log-probs, entropy, values and scores from the layers of transformers.

Read `causal_lm.py` first, then README.md in this folder. `loading.py` builds a network from its options,
`families.py` lists which model families are packed, `tile_functions.py` computes log-probs in tiles, and `adapter.py`
adds LoRA.

Imports `workers/engine/` for its interface of a network and for packing.
"""

"""Policy, value and reward networks: log-probs, entropy, values and scores from the layers of transformers.

Read `causal_lm.py` first, then README.md in this folder. `output_layer.py` computes log-probs from hidden states, in
tiles (`tile_functions.py`). `loading.py` builds a network from its options, `families.py` lists which model families
are packed, and `adapter.py` adds LoRA.

Imports `workers/engine/` for its interface of a network and for packing.
"""

"""The mathematics behind `verl_lite.core_algos`: pure functions of tensors, one file for each kind.

Read `loss_inputs.py` first: the argument of every loss, with the shape of each field. `policy_losses.py` and
`reinforce_losses.py` have the losses, `advantages.py` (then `advantages_by_token.py`) and `agentic_advantages.py` the
estimators, `masked.py` the means over tokens that count. Imports only torch, the registry and `verl_lite.metrics`.
"""

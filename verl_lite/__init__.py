"""The kernel of verl_lite: pure data, mathematics and contracts. Importing it needs no GPU, no Ray and no vLLM.

Read `core_algos.py` first (losses and advantages), then `protocol.py` (the batch), `schema.py` (its columns) and
`seqlen_balance.py` (the planner that makes gradients independent of the split). `single_controller/` calls workers,
`config/` has every option, `rewards/` and `envs/` what users extend. This folder imports nothing of the other three.
"""

__version__ = "0.2.0"

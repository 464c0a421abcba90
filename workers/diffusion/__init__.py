"""Workers of diffusion models: pipelines, differentiable sampling, policies and their workers.

Read `reward_flow_worker.py` (differentiable rewards) or `sde_policy.py` (policy gradient on denoising steps) first.
`pipeline.py` loads models of diffusers, `memory_saving.py` recomputes and offloads, `lora.py` adds adapters.

Imports `workers/engine/` and the base classes in `workers/roles/`.
"""

"""Training of image and video diffusion models: the loop, reward flow, and the clips.

Read `loop.py` first, the trainer that both diffusion commands share. `reward_flow.py` is the job of
`trainer.main_reward_flow`; the job of flow GRPO is in `recipes/flow_grpo`. `clips/` reads, checks and writes videos.
The guide is trainer/DIFFUSION.md.

Imports `launch/`, `loop/` and `planner/`. The workers are in `workers/diffusion/`.
"""

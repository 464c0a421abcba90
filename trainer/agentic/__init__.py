"""The trainer of agents that act in environments, with the advantages and metrics of episodes.

Read `agent_trainer.py` first: the stages in which it differs from `RayPPOTrainer`. `episode_log.py` writes episodes
for people, and `roll.py` has ROLL's interface. The guide is trainer/AGENTIC.md.

Imports `trainer/ray_trainer.py`, `rollout/` and `ppo/`. The episodes themselves run in `workers/agents/`.
"""

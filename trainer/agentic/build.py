"""What a run of agents is made of beside the usual: environments that are tried before anything heavy starts, and the
schedulers that choose episodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from trainer.agentic.agentic_pipeline import AgenticPipeline, EpisodeRewards
from trainer.evaluate.chunks import val_samplings
from trainer.ray_trainer import RayPPOTrainer, training_sampling
from trainer.roles import AgentRole
from trainer.rollout_scheduler import RolloutScheduler
from trainer.steps import EpisodeSteps
from verl_lite.config import PPOConfig
from verl_lite.envs.base import env_modules, env_templates
from workers.envs.pool import EnvPool
from workers.rollout.conversation import ChatJoins


def trainer_for(config: PPOConfig) -> type[RayPPOTrainer]:
    """The trainer that the configuration asks for."""
    return AgenticPipeline if config.is_agentic else RayPPOTrainer


def try_environments(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Makes, resets and steps every environment that is used, and tries the chat template on two turns. Raises
    UserError naming tag, key and remedy."""
    agentic, templates = config.agentic, env_templates(config.agentic.custom_envs)
    has_system = any(template.agent_system_template for template in templates.values())
    ChatJoins(tokenizer, config.data.apply_chat_template_kwargs, system=has_system)
    used = dict.fromkeys([*agentic.train_env_manager.tags, *agentic.val_env_manager.tags])
    pool = EnvPool(agentic.env_pool, templates, modules=env_modules())
    try:
        pool.dry_run(list(used))
    finally:
        pool.close()


def episode_parts(config: PPOConfig, agent: AgentRole, run_dir: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """The arguments of `AgenticPipeline` that say which episodes run and how they are counted."""
    agentic = config.agentic
    train = RolloutScheduler(config, agentic.train_env_manager, agent, training_sampling(config))
    val = None
    if config.validates:
        val = RolloutScheduler(config, agentic.val_env_manager, agent, val_samplings(config)[0].params, purpose="val")
    return {
        "rewards": EpisodeRewards(agentic.env_pool.max_error_rate, run_dir, tell),
        "steps": EpisodeSteps(config, train),
        "train_rollout_scheduler": train,
        "val_rollout_scheduler": val,
    }

"""An agent of 230,000 parameters learns to cross a frozen lake: gymnasium's fixed 4x4 map, and random maps.

Episodes are conversations of up to ten turns. GRPO compares eight episodes on the same map. `overrides` returns the
settings; `prepare` builds the model with its warm start unless it is in the cache.
"""

from pathlib import Path

from recipes.agentic_frozen_lake.worlds import CONVERSATION_TOKENS, CUSTOM_ENVS, MADE, PROMPT_TOKENS
from recipes.embedded import ONE_GROUP


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    environments = {f"agentic.custom_envs.{tag}": entry for tag, entry in CUSTOM_ENVS.items()}
    return environments | {
        **small_model(MADE.folder / "model"),
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": CONVERSATION_TOKENS,
        "agentic.train_env_manager.tags": ["lake_4x4", "lake_random"],
        # number of groups of each tag
        "agentic.train_env_manager.num_groups_partition": [2, 14],
        "agentic.val_env_manager.tags": ["lake_4x4", "lake_unseen"],
        "agentic.val_env_manager.num_groups_partition": [64, 128],
    }


def small_model(model: Path) -> dict[str, object]:
    """Returns the settings shared by the agentic recipes: GRPO, number of episodes, fast options for a small model."""
    return {
        "model.path": str(model),
        # a small model fits into memory without recomputing activations
        "model.enable_gradient_checkpointing": False,
        "algorithm.adv_estimator": "grpo",
        "rollout.kv_cache_memory_mb": 128,
        "rollout.max_num_seqs": 256,
        # as in training, so that the success is that of the policy that learns
        "rollout.val_kwargs.do_sample": True,
        "rollout.val_kwargs.temperature": 1.0,
        "rollout.val_kwargs.greedy_too": True,
        # the whole batch: one optimizer step, in which every ratio is 1
        "actor.ppo_mini_batch_size": -1,
        "actor.calculate_entropy": True,
        "actor.optim.lr": 5e-4,
        "actor.optim.lr_warmup_steps": 5,
        "actor.optim.betas": [0.9, 0.95],
        "actor.fsdp_config.wrap_policy.min_num_params": ONE_GROUP,
        "actor.fsdp_config.reshard_after_forward": False,
        "agentic.rollout_batch_size": 128,
        "agentic.train_env_manager.num_env_groups": 16,
        "agentic.train_env_manager.group_size": 8,
        "agentic.train_env_manager.format_penalty": -0.1,
        "agentic.val_env_manager.num_env_groups": 192,
        "agentic.val_batch_size": 192,
        "agentic.logging_steps": 20,
        "trainer.total_training_steps": 60,
        "trainer.val_before_train": True,
        "trainer.test_freq": 20,
    }


prepare = MADE.prepare

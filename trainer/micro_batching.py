"""How a rank cuts its rows in each pass of a step, as the options of that pass say; what they leave open is as in the
actor's update. The driver's roles plan by it, and so does `trainer.planner`."""

from __future__ import annotations

from dataclasses import dataclass

from verl_lite.config import PPOConfig, RefConfig, RolloutConfig


@dataclass(frozen=True)
class MicroBatching:
    """By a token budget, or by a number of sequences."""

    max_token_len: int | None
    micro_batch_size: int | None


def of_update(
    config: PPOConfig,
    dynamic: bool | None = None,
    max_token_len: int | None = None,
    micro_batch_size: int | None = None,
) -> MicroBatching:
    """The actor's update; the other arguments are what another pass has of its own."""
    actor = config.actor
    if actor.use_dynamic_bsz if dynamic is None else dynamic:
        return MicroBatching(max_token_len or actor.ppo_max_token_len_per_gpu, None)
    return MicroBatching(None, micro_batch_size or actor.ppo_micro_batch_size_per_gpu)


def of_log_probs(config: PPOConfig, options: RolloutConfig | RefConfig) -> MicroBatching:
    """Log-probs of the policy (config.rollout), or of the reference (config.ref)."""
    return of_update(
        config,
        options.log_prob_use_dynamic_bsz,
        options.log_prob_max_token_len_per_gpu,
        options.log_prob_micro_batch_size_per_gpu,
    )


def of_values(config: PPOConfig) -> MicroBatching:
    """The critic's values."""
    critic = config.critic
    return of_update(
        config,
        critic.use_dynamic_bsz,
        critic.forward_max_token_len_per_gpu or critic.ppo_max_token_len_per_gpu,
        critic.forward_micro_batch_size_per_gpu or critic.ppo_micro_batch_size_per_gpu,
    )


def of_critic_update(config: PPOConfig) -> MicroBatching:
    """The critic's update."""
    critic = config.critic
    return of_update(
        config, critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu
    )


def of_reward_model(config: PPOConfig) -> MicroBatching:
    """The reward model's scores."""
    model = config.reward_model
    return of_update(config, model.use_dynamic_bsz, model.forward_max_token_len_per_gpu, model.micro_batch_size_per_gpu)

"""What a step computes, and how a rank cuts its rows in each pass, as questions about the configuration.

Driver, plan and workers ask here. A function that reads more of the batch than others (a loss that takes `selected`, an
estimator that takes `sum_pi_squared`) says so by naming the argument.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_lite.config import PPOConfig, RefConfig, RolloutConfig
from verl_lite.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl_lite.registry import takes

# ------------------------------------------------------------------------------------------------ what is computed


def is_on_policy(config: PPOConfig) -> bool:
    """Whether each batch gives one optimizer step: then every ratio is 1, without old log-probs. Episodes give as many
    rows as they have steps, so there only a mini-batch that is all of them is one."""
    actor = config.actor
    whole = not config.is_agentic and actor.ppo_mini_batch_size >= config.data.train_batch_size
    return actor.ppo_epochs == 1 and (whole or actor.ppo_mini_batch_size == -1)


def needs_old_log_prob(config: PPOConfig) -> bool:
    """Whether a pass computes the policy's log-probs of before the update, because something reads them: later
    optimizer steps, the correction of the rollout, the KL in the reward, the estimator, or the choice of tokens for the
    loss. With bypass_mode the rollout's stand for them."""
    correction = config.algorithm.rollout_correction
    return not correction.bypass_mode and (
        not is_on_policy(config)
        or needs_rollout_is_weights(config)
        or correction.rollout_rs is not None
        or config.algorithm.use_kl_in_reward
        or needs_selected(config)
        or _estimator_takes(config, "old_log_probs")
    )


def needs_reward_function(config: PPOConfig) -> bool:
    """Whether a reward function is called; without it a reward model alone scores, or environments do."""
    return config.reward.function_weight != 0 and not config.is_agentic


def needs_rollout_is_weights(config: PPOConfig) -> bool:
    """Whether the loss is weighed by how far trainer and rollout engine were apart before the update; with bypass_mode
    the workers weigh it themselves, by where the policy is now."""
    correction = config.algorithm.rollout_correction
    return correction.rollout_is is not None and not correction.bypass_mode


def needs_critic(config: PPOConfig) -> bool:
    """Whether the estimator reads values, which a critic has to learn."""
    return _estimator_takes(config, "values")


def needs_reference(config: PPOConfig) -> bool:
    """Whether any KL term compares the policy with the reference model."""
    return config.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def needs_reference_model(config: PPOConfig) -> bool:
    """Whether it takes a model of its own: where the policy has an adapter, it is the policy without it."""
    return needs_reference(config) and not config.model.lora_rank


def needs_greedy_baseline(config: PPOConfig) -> bool:
    """Whether the estimator compares answers with the greedy one, which the same rollout then gives."""
    return _estimator_takes(config, "reward_baselines")


def needs_sum_pi_squared(config: PPOConfig) -> bool:
    """Whether the estimator reads the sum of squared probabilities over the vocabulary."""
    return _estimator_takes(config, "sum_pi_squared")


def needs_selected(config: PPOConfig) -> bool:
    """Whether the policy loss treats tokens differently that are chosen over the whole batch."""
    return takes(get_policy_loss_fn(config.actor.policy_loss.loss_mode), "selected")


def needs_scores(config: PPOConfig) -> bool:
    """Whether the policy loss reads how good each answer is."""
    return takes(get_policy_loss_fn(config.actor.policy_loss.loss_mode), "scores")


def _estimator_takes(config: PPOConfig, argument: str) -> bool:
    return takes(get_adv_estimator_fn(config.algorithm.adv_estimator), argument)


# ------------------------------------------------------------------------------------------- how it is cut on a rank


@dataclass(frozen=True)
class MicroBatching:
    """By a token budget, or by a number of sequences."""

    max_token_len: int | None
    micro_batch_size: int | None


def cut_of_update(
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


def cut_of_log_probs(config: PPOConfig, options: RolloutConfig | RefConfig) -> MicroBatching:
    """Log-probs of the policy (config.rollout), or of the reference (config.ref)."""
    return cut_of_update(
        config,
        options.log_prob_use_dynamic_bsz,
        options.log_prob_max_token_len_per_gpu,
        options.log_prob_micro_batch_size_per_gpu,
    )


def cut_of_values(config: PPOConfig) -> MicroBatching:
    """The critic's values."""
    critic = config.critic
    tokens = critic.forward_max_token_len_per_gpu or critic.ppo_max_token_len_per_gpu
    rows = critic.forward_micro_batch_size_per_gpu or critic.ppo_micro_batch_size_per_gpu
    return cut_of_update(config, critic.use_dynamic_bsz, tokens, rows)


def cut_of_critic_update(config: PPOConfig) -> MicroBatching:
    """The critic's update."""
    critic = config.critic
    tokens, rows = critic.ppo_max_token_len_per_gpu, critic.ppo_micro_batch_size_per_gpu
    return cut_of_update(config, critic.use_dynamic_bsz, tokens, rows)


def cut_of_reward_model(config: PPOConfig) -> MicroBatching:
    """The reward model's scores."""
    model = config.reward_model
    return cut_of_update(
        config, model.use_dynamic_bsz, model.forward_max_token_len_per_gpu, model.micro_batch_size_per_gpu
    )

"""What a step computes, and how a rank cuts its rows in each pass, as questions about the configuration.

Driver, plan and workers ask here. A function that reads more of the batch than others (a loss that takes `selected`, an
estimator that takes `sum_pi_squared`) says so by naming the argument.
"""

from dataclasses import dataclass

from verl_lite.config import PPOConfig
from verl_lite.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl_lite.registry import takes


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
        or correction.rollout_is is not None
        or correction.rollout_rs is not None
        or config.algorithm.use_kl_in_reward
        or loss_takes(config, "selected")
        or estimator_takes(config, "old_log_probs")
    )


def needs_reward_function(config: PPOConfig) -> bool:
    """Whether a reward function is called; without it a reward model alone scores, or environments do."""
    return config.reward.function_weight != 0 and not config.is_agentic


def needs_critic(config: PPOConfig) -> bool:
    """Whether the estimator reads values, which a critic has to learn."""
    return estimator_takes(config, "values")


def needs_reference(config: PPOConfig) -> bool:
    """Whether any KL term compares the policy with the reference model."""
    return config.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def needs_reference_model(config: PPOConfig) -> bool:
    """Whether it takes a model of its own: where the policy has an adapter, it is the policy without it."""
    return needs_reference(config) and not config.model.lora_rank


def needs_greedy_baseline(config: PPOConfig) -> bool:
    """Whether the estimator compares answers with the greedy one, which the same rollout then gives."""
    return estimator_takes(config, "reward_baselines")


def loss_takes(config: PPOConfig, column: str) -> bool:
    """Whether the policy loss reads it: `selected` (tokens chosen over the whole batch), `scores` (of each answer)."""
    return takes(get_policy_loss_fn(config.actor.policy_loss.loss_mode), column)


def estimator_takes(config: PPOConfig, column: str) -> bool:
    """Whether the advantage estimator reads it."""
    return takes(get_adv_estimator_fn(config.algorithm.adv_estimator), column)


@dataclass(frozen=True)
class MicroBatching:
    """How a rank cuts its rows in a pass: by a token budget, or by a number of sequences."""

    max_token_len: int | None
    micro_batch_size: int | None


def micro_batching(config: PPOConfig, stage: str) -> MicroBatching:
    """Of one of the passes update_actor, log_prob (of the policy), ref, values, update_critic and reward_model; what
    its section leaves open is as in the actor's update."""
    dynamic = tokens = rows = None
    if stage in ("log_prob", "ref"):
        options = config.rollout if stage == "log_prob" else config.ref
        dynamic, tokens = options.log_prob_use_dynamic_bsz, options.log_prob_max_token_len_per_gpu
        rows = options.log_prob_micro_batch_size_per_gpu
    elif stage in ("values", "update_critic"):
        critic = config.critic
        dynamic, tokens = critic.use_dynamic_bsz, critic.ppo_max_token_len_per_gpu
        rows = critic.ppo_micro_batch_size_per_gpu
        if stage == "values":
            tokens = critic.forward_max_token_len_per_gpu or tokens
            rows = critic.forward_micro_batch_size_per_gpu or rows
    elif stage == "reward_model":
        model = config.reward_model
        dynamic, tokens = model.use_dynamic_bsz, model.forward_max_token_len_per_gpu
        rows = model.micro_batch_size_per_gpu
    actor = config.actor
    if actor.use_dynamic_bsz if dynamic is None else dynamic:
        return MicroBatching(tokens or actor.ppo_max_token_len_per_gpu, None)
    return MicroBatching(None, rows or actor.ppo_micro_batch_size_per_gpu)

"""Derives from the configuration which models and passes a step needs, and how a rank forms its micro-batches.

Driver, planner and workers all use these functions. The registration of a loss declares the optional columns of the
batch that it reads (`selected`); an estimator requests them (`sum_pi_squared`) by naming them as arguments.
"""

from dataclasses import dataclass

from verl_lite.config import PPOConfig
from verl_lite.config.micro_batches import MICRO_BATCHES
from verl_lite.core_algos import get_adv_estimator_fn, get_policy_loss
from verl_lite.registry import takes
from workers.policy.loading import load_model_config


def is_on_policy(config: PPOConfig) -> bool:
    """Returns True if each batch is used for one optimizer step, so that every ratio is 1 and no old log-probs are
    needed."""
    actor = config.actor
    if actor.ppo_epochs != 1:
        return False
    if actor.ppo_mini_batch_size == -1:
        return True
    # batches of environments vary in size, so no number of prompts is certain to cover one
    return config.reads_prompts and actor.ppo_mini_batch_size >= config.data.train_batch_size


def needs_old_log_prob(config: PPOConfig) -> bool:
    """Returns True if a forward pass must compute the policy's log-probs before the update.

    They are read by later optimizer steps, the rollout correction, the KL penalty in the reward, the estimator, the
    token selection of the loss, and distillation over the policy's top tokens.
    """
    correction = config.algorithm.rollout_correction
    # the log-probs of the rollout take their place
    if correction.bypass_mode:
        return False
    if not is_on_policy(config):
        return True
    if correction.rollout_is is not None or correction.rollout_rs is not None:
        return True
    if config.algorithm.use_kl_in_reward or config.distillation.takes_student_topk:
        return True
    policy_loss = get_policy_loss(config.actor.policy_loss.loss_mode)
    return "selected" in policy_loss.columns or estimator_takes(config, "old_log_probs")


def needs_reward_function(config: PPOConfig) -> bool:
    """Returns True if a reward function may be called. Otherwise rewards come from a reward model or environments."""
    return config.reward.function_weight != 0 and config.reads_prompts


def needs_critic(config: PPOConfig) -> bool:
    """Returns True if the estimator reads values, which require a critic."""
    return estimator_takes(config, "values")


def needs_reference(config: PPOConfig) -> bool:
    """Returns True if a KL term compares the policy with the reference model."""
    return config.actor.use_kl_loss or config.algorithm.use_kl_in_reward


def needs_reference_model(config: PPOConfig) -> bool:
    """Returns True if the reference needs a separate model. With LoRA, the policy without its adapter is the
    reference."""
    return needs_reference(config) and not config.model.lora_rank


def needs_greedy_baseline(config: PPOConfig) -> bool:
    """Returns True if the estimator needs the reward of a greedy response, which the same rollout then generates."""
    return estimator_takes(config, "reward_baselines")


def estimator_takes(config: PPOConfig, column: str) -> bool:
    """Returns True if the advantage estimator reads the column."""
    estimator = get_adv_estimator_fn(config.algorithm.adv_estimator)
    return takes(estimator, column)


def distilled_tokens(config: PPOConfig) -> int:
    """Returns K, the number of tokens in each compared distribution; 0 if only sampled tokens are compared."""
    if not config.distillation.takes_topk:
        return 0
    topk = config.distillation.distillation_loss.topk
    vocab_size: int = load_model_config(config.model).get_text_config().vocab_size
    # the distributions over the whole vocabulary
    if topk == -1:
        return vocab_size
    return min(topk, vocab_size)


@dataclass(frozen=True)
class MicroBatching:
    """The size of a rank's micro-batches in a pass: either a token budget or a number of sequences; the other field is
    None."""

    max_token_len: int | None
    micro_batch_size: int | None


def micro_batching(config: PPOConfig, stage: str) -> MicroBatching:
    """Returns the micro-batch size of a pass.

    Args:
        config: the options of the run.
        stage: the pass: update_actor, log_prob (of the policy), ref, values, update_critic or reward_model.
    """
    options = MICRO_BATCHES[stage]
    if options.uses_tokens(config):
        return MicroBatching(options.max_token_len(config), None)
    return MicroBatching(None, options.micro_batch_size(config))

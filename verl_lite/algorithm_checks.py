"""Whether the chosen loss and estimator exist, have what they need, and fit their options: a part of `config_checks`.

Takes a `PPOConfig`; yields problems, each naming key, value, what was expected and what to change. An option that would
have no effect counts as a problem.
"""

from __future__ import annotations

from collections.abc import Iterator

from verl_lite.config import PolicyLossConfig, PPOConfig
from verl_lite.config_keys import unknown_value
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY, KL_ALIASES, LOSS_AGG_MODES, POLICY_LOSS_REGISTRY
from verl_lite.covariance_losses import TOKEN_SELECTIONS
from verl_lite.policy_losses import RATIO_LOSSES, SEQUENCE_MEANS

Problems = Iterator[str]

GROUP_ESTIMATORS = frozenset({"grpo", "grpo_vectorized", "grpo_passk", "gdpo", "rloo", "rloo_vectorized", "opo", "gpg"})
"""Advantage estimators that compare the samples of one prompt with each other."""
CRITIC_ESTIMATORS = frozenset({"gae"})
_EPISODES = "the step columns of episodes (traj_id, step, state_hash), which the trainer does not have"
NOT_PROVIDED = {
    "gae": "the values of a critic, which the trainer does not have yet",
    "remax": "the scores of greedy answers, which the trainer does not generate yet",
    "optimal_token_baseline": "sum_pi_squared, which the actor does not compute yet",
    "tir_optimal_token_baseline": "sum_pi_squared, which the actor does not compute yet",
    "step_reinforce": _EPISODES,
    "gigpo": _EPISODES,
}
"""What estimators need that no part of the trainer provides: they can be called, but not trained with."""
LOSS_OF_OPTION = {
    "clip_cov_ratio": "clip_cov",
    "clip_cov_lb": "clip_cov",
    "clip_cov_ub": "clip_cov",
    "kl_cov_ratio": "kl_cov",
    "ppo_kl_coef": "kl_cov",
    "dro_beta": "dro",
    "tis_lower_bound": "tis",
    "tis_upper_bound": "tis",
    "topr_positive_weight": "topr",
    "topr_negative_weight": "topr",
    "kimi15_tau": "kimi15",
}
"""The policy loss that reads each option of `actor.policy_loss`."""


def losses(config: PPOConfig) -> Problems:
    """The policy loss, its aggregation and the KL estimators."""
    actor = config.actor
    if not actor.clip_ratio_c > 1:
        yield (
            f"actor.clip_ratio_c={actor.clip_ratio_c}: it bounds the ratio from above where the advantage is "
            "negative, so a number above 1 is expected, such as 3.0"
        )
    if actor.loss_agg_mode not in LOSS_AGG_MODES:
        yield unknown_value("actor.loss_agg_mode", actor.loss_agg_mode, LOSS_AGG_MODES)
    elif actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield (
            f"actor.loss_scale_factor={actor.loss_scale_factor} has no effect with "
            f"actor.loss_agg_mode={actor.loss_agg_mode}: leave it out, or use seq-mean-token-sum-norm"
        )
    loss_mode = actor.policy_loss.loss_mode
    if ":" not in loss_mode and loss_mode not in POLICY_LOSS_REGISTRY:
        yield unknown_value("actor.policy_loss.loss_mode", loss_mode, POLICY_LOSS_REGISTRY) + "; or pkg.module:function"
    yield from _loss_options(config)
    kinds = {"actor.kl_loss_type": actor.kl_loss_type, "algorithm.kl_penalty": config.algorithm.kl_penalty}
    for name, kind in kinds.items():
        if kind.removesuffix("+") not in KL_ALIASES:
            yield unknown_value(name, kind, KL_ALIASES)


def _loss_options(config: PPOConfig) -> Problems:
    """Options of the policy loss that it needs, or that would have no effect with it."""
    actor, options = config.actor, config.actor.policy_loss
    mode = options.loss_mode
    if mode in TOKEN_SELECTIONS:
        yield (
            f"actor.policy_loss.loss_mode={mode} chooses tokens over the whole batch, and the trainer does not hand "
            "the choice to its ranks yet: use vanilla, with actor.clip_ratio_high=0.28 to keep entropy"
        )
    if mode in SEQUENCE_MEANS and actor.loss_agg_mode != "seq-mean-token-mean":
        yield (
            f"actor.loss_agg_mode={actor.loss_agg_mode} has no effect with actor.policy_loss.loss_mode={mode}, which "
            "is a mean over sequences: set actor.loss_agg_mode=seq-mean-token-mean"
        )
    if actor.ratio_type != "token" and mode not in RATIO_LOSSES and ":" not in mode:
        yield (
            f"actor.ratio_type={actor.ratio_type} has no effect with actor.policy_loss.loss_mode={mode}: leave it out, "
            f"or use one of {', '.join(sorted(RATIO_LOSSES))}"
        )
    if mode == "dro" and options.dro_beta is None:
        yield "actor.policy_loss.loss_mode=dro needs actor.policy_loss.dro_beta, which is null: give a number above 0"
    untouched = PolicyLossConfig()
    for name, owner in LOSS_OF_OPTION.items():
        value = getattr(options, name)
        if value != getattr(untouched, name) and mode != owner and ":" not in mode:
            yield (
                f"actor.policy_loss.{name}={value} has no effect with actor.policy_loss.loss_mode={mode}: it belongs "
                f"to {owner}, so leave it out"
            )
    if not options.clip_cov_lb < options.clip_cov_ub:
        yield (
            f"actor.policy_loss.clip_cov_lb={options.clip_cov_lb} is not below clip_cov_ub={options.clip_cov_ub}: "
            "no covariance lies between them"
        )
    if not options.tis_lower_bound < options.tis_upper_bound:
        yield (
            f"actor.policy_loss.tis_lower_bound={options.tis_lower_bound} is not below tis_upper_bound="
            f"{options.tis_upper_bound}: no ratio would pass as it is"
        )


def estimator(config: PPOConfig) -> Problems:
    """The advantage estimator, and what it needs."""
    chosen, warmup = config.algorithm.adv_estimator, config.trainer.critic_warmup
    if ":" not in chosen and chosen not in ADV_ESTIMATOR_REGISTRY:
        yield unknown_value("algorithm.adv_estimator", chosen, ADV_ESTIMATOR_REGISTRY) + "; or pkg.module:function"
    if chosen in NOT_PROVIDED:
        usable = ", ".join(sorted(set(ADV_ESTIMATOR_REGISTRY) - set(NOT_PROVIDED)))
        yield f"algorithm.adv_estimator={chosen} needs {NOT_PROVIDED[chosen]}; use one of {usable}"
    keys, weights = config.algorithm.gdpo_reward_keys, config.algorithm.gdpo_reward_weights
    if chosen == "gdpo" and not keys:
        yield (
            "algorithm.adv_estimator=gdpo needs algorithm.gdpo_reward_keys, which is empty: name the values of the "
            "reward function's dict that it normalises, such as [correct,format]"
        )
    if chosen != "gdpo" and (keys or weights):
        yield f"algorithm.gdpo_reward_keys={keys} has no effect with algorithm.adv_estimator={chosen}: leave it out"
    if chosen == "gdpo" and weights and len(weights) != len(keys):
        yield (
            f"algorithm.gdpo_reward_weights={weights}: one weight for each of algorithm.gdpo_reward_keys={keys} is "
            "expected, or none for equal weights"
        )
    if chosen in GROUP_ESTIMATORS and config.rollout.n == 1 and not config.trainer.val_only:
        yield (
            f"rollout.n=1: {chosen} compares the samples of one prompt with each other, and one sample teaches "
            "nothing: set rollout.n to at least 2, such as 8"
        )
    if warmup > 0 and chosen not in CRITIC_ESTIMATORS:
        yield (
            f"trainer.critic_warmup={warmup}: {chosen} has no critic, so nothing would learn in these steps: "
            "set it to 0"
        )

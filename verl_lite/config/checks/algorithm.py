"""Whether the chosen loss and estimator exist, have what they need, and fit their options: a part of `checks.config`.

Takes a `PPOConfig`; yields problems, each naming key, value, what was expected and what to change. An option that would
have no effect counts as a problem.
"""

from __future__ import annotations

from verl_lite.algos.policy_losses import RATIO_LOSSES, SEQUENCE_MEANS
from verl_lite.config.checks.values import Problems, given, listed, shown
from verl_lite.config.keys import unknown_value
from verl_lite.config.ppo import PPOConfig
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY, KL_ALIASES, LOSS_AGG_MODES, POLICY_LOSS_REGISTRY
from verl_lite.registry import takes

GROUP_ESTIMATORS = frozenset({"grpo", "grpo_vectorized", "grpo_passk", "gdpo", "rloo", "rloo_vectorized", "opo", "gpg"})
"""Advantage estimators that compare the samples of one prompt with each other."""
MEAN_FREE_ESTIMATORS = GROUP_ESTIMATORS | {"reinforce_plus_plus_baseline"}
"""Those whose result a number added to all scores of a prompt does not change."""
WHITENING_ESTIMATORS = frozenset({"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "gdpo"})
"""Those whose advantages are whitened over the batch by themselves."""
_EPISODES = (
    "the step columns of episodes (traj_id, step, state_hash), which single-turn answers do not have: it trains agents "
    "(agentic.train_env_manager.tags names their environments)"
)
OF_AGENTS = {
    "step_reinforce": _EPISODES,
    "gigpo": _EPISODES,
}
"""What estimators need that only agents in environments provide."""
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
    "cispo_unified_mask": "cispo",
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
    prompts, mini = config.data.train_batch_size, actor.ppo_mini_batch_size
    bypasses = config.algorithm.rollout_correction.bypass_mode
    if mode == "kl_cov" and actor.ppo_epochs == 1 and (mini == -1 or mini >= prompts) and not bypasses:
        yield (
            f"actor.policy_loss.loss_mode=kl_cov has no effect with actor.ppo_epochs=1 and actor.ppo_mini_batch_size="
            f"{mini} of data.train_batch_size={prompts} prompts: in the one optimizer step of a batch all ratios are "
            "1, and so its penalty |log ratio| has no gradient: set a smaller actor.ppo_mini_batch_size, or more epochs"
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
    for name, value in given(config, "actor.policy_loss."):
        owner = LOSS_OF_OPTION.get(name.rpartition(".")[2], mode)
        if mode != owner and ":" not in mode:
            yield (
                f"{name}={value} has no effect with actor.policy_loss.loss_mode={mode}: it belongs "
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
    if chosen in OF_AGENTS and not config.is_agentic:
        usable = ", ".join(sorted(set(ADV_ESTIMATOR_REGISTRY) - set(OF_AGENTS)))
        yield f"algorithm.adv_estimator={chosen} needs {OF_AGENTS[chosen]}; use one of {usable}"
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
    if chosen in GROUP_ESTIMATORS and config.rollout.n == 1 and not config.trainer.val_only and not config.is_agentic:
        yield (
            f"rollout.n=1: {chosen} compares the samples of one prompt with each other, and one sample teaches "
            "nothing: set rollout.n to at least 2, such as 8"
        )
    if warmup > 0 and not may_have_critic(chosen):
        yield (
            f"trainer.critic_warmup={warmup}: {chosen} has no critic, so nothing would learn in these steps: "
            "set it to 0"
        )
    steps = config.trainer.total_training_steps
    if steps is not None and 0 < steps <= warmup:
        yield (
            f"trainer.critic_warmup={warmup} with trainer.total_training_steps={steps}: the policy would never learn; "
            "set fewer steps of warm-up"
        )


def may_have_critic(estimator: str) -> bool:
    """Whether an estimator reads values; also for one of the user's own (pkg.module:function), not imported here."""
    function = ADV_ESTIMATOR_REGISTRY.get(estimator)
    return function is None or takes(function, "values")


def critic(config: PPOConfig) -> Problems:
    """The critic's options, where there is a critic; and that there are none where there is not."""
    chosen, mode = config.algorithm.adv_estimator, config.critic.loss_agg_mode
    if mode is not None and mode not in LOSS_AGG_MODES:
        yield unknown_value("critic.loss_agg_mode", mode, LOSS_AGG_MODES)
    if may_have_critic(chosen):
        return
    if options := given(config, "critic."):
        yield (
            f"{listed(options)}: without effect, because algorithm.adv_estimator={chosen} has no critic (verl's "
            "default is gae, the default here grpo): set algorithm.adv_estimator=gae, or leave all critic.* out"
        )


def shaping(config: PPOConfig) -> Problems:
    """What is done to scores before the estimator, and to advantages after it."""
    algorithm = config.algorithm
    for name in ("norm_mean_type", "norm_std_type"):
        if (
            getattr(algorithm, name) == "group"
            and config.rollout.n == 1
            and not config.trainer.val_only
            and not config.is_agentic
        ):
            yield (
                f"algorithm.{name}=group with rollout.n=1: a group of one answer has no spread, and its reward would "
                "be 0: set rollout.n to at least 2, such as 8, or use batch or running"
            )
    for name, why in _without_effect(config).items():
        value = getattr(algorithm, name)
        if value not in (None, False):
            yield f"algorithm.{name}={shown(value)} with algorithm.adv_estimator={algorithm.adv_estimator}: {why}"
    yield from _pf_ppo(config)


def _without_effect(config: PPOConfig) -> dict[str, str]:
    """Options that the chosen estimator does by itself, does not see, or cannot stand, each with the reason."""
    chosen, divides = config.algorithm.adv_estimator, config.algorithm.norm_adv_by_std_in_grpo
    reasons: dict[str, str] = {}
    if chosen in WHITENING_ESTIMATORS:
        reasons["whiten_advantages"] = "it whitens advantages by itself, so leave it out"
    if chosen in MEAN_FREE_ESTIMATORS:
        reasons["norm_mean_type"] = (
            "it subtracts a mean of the group by itself, so leave it out, or normalise with adv_estimator=reinforce"
        )
    if chosen in ("grpo", "grpo_vectorized", "grpo_passk") and divides:
        reasons["norm_std_type"] = (
            "it divides by the group's standard deviation by itself, so leave it out, or set "
            "algorithm.norm_adv_by_std_in_grpo=false"
        )
    if chosen == "remax":
        why = "it compares scores with those of greedy answers, which stay as they are, so leave it out"
        reasons |= dict.fromkeys(("norm_mean_type", "norm_std_type", "reward_clip", "whiten_rewards"), why)
    if chosen == "gdpo":
        why = "it reads algorithm.gdpo_reward_keys instead of the score, so leave it out"
        names = ("norm_mean_type", "norm_std_type", "reward_clip", "whiten_rewards", "use_kl_in_reward")
        reasons |= dict.fromkeys(names, why)
    return reasons


def _pf_ppo(config: PPOConfig) -> Problems:
    algorithm, options = config.algorithm, given(config, "algorithm.pf_ppo.")
    if algorithm.use_pf_ppo and algorithm.adv_estimator != "gae" and ":" not in algorithm.adv_estimator:
        yield (
            f"algorithm.use_pf_ppo=true with algorithm.adv_estimator={algorithm.adv_estimator}: PF-PPO draws the batch "
            "of PPO with a critic anew: set adv_estimator=gae, or use_pf_ppo=false"
        )
    if not algorithm.use_pf_ppo:
        for name, value in options:
            yield (
                f"{name}={value} has no effect with algorithm.use_pf_ppo=false: leave it out, or set "
                "algorithm.use_pf_ppo=true"
            )
    elif algorithm.pf_ppo.reweight_method != "pow" and "algorithm.pf_ppo.weight_pow" in dict(options):
        yield (
            f"algorithm.pf_ppo.weight_pow={algorithm.pf_ppo.weight_pow} has no effect with "
            f"algorithm.pf_ppo.reweight_method={algorithm.pf_ppo.reweight_method}: leave it out, or use pow"
        )

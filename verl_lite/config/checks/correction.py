"""Whether the options of the rollout correction are well formed and have an effect: a part of `checks.config`.

Takes a `PPOConfig`; yields problems, each naming key, value, what was expected and what to change.
"""

from __future__ import annotations

from verl_lite.config.checks.values import Problems, shown, value_of
from verl_lite.config.ppo import ActorConfig, PPOConfig
from verl_lite.config.rollout_correction import rejections_of, weighting_of
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY
from verl_lite.registry import takes

KEY = "algorithm.rollout_correction"


def rollout_correction(config: PPOConfig) -> Problems:
    """`algorithm.rollout_correction.*`: its thresholds, options without effect, and what it needs of the run."""
    options = config.algorithm.rollout_correction
    for read in (weighting_of, rejections_of):
        try:
            read(options)
        except ValueError as error:
            yield str(error)
    untouched = type(options)()
    for name, needed in (
        ("rollout_is_threshold", "rollout_is"),
        ("rollout_is_batch_normalize", "rollout_is"),
        ("rollout_rs_threshold", "rollout_rs"),
    ):
        value = getattr(options, name)
        if getattr(options, needed) is None and value not in (getattr(untouched, name), "2"):
            yield f"{KEY}.{name}={shown(value)} has no effect with {KEY}.{needed}=null: leave it out, or set {needed}"
    if not options.bypass_mode and options.loss_type != untouched.loss_type:
        yield (
            f"{KEY}.loss_type={options.loss_type} has no effect with {KEY}.bypass_mode=false: leave it out, or set "
            "bypass_mode=true"
        )
    switched_on = [name for name in ("rollout_is", "rollout_rs", "bypass_mode") if getattr(options, name)]
    if switched_on and not config.rollout.calculate_log_probs:
        value = shown(getattr(options, switched_on[0]))
        yield (
            f"rollout.calculate_log_probs=false with {KEY}.{switched_on[0]}={value}: the correction reads the rollout "
            "engine's log-probs, so set rollout.calculate_log_probs=true"
        )
    if options.bypass_mode:
        yield from _bypass(config)


def _bypass(config: PPOConfig) -> Problems:
    """What bypass_mode, which knows no log-probs of the trainer's before the update, cannot give or does not read."""
    options, estimator = config.algorithm.rollout_correction, config.algorithm.adv_estimator
    if options.loss_type == "ppo_clip" and options.rollout_is is not None:
        yield (
            f"{KEY}.rollout_is={options.rollout_is} has no effect with bypass_mode=true and loss_type=ppo_clip, whose "
            "ratio to the rollout policy is the importance weight: leave it out, or set loss_type=reinforce"
        )
    if options.rollout_is_batch_normalize and options.rollout_is is not None:
        yield (
            f"{KEY}.rollout_is_batch_normalize=true with bypass_mode=true: weights change with each optimizer step and "
            "are known in parts only, so there is no mean of the batch: set bypass_mode=false, or leave it out"
        )
    if options.loss_type == "reinforce":
        for name, default in (("policy_loss.loss_mode", "vanilla"), ("ratio_type", ActorConfig.ratio_type)):
            value = value_of(config, f"actor.{name}")
            if value != default:
                yield (
                    f"actor.{name}={value} has no effect with {KEY}.bypass_mode=true and loss_type=reinforce, where "
                    "the loss is -A w log pi: leave it out, or set loss_type=ppo_clip"
                )
    function = ADV_ESTIMATOR_REGISTRY.get(estimator)
    if function is not None and takes(function, "sum_pi_squared"):
        yield (
            f"algorithm.adv_estimator={estimator} needs sum_pi_squared, which the pass computes that "
            f"{KEY}.bypass_mode=true spares: set bypass_mode=false"
        )

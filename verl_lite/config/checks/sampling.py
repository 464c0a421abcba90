"""Whether dynamic sampling, the penalty of long answers and the numbers of answers fit the rest: a part of
`checks.config`.

Takes a `PPOConfig`; yields problems, each naming key, value, what was expected and what to change. An option that would
have no effect counts as a problem.
"""

from __future__ import annotations

from collections.abc import Mapping

from verl_lite.config.checks.algorithm import GROUP_ESTIMATORS
from verl_lite.config.checks.values import Problems, given, shown
from verl_lite.config.ppo import PPOConfig

MODEL_METRICS = ("model", "function")
"""Entries that a run with a reward model has besides those of the reward function."""


def filter_groups(config: PPOConfig) -> Problems:
    """algorithm.filter_groups against what is sampled and what scores it."""
    options = config.algorithm.filter_groups
    if not options.enable:
        yield from _switched_off(config, "algorithm.filter_groups")
        return
    if config.is_agentic:
        yield (
            "algorithm.filter_groups.enable=true is for answers to the prompts of a dataset: groups of episodes are "
            "filtered by agentic.train_env_manager.group_filter_cls=equal_scores"
        )
        return
    if options.max_num_gen_batches < 2:
        yield (
            f"algorithm.filter_groups.max_num_gen_batches={options.max_num_gen_batches}: the first generation batch is "
            "all prompts of a step, and what is dropped of it needs another: at least 2 is expected, such as 10"
        )
    if config.rollout.n == 1:
        yield (
            "algorithm.filter_groups.enable=true with rollout.n=1: one answer differs from no other, and every group "
            "would be dropped: set rollout.n to at least 2, such as 8"
        )
    metric = options.metric
    if metric in MODEL_METRICS and not config.reward_model.enable:
        yield (
            f"algorithm.filter_groups.metric={metric} is a part of the score with a reward model, and "
            "reward_model.enable=false: leave it out, or name an entry of the reward function's dict"
        )
    if config.reward.function_weight == 0 and metric not in (None, "score", *MODEL_METRICS):
        yield (
            f"algorithm.filter_groups.metric={metric}: a reward model gives nothing but a score, and with "
            "reward.function_weight=0 no reward function is called: leave it out, or say score"
        )


def overlong_buffer(config: PPOConfig) -> Problems:
    """reward.overlong_buffer against the length of answers."""
    options, longest = config.reward.overlong_buffer, config.data.max_response_length
    if not options.enable:
        yield from _switched_off(config, "reward.overlong_buffer")
        return
    if config.is_agentic:
        yield (
            "reward.overlong_buffer.enable=true is for answers to the prompts of a dataset: episodes have the rewards "
            "of their environments; leave it out"
        )
    if not 1 <= options.len <= longest:
        yield (
            f"reward.overlong_buffer.len={options.len}: the penalty grows over the last so many tokens of "
            f"data.max_response_length={longest}, so 1 to {longest} are expected; DAPO takes a fifth"
        )


def _switched_off(config: PPOConfig, section: str) -> Problems:
    for name, value in given(config, f"{section}."):
        yield (f"{name}={shown(value)} has no effect with {section}.enable=false: leave it out, or set enable=true")


def answers_per_prompt(config: PPOConfig) -> Problems:
    """data.sources.SOURCE.n against what compares the answers to one prompt with each other."""
    algorithm = config.algorithm
    compares = algorithm.adv_estimator in GROUP_ESTIMATORS
    if config.trainer.val_only or not (compares or algorithm.filter_groups.enable):
        return
    who = algorithm.adv_estimator if compares else "algorithm.filter_groups"
    for source, options in config.data.sources.items():
        if isinstance(options, Mapping) and options.get("n") == 1:
            yield (
                f"data.sources.{source}.n=1: {who} compares the answers to one prompt with each other, and one answer "
                "teaches nothing: give at least 2, or leave this source out of the data"
            )

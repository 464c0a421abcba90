"""Options of dynamic sampling, of the penalty of long answers and of answers per prompt that cannot be meant."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from verl_lite.config import PPOConfig
from verl_lite.config.checks.sampling import answers_per_prompt, filter_groups, overlong_buffer


def configured(**settings: object) -> PPOConfig:
    config = PPOConfig()
    config.rollout.n, config.data.max_response_length = 4, 20
    for name, value in settings.items():
        target: object = config
        *path, leaf = name.split("__")
        for part in path:
            target = getattr(target, part)
        setattr(target, leaf, value)
    return config


ON = {"algorithm__filter_groups__enable": True}
PENALTY = {"reward__overlong_buffer__enable": True, "reward__overlong_buffer__len": 4}
SOURCES = {"data__sources": {"a": {"n": 8}, "b": {"n": 1}}}


@pytest.mark.parametrize(
    ("check", "settings", "fragments"),
    [
        (filter_groups, {"algorithm__filter_groups__metric": "acc"}, ("metric=acc", "enable=false")),
        (filter_groups, {"algorithm__filter_groups__max_num_gen_batches": 3}, ("=3", "enable=false")),
        (filter_groups, ON | {"algorithm__filter_groups__max_num_gen_batches": 1}, ("=1", "at least 2")),
        (filter_groups, ON | {"rollout__n": 1}, ("rollout.n=1", "at least 2")),
        (filter_groups, ON | {"algorithm__filter_groups__metric": "model"}, ("metric=model", "reward_model.enable")),
        (
            filter_groups,
            ON
            | {"algorithm__filter_groups__metric": "acc", "reward__function_weight": 0.0, "reward_model__enable": True},
            ("metric=acc", "reward.function_weight=0", "score"),
        ),
        (filter_groups, ON | {"agentic__train_env_manager__tags": ["x"]}, ("group_filter_cls=equal_scores",)),
        (overlong_buffer, {"reward__overlong_buffer__len": 4}, ("len=4", "enable=false")),
        (overlong_buffer, {"reward__overlong_buffer__log": True}, ("log=true", "enable=false")),
        (overlong_buffer, PENALTY | {"reward__overlong_buffer__len": 0}, ("len=0", "1 to 20")),
        (overlong_buffer, PENALTY | {"reward__overlong_buffer__len": 21}, ("len=21", "1 to 20")),
        (overlong_buffer, PENALTY | {"agentic__train_env_manager__tags": ["x"]}, ("environments",)),
        (answers_per_prompt, SOURCES, ("data.sources.b.n=1", "grpo", "at least 2")),
        (answers_per_prompt, SOURCES | ON | {"algorithm__adv_estimator": "gae"}, ("algorithm.filter_groups",)),
    ],
)
def test_each_problem_is_found_and_names_what_to_change(
    check: Callable[[PPOConfig], object], settings: dict[str, object], fragments: tuple[str, ...]
) -> None:
    (problem,) = list(check(configured(**settings)))  # type: ignore[call-overload]
    for fragment in fragments:
        assert fragment in problem


@pytest.mark.parametrize(
    "settings",
    [
        {},
        ON,
        ON | {"algorithm__filter_groups__metric": "score", "algorithm__filter_groups__max_num_gen_batches": 20},
        ON | {"algorithm__filter_groups__metric": "model", "reward_model__enable": True},
        PENALTY | {"reward__overlong_buffer__log": True},
        SOURCES | {"algorithm__adv_estimator": "gae"},
    ],
)
def test_what_can_be_meant_passes(settings: dict[str, object]) -> None:
    config = configured(**settings)
    assert [*filter_groups(config), *overlong_buffer(config), *answers_per_prompt(config)] == []

"""Options of several rewards that cannot work, or would have no effect, are found before anything starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from verl_lite.config import CustomRewardConfig, PPOConfig, RemoteRewardConfig, RewardConfig, load_config
from verl_lite.config.checks.reward import rewards

FORMAT = {"reward": "format", "weight": 0.1}


def problems(functions: dict[str, Any], **reward: Any) -> list[str]:
    config = PPOConfig()
    config.reward = replace(RewardConfig(), functions=functions, **reward)
    return list(rewards(config))


@pytest.mark.parametrize(
    "functions",
    [
        {"accuracy": {"weight": 1}, "format": FORMAT},
        {"accuracy": None, "format": {**FORMAT, "kwargs": {"tags": ["a"]}, "outcome": False}},
        {
            "a": {"reward": "rule/regex", "weight": 0, "kwargs": {"pattern": "x"}},
            "b-2": {"path": "pkg://mine", "name": "f"},
        },
        {"a": {"reward": "reasoning_gym/chain_sum", "outcome": True}},
        {"a": {"kwargs": {"anything": 1}}},
    ],
)
def test_what_is_fine_is_not_complained_about(functions: dict[str, Any]) -> None:
    assert problems(functions) == []


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (3, "reward.functions.part=3: a mapping is expected, such as {reward: format, weight: 0.1}"),
        ({"reward": "fromat"}, "reward.functions.part.reward=fromat: no reward has this name. Did you mean 'format'?"),
        ({"reward": "fromat"}, "Known: DigitalLearningGmbH/MATH-lighteval, "),
        ({"reward": 3}, "reward.functions.part.reward=3: text is expected"),
        ({"reward": "format", "path": "mine.py"}, "one of them can be the function; leave the other out"),
        ({"path": "no/such.py"}, "reward.functions.part.path=no/such.py: there is no file /"),
        ({"reward": "format", "name": "f"}, "reward.functions.part.name=f is for a function of your own"),
        ({"style": "trl"}, "reward.functions.part.style=trl is for a function"),
        ({"path": "pkg://m", "style": "lists"}, "style='lists': one of sample, batch, trl"),
        ({"weight": float("inf")}, "reward.functions.part.weight=inf: a finite number is expected"),
        ({"weight": float("nan")}, "weight=nan: a finite number"),
        ({"weight": "1"}, "weight='1': a finite number"),
        ({"weight": True}, "weight=True: a finite number"),
        ({"weigth": 1}, "reward.functions.part.weigth: there is no such entry. Did you mean 'weight'?"),
        ({"outcome": "yes"}, "outcome='yes': true or false"),
        ({"kwargs": [1]}, "kwargs=.1.: a mapping is expected"),
        (
            {"reward": "format", "kwargs": {"tag": []}},
            "kwargs.tag: the function has no such argument. Did you mean 'tags'",
        ),
        ({"weight": 0}, "every weight is 0, so nothing scores"),
    ],
)
def test_a_wrong_part_is_told_with_its_key(entry: Any, reason: str) -> None:
    with pytest.raises(AssertionError, match=reason.replace("{", r"\{").replace("?", r"\?")):
        assert not problems({"part": entry}), "\n".join(problems({"part": entry}))


@pytest.mark.parametrize("name", ["model", "function", "error_rate", "overlong", "score"])
def test_names_of_other_columns_are_taken(name: str) -> None:
    assert problems({name: {}}) == [
        f"reward.functions.{name}: reward/{name} is the name of something else; call the part otherwise"
    ]


@pytest.mark.parametrize("name", ["a b", "a/b", "a.b", "1a", ""])
def test_names_that_would_not_be_one_word_of_a_metric(name: str) -> None:
    assert "letters, digits, _ and -" in problems({name: {}})[0]


def test_there_is_one_outcome() -> None:
    assert "a and c have outcome: true" in problems({"a": {"outcome": True}, "b": {}, "c": {"outcome": True}})[0]


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (
            {"custom_reward_function": CustomRewardConfig(path="pkg://m")},
            "custom_reward_function.path=pkg://m has no effect",
        ),
        (
            {"custom_reward_function": CustomRewardConfig(name="f")},
            "custom_reward_function.name=f has no effect beside",
        ),
        ({"reward_kwargs": {"limit": 1}}, "reward.reward_kwargs={'limit': 1} has no effect beside reward.functions"),
        ({"remote": RemoteRewardConfig(url="http://j")}, "reward.remote.url=http://j cannot be one of several rewards"),
        ({"batch_size": 8}, "reward.batch_size=8 has no effect"),
    ],
)
def test_what_has_no_meaning_beside_several_rewards(reward: dict[str, Any], reason: str) -> None:
    assert any(reason in problem for problem in problems({"accuracy": {}}, **reward))


def test_lists_have_a_size() -> None:
    assert problems({"a": {"path": "pkg://mine", "style": "batch"}}, batch_size=8) == []


def test_without_a_call_of_functions_they_have_no_effect() -> None:
    config = PPOConfig()
    config.reward.functions, config.reward.function_weight = {"a": {}}, 0.0
    config.reward_model.enable, config.reward_model.model.path = True, "model"
    assert any("reward.functions={'a': {}} has no effect with reward.function_weight=0" in x for x in rewards(config))


def test_parts_can_be_given_whole_or_entry_by_entry() -> None:
    whole = load_config(
        ["recipe=null", "reward.functions={accuracy: {weight: 1}, format: {reward: format, weight: 0.1}}"]
    )
    parts = load_config(
        ["recipe=null", "reward.functions.accuracy.weight=1", "reward.functions.format.reward=format",
         "reward.functions.format.weight=0.1"]
    )  # fmt: skip
    expected = {"accuracy": {"weight": 1}, "format": {"reward": "format", "weight": 0.1}}
    assert whole.config.reward.functions == parts.config.reward.functions == expected
    assert list(parts.config.reward.functions) == ["accuracy", "format"]


JUDGE = {"base_url": "http://127.0.0.1:1/v1", "model": "m"}


@pytest.mark.parametrize(
    ("part", "reward", "reason"),
    [
        ({"reward": "code"}, {"timeout_s": 16}, "reward.timeout_s=16: all tests of a program may take 15 s"),
        (
            {"reward": "code", "kwargs": {"total_timeout_s": 40}},
            {},
            "may take 40 s (reward.functions.part.kwargs.total_timeout_s",
        ),
        ({"reward": "judge"}, {}, "reward.functions.part.kwargs: The judge's base_url=None"),
        ({"reward": "judge", "kwargs": {**JUDGE, "verdict": "x"}}, {}, "verdict='x': one of number, json, yes_no"),
        (
            {"reward": "rule/judge", "kwargs": {**JUDGE, "api_key_env": "NO_SUCH_KEY"}},
            {},
            "kwargs.api_key_env=NO_SUCH_KEY: this environment variable is not set",
        ),
        ({"reward": "judge", "kwargs": {**JUDGE, "template": "{question}"}}, {}, "template has no {answer}"),
    ],
)
def test_programs_have_time_and_judges_an_address(part: dict[str, Any], reward: dict[str, Any], reason: str) -> None:
    [problem] = problems({"part": part}, **reward)
    assert reason in problem


def test_a_judge_and_programs_that_are_fine() -> None:
    judge = {"reward": "judge", "kwargs": JUDGE}
    assert problems({"code": {"reward": "code"}, "quality": judge}) == []


def test_parts_that_are_only_logged_may_stand_beside_a_reward_model() -> None:
    config = PPOConfig()
    config.reward.functions = {"truth": {"weight": 0}}
    assert "every weight is 0" in " ".join(rewards(config))
    config.reward_model.enable, config.reward_model.model.path = True, "a/model"
    assert list(rewards(config)) == []

"""The registry of rewards, the user's own function, and the outcomes of a sample."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl_lite.config import CustomRewardConfig, RewardConfig
from verl_lite.errors import UserError
from verl_lite.rewards import (
    REWARDS,
    RewardItem,
    Scorer,
    default_compute_score,
    load_scorer,
    read_score,
    register_reward,
)
from verl_lite.rewards.scoring import Caller


@pytest.fixture
def clean_registry() -> Any:
    before = dict(REWARDS)
    yield
    REWARDS.clear()
    REWARDS.update(before)


@pytest.mark.parametrize("pattern", sorted(REWARDS))
def test_every_registered_reward_has_the_signature_that_callers_use(pattern: str) -> None:
    inspect.signature(REWARDS[pattern]).bind(data_source="", solution_str="", ground_truth="", extra_info={})


def test_unknown_source_lists_what_is_known_and_what_to_do() -> None:
    with pytest.raises(ValueError) as caught:
        default_compute_score("openai/gsm9k", "1", "1")
    message = str(caught.value)
    for part in ("openai/gsm9k", "openai/gsm8k", "reward.custom_reward_function", "@register_reward", "math*"):
        assert part in message


def test_full_name_wins_over_pattern_and_longer_pattern_over_shorter(clean_registry: None) -> None:
    register_reward("zoo/*")(lambda **call: 1)
    register_reward("zoo/cat*")(lambda **call: 2)
    register_reward("zoo/cat")(lambda **call: 3)
    assert [default_compute_score(f"zoo/{name}", "", "") for name in ("dog", "cats", "cat")] == [1, 2, 3]


def test_a_later_registration_is_seen_after_a_lookup(clean_registry: None) -> None:
    register_reward("zoo/*")(lambda **call: 1)
    assert default_compute_score("zoo/cat", "", "") == 1
    register_reward("zoo/cat")(lambda **call: 3)
    assert default_compute_score("zoo/cat", "", "") == 3


def test_another_function_under_a_taken_name_is_refused(clean_registry: None) -> None:
    with pytest.raises(ValueError, match="already registered"):
        register_reward("openai/gsm8k")(lambda **call: 1)


def write(folder: Path, text: str) -> str:
    file = folder / "my_reward.py"
    file.write_text(text)
    return str(file)


def custom(path: str, name: str = "compute_score", **kwargs: Any) -> RewardConfig:
    return RewardConfig(custom_reward_function=CustomRewardConfig(path=path, name=name), reward_kwargs=kwargs)


def test_custom_function_gets_verls_arguments_and_reward_kwargs_win(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0):\n"
        "    return {'score': len(solution_str) + bonus, 'source': data_source, 'truth': ground_truth}\n",
    )
    item = RewardItem(key=1, data_source="mine", solution_str="abc", ground_truth="t", extra_info={})
    [result] = load_scorer(custom(path, bonus=10, ground_truth="other")).score_all([item])
    assert (result.score, result.extra, result.failed) == (13.0, {"source": "mine", "truth": "other"}, False)


def test_custom_function_may_be_async_or_in_a_module(tmp_path: Path) -> None:
    path = write(tmp_path, "async def f(**call):\n    return 0.25\n")
    item = RewardItem(1, "mine", "1", "1")
    assert load_scorer(custom(path, "f")).score_all([item])[0].score == 0.25
    assert load_scorer(custom("pkg://verl_lite.rewards.rules", "exact_match")).score_all([item])[0].score == 1.0


def test_custom_load_errors_name_the_key_and_what_was_found(tmp_path: Path) -> None:
    path = write(tmp_path, "import math\ndef score_a(): ...\ndef score_b(): ...\n")
    with pytest.raises(UserError, match=r"custom_reward_function.name='compute_score'.*score_a, score_b"):
        load_scorer(custom(path))
    with pytest.raises(UserError, match="custom_reward_function.path"):
        load_scorer(custom(str(tmp_path / "none.py")))
    with pytest.raises(UserError, match="Python file NAME.py"):
        (tmp_path / "text.txt").write_text("")
        load_scorer(custom(str(tmp_path / "text.txt")))


@pytest.mark.parametrize("returned", [1, 1.5, True, np.float32(0.5), np.bool_(True), np.array(2.0), {"score": 1}])
def test_numbers_are_scores(returned: Any) -> None:
    score, extra = read_score(returned)
    assert score == float(returned["score"] if isinstance(returned, dict) else returned) and extra == {}


@pytest.mark.parametrize(
    "returned",
    [
        None,
        "1.0",
        math.nan,
        math.inf,
        [],
        [1, 2],
        {},
        {"acc": 1},
        {"score": None},
        {"score": math.nan},
        np.nan,
        object(),
    ],
)
def test_anything_else_is_a_failure_and_never_zero(returned: Any) -> None:
    with pytest.raises(ValueError):
        read_score(returned)
    result = Scorer((Caller(lambda **call: returned),)).score_all([RewardItem("k", "s", "a", "t")])[0]
    assert result.failed and math.isnan(result.score) and "The reward function returned" in (result.error or "")


def test_extras_keep_numbers_and_strings() -> None:
    returned = {"score": 1, "acc": True, "length": np.int64(3), "pred": "4", "x": math.nan, "y": None, "z": [1]}
    assert read_score(returned) == (1.0, {"acc": 1.0, "length": 3.0, "pred": "4"})


def test_an_exception_is_the_samples_outcome_with_its_traceback() -> None:
    def broken(**call: Any) -> float:
        return 1 / len(call["solution_str"])

    result = Scorer((Caller(broken),)).score_all([RewardItem("k", "s", "", "t")])[0]
    assert result.failed and "ZeroDivisionError" in (result.error or "") and "in broken" in (result.error or "")

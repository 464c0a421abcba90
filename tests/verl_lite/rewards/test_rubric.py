"""Rubrics: weighted functions that name what they want to see, as one reward function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl_lite.config import CustomRewardConfig, RewardConfig
from verl_lite.errors import UserError
from verl_lite.rewards import RewardItem, Rubric, Scorer, load_scorer
from verl_lite.rewards.scoring import Caller

ITEM = RewardItem(0, "task", "  yes ", "yes", {"index": 3}, [{"role": "user", "content": "Well?"}])
MINE = """
from verl_lite.rewards import Rubric

def right(completion, answer):
    return completion[-1]["content"].strip() == answer

def brief(completion):
    return 1 / len(completion[-1]["content"])

async def judged(prompt, state):
    return len(prompt)

compute_score = Rubric(funcs=[right, brief], weights=[1.0, 0.2])
with_judge = Rubric(funcs=[right, judged])
"""


def call(*funcs: Any, **kwargs: Any) -> dict[str, float]:
    result = Rubric(funcs, **kwargs)("task", "  yes ", "yes", {"index": 3}, ITEM.prompt)
    assert isinstance(result, dict)
    return result


def scorer(tmp_path: Path, name: str) -> Any:
    (tmp_path / "mine.py").write_text(MINE)
    return load_scorer(
        RewardConfig(custom_reward_function=CustomRewardConfig(path=str(tmp_path / "mine.py"), name=name))
    )


def test_it_is_a_reward_function_of_the_users_file(tmp_path: Path) -> None:
    loaded = scorer(tmp_path, "compute_score")
    assert loaded.style == "sample"
    [result] = loaded.score_all([ITEM])
    assert result.score == pytest.approx(1.0 + 0.2 / 6)
    assert result.extra == {"acc": 1.0, "right": 1.0, "brief": pytest.approx(1 / 6)}


def test_with_an_async_function_it_is_async(tmp_path: Path) -> None:
    loaded = scorer(tmp_path, "with_judge")
    assert loaded.style == "async"
    assert loaded.score_all([ITEM])[0].score == 2.0


def test_functions_get_what_they_name() -> None:
    seen: dict[str, Any] = {}

    def all_of_verifiers(
        prompt: Any, completion: Any, answer: Any, state: Any, info: Any, task: Any, parser: Any
    ) -> int:
        seen.update(locals())
        return 1

    def all_of_ours(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any) -> int:
        seen.update(locals())
        return 1

    def rest(answer: Any, **known: Any) -> int:
        seen["rest"] = known
        return 1

    def with_default(completion: Any, strict: bool = True) -> float:
        return float(strict)

    assert call(all_of_verifiers, all_of_ours, rest, with_default, parser="a parser")["score"] == 4.0
    answer = [{"role": "assistant", "content": "  yes "}]
    expected = {"prompt": ITEM.prompt, "completion": answer, "answer": "yes", "info": {"index": 3}, "task": "task"}
    assert {name: seen[name] for name in expected} == expected == seen["state"]
    assert (seen["parser"], seen["solution_str"], seen["ground_truth"]) == ("a parser", "  yes ", "yes")
    assert (seen["data_source"], seen["extra_info"]) == ("task", {"index": 3})
    assert set(seen["rest"]) == set(expected) - {"answer"} | {
        "state", "parser", "solution_str", "ground_truth", "extra_info", "data_source",
    }  # fmt: skip


def test_state_goes_from_function_to_function_and_is_new_for_each_sample() -> None:
    def counts(state: dict[str, Any]) -> int:
        state["seen"] = state.get("seen", 0) + 1
        return state["seen"]

    def reads(state: dict[str, Any]) -> int:
        return state["seen"]

    rubric = Rubric([counts, reads], [1.0, 10.0])
    assert [rubric("s", "a", "t")["score"] for _ in range(3)] == [11.0] * 3  # type: ignore[index]


def test_a_function_that_raises_or_returns_nonsense_fails_the_sample() -> None:
    def good() -> float:
        return 1.0

    def nothing() -> None:
        return None

    def several() -> dict[str, float]:
        return {"score": 1.0}

    for function, reason in ((nothing, "'nothing' of"), (several, "'several' of")):
        [result] = Scorer((Caller(Rubric([good, function], [1.0, 0.0])),)).score_all([ITEM])
        assert result.failed and reason in (result.error or "")


def named(name: str) -> Any:
    def function() -> float:
        return 1.0

    function.__name__ = name
    return function


def over_a_group(completions: Any) -> float:
    return 1.0


def asks_too_much(completion: Any, judge_model: Any) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("funcs", "weights", "reason"),
    [
        ([], None, "a function or more"),
        ([named("a")], [1.0, 2.0], r"1 functions with weights \[1.0, 2.0\]"),
        ([named("a")], [float("nan")], "a finite number for each"),
        ([named("a"), named("a")], None, "a, a.: each needs its own"),
        ([lambda completion: 1.0], None, "each needs its own, by `def`"),
        ([named("score")], None, "each needs its own"),
        ([over_a_group], None, "over_a_group asks for completions, .*not as groups"),
        ([asks_too_much], None, "asks_too_much asks for judge_model, which there is not .*Known: prompt, completion"),
    ],
)
def test_what_cannot_be_a_rubric_is_refused_when_it_is_made(funcs: Any, weights: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        Rubric(funcs, weights)

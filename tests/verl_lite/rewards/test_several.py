"""Several rewards for each answer: their sum, what stays visible of each, and what a failure of one of them means."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_lite.config import CustomRewardConfig, RewardConfig
from verl_lite.errors import UserError
from verl_lite.rewards import (
    REWARDS,
    RewardItem,
    RewardResult,
    asks_by_source,
    load_scorer,
    register_reward,
)
from verl_lite.rewards.scoring import Caller, weighted_sum
from workers.rewards.pool import RewardError, RewardPool

QUESTION = [{"role": "user", "content": "What is 70 + 2?"}]
RIGHT = "<think>70 + 2</think><answer>#### 72</answer>"
MINE = """
import asyncio

def short(data_source, solution_str, ground_truth, extra_info=None, limit=10):
    if solution_str == "boom": raise KeyError("no such answer")
    return {"score": len(solution_str) <= limit, "length": len(solution_str), "pred": "mine"}

def compute_score(solution_str, prompt, **rest):
    return len(prompt[0]["content"])

async def judge(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.01)
    if solution_str == "cancel": raise asyncio.CancelledError()
    return 0.5

def lists(data_sources, solution_strs, ground_truths, extra_infos):
    if "boom" in solution_strs and len(solution_strs) > 1: raise ValueError("as a whole")
    return [None if answer == "none" else len(solution_strs) for answer in solution_strs]

def trl(prompts, completions, ground_truth, **columns):
    return [float(messages[0]["content"] == truth) for messages, truth in zip(completions, ground_truth)]
"""


@pytest.fixture
def mine(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(MINE)
    return str(tmp_path / "mine.py")


@pytest.fixture
def clean_registry() -> Iterator[None]:
    before = dict(REWARDS)
    yield
    REWARDS.clear()
    REWARDS.update(before)


def items(*answers: str, source: str = "openai/gsm8k") -> list[RewardItem]:
    return [RewardItem(index, source, answer, "72", {}, QUESTION) for index, answer in enumerate(answers)]


def load(functions: dict[str, Any]) -> Any:
    return load_scorer(RewardConfig(functions=functions))


# ------------------------------------------------------------------------------------------------------------ the sum


def test_the_score_is_the_weighted_sum_and_each_part_is_kept_before_its_weight(mine: str) -> None:
    scorer = load(
        {
            "accuracy": {"weight": 2},  # by data_source: GSM8K
            "format": {"reward": "format", "weight": 0.5},
            "short": {"path": mine, "name": "short", "weight": -0.1, "kwargs": {"limit": 100}},
        }
    )
    assert scorer.style == "sample"
    both, format_only, neither = scorer.score_all(items(RIGHT, RIGHT.replace("72", "71"), "71"))
    assert both.score == pytest.approx(2 * 1 + 0.5 * 1 - 0.1 * 1)
    assert format_only.score == pytest.approx(2 * 0 + 0.5 * 1 - 0.1 * 1)
    assert neither.score == pytest.approx(-0.1)
    assert both.extra == {
        "accuracy": 1.0,
        "format": 1.0,
        "short": 1.0,
        "acc": 1.0,
        "short.length": float(len(RIGHT)),
        "short.pred": "mine",
    }


def results(*extras: dict[str, float | str]) -> list[RewardResult]:
    return [RewardResult(float(place), extra) for place, extra in enumerate(extras)]


def test_the_outcome_gives_acc_and_pred_and_names_never_clash() -> None:
    def parts(outcome: int) -> tuple[Caller, ...]:
        return tuple(Caller(len, name, 10.0**place, place == outcome) for place, name in enumerate("abc"))

    returned = results({"acc": 0.25, "pred": "x", "b": 7.0}, {"acc": 0.75, "pred": "y"}, {"other": 3.0})
    first = weighted_sum(parts(0), returned)
    assert first.score == 0 * 1 + 1 * 10 + 2 * 100
    assert first.extra == {
        "a": 0.0, "b": 1.0, "c": 2.0, "acc": 0.25, "pred": "x", "a.b": 7.0, "b.acc": 0.75, "b.pred": "y",
        "c.other": 3.0,
    }  # fmt: skip
    third = weighted_sum(parts(2), returned)
    assert third.extra["acc"] == 2.0, "an outcome without acc is the outcome itself"
    assert third.extra["other"] == 3.0 and "pred" not in third.extra and third.extra["a.acc"] == 0.25


def test_outcome_names_another_than_the_first(mine: str) -> None:
    functions = {
        "format": {"reward": "format", "weight": 0.1},
        "answer": {"reward": "regex", "kwargs": {"pattern": r"#### (\d+)", "group": 1}, "outcome": True},
    }
    [result] = load(functions).score_all(items("#### 72"))
    assert result.extra == {"format": 0.0, "answer": 1.0, "acc": 1.0, "pred": "72"} and result.score == 1.0


def test_a_part_that_fails_fails_the_sample_and_is_named(mine: str) -> None:
    scorer = load({"accuracy": None, "short": {"path": mine, "name": "short"}})
    good, bad = scorer.score_all(items("71", "boom"))
    assert not good.failed and bad.failed and bad.extra == {}
    assert "The part 'short' of reward.functions failed." in bad.error and "no such answer" in bad.error


# ----------------------------------------------------------------------------------------------------- ways of calling


def test_parts_that_await_do_so_together_and_many_samples_at_once(mine: str) -> None:
    scorer = load({"judge": {"path": mine, "name": "judge"}, "again": {"path": mine, "name": "judge"}, "format": {}})
    assert scorer.style == "async"
    assert scorer.score_all(items("#### 72"))[0].score == 0.5 + 0.5 + 1.0

    async def all_of_them() -> list[RewardResult]:
        return list(await asyncio.gather(*(scorer.score(item) for item in items(*["x"] * 200))))

    assert [result.score for result in asyncio.run(all_of_them())] == [1.0] * 200


def test_parts_in_lists_and_one_by_one_beside_each_other(mine: str) -> None:
    scorer = load(
        {
            "accuracy": {},
            "lists": {"path": mine, "name": "lists", "style": "batch", "weight": 0.0},
            "trl": {"path": mine, "name": "trl", "style": "trl"},
            "judge": {"path": mine, "name": "judge"},
            "asks": {"path": mine, "weight": 0.0},
        }
    )
    assert scorer.style == "batch"
    first, second = scorer.score_all(items("#### 72", "72"))
    assert (first.score, second.score) == (1 + 0 + 0.5, 0 + 1 + 0.5)
    assert first.extra["lists"] == 2.0 and first.extra["asks"] == len("What is 70 + 2?")
    one, none, other = scorer.score_all(items("#### 72", "none", "72"))
    assert not one.failed and none.failed and not other.failed and "The part 'lists'" in (none.error or "")
    alone = scorer.score_all(items("boom", "72"))
    assert [result.extra["lists"] for result in alone] == [1.0, 1.0], "that part was called with each alone"


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("name", ["short", "judge", "lists"])
def test_in_reward_processes_and_in_the_driver(mine: str, num_workers: int, name: str) -> None:
    own = {"path": mine, "name": name, "style": "batch" if name == "lists" else "sample", "weight": 10}
    pool = RewardPool(RewardConfig(functions={"accuracy": {}, "own": own}), num_workers)
    try:
        pool.submit(items("#### 72", "71"))
        right, wrong = pool.collect([0, 1]).values()
    finally:
        pool.close()
    worth = {"short": 1.0, "judge": 0.5, "lists": 2.0}[name]
    assert (right.score, wrong.score) == (1 + 10 * worth, 10 * worth)
    assert right.extra["own"] == worth and right.extra["acc"] == 1.0


def test_a_part_that_cancels_itself_costs_only_its_sample(mine: str) -> None:
    pool = RewardPool(RewardConfig(functions={"accuracy": {}, "judge": {"path": mine, "name": "judge"}}), 1)
    try:
        pool.submit(items("71", "cancel", "#### 72"))
        outcomes = list(pool.collect([0, 1, 2]).values())
    finally:
        pool.close()
    assert [result.failed for result in outcomes] == [False, True, False]


# ------------------------------------------------------------------------------------------------- names, bad options


def test_a_registered_reward_by_name_gets_its_options_and_the_row(clean_registry: None) -> None:
    @register_reward("rule/bonus")
    def bonus(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, points: int = 1) -> float:
        return points * float(data_source == "openai/gsm8k" and ground_truth == "72")

    [result] = load({"bonus": {"reward": "bonus", "kwargs": {"points": 3}}}).score_all(items("x"))
    assert result.score == 3.0


def test_an_async_reward_that_is_only_there_to_be_named_makes_no_other_run_async(clean_registry: None) -> None:
    @register_reward("rule/slow_judge")
    async def judge(**call: Any) -> float:
        return 0.5

    assert load_scorer(RewardConfig()).style == "sample"
    assert load({"judge": {"reward": "slow_judge"}}).style == "async"
    [result] = load_scorer(RewardConfig()).score_all(items("x", source="rule/slow_judge"))  # type: ignore[union-attr]
    assert result.score == 0.5, "as a data source it works, one sample at a time"


def test_only_parts_by_data_source_ask_for_known_sources() -> None:
    assert asks_by_source(RewardConfig()) and asks_by_source(
        RewardConfig(functions={"a": {"reward": "format"}, "b": {}})
    )
    assert not asks_by_source(RewardConfig(functions={"a": {"reward": "format"}}))
    assert not asks_by_source(RewardConfig(custom_reward_function=CustomRewardConfig(path="x.py")))
    row = {"data_source": "nobody/knows", "reward_model": {"ground_truth": "1"}}
    for functions, known in (({"a": {}}, False), ({"a": {"reward": "format"}}, True)):
        pool = RewardPool(RewardConfig(functions=functions), 0)
        if known:
            pool.dry_run([row], ["nobody/knows"])
        else:
            with pytest.raises(UserError, match="No reward function for data_source='nobody/knows'"):
                pool.dry_run([row], ["nobody/knows"])


@pytest.mark.parametrize(
    ("functions", "reason"),
    [
        ({"a": {"path": "{mine}", "name": "shrt"}}, r"reward.functions.a.name='shrt'.*compute_score, judge, lists"),
        ({"a": {"path": "none.py"}}, "reward.functions.a.path='none.py': no such file"),
        ({"a": {"path": "{mine}", "name": "short", "kwargs": {"limt": 3}}}, "kwargs.limt: .* did you mean limit"),
        ({"a": {"reward": "frmat"}}, "no reward has this name; did you mean format"),
    ],
)
def test_what_does_not_load_is_said_with_its_key(mine: str, functions: dict[str, Any], reason: str) -> None:
    entry = functions["a"]
    given = {"a": {**entry, "path": mine} if entry.get("path") == "{mine}" else entry}
    with pytest.raises(UserError, match=reason):
        load(given)


def test_in_a_process_it_stops_the_start(mine: str) -> None:
    pool = RewardPool(RewardConfig(functions={"a": {"path": mine, "name": "nothing"}}), 1)
    try:
        with pytest.raises(RewardError, match=r"(?s)does not load.*reward.functions.a.name='nothing'"):
            pool.dry_run([{"data_source": "x", "reward_model": {"ground_truth": "1"}}])
    finally:
        pool.close()


def test_a_file_with_two_parts_runs_once_and_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "r.py").write_text(
            f"import pathlib\nwith open(pathlib.Path(__file__).parent / 'runs', 'a') as f: f.write('x')\n"
            f"class C: name = '{folder}'\n"
            "def f(**call):\n    import sys\n    return float(sys.modules[C.__module__].C is C)\ng = f\n"
        )
    paths = [str(tmp_path / folder / "r.py") for folder in ("one", "two")]
    functions: dict[str, Any] = {
        f"{name}{i}": {"path": path, "name": name} for i, path in enumerate(paths) for name in "fg"
    }
    [result] = load(functions).score_all(items("x"))
    assert result.score == 4.0
    assert [(tmp_path / folder / "runs").read_text() for folder in ("one", "two")] == ["x", "x"]

"""From a configuration to scores: registry, the user's own functions, ways of calling, several rewards, failures."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl_lite.config import CustomRewardConfig, RewardConfig
from verl_lite.errors import UserError
from verl_lite.rewards import (
    REWARDS,
    RewardItem,
    RewardResult,
    Scorer,
    asks_by_source,
    default_compute_score,
    load_scorer,
    read_score,
    register_reward,
)
from verl_lite.rewards.scoring import RewardPart, part_problems
from workers.rewards.reward_pool import RewardPool

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
    return 0.5

class Judge:
    async def __call__(self, solution_str, bonus=0, **rest):
        return len(solution_str) + bonus
as_object = Judge()

def lists(data_sources, solution_strs, ground_truths, extra_infos):
    if "boom" in solution_strs and len(solution_strs) > 1: raise ValueError("as a whole")
    return [None if answer == "none" else len(solution_strs) for answer in solution_strs]

def entries(data_sources, solution_strs, ground_truths, extra_infos, bonus=0):
    bad = {'nan': float('nan'), 'none': None, 'text': '1.0', 'dict': {'acc': 1}}
    rows = zip(solution_strs, ground_truths, extra_infos, strict=True)
    return [bad.get(a, {'score': len(a) + bonus, 'truth': t, 'index': e['index']}) for a, t, e in rows]

def trl(prompts, completions, ground_truth, difficulty, **columns):
    assert prompts == [[{'role': 'user', 'content': 'What is 70 + 2?'}]] * 2
    assert sorted(columns) == ['data_source', 'index']
    assert difficulty == ['easy', None]
    return [float(messages[0]["content"] == truth) for messages, truth in zip(completions, ground_truth)]
"""


@pytest.fixture(scope="module")
def mine(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("mine") / "mine.py"
    path.write_text(MINE)
    return str(path)


@pytest.fixture
def clean_registry() -> Iterator[None]:
    before = dict(REWARDS)
    yield
    REWARDS.clear()
    REWARDS.update(before)


def items(*answers: str, source: str = "openai/gsm8k", truth: str = "72") -> list[RewardItem]:
    return [RewardItem(i, source, answer, truth, {"index": i}, QUESTION) for i, answer in enumerate(answers)]


def load(functions: dict[str, Any]) -> Scorer:
    return load_scorer(RewardConfig(functions=functions))


def custom(path: str, name: str = "compute_score", style: str = "sample", **kwargs: Any) -> Scorer:
    own = CustomRewardConfig(path=path, name=name, style=style)
    return load_scorer(RewardConfig(custom_reward_function=own, reward_kwargs=kwargs))


def scores(results: list[RewardResult]) -> list[float | None]:
    return [None if result.failed else result.score for result in results]


# ------------------------------------------------------------------------------------------------------- the registry


def test_names_and_patterns_find_their_function(clean_registry: None) -> None:
    with pytest.raises(ValueError) as caught:
        default_compute_score("openai/gsm9k", "1", "1")
    for part in ("openai/gsm9k", "openai/gsm8k", "reward.custom_reward_function", "@register_reward", "math*"):
        assert part in str(caught.value)
    for number, pattern in enumerate(("zoo/*", "zoo/cat*", "zoo/cat"), 1):
        register_reward(pattern)(lambda number=number, **call: number)
    assert [default_compute_score(f"zoo/{name}", "", "") for name in ("dog", "cats", "cat")] == [1, 2, 3]
    with pytest.raises(ValueError, match="already registered"):
        register_reward("openai/gsm8k")(lambda **call: 1)


def test_an_async_reward_makes_a_run_async_unless_it_is_only_there_to_be_named(clean_registry: None) -> None:
    async def judge(**call: Any) -> float:
        return 0.5

    register_reward("rule/slow_judge")(judge)
    assert load_scorer(RewardConfig()).style == "sample" and load({"j": {"reward": "slow_judge"}}).style == "async"
    [result] = load_scorer(RewardConfig()).score_all(items("x", source="rule/slow_judge"))
    assert result.score == 0.5, "as a data source it works, one sample at a time"
    register_reward("slow/judge")(judge)
    loaded = load_scorer(RewardConfig())
    mixed = [RewardItem(0, "slow/judge", "x", "x"), RewardItem(1, "exact_match", "x", "x")]
    assert loaded.style == "async" and scores(loaded.score_all(mixed)) == [0.5, 1.0]


# ---------------------------------------------------------------------------------------------- what a function returns


@pytest.mark.parametrize("returned", [1, 1.5, True, np.float32(0.5), np.bool_(1), np.array(2.0), {"score": 1}, 3e38])
def test_numbers_are_scores(returned: Any) -> None:
    score, extra = read_score(returned)
    assert score == float(returned["score"] if isinstance(returned, dict) else returned) and extra == {}


NO_SCORES = [
    None, "1.0", math.nan, math.inf, [1, 2], {}, {"acc": 1}, {"score": None}, {"score": math.nan}, object(),
    1e308, -3.5e38, 10**400, np.float64(1e39), {"score": 1e308},  # float32 ends at 3.4028e38
]  # fmt: skip


def test_async_rewards_are_scored_where_an_event_loop_runs_already() -> None:
    """As in a notebook, with reward.num_workers=0."""

    async def judge(**call: Any) -> float:
        await asyncio.sleep(0)
        return 0.5

    async def judge_all(**lists: Any) -> list[float]:
        return [0.25] * len(lists["solution_strs"])

    async def cell() -> list[RewardResult]:
        results = Scorer((RewardPart(function=judge),)).score_all(items("a", "b"))
        return results + Scorer((RewardPart(style="batch", function=judge_all),)).score_all(items("a", "b"))

    assert [result.score for result in asyncio.run(cell())] == [0.5, 0.5, 0.25, 0.25]


@pytest.mark.parametrize("returned", NO_SCORES)
def test_anything_else_is_a_failure_and_never_zero(returned: Any) -> None:
    with pytest.raises(ValueError):
        read_score(returned)
    [result] = Scorer((RewardPart(function=lambda **call: returned),)).score_all(items("a"))
    assert result.failed and math.isnan(result.score)
    assert (result.error or "").startswith("The reward function returned"), "without a traceback of this project"


@pytest.mark.parametrize("style", ["sample", "async", "batch"])
def test_a_reward_that_exits_fails_its_sample_also_without_reward_processes(tmp_path: Path, style: str) -> None:
    start = "async def" if style == "async" else "def"
    file = tmp_path / "leaving.py"
    file.write_text(f"import sys\n{start} leave(*args, **kwargs):\n    sys.exit(3)\n")
    [result] = custom(str(file), "leave", "batch" if style == "batch" else "sample").score_all(items("a"))
    assert result.failed and "SystemExit: 3" in (result.error or "")


def test_extras_are_numbers_and_strings_of_bounded_length() -> None:
    returned = {"score": 1, "acc": True, "length": np.int64(3), "pred": "4", "x": math.nan, "y": 1e39, "z": [1]}
    assert read_score(returned) == (1.0, {"acc": 1.0, "length": 3.0, "pred": "4"})
    assert read_score({"score": 1, "a\udfff": 2}) == (1.0, {"a?": 2.0}), "the name of a column"
    assert len(read_score({"score": 1, "pred": "x" * 10_000_000})[1]["pred"]) == 10_000  # type: ignore[arg-type]


def test_an_exception_is_the_samples_outcome_with_a_traceback_of_bounded_length() -> None:
    def shout(**call: Any) -> float:
        raise ValueError("x" * 10_000_000)

    error = Scorer((RewardPart(function=shout),)).score_all(items("a"))[0].error or ""
    assert len(error) < 21_000 and "Traceback" in error and "in shout" in error and "characters omitted" in error


# ---------------------------------------------------------------------------------------------------- ways of calling


def test_custom_functions_get_verls_arguments_and_reward_kwargs_win(mine: str) -> None:
    [result] = custom(mine, "short", limit=2).score_all(items("abc"))
    assert (result.score, result.extra) == (0.0, {"length": 3.0, "pred": "mine"})
    assert scores(custom(mine).score_all(items("a"))) == [len("What is 70 + 2?")], "the prompt, because it is named"
    assert scores(custom(mine, "judge").score_all(items("a"))) == [0.5]
    loaded = custom(mine, "as_object", bonus=3)
    assert loaded.style == "async" and asyncio.run(loaded.score(items("four")[0])).score == 7
    assert scores(custom("pkg://verl_lite.rewards.rules", "exact_match").score_all(items("72"))) == [1.0]


def test_verls_lists_come_in_order_and_a_bad_entry_fails_its_own_sample_only(mine: str) -> None:
    loaded = custom(mine, "entries", "batch", bonus=10)
    results = loaded.score_all(items("a", "nan", "none", "text", "dict", "bb"))
    assert loaded.style == "batch" and scores(results) == [11, None, None, None, None, 12]
    assert results[5].extra == {"truth": "72", "index": 5.0}
    assert "expected a finite number" in (results[1].error or "") and "without 'score'" in (results[4].error or "")


def test_trls_lists_have_prompts_completions_and_the_columns_of_the_data(mine: str) -> None:
    loaded = custom(mine, "trl", "trl")
    first, second = items("72", "nonsense")
    easy = RewardItem(0, "src", "72", "72", {"index": 0, "difficulty": "easy"}, QUESTION)
    assert scores(loaded.score_all([easy, second])) == [1.0, 0.0]
    failed = loaded.score_all([first])[0]
    assert "difficulty" in (failed.error or ""), "a column that no row has is missing, and the error says so"


@pytest.mark.parametrize("returned", [[1.0, 1.0], [1.0] * 4, 1.0, "abc", {"score": 1}, None, iter([1.0] * 3)])
def test_a_wrong_number_of_results_is_told_with_both_numbers(returned: Any) -> None:
    loaded = Scorer((RewardPart(style="batch", function=lambda **lists: returned),))
    with pytest.raises(ValueError, match="The reward function returned .* for 3 samples; expected one result each"):
        loaded.score_list(items("a", "b", "c"))


# ----------------------------------------------------------------------------------------------------- several rewards


def test_the_score_is_the_weighted_sum_and_each_part_is_kept_before_its_weight(mine: str) -> None:
    scorer = load(
        {
            "accuracy": {"weight": 2},  # by data_source: GSM8K
            "format": {"reward": "format", "weight": 0.5},
            "short": {"path": mine, "name": "short", "weight": -0.1, "kwargs": {"limit": 100}},
        }
    )
    both, format_only, neither, bad = scorer.score_all(items(RIGHT, RIGHT.replace("72", "71"), "71", "boom"))
    assert both.score == pytest.approx(2 * 1 + 0.5 * 1 - 0.1 * 1)
    assert format_only.score == pytest.approx(2 * 0 + 0.5 * 1 - 0.1 * 1)
    assert neither.score == pytest.approx(-0.1)
    assert both.extra == {
        "accuracy": 1.0, "format": 1.0, "short": 1.0, "acc": 1.0, "short.length": float(len(RIGHT)),
        "short.pred": "mine",
    }  # fmt: skip
    assert bad.failed and bad.extra == {} and "no such answer" in (bad.error or "")
    assert "The part 'short' of reward.functions failed." in (bad.error or "")


def test_a_sum_that_float32_cannot_hold_fails_the_sample() -> None:
    parts = tuple(RewardPart(name, function=lambda **call: 3e38, outcome=name == "a") for name in "ab")
    [result] = Scorer(parts).score_all(items("x"))
    assert result.failed and "The weighted sum of reward.functions gave 6e+38" in (result.error or "")


def test_the_outcome_gives_acc_and_pred_and_names_never_clash() -> None:
    def sums_with(outcome: int) -> RewardResult:
        parts = (RewardPart(name, weight=10.0**n, outcome=n == outcome) for n, name in enumerate("abc"))
        return Scorer(tuple(parts)).combined(returned)

    extras: list[dict[str, float | str]] = [
        {"acc": 0.25, "pred": "x", "b": 7.0}, {"acc": 0.75, "pred": "y"}, {"other": 3.0},
    ]  # fmt: skip
    returned = [RewardResult(float(place), extra) for place, extra in enumerate(extras)]
    first = sums_with(0)
    assert first.score == 0 * 1 + 1 * 10 + 2 * 100
    assert first.extra == {
        "a": 0.0, "b": 1.0, "c": 2.0, "acc": 0.25, "pred": "x", "a.b": 7.0, "b.acc": 0.75, "b.pred": "y",
        "c.other": 3.0,
    }  # fmt: skip
    third = sums_with(2)
    assert third.extra["acc"] == 2.0, "an outcome without acc is the outcome itself"
    assert third.extra["other"] == 3.0 and "pred" not in third.extra and third.extra["a.acc"] == 0.25


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(("name", "worth"), [("short", 1.0), ("judge", 0.5), ("lists", 2.0)])
def test_in_reward_processes_and_in_the_driver(mine: str, num_workers: int, name: str, worth: float) -> None:
    own = {"path": mine, "name": name, "style": "batch" if name == "lists" else "sample", "weight": 10}
    pool = RewardPool(RewardConfig(functions={"accuracy": {}, "own": own}), num_workers)
    try:
        pool.submit(items("#### 72", "71"))
        right, wrong = pool.collect([0, 1]).values()
    finally:
        pool.close()
    assert (right.score, wrong.score) == (1 + 10 * worth, 10 * worth)
    assert right.extra["own"] == worth and right.extra["acc"] == 1.0


def test_only_parts_by_data_source_ask_for_known_sources() -> None:
    assert asks_by_source(RewardConfig(functions={"a": {"reward": "format"}, "b": {}}))
    assert not asks_by_source(RewardConfig(custom_reward_function=CustomRewardConfig(path="x.py")))
    row = {"data_source": "nobody/knows", "reward_model": {"ground_truth": "1"}}
    RewardPool(RewardConfig(functions={"a": {"reward": "format"}}), 0).dry_run([row], ["nobody/knows"])
    with pytest.raises(UserError, match="No reward function for data_source='nobody/knows'"):
        RewardPool(RewardConfig(), 0).dry_run([row], ["nobody/knows"])


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"path": "{mine}", "name": "shrt"}, r"reward.functions.a.name='shrt'.*compute_score, entries, judge"),
        ({"path": "none.py"}, "reward.functions.a.path='none.py': no such file"),
        ({"path": "{mine}", "name": "short", "kwargs": {"limt": 3}}, "kwargs.limt: .* did you mean limit"),
        ({"reward": "frmat"}, "no reward has this name; did you mean format"),
        ({"reward": "code", "kwargs": {"total_timeout_s": "20"}}, "a.kwargs.total_timeout_s='20': expected a number"),
        ({"reward": "code", "kwargs": {"max_tests": 1.5}}, "kwargs.max_tests=1.5: expected a whole number or null"),
        ({"reward": "math_verify", "kwargs": {"strict": "false"}}, "kwargs.strict='false': expected true or false"),
        ({"reward": "format", "kwargs": {"tags": "think"}}, "a.kwargs.tags='think': expected a list"),
        ({"reward": "judge", "kwargs": {"template": None}}, "a.kwargs.template=None: expected a text"),
        ({"reward": "format", "path": "x.py"}, "reward=format and path=x.py are both set"),
        ({"reward": "format", "weight": math.nan}, "a.weight=nan: expected a finite number"),
        ({"wait": 1}, "a.wait: unknown entry"),
    ],
)
def test_what_does_not_load_is_said_with_its_key(mine: str, entry: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        load({"a": {**entry, "path": mine} if entry.get("path") == "{mine}" else entry})


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"strict": "false"}, "reward.reward_kwargs.strict='false': expected true or false"),
        ({"stict": True}, "reward.reward_kwargs.stict: .* did you mean strict"),
    ],
)
def test_kwargs_of_a_reward_by_data_source_are_checked_before_the_run(kwargs: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=rf"{reason}.*data_source='math_x'"):
        RewardPool(RewardConfig(reward_kwargs=kwargs), 0).dry_run([], ["math_x"])


def test_each_registered_reward_accepts_its_own_defaults() -> None:
    for name, function in REWARDS.items():
        defaults = {key: entry.default for key, entry in inspect.signature(function).parameters.items()}
        given = {key: value for key, value in defaults.items() if value is not inspect.Parameter.empty}
        if name.startswith("rule/"):
            assert list(part_problems({"a": {"reward": name.removeprefix("rule/"), "kwargs": given}})) == [], name


def test_a_file_with_two_parts_runs_once_and_files_of_one_name_stay_apart(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "r.py").write_text(
            "import pathlib\nwith open(pathlib.Path(__file__).parent / 'runs', 'a') as f: f.write('x')\n"
            "class C: pass\ndef f(**call):\n    import sys\n    return float(sys.modules[C.__module__].C is C)\ng = f\n"
        )
    paths = [str(tmp_path / folder / "r.py") for folder in ("one", "two")]
    functions = {f"{name}{i}": {"path": path, "name": name} for i, path in enumerate(paths) for name in "fg"}
    assert load(functions).score_all(items("x"))[0].score == 4.0
    assert [(tmp_path / folder / "runs").read_text() for folder in ("one", "two")] == ["x", "x"]


def test_an_item_takes_its_values_from_a_row_of_a_batch_or_of_a_dataset() -> None:
    chat = [{"role": "user", "content": "1 + 1?"}]
    row = {
        "data_source": "sums",
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"split": "a"},
        "raw_prompt": chat,
    }
    item = RewardItem.of_row("key", row, "two", [b"png"])
    assert item == RewardItem("key", "sums", "two", "2", {"split": "a"}, chat, (b"png",))
    of_dataset = RewardItem.of_row(1, {"data_source": "sums", "prompt": chat}, "")
    assert of_dataset == RewardItem(1, "sums", "", None, None, chat, ())

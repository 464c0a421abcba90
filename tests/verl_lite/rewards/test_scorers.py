"""The three ways in which a reward function is called: a sample, many at a time, lists; and what each failure costs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from verl_lite.config import CustomRewardConfig, RewardConfig
from verl_lite.rewards import (
    REWARDS,
    RewardItem,
    RewardResult,
    Scorer,
    load_scorer,
    register_reward,
)
from verl_lite.rewards.scoring import Caller

QUESTION = [{"role": "user", "content": "1+1?"}]


@pytest.fixture
def clean_registry() -> Iterator[None]:
    before = dict(REWARDS)
    yield
    REWARDS.clear()
    REWARDS.update(before)


def scorer(folder: Path, code: str, style: str = "sample", **kwargs: Any) -> Scorer:
    (folder / "mine.py").write_text(code)
    custom = CustomRewardConfig(path=str(folder / "mine.py"), style=style)
    return load_scorer(RewardConfig(custom_reward_function=custom, reward_kwargs=kwargs))


def items(*answers: str, **info: Any) -> list[RewardItem]:
    return [RewardItem(i, "src", answer, f"t{i}", {"index": i, **info}, QUESTION) for i, answer in enumerate(answers)]


def scores(results: list[RewardResult]) -> list[float | None]:
    return [None if result.failed else result.score for result in results]


def test_verls_lists_come_in_order_and_results_go_to_their_samples(tmp_path: Path) -> None:
    code = (
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0):\n"
        "    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)\n"
        "    return [{'score': len(a) + bonus, 'truth': t, 'index': e['index'], 's': s} for s, a, t, e in rows]\n"
    )
    loaded = scorer(tmp_path, code, "batch", bonus=10)
    assert loaded.style == "batch"
    results = loaded.score_list(items("a", "bb", "ccc"))
    assert scores(results) == [11, 12, 13]
    assert [result.extra for result in results] == [{"truth": f"t{i}", "index": float(i), "s": "src"} for i in range(3)]


def test_trls_lists_have_prompts_completions_and_the_columns_of_the_data(tmp_path: Path) -> None:
    code = (
        "def compute_score(prompts, completions, ground_truth, difficulty, **columns):\n"
        "    assert prompts == [[{'role': 'user', 'content': '1+1?'}]] * 2\n"
        "    assert sorted(columns) == ['data_source', 'index']\n"
        "    assert difficulty == ['easy', None]\n"
        "    return [float(c[0]['content'] == t) for c, t in zip(completions, ground_truth)]\n"
    )
    loaded = scorer(tmp_path, code, "trl")
    first, second = items("t0", "nonsense")
    easy = RewardItem(0, "src", "t0", "t0", {"index": 0, "difficulty": "easy"}, QUESTION)
    assert scores(loaded.score_all([easy, second])) == [1.0, 0.0]
    failed = loaded.score_all([first])[0]
    assert "difficulty" in (failed.error or ""), "a column that no row has is missing, and the error says so"


def test_a_bad_entry_fails_its_own_sample_only(tmp_path: Path) -> None:
    code = (
        "def compute_score(solution_strs, **rest):\n"
        "    bad = {'nan': float('nan'), 'none': None, 'text': '1.0', 'dict': {'acc': 1}}\n"
        "    return [bad.get(text, 1.0) for text in solution_strs]\n"
    )
    loaded = scorer(tmp_path, code, "batch")
    results = loaded.score_all(items("good", "nan", "none", "text", "dict", "good"))
    assert scores(results) == [1.0, None, None, None, None, 1.0]
    assert "expected a finite number" in (results[1].error or "") and "without 'score'" in (results[4].error or "")


@pytest.mark.parametrize(
    "returned", ["values[:-1]", "values + [1.0]", "1.0", "'text'", "{'score': 1}", "None", "(v for v in values)"]
)
def test_a_wrong_number_of_results_is_told_with_both_numbers(tmp_path: Path, returned: str) -> None:
    code = (
        f"def compute_score(solution_strs, **rest):\n    values = [1.0 for _ in solution_strs]\n    return {returned}\n"
    )
    loaded = scorer(tmp_path, code, "batch")
    assert loaded.style == "batch"
    with pytest.raises(ValueError, match="The reward function returned .* for 3 samples; expected a list of so many"):
        loaded.score_list(items("a", "b", "c"))


def test_arrays_are_lists(tmp_path: Path) -> None:
    loaded = Scorer((Caller(lambda items: np.array([0.5, 1.0]), as_lists=lambda items: {"items": items}),))
    assert scores(loaded.score_list(items("a", "b"))) == [0.5, 1.0]


def test_a_list_that_fails_as_a_whole_is_repeated_one_by_one(tmp_path: Path) -> None:
    code = "def compute_score(solution_strs, **rest):\n    return [1 / len(text) for text in solution_strs]\n"
    results = scorer(tmp_path, code, "batch").score_all(items("a", "", "bb"))
    assert scores(results) == [1.0, None, 0.5] and "ZeroDivisionError" in (results[1].error or "")


def test_an_async_function_of_lists_is_awaited(tmp_path: Path) -> None:
    code = "async def compute_score(solution_strs, **rest):\n    return [len(text) for text in solution_strs]\n"
    assert scores(scorer(tmp_path, code, "batch").score_all(items("a", "bb"))) == [1, 2]


@pytest.mark.parametrize(
    "code",
    [
        "async def compute_score(solution_str, **rest):\n    return len(solution_str)",
        "class Judge:\n    async def __call__(self, solution_str, **rest):\n        return len(solution_str)\n"
        "compute_score = Judge()",
    ],
)
def test_async_functions_and_objects_are_recognised(tmp_path: Path, code: str) -> None:
    loaded = scorer(tmp_path, code)
    assert loaded.style == "async"
    assert asyncio.run(loaded.score(items("four")[0])).score == 4


def test_reward_kwargs_reach_an_async_function(tmp_path: Path) -> None:
    loaded = scorer(tmp_path, "async def compute_score(solution_str, bonus, **rest):\n    return bonus", bonus=3)
    assert loaded.style == "async" and asyncio.run(loaded.score(items("a")[0])).score == 3


def test_a_registered_async_function_makes_the_run_async_and_its_neighbours_stay_right(clean_registry: None) -> None:
    @register_reward("slow/judge")
    async def judge(solution_str: str, **rest: Any) -> float:
        await asyncio.sleep(0)
        return 0.5

    loaded = load_scorer(RewardConfig())
    assert loaded.style == "async"
    mixed = [RewardItem(0, "slow/judge", "x", "x"), RewardItem(1, "exact_match", "x", "x")]
    assert scores(loaded.score_all(mixed)) == [0.5, 1.0]


@pytest.mark.parametrize("style", ["custom", "registered"])
def test_the_prompt_goes_to_functions_that_name_it(tmp_path: Path, clean_registry: None, style: str) -> None:
    if style == "custom":
        code = "def compute_score(solution_str, prompt, **rest):\n    return len(prompt[0]['content'])"
        loaded, source = scorer(tmp_path, code), "src"
    else:
        register_reward("judged/*")(lambda solution_str, prompt, **rest: len(prompt[0]["content"]))
        loaded, source = load_scorer(RewardConfig()), "judged/x"
    assert loaded.style == "sample"
    assert loaded.score_all([RewardItem(0, source, "a", "t", {}, QUESTION)])[0].score == 4
    with_rest = scorer(tmp_path, "def compute_score(solution_str, **rest):\n    return float('prompt' in rest)")
    assert with_rest.score_all(items("a"))[0].score == 0, "verl's arguments and no others, unless it is named"


def test_what_a_result_holds_is_bounded() -> None:
    huge = "x" * 10_000_000
    result = Scorer((Caller(lambda **call: {"score": 1, "pred": huge}),)).score_all(items("a"))[0]
    assert len(result.extra["pred"]) == 10_000  # type: ignore[arg-type]

    def shout(**call: Any) -> float:
        raise ValueError(huge)

    error = Scorer((Caller(shout),)).score_all(items("a"))[0].error or ""
    assert len(error) < 21_000 and "Traceback" in error and "characters left out" in error

"""The score of an answer: function, model, or the weighted sum of both; failures; long answers; greedy baselines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainer.rewards.failures import FailureLog, RewardFailure, note_failed_rewards, reward_failure_log
from trainer.rewards.scores import RewardManager, mask_failed, punish_overlong, take_greedy_baselines
from verl_lite.config import PPOConfig, RewardConfig
from verl_lite.errors import UserError
from verl_lite.metrics import values
from verl_lite.protocol import DataProto, as_column
from verl_lite.rewards import RewardItem, RewardResult

LENGTHS = [3, 1, 2, 0]


def batch() -> DataProto:
    """Four answers of 3, 1, 2 and no tokens."""
    mask = (torch.arange(3) < torch.tensor(LENGTHS)[:, None]).long()
    return DataProto.from_dict(
        tensors={"response_mask": mask, "responses": torch.full((4, 3), 7)},
        non_tensors={
            "sample_id": np.array([f"train/1/p/{row}" for row in range(4)], dtype=object),
            "data_source": np.array(["task"] * 4, dtype=object),
        },
    )


class Pool:
    """The reward function's results, by row; notes what it was asked."""

    def __init__(self, results: list[RewardResult]) -> None:
        self.results, self.asked = results, 0

    def call(self, method: str, keys: Sequence[str] = ()) -> Any:
        if method == "processes_replaced":
            return 3
        self.asked += 1
        return dict(zip(keys, self.results, strict=True))

    send = stop = None


class Model:
    def __init__(self, results: list[RewardResult], weight: float = 1.0) -> None:
        self.results, self.weight = results, weight

    def score(self, batch: DataProto) -> list[RewardResult]:
        assert len(batch) == len(self.results)
        return self.results


def results(*scores: float, **extra: Any) -> list[RewardResult]:
    return [RewardResult(score, {name: extra[name] for name in extra}) for score in scores]


def manager(tmp_path: Path, pool: Any = None, model: Any = None, **options: Any) -> RewardManager:
    config = RewardConfig(**options)
    return RewardManager(pool, config, reward_failure_log(config.max_error_rate, tmp_path), model)


def score(tmp_path: Path, pool: Any = None, model: Any = None, **options: Any) -> DataProto:
    return manager(tmp_path, pool, model, **options).score(batch())


def test_answers_whose_rewards_are_available_and_answers_that_are_submitted_again(tmp_path: Path) -> None:
    class ReadyPool(Pool):
        def call(self, method: str, keys: Sequence[Any] = ()) -> Any:
            self.items = list(keys)
            return {"train/1/p/2"} if method == "ready" else None

    pool: Any = ReadyPool([])
    rewards = manager(tmp_path, pool)
    assert rewards.are_ready(batch()).tolist() == [False, False, True, False]
    model: Any = Model([])
    assert not manager(tmp_path, pool, model).are_ready(batch()).any(), "the model scores at the end"
    assert manager(tmp_path).are_ready(batch()).all(), "nothing to wait for"
    columns = {"raw_prompt": [[]] * 4, "extra_info": [{"a": 1}] * 4, "reward_model": [{"ground_truth": "4"}] * 4}
    rewards.submit(batch() | DataProto.from_dict({}, {name: as_column(each) for name, each in columns.items()}))
    first = RewardItem("train/1/p/0", "task", "[7, 7, 7]", "4", {"a": 1}, [])
    assert pool.items[0] == first and [item.solution_str for item in pool.items] == ["[7, 7, 7]", "[7]", "[7, 7]", "[]"]


def test_a_function_alone_is_the_score_itself(tmp_path: Path) -> None:
    scored = score(tmp_path, Pool(results(0.5, 1.0, 2.0, 3.0, acc=1.0)))
    assert scored.batch["token_level_scores"].tolist() == [[0, 0, 0.5], [1, 0, 0], [0, 2, 0], [0, 0, 0]]
    assert set(scored.non_tensor_batch) == {"reward_failed", "reward_timed_out", "reward/acc"}
    assert values(scored.meta_info["metrics"]) == {
        "reward/error_rate": 0.0,
        "reward/timeout_rate": 0.0,
        "reward/processes_replaced": 3.0,
        "reward/acc/mean": 1.0,
    }


def test_numbers_that_the_function_returns_have_means_over_the_answers_that_have_them(tmp_path: Path) -> None:
    outcomes = [
        RewardResult(1.0, {"format": 1.0, "half": 0.5, "why": "right", "pred": 72.0, "judge.pred": 1.0, "mixed": 1.0}),
        RewardResult(0.0, {"format": 0.0, "why": "wrong", "pred": 71.0, "mixed": "none"}),
        RewardResult.failure("boom"),
        RewardResult(1.0, {"format": 1.0, "empty": 1.0}),  # an empty answer counts nowhere
    ]
    metrics = values(score(tmp_path, Pool(outcomes), max_error_rate=1.0).meta_info["metrics"])
    means = {name: value for name, value in metrics.items() if name.endswith("/mean")}
    assert means == {"reward/format/mean": 0.5, "reward/half/mean": 0.5}


def test_a_greedy_baseline_is_in_no_mean(tmp_path: Path) -> None:
    rows = batch()
    rows.non_tensor_batch["is_greedy"] = np.array([False, True, False, False])
    pool = Pool([*results(1.0, acc=1.0), *results(0.0, acc=0.0), *results(1.0, 1.0, acc=1.0)])
    scored = manager(tmp_path, pool, Model(results(3.0, 5.0, 3.0, 0.0))).score(rows)
    metrics = values(scored.meta_info["metrics"])
    assert metrics["reward/acc/mean"] == 1.0 and metrics["reward/model/max"] == 3.0
    assert scored.non_tensor_batch["reward/acc"].tolist() == [1.0, 0.0, 1.0, 1.0], "but it is scored"


def test_both_are_added_with_their_weights_and_kept_apart(tmp_path: Path) -> None:
    pool, model = Pool(results(1.0, 0.0, 1.0, 1.0, acc=1.0)), Model(results(0.5, -2.0, 4.0, 0.0), weight=0.25)
    scored = score(tmp_path, pool, model, function_weight=2.0)
    # 2 * 1 + 0.25 * 0.5,  2 * 0 + 0.25 * -2,  2 * 1 + 0.25 * 4, and an empty answer, which has no token to stand on
    assert scored.batch["token_level_scores"].tolist() == [[0, 0, 2.125], [-0.5, 0, 0], [0, 3.0, 0], [0, 0, 0]]
    columns = scored.non_tensor_batch
    assert columns["reward/function"].tolist() == [1.0, 0.0, 1.0, 1.0]
    assert columns["reward/model"].tolist() == [0.5, -2.0, 4.0, 0.0]
    assert columns["reward/acc"].tolist() == [1.0] * 4
    metrics = values(scored.meta_info["metrics"])
    expected = {"mean": 2.5 / 3, "max": 4.0, "min": -2.0}  # of the three that are not empty
    assert {name: metrics[f"reward/model/{name}"] for name in expected} == pytest.approx(expected)
    assert metrics["reward/function/mean"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("part", ["function", "model"])
def test_a_failure_of_either_part_masks_the_answer_and_keeps_the_error(tmp_path: Path, part: str) -> None:
    broken = [*results(1.0), RewardResult.failure("no number"), *results(1.0, 1.0)]
    whole = results(2.0, 2.0, 2.0, 0.0)
    parts = (Pool(broken), Model(whole)) if part == "function" else (Pool(whole), Model(broken))
    scored = score(tmp_path, *parts, max_error_rate=0.5)
    assert scored.non_tensor_batch["reward_failed"].tolist() == [False, True, False, False]
    assert scored.batch["token_level_scores"].sum(1).tolist() == [3.0, 0.0, 3.0, 0.0]
    assert scored.non_tensor_batch[f"reward/{part}"].tolist()[1] is None
    metrics = values(scored.meta_info["metrics"])
    assert metrics["reward/error_rate"] == 0.25
    assert metrics[f"reward/{part}/mean"] == 1.0, "a failed part is in no mean"
    [line] = (tmp_path / "reward_failures.jsonl").read_text().splitlines()
    assert json.loads(line)["error"] == "no number" and json.loads(line)["response_ids"] == [7]
    assert mask_failed(batch() | scored).batch["response_mask"].sum(1).tolist() == [3, 0, 2, 0]


def test_parts_whose_sum_float32_cannot_hold_mask_the_answer(tmp_path: Path) -> None:
    parts = Pool(results(1.0, 3e38, 1.0, 1.0)), Model(results(1.0, 3e38, 1.0, 1.0))
    scored = score(tmp_path, *parts, max_error_rate=0.5)
    assert scored.non_tensor_batch["reward_failed"].tolist() == [False, True, False, False]
    assert scored.batch["token_level_scores"].isfinite().all()


def test_a_value_of_the_function_may_not_take_the_name_of_a_part(tmp_path: Path) -> None:
    pool = Pool(results(1.0, 1.0, 1.0, 1.0, model=3.0))
    with pytest.raises(UserError, match="returned an entry 'model'"):
        score(tmp_path, pool, Model(results(0.0, 0.0, 0.0, 0.0)))
    assert "reward/model" in score(tmp_path, pool).non_tensor_batch, "without a model the name is free"


# --------------------------------------------------------------------------------------------------- failures over time


def failing(count: int, of: int, late: int = 0) -> tuple[DataProto, list[RewardResult]]:
    """A batch of `of` rows, of which the first `count` failed, `late` of them by time."""
    broken = [RewardResult.failure(f"boom {row}", timed_out=row < late) for row in range(count)]
    rows = DataProto.from_dict(
        tensors={"response_mask": torch.tensor([[1, 1, 0]] * of), "responses": torch.tensor([[5, 6, 0]] * of)},
        non_tensors={
            "sample_id": np.array([f"train/1/p/{row}" for row in range(of)], dtype=object),
            "data_source": np.array(["task"] * of, dtype=object),
            "reward_model": np.array([{"ground_truth": row} for row in range(of)], dtype=object),
        },
    )
    return rows, [*broken, *results(*[1.0] * (of - count))]


def note(log: FailureLog, count: int, of: int) -> None:
    note_failed_rewards(log, *failing(count, of), decode=str)


def test_the_first_failure_is_shown_once_and_all_are_kept_with_the_answer(tmp_path: Path) -> None:
    shown: list[str] = []
    log = reward_failure_log(0.5, tmp_path, show=shown.append)
    for _ in range(3):
        note_failed_rewards(log, *failing(2, of=40, late=1), decode=lambda ids: f"text of {ids}")
    assert len(shown) == 1
    for part in ("train/1/p/0", "data_source='task'", "text of [5, 6]", "boom 0", "reward_failures.jsonl"):
        assert part in shown[0]
    lines = [json.loads(line) for line in (tmp_path / "reward_failures.jsonl").read_text().splitlines()]
    assert len(lines) == 6 and [line["timed_out"] for line in lines[:2]] == [True, False]
    assert lines[1] | {"error": "boom 1", "response": "text of [5, 6]", "ground_truth": 1} == lines[1]


@pytest.mark.parametrize(
    ("batches", "stops"),
    [
        ([(1, 4)], False),  # of 4 as of 20: 1 is not more than 2
        ([(3, 4)], True),
        ([(2, 20)], False),  # exactly a tenth is not more than that
        ([(1, 4), (1, 4), (1, 4)], True),  # small steps add up: 3 of 12
        ([(1, 4), *[(0, 4)] * 5, (1, 4), (1, 4)], False),  # what is past twenty rewards ago is forgotten
        ([(2, 20), (2, 20), (2, 20)], False),  # and a step of twenty counts alone
        ([(101, 1000)], True),
    ],
)
def test_more_than_the_share_stops_the_run(tmp_path: Path, batches: list[tuple[int, int]], stops: bool) -> None:
    log = reward_failure_log(0.1, tmp_path, show=lambda text: None)
    for count, of in batches[:-1]:
        note(log, count, of)
    if stops:
        with pytest.raises(RewardFailure, match="reward.max_error_rate=0.1 allows"):
            note(log, *batches[-1])
    else:
        note(log, *batches[-1])


def test_what_a_failure_says_cannot_steer_the_terminal_and_a_full_disk_does_not_end_the_run(tmp_path: Path) -> None:
    shown: list[str] = []
    batch, _ = failing(1, of=40)
    results = [RewardResult.failure("\x1b[2Jboom\r\x07")] + [RewardResult(1.0)] * 39
    note_failed_rewards(reward_failure_log(0.5, tmp_path, show=shown.append), batch, results, str)
    assert r"\x1b[2Jboom\r\x07" in shown[0] and all(x.isprintable() or x == "\n" for x in shown[0])
    file = tmp_path / "reward_failures.jsonl"
    assert json.loads(file.read_text())["error"] == "\x1b[2Jboom\r\x07"
    file.unlink()
    file.mkdir()
    with pytest.raises(RewardFailure, match=r"(?s)could not be written.*\\x1b\[2Jboom"):
        note_failed_rewards(reward_failure_log(0.0, tmp_path), batch, results, str)


# ------------------------------------------------------------------------ long answers are punished, greedy ones go


def overlong(log: bool = False) -> PPOConfig:
    config = PPOConfig()
    config.data.max_response_length = 4
    buffer = config.reward.overlong_buffer
    buffer.enable, buffer.len, buffer.penalty_factor, buffer.log = True, 2, 0.5, log
    return config


def long_answers() -> DataProto:
    """Answers of 2, 3 and 4 tokens, each worth 1, and one of 4 whose reward failed."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    scores = torch.tensor([[0, 1.0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
    return DataProto.from_dict(tensors={"response_mask": mask, "token_level_scores": scores})


def test_the_score_loses_the_penalty_and_the_outcome_does_not() -> None:
    before = long_answers()
    punished, metrics = punish_overlong(before, overlong(log=True))
    expected = [[0, 1.0, 0, 0], [0, 0, 0.75, 0], [0, 0, 0, 0.5], [0, 0, 0, 0]]
    assert punished.batch["token_level_scores"].tolist() == expected
    assert punished.batch["outcomes"].tolist() == [1, 1, 1, 0]
    assert (
        before.batch["token_level_scores"].equal(long_answers().batch["token_level_scores"])
        and "outcomes" not in before
    )
    assert punished.non_tensor_batch["reward/overlong_reward"].tolist() == [0, -0.25, -0.5, 0]
    assert punished.non_tensor_batch["reward/overlong"].tolist() == [0, 1, 1, 0]
    assert values(metrics) == {
        "reward/overlong_reward/mean": pytest.approx(-0.25),  # over answers that count
        "reward/overlong/mean": pytest.approx(2 / 3),
    }
    punished, metrics = punish_overlong(before, overlong())
    assert metrics == {} and not punished.non_tensor_batch and punished.batch["token_level_scores"].tolist() == expected


def test_an_entry_of_that_name_is_not_overwritten() -> None:
    given = long_answers()
    given.non_tensor_batch["reward/overlong"] = as_column([1, 2, 3, 4])
    with pytest.raises(UserError, match="returned an entry 'overlong'"):
        punish_overlong(given, overlong(log=True))
    punish_overlong(given, overlong())


def with_greedy() -> DataProto:
    """Prompts a and b, two sampled answers and a greedy one each; b's greedy answer failed; not in order."""
    scores = torch.tensor([1.0, 0.25, 0.0, 0.0, 3.0, 4.0])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1], [1, 1], [1, 1]])
    return DataProto.from_dict(
        tensors={"token_level_scores": torch.stack([scores, torch.zeros(6)], 1), "response_mask": mask},
        non_tensors={
            "uid": np.array(["a", "a", "b", "a", "b", "b"], dtype=object),
            "is_greedy": np.array([False, True, True, False, False, False]),
            "sample": np.arange(6),
        },
    )


def test_scores_of_greedy_answers_become_columns_and_a_failed_one_masks_its_prompt() -> None:
    given = with_greedy()
    result, metrics = take_greedy_baselines(given)
    assert list(result.non_tensor_batch["sample"]) == [0, 3, 4, 5] and "is_greedy" not in result
    assert result.batch["reward_baselines"].tolist() == [0.25, 0.25, 0.0, 0.0]
    assert result.batch["response_mask"].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    assert {name: metric.value for name, metric in metrics.items()} == {
        "critic/reward_baselines/mean": 0.25,
        "reward/baseline_error_rate": 0.5,
    }
    assert len(given) == 6 and given.batch["response_mask"][4].tolist() == [1, 1], "what was given stays"

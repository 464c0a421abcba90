"""ReMax's greedy answers: one rollout call, scored as the others, gone from the batch, their scores the baselines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.test_fit import PROMPTS, Parts, make
from trainer.rewards.scores import take_greedy_baselines
from verl_lite.protocol import DataProto

QUIET = {"trainer__val_before_train": False, "trainer__test_freq": 0}


def batch() -> DataProto:
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
    given = batch()
    result, metrics = take_greedy_baselines(given)
    assert list(result.non_tensor_batch["sample"]) == [0, 3, 4, 5] and "is_greedy" not in result
    assert result.batch["reward_baselines"].tolist() == [0.25, 0.25, 0.0, 0.0]
    assert result.batch["response_mask"].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    assert {name: metric.value for name, metric in metrics.items()} == {
        "critic/reward_baselines/mean": 0.25,
        "reward/baseline_error_rate": 0.5,
    }
    assert len(given) == 6 and given.batch["response_mask"][4].tolist() == [1, 1], "what was given stays"


class Counting(Parts):
    """Parts that note which rows were asked for, by sample_id, and which were scored."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.asked: list[DataProto] = []
        self.scored: list[list[str]] = []

    def generate(self, rows: DataProto) -> DataProto:
        self.asked.append(rows)
        return super().generate(rows)

    def call(self, method: str, keys: Sequence[str] = ()) -> Any:
        self.scored += [list(keys)] if method == "collect" else []
        return super().call(method, keys)


def test_one_call_generates_both_and_only_sampled_answers_are_learnt_from(tmp_path: Path) -> None:
    parts = Counting()
    make(tmp_path, parts, algorithm__adv_estimator="remax", **QUIET).fit()
    rows = parts.asked[0]
    assert parts.calls.count("generate train") == 3, "one call a step"
    assert list(rows.non_tensor_batch["is_greedy"]) == [False, False, True] * PROMPTS
    assert list(rows.non_tensor_batch["uid"]) == [f"p{i}" for i in range(PROMPTS) for _ in range(3)]
    assert len(set(parts.scored[0])) == 3 * PROMPTS, "greedy answers are scored in the same call as the others"
    learnt = parts.batches["update"]
    assert len(learnt) == 2 * PROMPTS and list(learnt.non_tensor_batch["sample"]) == [0, 1] * PROMPTS
    # the fake pool scores 0 1 0 | 1 0 1 | 0 1 0, the third of each is the greedy answer's
    assert learnt.batch["reward_baselines"].tolist() == [0, 0, 1, 1, 0, 0]
    assert learnt.batch["advantages"][:, 0].tolist() == [0, 1, 0, -1, 0, 1]
    logged = dict(parts.logged)[1]
    assert logged["critic/reward_baselines/mean"] == pytest.approx(1 / 3)
    assert logged["reward/baseline_error_rate"] == 0
    assert logged["critic/score/mean"] == pytest.approx(0.5), "of sampled answers"
    lengths = learnt.batch["response_mask"].sum(1).float()
    assert logged["response_length/mean"] == pytest.approx(lengths.mean().item())

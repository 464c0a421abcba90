"""The numbers of a validation do not depend on data.val_batch_size or the number of ranks. (Nor on a killed try before:
tests/e2e/test_evaluation.py.)"""

from __future__ import annotations

import copy
import importlib.util
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.trainer.answering import answering, sampled, task, validated
from trainer.observe.final_report import FitResult
from verl_lite.config import PPOConfig

PROMPTS, ANSWERS = 11, 3
vllm_missing = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> PPOConfig:
    return task(tmp_path_factory.mktemp("task"), PROMPTS)


def test_ranks_and_batch_sizes_change_no_bit(config: PPOConfig, tmp_path: Path) -> None:
    """Greedy and sampled, on 1 and 3 ranks, by 1, 7 and all prompts: the same samples and the same numbers; 11
    prompts divide by none of these, so ranks are given rows to fill up, which nobody scores."""
    config = copy.deepcopy(config)
    sampled(config, ANSWERS)
    found = {}
    for ranks in (1, 3):
        with answering(config, tmp_path, ranks) as trainer:
            pool, kept = trainer.rewards.pool, trainer.samples  # type: ignore[attr-defined]
            for size in (None, 1, 7):
                config.data.val_batch_size, kept.rows = size, []  # type: ignore[attr-defined]
                metrics, before = trainer.validate(FitResult()), len(pool.call("seen")) - PROMPTS * (ANSWERS + 1)
                scored, rows = pool.call("seen")[before:], kept.rows  # type: ignore[attr-defined]
                assert len(rows) == len(set(scored)) == PROMPTS * (ANSWERS + 1), "each sample is scored once"
                found[ranks, size] = metrics, [asdict(row) for row in rows]
            assert len(pool.call("seen")) == 3 * PROMPTS * (ANSWERS + 1)
    first_metrics, first_rows = found[1, None]
    assert len({row["output"] for row in first_rows}) > PROMPTS, "the answers differ, so that the test can fail"
    assert len([name for name in first_metrics if name.startswith("val-core")]) == 10, "5 of each source"
    for case, (metrics, rows) in found.items():
        assert rows == first_rows, case
        assert metrics == first_metrics, case


@pytest.mark.long
@vllm_missing
def test_vllm_greedy_is_the_same_by_any_batch_size(config: PPOConfig, tmp_path: Path) -> None:
    config = copy.deepcopy(config)
    config.rollout.name = "vllm"
    found = []
    for size in (1, None):
        config.data.val_batch_size = size
        metrics, rows, _ = validated(config, tmp_path, ranks=1)
        found.append((metrics, [row.output for row in rows]))
    assert found[0] == found[1]

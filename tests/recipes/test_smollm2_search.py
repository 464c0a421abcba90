"""The search of reasoning-gym tasks: which questions it writes, and what it prints."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from recipes.smollm2 import search
from verl_lite.rewards import default_compute_score


def test_questions_of_a_task_are_rows_that_its_scorer_understands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a zebra puzzle is longer than the limit
    monkeypatch.setattr(search, "task_names", lambda: ["spell_backward", "zebra_puzzles"])
    assert search.write_questions(tmp_path / "a" / "questions.parquet", 3) == ["spell_backward"]
    rows = pq.read_table(tmp_path / "a" / "questions.parquet").to_pylist()
    assert [row["data_source"] for row in rows] == ["reasoning_gym/spell_backward"] * 3
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        arguments = row["data_source"], truth, truth, row["extra_info"]
        assert default_compute_score(*arguments) == 1.0
        assert default_compute_score(row["data_source"], "no", truth, row["extra_info"]) < 1.0


def test_the_table_has_the_best_tasks_first_and_names_the_others() -> None:
    metrics = {}
    for task, sampled, greedy in (("a", 0.25, 0.0), ("b", 0.5, 0.25), ("c", 0.0, 0.0)):
        metrics[f"val-core/reasoning_gym/{task}/reward/mean@1"] = sampled
        metrics[f"val-aux/reasoning_gym/{task}/greedy/reward/mean@1"] = greedy
    lines = list(search.table(["a", "b", "c", "d"], metrics, 4))
    assert lines[2:4] == ["| b | 0.50 | 0.25 |", "| a | 0.25 | 0.00 |"]
    assert lines[-2] == "No right answer: c"
    # the metrics contain no mean of a task of which every reward failed
    assert lines[-1] == "Not scored, because the reward failed for all answers: d"

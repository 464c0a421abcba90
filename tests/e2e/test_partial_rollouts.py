"""Samples that continue under new weights, in the main command."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_run import TinyTask
from trainer.observe.tracking import read_metrics

pytestmark = pytest.mark.slow

PARTIAL = [
    "async_training.max_off_policy_threshold=1", "async_training.partial_rollout=true", "trainer.backend=inline",
    "data.max_response_length=400", "rollout.ignore_eos=true", "rollout.max_num_seqs=1",
]  # fmt: skip
"""With one seat and answers of equal length, so that a sample is running when an update begins: the answers of a batch
take longer than an update on any machine."""


def trained(folder: Path, *options: str, steps: int = 6) -> list[dict[str, float]]:
    run = TinyTask(folder).start("run", *PARTIAL, *options, steps=steps)
    try:
        assert run.wait() == 0, run.output()
        return list(read_metrics(folder / "run" / "metrics.jsonl").values())
    finally:
        run.close()


@pytest.mark.parametrize("engine", ["hf", "tests.e2e.sleeping_engine:SleepingEngine"])
def test_samples_continue_on_engines_that_sleep_during_training_and_on_others(engine: str, tmp_path: Path) -> None:
    rows = trained(tmp_path, f"rollout.name={engine}")
    assert [row["async/staleness/oldest"] for row in rows[2:]] == [1] * 4
    assert max(row["async/versions_per_sample/max"] for row in rows) == 2
    beside = [row for row in rows if row.get("rollout/seconds_beside_training", 0) > 0]
    assert bool(beside) == (engine == "hf"), "an engine that sleeps cannot sample during training"


def test_a_surplus_is_carried_over_or_aborted(tmp_path: Path) -> None:
    # 6 groups of 2 answers of equal length on 8 seats: the last two groups start when the first four end, and the
    # engine does not run during the update
    seats = ["rollout.name=tests.e2e.sleeping_engine:SleepingEngine"]
    seats += ["rollout.oversample=1.5", "rollout.max_num_seqs=8"]
    carried = trained(tmp_path / "carried", *seats, "async_training.batches_ahead=0")
    assert all("rollout/oversample/aborted_groups" not in row for row in carried)
    assert max(row["async/versions_per_sample/max"] for row in carried) == 2
    assert max(row["async/staleness/oldest"] for row in carried) == 1
    off = ["async_training.max_off_policy_threshold=0", "async_training.partial_rollout=null"]
    aborted = trained(tmp_path / "aborted", *seats, *off, steps=3)
    assert [row["rollout/oversample/aborted_groups"] for row in aborted] == [2] * 3


def test_keys_and_values_may_be_kept(tmp_path: Path) -> None:
    rows = trained(tmp_path, "rollout.recompute_kv_on_update=false")
    assert max(row["async/versions_per_sample/max"] for row in rows) == 2

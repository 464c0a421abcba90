"""A tracker that raises or hangs: the run does not notice, and the guide shows how to send it the run afterwards."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.trainer.observe.scripted import Run, Scripted

STEPS = range(1, 51)


@pytest.mark.parametrize("where", ["start", "log", "log_samples", "finish"])
def test_one_that_raises_costs_one_warning(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(what: str) -> None:
        if what == where:
            raise ConnectionError("the server is down")

    Scripted(monkeypatch, down)
    printed = Run(tmp_path).train(*STEPS, samples=True)
    assert printed.count("the server is down") == printed.count("trainer/REPORTS.md#trackers") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(STEPS)


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_one_that_hangs_delays_nothing(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.observe.tracking.FINISH_TIMEOUT_S", 0.3)
    release = threading.Event()
    Scripted(monkeypatch, lambda what: what == where and release.wait(30))
    run = Run(tmp_path)
    slowest = 0.0
    for step in STEPS:
        began = time.monotonic()
        run.tracking.log({"training/global_step": float(step)}, step)
        slowest = max(slowest, time.monotonic() - began)
    began = time.monotonic()
    printed = run.train()
    assert slowest < 0.5 and time.monotonic() - began < 5 and printed.count("does not finish") == 1
    release.set()


def test_it_is_made_with_the_first_message_and_not_while_the_cluster_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    Scripted(monkeypatch, calls.append)
    Run(tmp_path).train()
    assert not calls, "a run that failed before its first step has nothing to tell"


def test_a_run_that_goes_back_gives_each_step_once_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Scripted(monkeypatch)
    Run(tmp_path).train(1, 2, 3, 4, 5)
    run = Run(tmp_path)
    run.tracking.log({"val-core/x": 0.5}, 2)
    run.train(3, 4, 5, 6, 7)
    assert tracker.steps == [1, 2, 3, 4, 5, 6, 7]
    run = Run(tmp_path)
    run.tracking.log({"val-core/x": 0.5}, 7)  # a plain resumption validates after the last step
    run.train(8)
    assert tracker.taken[7] == (7, {"val-core/x": 0.5}) and tracker.steps[8:] == [8]

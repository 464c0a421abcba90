"""A tracker that raises, hangs, is slow or comes back: the run does not notice, and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.tracking.scripted import SAMPLE, Hanging, Run, Scripted, raising
from trainer.console import Console
from trainer.tracking.follower import BackgroundTracker, Follower
from trainer.tracking.trackers import TrackedRun

STEPS = range(1, 51)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.tracking.follower.FINISH_TIMEOUT_S", 0.3)
    monkeypatch.setattr("trainer.tracking.follower.FIRST_PAUSE_S", 0.0)


def lacking(run: Run) -> int:
    tracked = TrackedRun(run.folder, "p", "e", {}, Console())
    return Follower("scripted", Scripted(), tracked).lacking()


def test_what_works_gets_everything(tmp_path: Path) -> None:
    tracker = Scripted()
    run = Run(tmp_path, tracker)
    assert run.train(1, 2, samples=True) == "" and lacking(run) == 0
    assert tracker.steps == [1, 2]
    given = [(step, row) for step, rows in tracker.taken if isinstance(rows, list) for row in rows]
    assert given == [(step, replace(SAMPLE, step=step)) for step in (1, 2)]


def test_it_is_made_with_the_first_message_and_not_while_the_cluster_starts(tmp_path: Path) -> None:
    made: list[int] = []

    def factory(_: TrackedRun) -> Scripted:
        made.append(len(made))
        return Scripted()

    BackgroundTracker("idle", factory, TrackedRun(tmp_path, "project", "run", {}, Console())).finish()
    assert not made, "a run that failed before its first step has nothing to tell"


@pytest.mark.parametrize("where", ["start", "log", "log_samples", "finish"])
def test_one_that_raises_costs_one_warning(tmp_path: Path, where: str) -> None:
    tracker = Scripted(raising(where))
    run = Run(tmp_path, tracker)
    printed = run.train(*STEPS, samples=True)
    assert printed.count("the server is down") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(STEPS)
    assert ("python -m trainer.sync" in printed) == (where != "finish")
    assert len(tracker.taken) + lacking(run) == 2 * len(STEPS), "what it did not take is known"


@pytest.mark.parametrize("where", ["start", "log", "finish"])
@pytest.mark.usefixtures("hasty")
def test_one_that_hangs_delays_nothing(tmp_path: Path, where: str) -> None:
    hanging = Hanging(where)
    tracker = Scripted(hanging)
    run = Run(tmp_path, tracker)
    slowest = 0.0
    for step in STEPS:
        started = time.thread_time()
        run.tracking.log({"training/global_step": float(step)}, step)
        slowest = max(slowest, time.thread_time() - started)
    started = time.monotonic()
    run.tracking.finish()
    assert time.monotonic() - started < 10.0, "it hangs for 30 s"
    assert slowest < 0.05
    assert "tracker scripted does not finish; the run goes on" in run.file.getvalue()
    assert set(tracker.steps) == (set(STEPS) if where == "finish" else set())
    assert lacking(run) == (0 if where == "finish" else len(STEPS))
    hanging.release.set()


@pytest.mark.parametrize("where", ["log", "start"])
@pytest.mark.usefixtures("hasty")
def test_one_that_comes_back_is_given_what_it_missed_in_order(tmp_path: Path, where: str) -> None:
    Run(tmp_path, Scripted(raising("start"))).train(1, 2, 3)
    tracker = Scripted(raising(where, times=2))
    run = Run(tmp_path, tracker)
    for step in (4, 5):
        run.tracking.log({"training/global_step": float(step)}, step)
        time.sleep(0.1)
    printed = run.train(6)
    assert tracker.steps == [1, 2, 3, 4, 5, 6] and lacking(run) == 0 and printed.count("tracker scripted") == 1


def test_one_message_that_it_refuses_three_times_holds_up_no_other(tmp_path: Path) -> None:
    class Picky(Scripted):
        def log(self, metrics: Mapping[str, float], step: int) -> None:
            if step == 3:
                raise ValueError("not this one")
            super().log(metrics, step)

    Run(tmp_path, Scripted(raising("start"))).train(1, 2, 3, 4, 5)
    tracked = TrackedRun(tmp_path, "p", "e", {}, Console())
    for tries in (1, 2, 3):
        follower = Follower("scripted", tracker := Picky(), tracked)
        if tries < 3:
            with pytest.raises(ValueError, match="not this one"):
                follower.catch_up()
        else:
            follower.catch_up()
            assert tracker.steps == [4, 5] and follower.lacking() == 0 and follower.taken["refused"] == 1


def test_after_a_failure_it_is_left_alone_for_a_while(tmp_path: Path) -> None:
    calls: list[str] = []

    def down(what: str) -> None:
        calls.append(what)
        raise ConnectionError(what)

    run = Run(tmp_path, Scripted(down))
    for step in range(1, 9):
        run.tracking.log({"x": 1.0}, step)
        time.sleep(0.02)
    run.tracking.finish()
    assert calls == ["start", "start"], "once, and once more at the end"


def test_a_run_that_goes_back_gives_each_step_once_and_in_order(tmp_path: Path) -> None:
    first, second, third = Scripted(), Scripted(), Scripted()
    Run(tmp_path, first).train(1, 2, 3, 4, 5)
    run = Run(tmp_path, second)
    run.tracking.log({"val-core/x": 0.5}, 2)
    run.train(3, 4, 5, 6, 7)
    assert first.steps == [1, 2, 3, 4, 5] and second.steps == [6, 7]
    run = Run(tmp_path, third)
    run.tracking.log({"val-core/x": 0.5}, 7)  # a plain resumption validates after the last step
    run.train(8)
    assert third.taken[0] == (7, {"val-core/x": 0.5}) and third.steps == [7, 8]


def test_steps_done_again_while_it_is_down_are_given_once(tmp_path: Path) -> None:
    Run(tmp_path, Scripted(raising("start"))).train(1, 2, 3)
    tracker = Scripted(raising("start"))
    run = Run(tmp_path, tracker)
    run.train(2, 3, 4, new=1.0)
    tracker.before = lambda what: None
    Run(tmp_path, tracker).train(5)
    assert tracker.steps == [1, 2, 3, 4, 5] and [("new" in row) for _, row in tracker.taken] == [0, 1, 1, 1, 0]  # type: ignore[operator]


def test_one_that_forgets_is_given_the_repeated_steps(tmp_path: Path) -> None:
    Run(tmp_path, Scripted()).train(1, 2, 3)
    tracker = Scripted()
    tracker.forgets = True  # type: ignore[attr-defined]
    Run(tmp_path, tracker).train(2, 3)
    assert tracker.steps == [2, 3]

"""A tracker that raises, hangs or comes back: the run does not notice, and nothing is lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.trainer.tracking.scripted import Hanging, Run, Scripted, raising
from trainer.console import Console
from trainer.tracking import Follower, TrackedRun

STEPS = range(1, 51)


def lacking(run: Run) -> int:
    return Follower("scripted", Scripted(), TrackedRun(run.folder, "p", "e", {}, Console())).lacking()


def test_it_is_made_with_the_first_message_and_not_while_the_cluster_starts(tmp_path: Path) -> None:
    made: list[int] = []

    def factory(_: TrackedRun) -> Scripted:
        made.append(len(made))
        return Scripted()

    assert Follower("idle", factory, TrackedRun(tmp_path, "project", "run", {}, Console())).finish(9.0)
    assert not made, "a run that failed before its first step has nothing to tell"


@pytest.mark.parametrize("where", ["start", "log", "log_samples", "finish"])
def test_one_that_raises_costs_one_warning(tmp_path: Path, where: str) -> None:
    tracker = Scripted(raising(where))
    run = Run(tmp_path, tracker)
    printed = run.train(*STEPS, samples=True)
    assert printed.count("the server is down") == printed.count("python -m trainer.sync") == 1
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(STEPS)
    assert len(tracker.taken) + lacking(run) == 2 * len(STEPS), "what it did not take is known"


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_one_that_hangs_delays_nothing(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.tracking.FINISH_TIMEOUT_S", 0.3)
    tracker = Scripted(hanging := Hanging(where))
    run = Run(tmp_path, tracker)
    slowest = 0.0
    for step in STEPS:
        began = time.monotonic()
        run.tracking.log({"training/global_step": float(step)}, step)
        slowest = max(slowest, time.monotonic() - began)
    while where == "finish" and lacking(run):
        time.sleep(0.1)
    began = time.monotonic()
    printed = run.train()
    assert slowest < 0.5 and time.monotonic() - began < 5 and printed.count("does not finish") == 1
    assert lacking(run) == (0 if where == "finish" else len(STEPS))
    hanging.release.set()


def test_one_that_comes_back_is_given_what_it_missed_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.tracking.PAUSE_S", 0.0)
    Run(tmp_path, Scripted(raising("start"))).train(1, 2, 3)
    tracker = Scripted(raising("log", times=2))
    run = Run(tmp_path, tracker)
    for step in (4, 5):
        run.tracking.log({"training/global_step": float(step)}, step)
        time.sleep(0.1)
    printed = run.train(6)
    assert tracker.steps == [1, 2, 3, 4, 5, 6] and lacking(run) == 0 and printed.count("tracker scripted") == 1


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
    Run(tmp_path, tracker).train(2, 3, 4, new=1.0)
    tracker.before = lambda what: None
    Run(tmp_path, tracker).train(5)
    assert tracker.steps == [1, 2, 3, 4, 5]
    assert [isinstance(row, dict) and "new" in row for _, row in tracker.taken] == [False, True, True, True, False]
    again = Scripted()
    again.forgets = True  # type: ignore[attr-defined]
    Run(tmp_path, again).train(4, 5)
    assert again.steps == [4, 5], "one that forgets is given the repeated steps"

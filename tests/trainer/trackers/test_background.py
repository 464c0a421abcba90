"""A tracker that raises, hangs, is slow or comes back: the run does not notice, and nothing is lost."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.trainer.trackers.scripted import SAMPLE, Hanging, Run, Scripted, raising
from trainer.console import Console
from trainer.trackers.background import BackgroundTracker
from trainer.tracking import TRACKERS, TrackedRun

STEPS = range(1, 51)


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    before = dict(TRACKERS)
    yield
    TRACKERS.clear()
    TRACKERS.update(before)


def spooled(run: Run) -> list[int]:
    return sorted(json.loads(line)["step"] for line in run.spool.read_text().splitlines())


def test_what_works_gets_everything_and_leaves_no_spool(tmp_path: Path) -> None:
    tracker = Scripted()
    run = Run(tmp_path, tracker)
    assert run.train(1, 2, samples=True) == ""
    assert tracker.taken == [
        (1, {"training/global_step": 1.0, "actor/lr": 0.5}), (1, [SAMPLE]),
        (2, {"training/global_step": 2.0, "actor/lr": 1.0}), (2, [SAMPLE]),
    ]  # fmt: skip
    assert not run.spool.exists() and (tmp_path / "scripted_step.txt").read_text() == "2"


def test_it_is_made_with_the_first_message_and_not_while_the_cluster_starts(tmp_path: Path) -> None:
    made: list[int] = []
    run = TrackedRun(tmp_path, "project", "run", {}, Console())

    def factory(_: TrackedRun) -> Scripted:
        made.append(len(made))
        return Scripted()

    BackgroundTracker("idle", factory, run).finish()
    assert not made, "a run that failed before its first step has nothing to tell"
    tracker = BackgroundTracker("busy", factory, run)
    assert not made
    tracker.log({"training/global_step": 1.0}, 1)
    tracker.finish()
    assert made == [0]


@pytest.mark.parametrize("where", ["start", "log", "log_samples"])
def test_one_that_raises_costs_one_warning_and_what_it_did_not_take_is_kept(tmp_path: Path, where: str) -> None:
    tracker = Scripted(raising(where))
    run = Run(tmp_path, tracker)
    printed = run.train(*STEPS, samples=True)
    assert printed.count("the server is down") == 1 and "python -m trainer.sync" in printed
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(STEPS)
    taken = [step for step, _ in tracker.taken]
    assert sorted(taken + spooled(run)) == sorted([*STEPS, *STEPS]), "each message is with the tracker or in the spool"


def test_one_that_raises_at_the_end_costs_a_warning(tmp_path: Path) -> None:
    tracker = Scripted(raising("finish"))
    printed = Run(tmp_path, tracker).train(1, 2)
    assert printed.count("the server is down") == 1 and tracker.steps == [1, 2]


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_one_that_hangs_delays_nothing_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr("trainer.trackers.background.QUEUE_LENGTH", 10)
    monkeypatch.setattr("trainer.trackers.background.FINISH_TIMEOUT_S", 0.3)
    hanging = Hanging(where)
    tracker = Scripted(hanging)
    run = Run(tmp_path, tracker)
    started = time.monotonic()
    printed = run.train(*STEPS)
    assert time.monotonic() - started < 10.0, "it hangs for 30 s"
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == len(STEPS)
    assert "tracker scripted" in printed
    kept = spooled(run) if run.spool.exists() else []
    assert set(tracker.steps) | set(kept) == set(STEPS)
    assert (where == "finish") == (kept == [])
    hanging.release.set()


def test_logging_to_one_that_hangs_takes_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.trackers.background.QUEUE_LENGTH", 10)
    monkeypatch.setattr("trainer.trackers.background.FINISH_TIMEOUT_S", 0.3)
    hanging = Hanging("log")
    run = Run(tmp_path, Scripted(hanging))
    slowest = 0.0
    for step in STEPS:
        started = time.thread_time()
        run.tracking.log({"x": 1.0}, step)
        slowest = max(slowest, time.thread_time() - started)
    assert slowest < 0.05
    run.tracking.finish()
    hanging.release.set()


@pytest.mark.parametrize(("where", "times"), [("log", 1), ("log", 2), ("start", 4)])
def test_one_that_comes_back_is_given_what_it_missed_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, times: int
) -> None:
    monkeypatch.setattr("trainer.trackers.background.FIRST_PAUSE_S", 0.0)
    tracker = Scripted(raising(where, times))
    run = Run(tmp_path, tracker)
    printed = run.train(*range(1, 9))
    assert tracker.steps == list(range(1, 9)) and not run.spool.exists()
    assert printed.count("tracker scripted") == 1


def test_what_an_earlier_process_kept_comes_first(tmp_path: Path) -> None:
    Run(tmp_path, Scripted(raising("start"))).train(1, 2)
    tracker = Scripted()
    Run(tmp_path, tracker).train(3, 4)
    assert tracker.steps == [1, 2, 3, 4]


def test_one_message_that_it_refuses_holds_up_no_other(tmp_path: Path) -> None:
    class Picky(Scripted):
        def log(self, metrics: Mapping[str, float], step: int) -> None:
            if step == 3:
                raise ValueError("not this one")
            super().log(metrics, step)

    tracker = Picky()
    run = Run(tmp_path, tracker)
    run.train(*range(1, 9))
    assert tracker.steps == [1, 2, 4, 5, 6, 7, 8] and spooled(run) == [3]


def test_after_three_failures_it_is_left_alone_for_a_while(tmp_path: Path) -> None:
    calls = []

    def down(what: str) -> None:
        calls.append(what)
        raise ConnectionError(what)

    run = Run(tmp_path, Scripted(lambda what: down(what) if what == "log" else None))
    run.train(*range(1, 9))
    assert len(calls) == 4 and spooled(run) == list(range(1, 9)), "the third time it is offered two"


def test_a_run_that_goes_back_gives_each_step_once_and_in_order(tmp_path: Path) -> None:
    first = Scripted()
    Run(tmp_path, first).train(1, 2, 3, 4, 5)
    second = Scripted()
    run = Run(tmp_path, second)
    run.tracking.log({"val-core/x": 0.5}, 2)
    printed = run.train(3, 4, 5, 6, 7)
    assert first.steps == [1, 2, 3, 4, 5] and second.steps == [6, 7]
    assert printed.count("has the steps up to 5 already") == 1
    third = Scripted()
    run = Run(tmp_path, third)
    run.tracking.log({"val-core/x": 0.5}, 7)  # a plain resumption validates after the last step
    run.train(8)
    assert third.taken[0] == (7, {"val-core/x": 0.5}) and third.steps == [7, 8]


def test_steps_done_again_while_it_is_down_are_kept_once(tmp_path: Path) -> None:
    Run(tmp_path, Scripted(raising("start"))).train(1, 2, 3)
    run = Run(tmp_path, Scripted(raising("start")))
    run.train(2, 3, 4)
    assert spooled(run) == [1, 2, 3, 4]


def test_one_that_forgets_is_given_the_repeated_steps(tmp_path: Path) -> None:
    Run(tmp_path, Scripted()).train(1, 2, 3)
    tracker = Scripted()
    tracker.forgets = True  # type: ignore[attr-defined]
    Run(tmp_path, tracker).train(2, 3)
    assert tracker.steps == [2, 3]


def test_a_spool_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("a file where the folder should be")
    printed = Run(tmp_path, Scripted(raising("log"))).train(1, 2)
    assert "tracker scripted" in printed and threading.active_count() < 20

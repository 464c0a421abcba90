"""A tracker that raises, hangs or comes back: the run does not notice, and nothing is lost; what it did not take while
the run trained is handed over by `trainer.sync`."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.tracking.scripted import SAMPLE, Run, Scripted, hanging, raising
from trainer.console import Console
from trainer.sync import main
from trainer.tracking import TRACKERS, Follower, TrackedRun

STEPS = range(1, 51)
CONFIG = "trainer:\n  project_name: p\n  experiment_name: e  # command line\n  logger: [console, scripted]\n"


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
    tracker = Scripted(hanging(where, release := threading.Event()))
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
    release.set()


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


# ------------------------------------------------------------------------------------------------------ trainer.sync


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def test_what_it_lacks_is_handed_over_in_order_and_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run(folder, Scripted(raising("start"))).train(1, 2, 3, samples=True)
    TRACKERS["scripted"] = back = Scripted(raising("log", times=1))
    assert main([str(folder)]) == 1 and "lacks 6" in capsys.readouterr().out
    assert main([str(folder)]) == 0 and "scripted: took 6 messages" in capsys.readouterr().out
    assert main([str(folder)]) == 0 and back.steps == [1, 2, 3]


def test_one_that_hangs_keeps_nobody_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(folder, Scripted(raising("start"))).train(1)
    monkeypatch.setattr("trainer.sync.PATIENCE_S", 0.2)
    TRACKERS["scripted"] = Scripted(hanging("log", release := threading.Event()))
    assert main([str(folder)]) == 1 and "lacks 1" in capsys.readouterr().out
    release.set()


def test_a_tracker_that_the_run_did_not_have_gets_all_of_it_as_it_was_in_the_end(folder: Path) -> None:
    for steps in ((1, 2, 3), (2, 3)):
        Run(folder, Scripted()).train(*steps, samples=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "da')  # the machine went down here
    TRACKERS["other"] = other = Scripted()
    assert main([str(folder), "--to", "other"]) == 0 and other.steps == [1, 2, 3]
    samples = [given for _, given in other.taken if isinstance(given, list)]
    assert samples == [[replace(SAMPLE, step=step)] for step in (1, 2, 3)]
    assert main([str(folder), "--to", "other", "--all"]) == 0 and other.steps == [1, 2, 3] * 2


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nothing_here"], "expected the folder of a run"),
        ([".", "--to", "wandbb"], "--to wandbb: no tracker 'wandbb'; known: jsonl, console"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    argv: list[str], says: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(argv) == 2 and says in " ".join(capsys.readouterr().err.split())

"""A sweep that is killed, and the same command again: what ended is kept, what ran goes on, nothing runs twice."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny_run import ROOT
from tests.trainer.sweeps.fake_trial import METRIC
from trainer.sweeps.study import Study

FAKE = Path(__file__).with_name("fake_trial.py")
KILLED_AFTER_EACH_PRUNING = """
import os, sys
from trainer.sweeps import study
log = study.Study._log
def killed(self, **event):
    log(self, **event)
    if event.get("prune"):
        os.kill(os.getpid(), 9)
study.Study._log = killed
from trainer.sweep import main
sys.exit(main(sys.argv[1:]))
"""


def started(folder: Path, *words: str, code: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, *(["-c", code] if code else ["-m", "trainer.sweep"])]
    common = ["--command", str(FAKE), "--options", "none", "--metric", METRIC, "--study", str(folder), "--slots", "2"]
    with folder.with_suffix(".out").open("a") as output:
        return subprocess.Popen(
            [*command, *common, *words],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=output,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
        )


def starts(run: Path) -> list[dict[str, object]]:
    file = run / "starts"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def over(folder: Path) -> dict[Path, int]:
    """Starts of the runs that need no more: of trials that are over, and those that are done."""
    trials = Study.load(folder).trials if (folder / "study.json").exists() else []
    return {run.folder: len(starts(run.folder)) for t in trials for run in t.runs if t.is_over or run.state == "done"}


def runs_alive(folder: Path) -> list[int]:
    pids = [start["pid"] for run in folder.glob("trials/*/*/starts") for start in starts(run.parent)]
    return [int(str(pid)) for pid in pids if Path("/proc", str(pid), "stat").exists()]


def check(folder: Path, steps: int) -> list[str]:
    study = Study.load(folder)
    for run in (run for trial in study.trials for run in trial.runs):
        assert not (run.folder / "twice").exists()
        done = (run.folder / "steps").read_text().split() if (run.folder / "steps").exists() else []
        repeated = len(done) - len(set(done))
        assert repeated < len(starts(run.folder)), "at most the step at hand, at each kill, is done again"
        assert run.state != "done" or set(done) == {str(step) for step in range(1, steps + 1)}
    return [trial.state for trial in study.trials]


def kill_at_random(folder: Path, kills: int, seed: int) -> None:
    words = ["x=1,2,3,4", "y=a,b", "steps=12", "pause=0.3", "--seeds", "2", "--pruner", "asha:reduction_factor=2"]
    chance, known = random.Random(seed), dict[Path, int]()
    for number in range(kills):
        process = started(folder, *words)
        log, before = folder / "log.jsonl", time.monotonic()
        size = log.stat().st_size if log.exists() else 0
        while process.poll() is None and time.monotonic() - before < 120:  # from the first event on
            if log.exists() and log.stat().st_size > size:
                break
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 2 if number else 5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        if number % 2:  # every other time the next sweep begins while the runs may still end
            deadline = time.monotonic() + 20
            while runs_alive(folder):
                assert time.monotonic() < deadline, "no run outlives its sweep"
                time.sleep(0.05)
        now = over(folder)
        assert known.items() <= now.items(), "what was over did not start again, and stays over"
        known = now
    assert started(folder, *words).wait(timeout=300) == 0, folder.with_suffix(".out").read_text()[-3000:]
    assert known.items() <= over(folder).items()
    states = check(folder, 12)
    assert len(states) == 8 and set(states) <= {"complete", "pruned"}, states


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_and_nothing_runs_twice(tmp_path: Path) -> None:
    kill_at_random(tmp_path / "study", kills=2, seed=0)


@pytest.mark.long
def test_killed_at_twenty_random_instants(tmp_path: Path) -> None:
    kill_at_random(tmp_path / "study", kills=20, seed=1)


@pytest.mark.slow
def test_a_pruning_decision_outlives_a_kill_right_after_it(tmp_path: Path) -> None:
    """Issue 16, line 17. Trials of falling quality, one after the other, so that each later one is pruned."""
    folder = tmp_path / "study"
    words = ["x=3,2,1", "steps=6", "pause=0.2", "--pruner", "asha:reduction_factor=2", "--slots", "1"]
    kills = 0
    while started(folder, *words, code=KILLED_AFTER_EACH_PRUNING).wait(timeout=120) == -signal.SIGKILL:
        kills += 1
        before = over(folder)
    assert kills == 2 and over(folder).items() >= before.items(), "a pruned trial is not run again"
    assert check(folder, 6) == ["complete", "pruned", "pruned"], folder.with_suffix(".out").read_text()[-3000:]
    assert all(len(starts(trial.runs[0].folder)) == 1 for trial in Study.load(folder).trials)


@pytest.mark.slow
def test_ctrl_c_lets_runs_save_and_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    process = started(folder, "x=1,2", "steps=1000", "pause=0.05")
    while len(list(folder.glob("trials/*/*/metrics.jsonl"))) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output = folder.with_suffix(".out")
    assert process.wait(timeout=60) == 130, output.read_text()
    assert f"To go on: python -m trainer.sweep --study {folder} --slots 2" in output.read_text()
    assert [run.state for trial in Study.load(folder).trials for run in trial.runs] == ["stopped"] * 2
    assert not runs_alive(folder)

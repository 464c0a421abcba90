"""Whole sweeps on Ray Tune: killed and gone on with, of real trainings, and on the machines of a cluster."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hints import commands_in, execute
from tests.ray_machines import AUTH, RayMachines
from tests.tiny_run import ROOT, TinyTask, permitting
from tests.trainer.sweeps.fake_trial import METRIC
from trainer.sweeps.study import Study
from verl_lite.errors import UserError
from verl_lite.machine.gpus import Gpu, GpuProcess

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
FAKE = Path(__file__).with_name("fake_trial.py")
FAKED = f"""
import os, sys
from trainer.sweeps import sweep_checks, study
from verl_lite.config import PPOConfig
from verl_lite.single_controller import liveness
liveness.LOST_AFTER_LOOKS = 2
config = PPOConfig()
config.trainer.device = "cpu"
study.COMMAND = ({str(FAKE)!r},)
sweep_checks.load, sweep_checks.problem = lambda *_: config, lambda *_: ""
sweep_checks.check_sweep = lambda *_: None
log = study.Study._log
def killed(self, event):
    log(self, event)
    if event.get("prune") and "KILLED" in os.environ:
        os.kill(os.getpid(), 9)
study.Study._log = killed
from trainer.sweep import main
sys.exit(main(sys.argv[1:]))
"""


def started(folder: Path, *words: str, code: str = FAKED, **environment: str) -> subprocess.Popen[str]:
    """A sweep in a process of its own, of stand-ins for trainings."""
    command = [sys.executable, *(["-c", code] if code else ["-m", "trainer.sweep"]), *words, "--study", str(folder)]
    with folder.with_suffix(".out").open("a") as output:
        return subprocess.Popen(
            command,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=output,
            stderr=output,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
        )


def wait_until(done: Callable[[], bool], output: Path) -> None:
    deadline = time.monotonic() + 500
    while not done():
        assert time.monotonic() < deadline, output.read_text()[-3000:]
        time.sleep(0.1)


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
        assert repeated < max(1, len(starts(run.folder))), "at most the step at hand, at each kill, is done again"
        assert run.state != "done" or set(done) == {str(step) for step in range(1, steps + 1)}
    return [trial.state for trial in study.trials]


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_and_nothing_runs_twice(tmp_path: Path) -> None:
    """kill -9 right after the log says that a trial is pruned (issue 16, line 17); the same command again."""
    folder, output = tmp_path / "study", tmp_path / "study.out"
    words = ["x=3,2,1,4", "steps=8", "pause=0.4", "--pruner", "asha:reduction_factor=2", "--slots", "2"]
    words += ["--metric", METRIC]
    assert started(folder, *words, KILLED="1").wait(timeout=500) == -signal.SIGKILL, output.read_text()
    before = over(folder)
    assert before and "pruned" in [trial.state for trial in Study.load(folder).trials]
    wait_until(lambda: not runs_alive(folder), output)  # no run outlives its sweep

    assert started(folder, *words).wait(timeout=500) == 0, output.read_text()
    assert before.items() <= over(folder).items(), "a pruned trial is not run again"
    assert not permitting(folder, 0o077), "its user's alone"
    states = check(folder, 8)
    assert states[0] == "complete" and len(states) == 4 and set(states) == {"complete", "pruned"}, output.read_text()


@pytest.mark.long
def test_killed_at_twenty_random_instants(tmp_path: Path) -> None:
    folder, chance, known = tmp_path / "study", random.Random(1), dict[Path, int]()
    words = ["x=1,2,3,4", "y=a,b", "steps=12", "pause=0.3", "--seeds", "2", "--pruner", "asha:reduction_factor=2"]
    words += ["--metric", METRIC, "--slots", "2"]
    for number in range(20):
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
            wait_until(lambda: not runs_alive(folder), folder.with_suffix(".out"))
        now = over(folder)
        assert known.items() <= now.items(), "what was over did not start again, and stays over"
        known = now
    assert started(folder, *words).wait(timeout=300) == 0, folder.with_suffix(".out").read_text()[-3000:]
    assert known.items() <= over(folder).items()
    states = check(folder, 12)
    assert len(states) == 8 and set(states) <= {"complete", "pruned"}, states


@pytest.mark.slow
def test_failures_by_cause_a_clean_environment_and_the_table(tmp_path: Path) -> None:
    kinds = {
        "good": {"x": 2},
        "lost": {"x": 1, "fail": "lost", "times": 1, "at": 2},
        "finished": {"x": 1, "fail": "finished", "at": 3},
        "lost_for_good": {"x": 1, "fail": "lost"},
        "wrong": {"x": 1, "fail": "input"},
        "broken": {"x": 1, "fail": "error"},
    }
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps({"space": {"kind": kinds}, "settings": {"steps": 3}, "retries": 1, "metric": METRIC}))
    process = started(tmp_path / "study", "--file", str(file), "--slots", "2", RAY_ADDRESS="10.0.0.9:6379")
    assert process.wait(timeout=500) == 1
    trials = {str(trial.parameters["kind"]): trial for trial in Study.load(tmp_path / "study").trials}
    assert [trial.state for trial in trials.values()] == [*["complete"] * 3, *["failed"] * 3]
    counts = {kind: len(starts(trial.runs[0].folder)) for kind, trial in trials.items()}
    assert counts == {"good": 1, "lost": 2, "finished": 1, "lost_for_good": 2, "wrong": 1, "broken": 1}
    assert (trials["lost"].runs[0].folder / "steps").read_text().split() == ["1", "2", "3"], "from its checkpoint"
    assert trials["wrong"].error.startswith("wrong input: UserError: data.train_files=['a.parquet']")
    assert trials["broken"].error == "ValueError: the reward is wrong" and "ECC" in trials["lost_for_good"].error
    environment = starts(trials["good"].runs[0].folder)[0]["environment"]
    assert isinstance(environment, dict) and environment["OMP_NUM_THREADS"] == "1"
    assert not [name for name in environment if name.startswith(("RAY_", "TUNE_")) or name == "VERL_LITE_RUN"]
    assert environment.get("TMPDIR") == os.environ.get("TMPDIR"), "the sweep's own ends with the sweep"
    told = (tmp_path / "study.out").read_text()
    assert f"trial 4 failed: {trials['wrong'].error}"[:80] in told and "To train trial 0 in full:" in told
    [(module, words)] = commands_in(told)
    execute(module, words)


@pytest.mark.slow
@pytest.mark.long
def test_a_real_training_stopped_with_its_sweep_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """One trial, so that there is one training to start again."""
    task, folder, metric = TinyTask(tmp_path), tmp_path / "study", "critic/score/mean"
    usual = [*task.options, "trainer.backend=inline", "reward.num_workers=0", "trainer.total_training_steps=3"]
    process = started(folder, *usual, "trainer.save_freq=1", "--seeds", "[3]", "--metric", metric, code="")
    output = folder.with_suffix(".out")
    wait_until(lambda: bool(list(folder.glob("trials/*/*/global_step_1"))) or process.poll() is not None, output)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=300) == 130, output.read_text()
    assert "seed 3 stopped" in output.read_text() and "To continue: python -m trainer.sweep" in output.read_text()
    assert started(folder, code="").wait(timeout=500) == 0, output.read_text()
    [trial] = Study.load(folder).trials
    rows = [json.loads(line) for line in (trial.runs[0].folder / "metrics.jsonl").read_text().splitlines()]
    scores = [(row["step"], row["data"][metric]) for row in rows if metric in row.get("data", {})]
    assert sorted({step for step, _ in scores}) == [1, 2, 3] and trial.value == scores[-1][1]
    assert trial.state == "complete" and scores[0][0] == 1 != scores[1][0], "step 1 had a checkpoint"


def test_devices_of_foreign_processes_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.sweeps import trial_process, tuning

    def gpu(index: int, *held_gib: int) -> Gpu:
        processes = tuple(GpuProcess(4_000_000 + number, gib << 30) for number, gib in enumerate(held_gib))
        return Gpu(index, f"GPU-{index}", "H100", 80 << 30, (80 - sum(held_gib)) << 30, processes)

    there, told = [gpu(0, 20), gpu(1), gpu(2)], list[str]()
    for module in (tuning, trial_process):
        monkeypatch.setattr(module, "list_gpus", lambda: there)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert tuning.free_devices(told.append) == ["2"]
    assert "device not used: GPU 0 (H100, GPU-0) is in use" in told[0]
    monkeypatch.setattr(trial_process, "marked_processes", lambda mark, token: [4_000_000])
    assert trial_process.busy_device("mine") == "", "what this sweep's own runs hold is no reason"
    monkeypatch.setattr(trial_process, "marked_processes", lambda mark, token: [])
    assert "is in use" in trial_process.busy_device("mine")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match=r"(?s)no device is free.*CUDA_VISIBLE_DEVICES"):
        tuning.free_devices(told.append)


# ---------------------------------------------------------------------------------------------------------- a cluster


@pytest.mark.slow
def test_an_address_without_a_cluster_ends_the_sweep_before_it_begins(tmp_path: Path) -> None:
    with socket.create_server((FIRST, 0)) as server:
        port = server.getsockname()[1]
    code = f"from trainer.sweeps import tuning\ntuning._CONNECT_TIMEOUT_S = 0.3\n{FAKED}"
    process = started(tmp_path / "s", "x=1,2", "--ray-address", f"{FIRST}:{port}", code=code)
    assert process.wait(300) == 2
    assert "nobody has answered" in (tmp_path / "s.out").read_text() and not (tmp_path / "s").exists()


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayMachines]:
    """Two with a core each."""
    for name, value in AUTH.items():
        monkeypatch.setenv(name, value)
    cluster = RayMachines([FIRST, SECOND], slots=1, env={})
    yield cluster
    cluster.close()


@pytest.mark.slow
@pytest.mark.long
def test_on_a_cluster_it_loses_a_machine_then_the_head(tmp_path: Path, machines: RayMachines) -> None:
    folder, output = tmp_path / "s", tmp_path / "s.out"
    words = ["x=1,2", "steps=400", "pause=0.1", "--metric", METRIC, "--ray-address", machines.address]
    process = started(folder, *words)
    wait_until(lambda: len(runs_alive(folder)) == 2, output)
    machines.kill(SECOND)
    told = "the machine or its Ray node was lost; restarting from its last checkpoint"
    wait_until(lambda: told in output.read_text(), output)
    machines.kill_head()
    assert process.wait(300) == 1 and "The same command continues the sweep" in output.read_text()
    wait_until(lambda: not runs_alive(folder), output)

"""Whole sweeps on Ray Tune: of a stand-in for a training, of real ones, and on the machines of a cluster."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray_machines import AUTH, RayMachines
from tests.tiny_run import ROOT, TinyTask
from tests.trainer.sweeps.fake_trial import METRIC
from tests.trainer.sweeps.test_killed import FAKE, runs_alive, started, starts
from trainer.sweep import main
from trainer.sweeps.study import Study
from verl_lite.machine.gpus import Gpu, GpuProcess

FIRST, SECOND = "127.0.0.2", "127.0.0.3"
PATIENCE_S = 240.0


def words(folder: Path, *more: str) -> list[str]:
    return ["--command", str(FAKE), "--options", "none", "--metric", METRIC, "--study", str(folder), *more]


@pytest.mark.slow
def test_failures_by_cause_a_clean_environment_and_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    kinds = {
        "good": ["x=2"],
        "lost": ["x=1", "fail=lost", "times=1", "at=2"],
        "lost_for_good": ["x=1", "fail=lost"],
        "wrong": ["x=1", "fail=input"],
        "broken": ["x=1", "fail=error"],
    }
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps({"space": {"kind": kinds}, "settings": {"steps": 3}, "retries": 1, "slots": 2}))
    assert main(words(tmp_path / "study", "--file", str(file))) == 1
    trials = {str(trial.parameters["kind"]): trial for trial in Study.load(tmp_path / "study").trials}
    assert [trial.state for trial in trials.values()] == ["complete", "complete", *["failed"] * 3]
    counts = {kind: len(starts(trial.runs[0].folder)) for kind, trial in trials.items()}
    assert counts == {"good": 1, "lost": 2, "lost_for_good": 2, "wrong": 1, "broken": 1}
    assert (trials["lost"].runs[0].folder / "steps").read_text().split() == ["1", "2", "3"], "from its checkpoint"
    assert trials["wrong"].error.startswith("wrong input: UserError: data.train_files=['a.parquet']")
    assert trials["broken"].error == "ValueError: the reward is wrong" and "ECC" in trials["lost_for_good"].error
    environment = starts(trials["good"].runs[0].folder)[0]["environment"]
    assert isinstance(environment, dict) and environment["OMP_NUM_THREADS"] == "1"
    assert not [name for name in environment if name.startswith(("RAY_", "TUNE_")) or name == "VERL_LITE_RUN"]
    assert environment.get("TMPDIR") == os.environ.get("TMPDIR"), "the sweep's own ends with the sweep"
    told = capsys.readouterr().out
    assert f"trial 3 failed: {trials['wrong'].error}"[:80] in told and "To train trial 0 in full:" in told


@pytest.mark.slow
def test_a_real_training_killed_with_its_sweep_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    task, folder, metric = TinyTask(tmp_path), tmp_path / "study", "critic/score/mean"
    usual = [*task.options, "trainer.backend=inline", "reward.num_workers=0", "trainer.total_training_steps=4"]
    argv = [*usual, "trainer.save_freq=1", "actor.optim.lr=1e-3,1e-4", "--seeds", "[3]", "--slots", "2"]
    more = ["--command", "trainer.main_ppo", "--options", "ppo", "--metric", metric, "--take", "best"]
    process = started(folder, *argv, *more)
    while not list(folder.glob("trials/*/seed-3/global_step_1")):
        assert process.poll() is None, folder.with_suffix(".out").read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    begun = {path.parents[1].name for path in folder.glob("trials/*/seed-3/global_step_1")}
    assert main(["--study", str(folder), "--slots", "2"]) == 0
    study = Study.load(folder)
    assert [trial.state for trial in study.trials] == ["complete"] * 2 and begun
    for trial in study.trials:
        rows = [json.loads(line) for line in (trial.runs[0].folder / "metrics.jsonl").read_text().splitlines()]
        scores = [(row["step"], row["data"][metric]) for row in rows if metric in row["data"]]
        assert sorted({step for step, _ in scores}) == [1, 2, 3, 4] and trial.value == max(value for _, value in scores)
        assert trial.folder.name not in begun or scores[0][0] == 1 != scores[1][0], "step 1 had a checkpoint"


def test_the_sweep_of_the_recipe_is_checked_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every word of recipes/grpo/sweep.yaml, in all six combinations; the recipe's model and data are not made here."""
    from trainer.sweeps.options import read_options
    from trainer.sweeps.target import Target, check, find_target

    for step in ("prepare", "_check"):
        monkeypatch.setattr(Target, step, lambda self, _: None)
    options = read_options(["--file", str(ROOT / "recipes/grpo/sweep.yaml")])
    assert options.question is not None and options.search is not None and options.question.seeds == (1, 2)
    assert check(find_target(options.question), options.search) == []


def test_devices_of_foreign_processes_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.sweeps import child, tuning
    from verl_lite.errors import UserError

    def gpu(index: int, *held_gib: int) -> Gpu:
        processes = tuple(GpuProcess(4_000_000 + number, gib << 30) for number, gib in enumerate(held_gib))
        return Gpu(index, f"GPU-{index}", "H100", 80 << 30, (80 - sum(held_gib)) << 30, processes)

    there, told = [gpu(0, 20), gpu(1), gpu(2)], list[str]()
    for module in (tuning, child):
        monkeypatch.setattr(module, "list_gpus", lambda: there)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert tuning._free_devices(False, told.append) == ["2"]
    assert "GPU 0 (H100, GPU-0) is in use" in told[0] and "passed over" in told[0]
    monkeypatch.setattr(child.watcher, "marked_processes", lambda mark, token: [4_000_000])
    assert child._busy_device("mine") == "", "what this sweep's own runs hold is no reason"
    monkeypatch.setattr(child.watcher, "marked_processes", lambda mark, token: [])
    assert "is in use" in child._busy_device("mine")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match=r"(?s)no device is free:\n.*--wait"):
        tuning._free_devices(False, told.append)


# ---------------------------------------------------------------------------------------------------------- a cluster


def test_an_address_without_a_cluster_ends_the_sweep_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trainer.sweeps.tuning._FIRST_ANSWER_S", 0.3)
    with socket.create_server((FIRST, 0)) as server:
        port = server.getsockname()[1]
    assert main(words(tmp_path / "s", "--slots", "1", "--ray-address", f"{FIRST}:{port}", "x=1,2")) == 2
    assert "nobody has answered" in capsys.readouterr().err and not (tmp_path / "s").exists()


@pytest.fixture
def machines() -> Iterator[RayMachines]:
    """Two with a core each."""
    cluster = RayMachines([FIRST, SECOND], slots=1, env={})
    yield cluster
    cluster.close()


@pytest.mark.slow
def test_on_a_cluster_it_is_killed_then_loses_a_machine_then_the_head(
    tmp_path: Path, machines: RayMachines, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in AUTH.items():
        monkeypatch.setenv(name, value)
    folder, argv = tmp_path / "s", ["x=1,2", "steps=400", "pause=0.1", "--ray-address", machines.address]
    output = folder.with_suffix(".out")
    assert started(folder, *argv, "--threads", "4").wait(PATIENCE_S) == 2
    assert "each run asks for {'CPU': 4.0} on one machine, and none has that" in output.read_text()

    def wait_until(what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not {"two run": len(runs_alive(folder)) == 2, "none": not runs_alive(folder)}.get(
            what, what in output.read_text()
        ):
            assert time.monotonic() < deadline, (what, output.read_text())
            time.sleep(0.1)

    process = started(folder, *argv)
    wait_until("two run")
    process.kill()
    process.wait()
    wait_until("none")
    assert [trial.state for trial in Study.load(folder).trials] == ["waiting"] * 2

    process = started(folder, *argv)
    wait_until("two run")
    machines.kill(SECOND)
    wait_until("the machine, or its part of Ray, was lost; again, from its last checkpoint")
    machines.kill_head()
    assert process.wait(PATIENCE_S) == 1 and "is gone. To go on: the same command" in output.read_text()
    wait_until("none")

"""Runs of a sweep on the machines of a Ray cluster: what is said of an address where there is none, a training that is
stopped and goes on, and a sweep that is killed, loses a machine, and then the head."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.ray_machines import AUTH, RayMachines
from tests.tiny_run import TinyTask
from trainer.sweeps.command import sweep
from trainer.sweeps.study import DESCRIPTION, read_study
from verl_lite.errors import NoRoomError, UserError

ROOT = Path(__file__).resolve().parents[3]
FAKE = Path(__file__).with_name("fake_trial.py")
METRIC = "val-core/task/acc/mean@1"
FIRST, SECOND = "127.0.0.2", "127.0.0.3"
PATIENCE_S = 240.0


def words(study: Path, address: str, *more: str) -> list[str]:
    usual = ["--command", str(FAKE), "--options", "none", "--metric", METRIC]
    return [*usual, "--study", str(study), "--ray", address, *more]


def test_an_address_without_a_cluster_ends_the_sweep_before_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.sweeps.ray_places._FIRST_ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.2", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(NoRoomError, match=rf"--ray 127.0.0.2:{port}: nobody has answered .* `ray start --head`"):
        sweep(words(tmp_path / "s", f"127.0.0.2:{port}", "x=1,2"))
    with pytest.raises(UserError, match="--ray somewhere: expected HOST:PORT"):
        sweep(words(tmp_path / "s", "somewhere", "x=1,2"))
    with pytest.raises(UserError, match="--ray with --devices: Ray chooses the devices"):
        sweep(words(tmp_path / "s", f"127.0.0.2:{port}", "x=1,2", "--devices", "0"))
    assert not (tmp_path / "s" / DESCRIPTION).exists()


class Sweeping:
    """The command in a process of its own."""

    def __init__(self, folder: Path, *argv: str) -> None:
        self.log = folder / f"log-{time.monotonic()}"
        environment = {**os.environ, **AUTH, "PYTHONPATH": str(ROOT), "TMPDIR": "/tmp"}
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainer.sweep", *argv],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=file,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's tests ignore it
            )

    def wait_for(self, is_true: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_true():
            assert time.monotonic() < deadline and self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)


def pids(study: Path) -> list[int]:
    """Of all starts of runs."""
    files = study.glob("trials/*/run/starts")
    return [json.loads(line)["pid"] for file in files for line in file.read_text().splitlines()]


def wait_until_gone(study: Path) -> None:
    deadline = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in pids(study)):
        assert time.monotonic() < deadline, "runs outlive their sweep"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def machines() -> Iterator[RayMachines]:
    """Two with a core each."""
    cluster = RayMachines([FIRST, SECOND], slots=1, env={})
    yield cluster
    cluster.close()


REWARD = """
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if list(Path("FOLDER").glob("study/trials/*/*/metrics.jsonl")):  # in the second step
        Path("FOLDER/begun").touch()
        while Path("FOLDER/hold").exists():
            time.sleep(0.05)
    return sum(map(ord, solution_str)) % 7 / 7
"""


@pytest.mark.slow
def test_a_training_on_another_machine_is_stopped_and_goes_on(tmp_path: Path, machines: RayMachines) -> None:
    """With the usual private Ray of a run, on a machine that is one of a cluster."""
    task, study = TinyTask(tmp_path, REWARD.replace("FOLDER", str(tmp_path))), tmp_path / "study"
    usual = [*task.options, "trainer.total_training_steps=3", "trainer.save_freq=1", "seeds=[3]"]
    argv = [*usual, "--metric", "critic/score/mean", "--study", str(study), "--ray", machines.address]
    (tmp_path / "hold").touch()
    sweeping = Sweeping(tmp_path, *argv)
    sweeping.wait_for((tmp_path / "begun").exists)
    sweeping.process.send_signal(signal.SIGINT)
    sweeping.wait_for(lambda: "stopping 1 runs" in sweeping.log.read_text())
    (tmp_path / "hold").unlink()
    assert sweeping.process.wait(PATIENCE_S) == 130, sweeping.log.read_text()
    again = f"to go on: python -m trainer.sweep --study {study} --ray {machines.address}"
    assert again in sweeping.log.read_text()

    sweeping = Sweeping(tmp_path, *shlex.split(again.partition("trainer.sweep")[2]))
    assert sweeping.process.wait(PATIENCE_S) == 0, sweeping.log.read_text()
    run = read_study(study).trials[0].runs[0]
    assert [(attempt.cause, attempt.status) for attempt in run.attempts] == [("stopped", 130), ("done", 0)]
    assert "stopping after this step" in run.log.read_text()
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if "critic/score/mean" in row["data"]]
    assert steps == [1, 2, 3], "the second start went on from where the first one ended"
    assert not [pid for pid in machines.processes() if b"VERL_LITE_SWEEP_ATTEMPT" in _environment(pid)]


def _environment(pid: int) -> bytes:
    try:
        return Path("/proc", str(pid), "environ").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_a_sweep_is_killed_then_loses_a_machine_then_the_head(tmp_path: Path, machines: RayMachines) -> None:
    study, hold = tmp_path / "s", tmp_path / "hold"
    argv = words(study, machines.address, "x=1,2,3", "steps=2", f"hold={hold}")
    hold.touch()
    sweeping: list[Sweeping] = []
    try:
        with pytest.raises(AssertionError, match="each run asks for 4 CPU on one machine, and none has that"):
            Sweeping(tmp_path, *argv, "--threads", "4").wait_for(lambda: False)

        sweeping.append(Sweeping(tmp_path, *argv))
        sweeping[0].wait_for(lambda: len(pids(study)) == 2)
        sweeping[0].process.kill()
        sweeping[0].process.wait()
        wait_until_gone(study)

        sweeping.append(Sweeping(tmp_path, *argv))
        sweeping[1].wait_for(lambda: len(pids(study)) == 4)
        machines.kill(SECOND)
        sweeping[1].wait_for(lambda: "lost device" in sweeping[1].log.read_text())
        machines.kill_head()
        assert sweeping[1].process.wait(PATIENCE_S) == 1
        told = sweeping[1].log.read_text()
        assert told.endswith(f"start a cluster: python -m trainer.sweep --study {study} --ray {machines.address}\n"), (
            told
        )
        wait_until_gone(study)

        hold.unlink()
        assert sweep(["--study", str(study)]) == 0, "here it goes on as anywhere"
        trials = read_study(study).trials
        assert [trial.state for trial in trials] == ["complete"] * 3 and trials[2].value == pytest.approx(6)
        causes = sorted([attempt.cause or "" for attempt in trial.runs[0].attempts] for trial in trials)
        assert causes == [["done"], ["sweep died", "lost device", "done"], ["sweep died", "sweep died", "done"]]
        runs = [trial.runs[0] for trial in trials]
        lost = next(run for run in runs if any(attempt.cause == "lost device" for attempt in run.attempts))
        assert SECOND in lost.attempts[1].slot
        assert SECOND in lost.attempts[1].lines[0] and "is lost" in lost.attempts[1].lines[0]
    finally:
        for one in sweeping:
            one.process.kill()

"""Runs of a sweep on the machines of a Ray cluster: what is said of an address where there is none, and a whole sweep
that is killed, goes on, and loses a machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.ray_machines import AUTH, RayMachines
from trainer.sweep import sweep
from trainer.sweeps.study import DESCRIPTION, read_study
from verl_lite.errors import NoRoomError, UserError

ROOT = Path(__file__).resolve().parents[3]
FAKE = Path(__file__).with_name("fake_trial.py")
METRIC = "val-core/task/acc/mean@1"
FIRST, SECOND = "127.0.0.2", "127.0.0.3"
PATIENCE_S = 240.0


def words(study: Path, address: str, *more: str) -> list[str]:
    usual = ["--command", str(FAKE), "--options", "none", "--metric", METRIC, "--study", str(study)]
    return [*usual, "--ray", address, *more]


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

    def __init__(self, study: Path, address: str, *more: str) -> None:
        self.log = study.parent / f"log-{time.monotonic()}"
        environment = {**os.environ, **AUTH, "PYTHONPATH": str(ROOT), "TMPDIR": "/tmp"}
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainer.sweep", *words(study, address, *more)],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=file,
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


@pytest.mark.slow
def test_a_sweep_over_two_machines_is_killed_and_then_loses_one(tmp_path: Path) -> None:
    study, hold = tmp_path / "s", tmp_path / "hold"
    more = ["x=1,2,3", "steps=2", f"hold={hold}"]
    hold.touch()
    machines = RayMachines([FIRST, SECOND], slots=1, env={})
    sweeping: list[Sweeping] = []
    try:
        with pytest.raises(AssertionError, match="each run asks for 4 CPU on one machine, and none has that"):
            Sweeping(study, machines.address, *more, "--threads", "4").wait_for(lambda: False)

        sweeping.append(Sweeping(study, machines.address, *more))
        sweeping[0].wait_for(lambda: len(pids(study)) == 2)
        sweeping[0].process.kill()
        sweeping[0].process.wait()
        deadline = time.monotonic() + 60
        while any(psutil.pid_exists(pid) for pid in pids(study)):
            assert time.monotonic() < deadline, "runs outlive their sweep"
            time.sleep(0.1)

        sweeping.append(Sweeping(study, machines.address, *more))
        sweeping[1].wait_for(lambda: len(pids(study)) == 4)
        machines.kill(SECOND)
        sweeping[1].wait_for(lambda: "lost device" in sweeping[1].log.read_text())
        hold.unlink()
        assert sweeping[1].process.wait(PATIENCE_S) == 0, sweeping[1].log.read_text()
        trials = read_study(study).trials
        assert [trial.state for trial in trials] == ["complete"] * 3 and trials[2].value == pytest.approx(6)
        causes = {tuple(attempt.cause for attempt in trial.runs[0].attempts) for trial in trials}
        assert ("sweep died", "lost device", "done") in causes, causes
        lost = next(trial.runs[0] for trial in trials if len(trial.runs[0].attempts) == 3)
        assert SECOND in lost.attempts[1].slot and FIRST in lost.attempts[2].slot
        assert SECOND in lost.attempts[1].lines[0] and "is lost" in lost.attempts[1].lines[0]
    finally:
        for one in sweeping:
            one.process.kill()
        machines.close()

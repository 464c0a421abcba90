"""One run of a trial: a process of its own on this machine, from its start to an end with nothing left behind."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.cli import WRONG_INPUT
from trainer.sweeps.study import STOP
from verl_lite.errors import printable
from verl_lite.machine.gpus import is_busy, list_gpus, other_users, visible_gpus, without_processes
from verl_lite.single_controller import watcher
from workers.pool.child import die_with_parent

SWEEP_MARK = "VERL_LITE_SWEEP"
_RUN_MARK = "VERL_LITE_SWEEP_RUN"
_PATIENCE_S = 5.0
"""That a run's guard has to clean up after its driver, before what is left is killed."""
_TAIL_BYTES = 64 << 10
_MACHINE = re.compile(
    r"WorkerDiedError|ClusterLostError|NoRoomError|its process ended without an exception|No space left on device|"
    r"uncorrectable ECC|GPU is lost|fallen off the bus|\bXid\b|NCCL.*(remote error|unhandled (cuda|system) error)|"
    r"CUDA error: (unspecified launch failure|an illegal memory access|unknown error|hardware)|"
    r"but only \d+ of \d+ devices can be had|is in use by pid"  # somebody took the device in between
)


class MachineFault(RuntimeError):
    """A run ended by no fault of its own: Ray Tune starts it again, and it goes on from its checkpoint."""


@dataclass(frozen=True)
class Order:
    """A run to be done. environment: of the process, whole; None = this process's, without what Ray put there.

    sweep: mark of all runs of this sweep. grace_s: that the run has to end by itself when asked to.
    """

    command: list[str]
    folder: Path
    cwd: Path
    metric: str
    environment: dict[str, str] | None
    additions: dict[str, str]
    sweep: str
    gpus: bool
    grace_s: float


class Child:
    """The process of an order. It ends with this one, kill -9 included."""

    def __init__(self, order: Order) -> None:
        self.order, self.metrics = order, MetricsReader(order.folder / "metrics.jsonl", order.metric)
        self._log = order.folder.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None
        self._asked_to_end: float | None = None
        self._mark, self._begun, self._logged = uuid.uuid4().hex, 0.0, 0

    def why_not(self) -> str:
        """Why the run cannot start now: another process works in its folder, or holds its device; empty if it can.
        Starts it then."""
        order = self.order
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:  # its lock is the run's as well, which holds it as long as it lives
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return f"{order.folder} is in use: a run of an earlier sweep still ends"
            if order.gpus and (reason := _busy_device(order.sweep)):
                return reason
            environment = clean(os.environ, order.command) if order.environment is None else order.environment
            if order.gpus:
                environment = {**environment, "CUDA_VISIBLE_DEVICES": os.environ["CUDA_VISIBLE_DEVICES"]}
            self._logged, self._begun, parent = log.tell(), time.time(), os.getpid()
            self._process = subprocess.Popen(
                order.command,
                cwd=order.cwd,
                env={**environment, **order.additions, SWEEP_MARK: order.sweep, _RUN_MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the sweep, which asks its runs to end
                preexec_fn=lambda: _begin_run(parent),
            )
        return ""

    @property
    def has_begun(self) -> bool:
        return self._process is not None

    def is_unwanted(self) -> bool:
        """Whether the sweep, or the trial, is to end."""
        trial = self.order.folder.parent
        return (trial / STOP).exists() or (trial.parent.parent / STOP).exists()

    def look(self) -> dict[str, Any] | None:
        """How the run ended, None while it runs; asks it to end if it is unwanted. Raises MachineFault."""
        assert self._process is not None, "it has begun"
        status = self._process.poll()
        self.metrics.update()
        if status is None:
            if self._asked_to_end is None and self.is_unwanted():
                self._asked_to_end = time.monotonic()
                self._process.send_signal(signal.SIGINT)
            elif self._asked_to_end and time.monotonic() - self._asked_to_end > self.order.grace_s:
                self.kill()
            return None
        self.kill()
        ended: dict[str, Any] = {"seconds": time.time() - self._begun, "steps": self.metrics.step}
        if status == 0:
            return ended | {"state": "done"}
        if self._asked_to_end is not None:
            return ended | {"state": "stopped"}
        is_machines, error = diagnose(status, self._end_of_log())
        if is_machines:
            raise MachineFault(error)
        return ended | {"state": "failed", "error": error}

    def kill(self) -> None:
        """Ends it, and whatever it left."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            watcher.end(_RUN_MARK, self._mark, [], patience_s=_PATIENCE_S)

    def _end_of_log(self) -> str:
        with self._log.open("rb") as file:
            file.seek(max(self._logged, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace")


def clean(environment: Mapping[str, str], command: Sequence[str]) -> dict[str, str]:
    """What a run inherits: nothing of the sweep's Ray, but its token where the run is to join a cluster as well."""
    joins = any(word.startswith("ray_kwargs.ray_init.address=") for word in command)
    ours = (watcher.RUN_MARK, watcher.CLUSTER_MARK, "TUNE_")
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(ours) and (not name.startswith("RAY_") or (joins and name.startswith("RAY_AUTH_")))
    }


def diagnose(status: int, output: str) -> tuple[bool, str]:
    """Whether the machine was at fault, and what the run said last.

    Args:
        status: exit status, negative for a signal. output: the end of what the run printed.
    """
    lines = [line.strip() for line in printable(output).splitlines() if line.strip()]
    telling = next((line for line in reversed(lines) if _MACHINE.search(line)), None)
    if telling is not None:
        return True, telling[:300]
    errors = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    said = lines[errors[-1] :][:3] if errors else lines[-1:]
    text = "\n".join(line[:300] for line in said) or f"exit status {status}, without a word"
    if status in (-signal.SIGKILL, -signal.SIGBUS, -signal.SIGSEGV):
        return True, f"killed by {signal.Signals(-status).name}: " + (
            "no memory, most likely" if status == -9 else text
        )
    return False, f"wrong input: {text}" if status == WRONG_INPUT else text


def _begin_run(parent: int) -> None:
    """In a run's process: it ends with its parent, and hears SIGINT, by which it is asked to end, also where that is
    ignored here, as in a shell's background job, or blocked, as in the threads of Ray's actors."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _busy_device(sweep: str) -> str:
    """Who else uses a device that Ray gave this process; empty if nobody does in earnest."""
    own: Collection[int] = watcher.marked_processes(SWEEP_MARK, sweep)
    for gpu in (without_processes(one.gpu, own) for one in visible_gpus(list_gpus() or [])):
        if is_busy(gpu):
            return f"{gpu} is in use: " + "; ".join(other_users(gpu) or ["by processes that are not visible from here"])
    return ""


class MetricsReader:
    """What a run has logged so far of one metric, read as the file grows.

    values: by step; where a resumed run went back, later steps are forgotten. step: the last. names: of all metrics.
    """

    def __init__(self, path: Path, metric: str) -> None:
        self._path, self._metric, self._offset = path, metric, 0
        self.values: dict[int, float] = {}
        self.names: set[str] = set()
        self.step = 0

    def update(self) -> None:
        """Reads what is new."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            try:
                row: Any = json.loads(line)
                step, data = int(row["step"]), row["data"]
            except (ValueError, KeyError, TypeError):  # a line that a crash cut off
                continue
            if step < self.step:
                self.values = {known: value for known, value in self.values.items() if known <= step}
            self.step = step
            self.names |= data.keys()
            if data.get(self._metric) is not None:
                self.values[step] = float(data[self._metric])

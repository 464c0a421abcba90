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
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import tune

from trainer.cli import NOTHING_LEFT, WRONG_INPUT
from trainer.sweeps.question import STOP
from trainer.tracking.record import METRICS, read_metrics
from verl_lite.errors import printable
from verl_lite.machine.gpus import ResourceRequest, list_gpus, unavailable, visible_gpus, without_processes
from verl_lite.single_controller import watcher
from workers.pool.child import die_with_parent

SWEEP_MARK = "VERL_LITE_SWEEP"
_RUN_MARK = "VERL_LITE_SWEEP_RUN"
_GRACE_S = 120.0
"""That a run has to end by itself when asked to."""
_PATIENCE_S = 5.0
"""That a run's guard has to clean up after its driver, before what is left is killed."""
_TAIL_BYTES = 64 << 10
_REPORT_S, _LOOK_S = 1.0, 0.1
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
    """A run to be done. environment: of its process; None = that of this machine. sweep: mark of all its runs."""

    command: list[str]
    folder: Path
    cwd: str
    metric: str
    environment: dict[str, str] | None
    sweep: str
    gpus: bool


class RunActor(tune.Trainable):
    """On the machine of a run: the process of an order. It ends with this one, kill -9 included."""

    def setup(self, config: dict[str, Any]) -> None:
        self._order = Order(**config)
        self._log = self._order.folder.with_suffix(".log")
        self._process: subprocess.Popen[bytes] | None = None
        self._asked_to_end: float | None = None
        self._mark, self._begun, self._logged = uuid.uuid4().hex, 0.0, 0
        self._read, self._steps = 0, dict[int, dict[str, float]]()

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.cleanup()
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """Waits until it logs something, ends, or a second is over; gives what is known of it as JSON, as Tune takes
        nested results apart. Raises MachineFault."""
        deadline, ended, waits, known = time.monotonic() + _REPORT_S, None, "", self._read
        while ended is None and self._read == known and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            if self._process is not None:
                ended = self._look(self._process)
            elif self._is_unwanted():
                ended = {"state": "stopped"}
            else:
                waits = self._why_not()
        metric = self._order.metric
        values = {step: data[metric] for step, data in self._steps.items() if metric in data}
        names = sorted(set().union(*self._steps.values())) if ended and not values else []
        said = {"values": values, "step": max(self._steps, default=0), "waits": waits, "names": names, "ended": ended}
        return {"said": json.dumps(said), "done": ended is not None}

    def cleanup(self) -> None:
        """Ends it, and whatever it left."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            watcher.end(_RUN_MARK, self._mark, [], patience_s=_PATIENCE_S)

    def _why_not(self) -> str:
        """Why the run cannot start now: another process works in its folder, or holds its device; empty if it can.
        Starts it then."""
        order = self._order
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:  # its lock is the run's as well, which holds it as long as it lives
            try:
                fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return f"{order.folder} is in use: a run of an earlier sweep still ends"
            if order.gpus and (reason := busy_device(order.sweep)):
                return reason
            environment = clean(os.environ) if order.environment is None else order.environment
            if order.gpus:
                environment = {**environment, "CUDA_VISIBLE_DEVICES": os.environ["CUDA_VISIBLE_DEVICES"]}
            self._logged, self._begun, parent = log.tell(), time.monotonic(), os.getpid()
            self._process = subprocess.Popen(
                order.command,
                cwd=order.cwd,
                env={**environment, SWEEP_MARK: order.sweep, _RUN_MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the sweep, which asks its runs to end
                preexec_fn=lambda: _begin_run(parent),
            )
        return ""

    def _is_unwanted(self) -> bool:
        """Whether the sweep, or the trial, is to end."""
        trial = self._order.folder.parent
        return (trial / STOP).exists() or (trial.parent.parent / STOP).exists()

    def _look(self, process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
        """How the run ended, None while it runs; asks it to end if it is unwanted."""
        status, metrics = process.poll(), self._order.folder / METRICS
        if metrics.is_file() and (size := metrics.stat().st_size) != self._read:
            self._read, self._steps = size, read_metrics(metrics)
        if status is None:
            if self._asked_to_end is None and self._is_unwanted():
                self._asked_to_end = time.monotonic()
                process.send_signal(signal.SIGINT)
            elif self._asked_to_end and time.monotonic() - self._asked_to_end > _GRACE_S:
                self.cleanup()
            return None
        self.cleanup()
        ended: dict[str, Any] = {"seconds": time.monotonic() - self._begun, "steps": max(self._steps, default=0)}
        if status == 0 or self._asked_to_end is not None:
            return ended | {"state": "stopped" if status else "done"}
        with self._log.open("rb") as file:
            file.seek(max(self._logged, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            output = file.read().decode(errors="replace")
        if status == WRONG_INPUT and NOTHING_LEFT in output:  # killed with an earlier sweep after its last step
            return ended | {"state": "done"}
        is_machines, error = diagnose(status, output)
        if is_machines:
            raise MachineFault(error)
        return ended | {"state": "failed", "error": error}


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """What a run inherits: nothing of the sweep's Ray."""
    ours = (watcher.RUN_MARK, watcher.CLUSTER_MARK, "TUNE_", "RAY_")
    return {"OMP_NUM_THREADS": "1"} | {name: v for name, v in environment.items() if not name.startswith(ours)}


def diagnose(status: int, output: str) -> tuple[bool, str]:
    """Whether the machine was at fault, and what the run said last.

    Args:
        status: exit status, negative for a signal. output: the end of what the run printed.
    """
    lines = [line.strip()[:300] for line in printable(output).splitlines() if line.strip()]
    telling = next((line for line in reversed(lines) if _MACHINE.search(line)), None)
    if telling is not None:
        return True, telling
    errors = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    text = "\n".join(lines[errors[-1] :][:3] if errors else lines[-1:]) or f"exit status {status}, without a word"
    if status in (-signal.SIGKILL, -signal.SIGBUS, -signal.SIGSEGV):
        cause = "no memory, most likely" if status == -signal.SIGKILL else text
        return True, f"killed by {signal.Signals(-status).name}: {cause}"
    return False, f"wrong input: {text}" if status == WRONG_INPUT else text


def busy_device(sweep: str) -> str:
    """Who else uses a device that Ray gave this process; empty if nobody does in earnest."""
    own: Collection[int] = watcher.marked_processes(SWEEP_MARK, sweep)
    for gpu in (without_processes(one.gpu, own) for one in visible_gpus(list_gpus() or [])):
        if reason := unavailable(gpu, ResourceRequest(1)):
            return f"{gpu} {reason}"
    return ""


def _begin_run(parent: int) -> None:
    """In a run's process: it ends with its parent, and hears SIGINT, by which it is asked to end, also where that is
    ignored here, as in a shell's background job, or blocked, as in the threads of Ray's actors."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())

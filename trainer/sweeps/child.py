"""One run of a trial: a process of its own on this machine, from its start to an end with nothing left behind."""

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
from typing import Any, BinaryIO

from ray import tune

from trainer.cli import NOTHING_LEFT, WRONG_INPUT
from trainer.sweeps.question import STOP, metric_by_step
from trainer.tracking import METRICS, read_metrics
from verl_lite.errors import printable
from verl_lite.machine.gpus import ResourceRequest, list_gpus, unavailable, visible_gpus, without_processes
from verl_lite.single_controller import watcher
from workers.pool.child_main import die_with_parent

SWEEP_MARK = "VERL_LITE_SWEEP"
_RUN_MARK = "VERL_LITE_SWEEP_RUN"
_GRACE_S = 120.0  # for a run to end by itself when asked to
_PATIENCE_S = 5.0  # for a run's guard to clean up after its driver, before what is left is killed
_TAIL_BYTES = 64 << 10
_LOOK_S = 0.1
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
    """A run. environment: None = that of its machine. sweep: mark of all its runs. umask: of its log."""

    command: list[str]
    folder: Path
    cwd: str
    metric: str
    environment: dict[str, str] | None
    sweep: str
    gpus: bool
    umask: int

    def is_unwanted(self) -> bool:
        """Whether the sweep, or the trial, is to end."""
        trial = self.folder.parent
        return (trial / STOP).exists() or (trial.parent.parent / STOP).exists()


def train(config: dict[str, Any]) -> None:
    """On the machine of a run: the process of `config["order"]`, which ends with this one, kill -9 included. Reports
    what it logs, and how it ended, as JSON, as Tune takes nested results apart. Raises MachineFault."""
    order: Order = config["order"]
    path = order.folder.with_suffix(".log")
    os.umask(order.umask)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        while (reason := held_up(order, log)) and not order.is_unwanted():
            _report(order, {}, waits=reason)
            time.sleep(1.0)
        if order.is_unwanted():
            return _report(order, {}, {"state": "stopped"})
        mark, metrics, size, asked = uuid.uuid4().hex, order.folder / METRICS, -1, 0.0
        begun, before = time.monotonic(), log.tell()
        process = _started(order, mark, log)
        _report(order, read_metrics(metrics))
        try:
            is_over = False
            while not is_over:
                time.sleep(_LOOK_S)
                is_over = process.poll() is not None
                if metrics.is_file() and metrics.stat().st_size != size:
                    size = metrics.stat().st_size
                    _report(order, read_metrics(metrics))
                if not asked and order.is_unwanted():
                    asked = time.monotonic()
                    process.send_signal(signal.SIGINT)
                is_over |= bool(asked) and time.monotonic() - asked > _GRACE_S
        finally:
            process.kill()
            process.wait()
            watcher.end(_RUN_MARK, mark, [], patience_s=_PATIENCE_S)
    steps = read_metrics(metrics)
    ended = {"seconds": time.monotonic() - begun, "steps": max(steps, default=0)}
    _report(order, steps, ended | _how_it_ended(process.returncode, path, before, was_asked=bool(asked)))


def held_up(order: Order, log: BinaryIO) -> str:
    """For what the run has to wait; empty if it may begin, and then the log is its own."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the run's process has it as well
    except BlockingIOError:
        return f"its process of an earlier sweep, which writes to {log.name}, has not ended yet"
    return busy_device(order.sweep) if order.gpus else ""


def _started(order: Order, mark: str, log: BinaryIO) -> subprocess.Popen[bytes]:
    environment, parent = clean(os.environ) if order.environment is None else order.environment, os.getpid()
    if order.gpus:
        environment = {**environment, "CUDA_VISIBLE_DEVICES": os.environ["CUDA_VISIBLE_DEVICES"]}

    def begin() -> None:
        """It ends with its parent, and hears SIGINT, by which it is asked to end, also where that is ignored here, as
        in a shell's background job, or blocked, as in the threads of Ray's actors."""
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    return subprocess.Popen(
        order.command,
        cwd=order.cwd,
        env={**environment, SWEEP_MARK: order.sweep, _RUN_MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for the sweep, which asks its runs to end
        preexec_fn=begin,
    )


def _report(
    order: Order, steps: Mapping[int, Mapping[str, float]], ended: dict[str, Any] | None = None, waits: str = ""
) -> None:
    values = metric_by_step(steps, order.metric)
    names = sorted(set().union(*steps.values())) if ended and not values else []
    said = {"values": values, "step": max(steps, default=0), "waits": waits, "names": names, "ended": ended}
    tune.report({"said": json.dumps(said)})


def _how_it_ended(status: int, log: Path, begin: int, was_asked: bool) -> dict[str, Any]:
    """begin: where its output begins in the log."""
    if status == 0 or was_asked:
        return {"state": "stopped" if status else "done"}
    with log.open("rb") as file:
        file.seek(max(begin, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        output = file.read().decode(errors="replace")
    if status == WRONG_INPUT and NOTHING_LEFT in output:  # killed with an earlier sweep after its last step
        return {"state": "done"}
    is_machines, error = diagnose(status, output)
    if is_machines:
        raise MachineFault(error)
    return {"state": "failed", "error": error}


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """What a run inherits: nothing of the sweep's Ray."""
    ours = (watcher.RUN_MARK, watcher.CLUSTER_MARK, "TUNE_", "RAY_")
    return {"OMP_NUM_THREADS": "1"} | {name: v for name, v in environment.items() if not name.startswith(ours)}


def diagnose(status: int, output: str) -> tuple[bool, str]:
    """Whether the machine was at fault, and what the run said last. status: negative for a signal. output: the end of
    what it printed."""
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

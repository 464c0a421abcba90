"""Runs one run of a trial as a process on this machine and removes everything that it leaves."""

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
from trainer.sweeps.study_spec import STOP, metric_by_step
from trainer.tracking import METRICS, read_metrics
from verl_lite.errors import printable
from verl_lite.machine.gpus import ResourceRequest, list_gpus, unavailable, visible_gpus, without_processes
from verl_lite.machine.process_tree import die_with_parent
from verl_lite.single_controller import watcher

SWEEP_MARK = "VERL_LITE_SWEEP"
_RUN_MARK = "VERL_LITE_SWEEP_RUN"
_GRACE_S = 120.0  # time for a run to end after SIGINT
_PATIENCE_S = 5.0  # time for a run's guard to clean up before remaining processes are killed
_TAIL_BYTES = 64 << 10
_POLL_S = 0.1
_MACHINE_FAULT = re.compile(
    r"WorkerDiedError|ClusterLostError|NoRoomError|its process ended without an exception|No space left on device|"
    r"uncorrectable ECC|GPU is lost|fallen off the bus|\bXid\b|NCCL.*(remote error|unhandled (cuda|system) error)|"
    r"CUDA error: (unspecified launch failure|an illegal memory access|unknown error|hardware)|"
    r"but only \d+ of \d+ devices are available|is in use by pid"  # another process took the device in between
)


class MachineFault(RuntimeError):
    """A run ended because of its machine. Ray Tune starts it again, and it continues from its checkpoint."""


@dataclass(frozen=True)
class Order:
    """The order to start a run.

    environment: environment variables; None = those of its machine. sweep: mark of all runs of the sweep. gpus: True if
    the run uses GPUs. umask: umask of its log.
    """

    command: list[str]
    folder: Path
    cwd: str
    metric: str
    environment: dict[str, str] | None
    sweep: str
    gpus: bool
    umask: int

    def is_unwanted(self) -> bool:
        """Returns True if the sweep or the trial was asked to end."""
        trial = self.folder.parent
        return (trial / STOP).exists() or (trial.parent.parent / STOP).exists()


def train(config: dict[str, Any]) -> None:
    """Runs the process of `config["order"]` on the machine of the run. The process ends with this one, even by kill -9.

    Reports its metrics and its end to Tune, as JSON because Tune flattens nested results. Raises MachineFault.
    """
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
        mark = uuid.uuid4().hex
        metrics = order.folder / METRICS
        size = -1
        asked = 0.0
        begun, before = time.monotonic(), log.tell()
        process = _start_process(order, mark, log)
        _report(order, read_metrics(metrics))
        try:
            is_over = False
            while not is_over:
                time.sleep(_POLL_S)
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
    _report(order, steps, ended | _end_of_run(process.returncode, path, before, was_asked=bool(asked)))


def held_up(order: Order, log: BinaryIO) -> str:
    """Returns the reason why the run must wait; empty if it can start, and then the log is locked for it."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the run's process inherits the lock
    except BlockingIOError:
        return f"an earlier sweep's process, which writes to {log.name}, has not ended yet"
    return busy_device(order.sweep) if order.gpus else ""


def _start_process(order: Order, mark: str, log: BinaryIO) -> subprocess.Popen[bytes]:
    environment = clean(os.environ) if order.environment is None else order.environment
    parent = os.getpid()
    if order.gpus:
        environment = {**environment, "CUDA_VISIBLE_DEVICES": os.environ["CUDA_VISIBLE_DEVICES"]}

    def begin() -> None:
        """Ends the process with its parent, and enables SIGINT, which asks the run to end. SIGINT is ignored in
        background jobs of a shell and blocked in the threads of Ray's actors."""
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
        start_new_session=True,  # Ctrl-C reaches the sweep alone, which asks its runs to end
        preexec_fn=begin,
    )


def _report(
    order: Order, steps: Mapping[int, Mapping[str, float]], ended: dict[str, Any] | None = None, waits: str = ""
) -> None:
    values = metric_by_step(steps, order.metric)
    names = sorted(set().union(*steps.values())) if ended and not values else []
    report = {"values": values, "step": max(steps, default=0), "waits": waits, "names": names, "ended": ended}
    tune.report({"report": json.dumps(report)})


def _end_of_run(status: int, log: Path, begin: int, was_asked: bool) -> dict[str, Any]:
    """Returns the end of a run for the study. begin: offset of its output in the log."""
    if status == 0 or was_asked:
        return {"state": "stopped" if status else "done"}
    with log.open("rb") as file:
        file.seek(max(begin, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        output = file.read().decode(errors="replace")
    if status == WRONG_INPUT and NOTHING_LEFT in output:  # an earlier sweep was killed after the run's last step
        return {"state": "done"}
    is_machines, error = diagnose(status, output)
    if is_machines:
        raise MachineFault(error)
    return {"state": "failed", "error": error}


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment that a run inherits, without the variables of the sweep's Ray."""
    ours = (watcher.RUN_MARK, watcher.CLUSTER_MARK, "TUNE_", "RAY_")
    return {"OMP_NUM_THREADS": "1"} | {name: v for name, v in environment.items() if not name.startswith(ours)}


def diagnose(status: int, output: str) -> tuple[bool, str]:
    """Returns whether the machine caused the failure of a run, and the run's last error.

    status: exit status, negative for a signal. output: the end of the run's output.
    """
    lines = [line.strip()[:300] for line in printable(output).splitlines() if line.strip()]
    telling = next((line for line in reversed(lines) if _MACHINE_FAULT.search(line)), None)
    if telling is not None:
        return True, telling
    errors = [number for number, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    text = "\n".join(lines[errors[-1] :][:3] if errors else lines[-1:]) or f"exit status {status}, without output"
    if status in (-signal.SIGKILL, -signal.SIGBUS, -signal.SIGSEGV):
        cause = "probably out of memory" if status == -signal.SIGKILL else text
        return True, f"killed by {signal.Signals(-status).name}: {cause}"
    return False, f"wrong input: {text}" if status == WRONG_INPUT else text


def busy_device(sweep: str) -> str:
    """Returns who else uses a device that Ray assigned to this process; empty if nobody does."""
    own: Collection[int] = watcher.marked_processes(SWEEP_MARK, sweep)
    for gpu in (without_processes(one.gpu, own) for one in visible_gpus(list_gpus() or [])):
        if reason := unavailable(gpu, ResourceRequest(1)):
            return f"{gpu} {reason}"
    return ""

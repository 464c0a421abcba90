"""Runs one run of a trial as a process on this machine and removes everything that it leaves."""

import fcntl
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from ray import tune

from trainer.cli import NOTHING_LEFT, WRONG_INPUT
from trainer.observe.tracking import METRICS, read_metrics
from trainer.sweeps.study_spec import STOP, metric_by_step
from verl_lite.errors import printable
from verl_lite.json_types import JsonObject
from verl_lite.machine.gpus import ResourceRequest, list_gpus, unavailable, visible_gpus, without_processes
from verl_lite.machine.process_table import marked_processes
from verl_lite.machine.process_tree import MARK, RUN_MARK, ProcessTree, die_with_parent
from verl_lite.single_controller import watcher
from verl_lite.single_controller.watcher import CLUSTER_MARK

SWEEP_MARK = "VERL_LITE_SWEEP"
"""Environment variable of all runs of a sweep, on every machine."""

_GRACE_S = 120.0  # time for a run to end after SIGINT
_PATIENCE_S = 5.0  # time for a run's guard to clean up before remaining processes are killed
_WAITING_POLL_S = 1.0  # interval between looks at whether a run can start
_TAIL_BYTES = 64 << 10
_POLL_S = 0.1
_LINE_CHARACTERS = 300
# errors after which the run is started again, as after a kill or a crash of its process
_MACHINE_FAULT = re.compile(
    # of this library's processes, and of a full disk
    r"WorkerDiedError|ClusterLostError|NoRoomError|its process ended without an exception|No space left on device|"
    # of the NVIDIA driver, NCCL and CUDA
    r"uncorrectable ECC|GPU is lost|fallen off the bus|\bXid\b|NCCL.*(remote error|unhandled (cuda|system) error)|"
    r"CUDA error: (unspecified launch failure|an illegal memory access|unknown error|hardware)|"
    # another process took the device in between
    r"but only \d+ of \d+ devices are available|is in use by pid"
)
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")


class MachineFault(RuntimeError):
    """A run ended because of its machine. Ray Tune starts it again, and it continues from its checkpoint."""


@dataclass(frozen=True)
class Order:
    """The order to start a run.

    Attributes:
        command: The command with its arguments.
        folder: The run folder.
        cwd: Working directory of the process.
        metric: The compared metric.
        environment: Environment variables; None = those of its machine.
        sweep: Mark of all runs of the sweep.
        gpus: True if the run uses GPUs.
        umask: Umask of its log.
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
        trial_folder = self.folder.parent
        study_folder = trial_folder.parent.parent
        return (trial_folder / STOP).exists() or (study_folder / STOP).exists()


def train(config: dict[str, Order]) -> None:
    """Runs the process of `config["order"]` on the machine of the run. The process ends with this one, even by kill -9.

    Reports its metrics and its end to Tune, as JSON because Tune flattens nested results.

    Raises:
        MachineFault: if the run has to be started again.
    """
    order = config["order"]
    log_path = order.folder.with_suffix(".log")
    os.umask(order.umask)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("ab") as log:
        reason = held_up(order, log)
        while reason and not order.is_unwanted():
            _report(order, {}, waits=reason)
            time.sleep(_WAITING_POLL_S)
            reason = held_up(order, log)
        if order.is_unwanted():
            _report(order, {}, {"state": "stopped"})
            return

        # a run that is started again appends to its log; only the new part tells why it ended. An earlier process may
        # have written to the log since it was opened
        start_of_output = log.seek(0, os.SEEK_END)
        start_time = time.monotonic()
        tree = _start_process(order, log)
        try:
            was_asked = _follow(order, tree)
        finally:
            # the run's guard cleans up after the end of this process; what then remains is killed
            tree.process.kill()
            tree.process.wait()
            watcher.end(MARK, tree.mark, patience_s=_PATIENCE_S)
            tree.end()

    steps = read_metrics(order.folder / METRICS)
    seconds = time.monotonic() - start_time
    ended: JsonObject = {"seconds": seconds, "steps": max(steps, default=0)}
    ended |= _end_of_run(tree.process.returncode, log_path, start_of_output, was_asked)
    _report(order, steps, ended)


def _follow(order: Order, tree: ProcessTree) -> bool:
    """Reports the metrics of a run until it ends. Asks the run to end (SIGINT) if it becomes unwanted, and returns when
    it takes longer than _GRACE_S to end. Returns True if the run was asked to end."""
    metrics = order.folder / METRICS
    reported_bytes = -1
    asked_at: float | None = None
    # the first report, from which the sweep learns that the run has started
    _report(order, read_metrics(metrics))
    while True:
        time.sleep(_POLL_S)
        has_ended = tree.process.poll() is not None

        if metrics.is_file() and metrics.stat().st_size != reported_bytes:
            reported_bytes = metrics.stat().st_size
            _report(order, read_metrics(metrics))

        if asked_at is None and order.is_unwanted():
            asked_at = time.monotonic()
            tree.process.send_signal(signal.SIGINT)
        is_late = asked_at is not None and time.monotonic() - asked_at > _GRACE_S
        if has_ended or is_late:
            return asked_at is not None


def held_up(order: Order, log: BinaryIO) -> str:
    """Tries to lock the log for this run. Returns an empty string on success, otherwise the reason to wait."""
    try:
        # the run's process inherits the lock
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return f"an earlier sweep's process, which writes to {log.name}, has not ended yet"
    except OSError as error:
        # a file system without locks
        log.write(f"note: {log.name} cannot be locked ({error.strerror})\n".encode())
    if order.gpus:
        return busy_device(order.sweep)
    return ""


def _start_process(order: Order, log: BinaryIO) -> ProcessTree:
    """Starts the command of an order, with its output in the log."""
    if order.environment is None:
        environment = clean(os.environ)
    else:
        environment = dict(order.environment)
    environment[SWEEP_MARK] = order.sweep
    # the devices that Ray assigned to this process
    if order.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    parent = os.getpid()

    def begin() -> None:
        """Ends the process with its parent, and enables SIGINT, which asks the run to end. SIGINT is ignored in
        background jobs of a shell and blocked in the threads of Ray's actors."""
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    # in a session of its own: Ctrl-C reaches the sweep alone, which asks its runs to end
    return ProcessTree(
        order.command,
        environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=order.cwd,
        before_exec=begin,
    )


def _report(
    order: Order, steps: Mapping[int, Mapping[str, float]], ended: JsonObject | None = None, waits: str = ""
) -> None:
    """Reports the state of a run to Tune.

    Args:
        order: the order to start it.
        steps: its metrics by step.
        ended: how it ended, if it has ended.
        waits: the reason why it cannot start yet.
    """
    values = metric_by_step(steps, order.metric)
    names: list[str] = []
    # a message shows which metrics the run has logged instead
    if ended and not values:
        names = sorted(set().union(*steps.values()))
    report = {
        "values": values,
        "step": max(steps, default=0),
        "waits": waits,
        "names": names,
        "ended": ended,
    }
    tune.report({"report": json.dumps(report)})


def _end_of_run(status: int, log: Path, start_of_output: int, was_asked: bool) -> JsonObject:
    """Describes the end of a run for the study.

    Args:
        status: exit status of its process.
        log: file with its output.
        start_of_output: offset of its output in this file.
        was_asked: True if the sweep asked it to end.

    Raises:
        MachineFault: if the machine caused the end.
    """
    # a run that was asked to end can have completed its last step before
    if status == 0:
        return {"state": "done"}
    if was_asked:
        return {"state": "stopped"}

    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start_of_output, size - _TAIL_BYTES))
        output = file.read().decode(errors="replace")
    # an earlier sweep was killed after the run's last step
    if status == WRONG_INPUT and NOTHING_LEFT in output:
        return {"state": "done"}
    is_machines, error = diagnose(status, output)
    # Tune starts a trial again that ends with an exception
    if is_machines:
        raise MachineFault(error)
    return {"state": "failed", "error": error}


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment that a run inherits, without the variables of the sweep's Ray."""
    # a run has a cluster of its own, with other marks and settings
    of_the_sweep = (RUN_MARK, CLUSTER_MARK, "TUNE_", "RAY_")
    # one thread, unless the user sets another number: several runs share the cores
    inherited = {"OMP_NUM_THREADS": "1"}
    for name, value in environment.items():
        if not name.startswith(of_the_sweep):
            inherited[name] = value
    return inherited


def diagnose(status: int, output: str) -> tuple[bool, str]:
    """Returns whether the machine caused the failure of a run, and the run's last error.

    Args:
        status: exit status of its process, negative for a signal.
        output: the end of its output.
    """
    lines = []
    for line in printable(output).splitlines():
        line = line.strip()
        if line:
            lines.append(line[:_LINE_CHARACTERS])
    for line in reversed(lines):
        if _MACHINE_FAULT.search(line):
            return True, line

    error = _last_error(lines) or f"exit status {status}, without output"
    if status == -signal.SIGKILL:
        return True, "killed by SIGKILL: probably out of memory"
    if status in (-signal.SIGBUS, -signal.SIGSEGV):
        return True, f"killed by {signal.Signals(-status).name}: {error}"
    if status == WRONG_INPUT:
        return False, f"wrong input: {error}"
    return False, error


def _last_error(lines: Sequence[str]) -> str:
    """Returns the last line that begins with the name of an exception and two lines after it, or the last line."""
    if not lines:
        return ""
    for number in reversed(range(len(lines))):
        if _EXCEPTION.match(lines[number]):
            return "\n".join(lines[number : number + 3])
    return lines[-1]


def busy_device(sweep: str) -> str:
    """Returns who else uses a device that Ray assigned to this process; empty if nobody does."""
    # processes of the same sweep are no other users
    pids_of_sweep = marked_processes(SWEEP_MARK, sweep)
    for visible in visible_gpus(list_gpus() or []):
        gpu = without_processes(visible.gpu, pids_of_sweep)
        reason = unavailable(gpu, ResourceRequest(1))
        if reason:
            return f"{gpu} {reason}"
    return ""

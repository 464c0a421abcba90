"""One run of a trial: its process, from start to end with nothing left behind, and its numbers as they come.

`Launcher` is the seam at which runs may go elsewhere: `LocalLauncher` starts a process on this machine, with a session
of its own and a mark that all it starts inherits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainer.sweeps.slots import Slot
from verl_lite.single_controller import watcher
from verl_lite.single_controller.guard import current_guard
from workers.pool.child import die_with_parent

MARK = "VERL_LITE_SWEEP"
RUN_MARK = "VERL_LITE_SWEEP_ATTEMPT"
_PATIENCE_S = 5.0
"""That a run's guard has to clean up after its driver, before what is left is killed."""


class Process(Protocol):
    """A run that was started."""

    pid: int

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""

    def interrupt(self) -> None:
        """Asks it to end after the step at hand."""

    def kill(self) -> None:
        """Ends it and whatever it started, now."""

    def clean(self) -> None:
        """After its end: ends whatever it left."""


class Launcher(Protocol):
    """Starts runs."""

    def start(self, command: Sequence[str], log: Path, slot: Slot) -> Process:
        """command: whole, python first. log: what the run prints is added to it."""


class LocalLauncher:
    """Runs on this machine. cwd: where they are started, so that relative paths mean what they meant to the user."""

    def __init__(self, cwd: Path) -> None:
        self._cwd = cwd
        self._token = uuid.uuid4().hex

    def start(self, command: Sequence[str], log: Path, slot: Slot) -> Process:
        return LocalProcess(command, log, self._cwd, {**usual_environment(), **slot.environment, MARK: self._token})

    def own(self) -> list[int]:
        """All processes of this sweep's runs."""
        return watcher.marked_processes(MARK, self._token)


class LocalProcess:
    """A run on this machine. environment: all of it. log: what it prints is added to it."""

    def __init__(self, command: Sequence[str], log: Path, cwd: Path, environment: Mapping[str, str]) -> None:
        self._mark = uuid.uuid4().hex
        parent = os.getpid()
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                list(command),
                cwd=cwd,
                env={**environment, RUN_MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the sweep, which ends its runs
                preexec_fn=lambda: _begin_run(parent),
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self.clean()

    def clean(self) -> None:
        watcher.end(RUN_MARK, self._mark, [], patience_s=_PATIENCE_S)


def _begin_run(parent: int) -> None:
    """In a run's process: it ends with its sweep, and hears SIGINT, by which it is asked to end, also where that is
    ignored here, as in a shell's background job, or blocked, as in the threads of Ray's actors."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def usual_environment() -> dict[str, str]:
    """This process's, with temporary files where they went before the sweep had a guard: a run has its own."""
    environment = dict(os.environ)
    guard = current_guard()
    before = guard.environment.get("TMPDIR") if guard is not None else os.environ.get("TMPDIR")
    environment.pop("TMPDIR", None)
    if before is not None:
        environment["TMPDIR"] = before
    return environment


class Numbers:
    """What a run has logged so far of one metric, read as the file grows.

    values: by step; where a resumed run went back, later steps are forgotten. step: the last one, 0 before it.
    names: of all metrics that were seen.
    """

    def __init__(self, path: Path, metric: str) -> None:
        self._path, self._metric = path, metric
        self._offset = 0
        self.values: dict[int, float] = {}
        self.names: set[str] = set()
        self.step = 0

    def update(self) -> None:
        """Reads what is new."""
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:  # begun anew
                    self._offset, self.values, self.step = 0, {}, 0
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            row: Any = json.loads(line)
            step, data = int(row["step"]), row["data"]
        except (json.JSONDecodeError, KeyError, TypeError, ValueError):  # a line that a crash cut off
            return
        if step < self.step:
            self.values = {known: value for known, value in self.values.items() if known <= step}
        self.step = step
        self.names |= data.keys()
        value = data.get(self._metric)
        if value is not None:
            self.values[step] = float(value)

    def value(self, take: str, mode: str) -> float | None:
        """The last value or the best one; None before there is any."""
        if not self.values:
            return None
        if take == "last":
            return self.values[max(self.values)]
        return max(self.values.values()) if mode == "max" else min(self.values.values())


def end_of(log: Path, length: int = 64 << 10, since: int = 0) -> str:
    """The last bytes of a file as text, after the first `since` of it."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since, size - length))
            return file.read().decode(errors="replace")
    except FileNotFoundError:
        return ""

"""Who runs which trial, where several sweeps, on one machine or on many, work on one study.

    STUDY/sweeps/N              a sweep that joined: who it is, and a beat that it renews; locked while it lives
    STUDY/trials/0007/owner.K   the sweep that runs trial 7; a higher K took it over from one that died

A file is made by linking a finished one to its name, which only one can do, on NFS too. A sweep on this machine, by its
boot (hosts of one name exist), is dead when its lock is free; one elsewhere, or where files cannot be locked, when its
beat has not changed for `stale_s` while this one looked on, so that clocks need not agree. Optuna's own heartbeat is
not used: it fails a trial whose process died, and enqueues another one, where this continues the runs in their folders.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

BEAT_EVERY_S = 5.0
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)
"""What a file system without locks answers."""


@dataclass(frozen=True)
class Place:
    """A machine, from one start of it to the next."""

    host: str
    boot: str

    @classmethod
    def here(cls) -> Place:
        boot = Path("/proc/sys/kernel/random/boot_id")
        return cls(socket.gethostname(), boot.read_text().strip() if boot.is_file() else "")


class Sweeper:
    """This process's part in a study. Use it as a context: it joins, beats, and leaves."""

    def __init__(self, study: Path, stale_s: float, place: Place | None = None) -> None:
        self.study, self.stale_s, self.place = study, stale_s, place or Place.here()
        self.number = -1
        self._folder = study / "sweeps"
        self._descriptor = -1
        self._beats = 0
        self._ended = threading.Event()
        self._seen: dict[int, list[tuple[int, float]]] = {}  # of others: beats, and when each was new

    def __enter__(self) -> Sweeper:
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f".{uuid.uuid4().hex}"
        self._descriptor = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _try_lock(self._descriptor)
        self._beat()
        self.number = self._take_number(draft)
        draft.unlink()
        threading.Thread(target=self._keep_beating, name="sweep-beat", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        os.close(self._descriptor)

    def _take_number(self, draft: Path) -> int:
        number = 0
        while not _link(draft, self._folder / str(number)):
            number += 1
        return number

    def _beat(self) -> None:
        self._beats += 1
        user = psutil.Process().username()
        told = {"pid": os.getpid(), "user": user, "host": self.place.host, "boot": self.place.boot, "beat": self._beats}
        text = json.dumps(told).encode()
        os.pwrite(self._descriptor, text + b" " * max(0, os.fstat(self._descriptor).st_size - len(text)), 0)

    def _keep_beating(self) -> None:
        while not self._ended.wait(BEAT_EVERY_S):
            try:
                self._beat()
            except OSError:  # the context has ended, or a disk that is full for now
                continue

    # ------------------------------------------------------------------------------------------------------- others

    def who(self, number: int) -> str:
        """A sweep in words."""
        told = _read(self._folder / str(number))
        return f"sweep {number} (pid {told.get('pid', '?')} of user {told.get('user', '?')} on {told.get('host', '?')})"

    def is_alive(self, number: int) -> bool:
        """Whether a sweep that joined is still there, as far as can be told by now."""
        if number == self.number:
            return True
        path = self._folder / str(number)
        told = _read(path)
        locked = _is_locked(path) if told.get("boot") == self.place.boot else None
        if locked is not None:
            return locked
        beat, seen = int(told.get("beat", 0)), self._seen.setdefault(number, [])
        if not seen or seen[-1][0] != beat:
            seen[1:] = [(beat, time.monotonic())]  # the first one and the last
        return time.monotonic() - seen[-1][1] < self.stale_s

    def is_undecided(self, number: int) -> bool:
        """Whether a sweep elsewhere counts as alive only because it was not watched for long enough."""
        return self.is_alive(number) and len(self._seen.get(number, ())) == 1

    # ------------------------------------------------------------------------------------------------------- trials

    def owner(self, trial: Path) -> int | None:
        """The sweep that runs a trial, by its folder, or ran it last; None if none did."""
        latest = _latest(trial)
        return None if latest is None else int((trial / f"owner.{latest}").read_text())

    def claim(self, trial: Path) -> bool:
        """Makes this sweep the owner of a trial that has none alive. False if it has, or another one was faster."""
        latest = _latest(trial)
        if latest is not None:
            owner = self.owner(trial)
            if owner == self.number or (owner is not None and self.is_alive(owner)):
                return False
        trial.mkdir(parents=True, exist_ok=True)
        draft = trial / f".{uuid.uuid4().hex}"
        draft.write_text(str(self.number))
        try:
            return _link(draft, trial / f"owner.{0 if latest is None else latest + 1}")
        finally:
            draft.unlink()


def _latest(trial: Path) -> int | None:
    numbers = [int(path.suffix[1:]) for path in trial.glob("owner.*") if path.suffix[1:].isdigit()]
    return max(numbers, default=None)


def _link(draft: Path, name: Path) -> bool:
    try:
        os.link(draft, name)
    except FileExistsError:
        return False
    return True


def _read(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):  # it is being written at this instant, or gone
        return {}
    return told if isinstance(told, dict) else {}


def _try_lock(descriptor: int) -> bool | None:
    """Whether the lock was free, and is now held; None on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return None
    return True


def _is_locked(path: Path) -> bool | None:
    """None where files cannot be locked."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:  # of another user, who lets us read: his beat tells
        return None
    try:
        free = _try_lock(descriptor)
        return None if free is None else not free
    finally:
        os.close(descriptor)

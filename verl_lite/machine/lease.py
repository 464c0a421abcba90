"""Leases: a locked file for each device, so that two runs on one machine never take one device unknowingly.

All users of a machine share one folder of lock files. The kernel holds the lock as long as the process lives, so a run
that was killed holds nothing. The file says who holds the device, for the message that others get.

    $VERL_LITE_LEASES, else /tmp/verl_lite-leases (like /tmp: everybody may add files, nobody removes those of others)
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from verl_lite.errors import UserError

_FOLDER_VARIABLE = "VERL_LITE_LEASES"
_DEFAULT_FOLDER = "/tmp/verl_lite-leases"  # not TMPDIR: users and jobs have their own of that
_LONGEST_TEXT = 1000
_EVERYBODY_ADDS = 0o1777
_EVERYBODY_READS_AND_WRITES = 0o666


@dataclass(frozen=True)
class Holder:
    """Who holds a device. run: what the process does, usually its run folder. since: local time."""

    pid: int
    user: str
    run: str
    since: str

    @classmethod
    def this_process(cls, run: str) -> Holder:
        return cls(os.getpid(), psutil.Process().username(), run, time.strftime("%Y-%m-%d %H:%M:%S"))

    def __str__(self) -> str:
        return f"pid {self.pid} of user {self.user}, run {self.run}, since {self.since}"


class LeaseTaken(Exception):
    """Somebody else holds it. `holder` is None where its file does not tell."""

    def __init__(self, holder: Holder | None) -> None:
        super().__init__(str(holder) if holder else "a run that does not tell its name")
        self.holder = holder


@contextmanager
def leased(name: str, holder: Holder, *, shared: bool = False, folder: Path | None = None) -> Iterator[None]:
    """Holds the lease of that name inside the block. Raises LeaseTaken.

    name: of a device, unique on this machine. shared: together with others that also ask for it so.
    """
    path = (folder or leases_folder()) / "".join(c if c.isalnum() or c in "-_." else "_" for c in name)
    with leased_file(path, holder, shared=shared):
        yield


@contextmanager
def leased_file(path: Path, holder: Holder, *, shared: bool = False) -> Iterator[None]:
    """The same with a lock file of any place, which exists as long as somebody holds it."""
    descriptor = _lock(path, shared)
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(asdict(holder)).encode(), 0)
        yield
    finally:
        _remove_if_last(path, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # for forks that have the descriptor too
        os.close(descriptor)


def _lock(path: Path, shared: bool) -> int:
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    while True:
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            if _is_still(path, descriptor):
                return descriptor
        except BlockingIOError:
            holder = _read_holder(descriptor)
            os.close(descriptor)
            raise LeaseTaken(holder) from None
        except OSError:  # a file system without locks
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder removed it between the two calls


def _open(path: Path) -> int:
    """Opens or makes the file. Making and opening are apart: in a folder that all may write to, the kernel lets nobody
    open the file of somebody else in a way that could also make it."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            try:
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL)
                os.fchmod(descriptor, _EVERYBODY_READS_AND_WRITES)  # whatever the umask
            except FileExistsError:
                continue
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise UserError(f"{path} is no regular file: somebody put something else there; set {_FOLDER_VARIABLE}")
        return descriptor


def _is_still(path: Path, descriptor: int) -> bool:
    try:
        found, ours = os.lstat(path), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (ours.st_dev, ours.st_ino)


def _remove_if_last(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:  # others share it, or the file is another user's: it stays, and means nothing without a lock
        pass


def _read_holder(descriptor: int) -> Holder | None:
    """What the file says. Others may write to it, so nothing in it is believed but as text to show."""
    try:
        known = json.loads(os.pread(descriptor, 4 * _LONGEST_TEXT, 0))
        texts = [
            "".join(c if c.isprintable() else "?" for c in str(known[name])[:_LONGEST_TEXT])
            for name in ("user", "run", "since")
        ]
        return Holder(int(known["pid"]), *texts)
    except (ValueError, KeyError, TypeError):
        return None


def leases_folder() -> Path:
    """The folder that all users of this machine share, made if need be."""
    folder = Path(os.environ.get(_FOLDER_VARIABLE) or _DEFAULT_FOLDER)
    try:
        folder.mkdir(parents=True)
        folder.chmod(_EVERYBODY_ADDS)  # whatever the umask
    except FileExistsError:
        pass
    if folder.is_symlink() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(
            f"{folder}, where runs say which devices they use, is not a folder that can be written to: set "
            f"{_FOLDER_VARIABLE} to one that all users of this machine can write to, the same for all"
        )
    return folder


def take_devices(
    candidates: Iterable[tuple[str, str | None]],
    count: int,
    holder: Holder,
    stack: ExitStack,
    *,
    shared: bool = False,
    folder: Path | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Leases the first `count` free ones of `candidates`, until `stack` ends.

    candidates: (name of the lease, reason why it cannot be had or None).
    Gives the names that were taken, and by name why others were passed over. With too few nothing is held.
    shared: knowingly together with others; then also a device that somebody holds for himself is taken, without lease.
    """
    taken: list[str] = []
    refused: dict[str, str] = {}
    with ExitStack() as held:
        for name, reason in candidates:
            if len(taken) == count:
                break
            if reason is not None:
                refused[name] = reason
                continue
            try:
                held.enter_context(leased(name, holder, shared=shared, folder=folder))
            except LeaseTaken as error:
                refused[name] = f"is held by {error}"
                if not shared:
                    continue
            taken.append(name)
        if len(taken) == count:
            stack.enter_context(held.pop_all())
    return taken, refused

"""The run's guard: a small process that outlives the driver and ends whatever is left of the run, kill -9 included.

`guarded()` marks everything that the driver starts from then on, and starts the guard (`watcher.py`), which waits for
the driver's end. At a normal end the driver cleans up itself.
"""

import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from verl_lite.single_controller import watcher

# Unix sockets have room for 107 bytes: base + "/vl-12345678/ray" +
# "/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store".
_LONGEST_BASE = 26
_PREFIX = "vl-"
_SHORT_BASE = "/tmp"


@dataclass
class Guard:
    """The guard of this process's run.

    folder: for sockets, its name short. temp: where temporary files go (TMPDIR), on the disk that the user chose.
    """

    token: str
    folder: Path
    temp: Path
    base: str  # where this process's temporary files went before
    process: subprocess.Popen[bytes]
    environment: dict[str, str | None]  # what the variables we set were before


_guard: Guard | None = None


def current_guard() -> Guard | None:
    """The guard of the run that this process drives, if there is one."""
    return _guard


@contextmanager
def guarded() -> Iterator[Guard]:
    """What is started inside ends with the block, or with this process. Inside another `guarded` it is that one's."""
    if _guard is not None:
        yield _guard
        return
    try:
        guard = start_guard()
        tempfile.tempdir = str(guard.temp)  # this process's own temporary files are the run's as well
        yield guard
    finally:
        stop_guard()


def start_guard() -> Guard:
    """Start the guard of this process; it must have none. Temporary files of what is started go to its folder, those of
    this process stay where they were."""
    global _guard
    assert _guard is None, "one run at a time"
    base = tempfile.gettempdir()
    token = secrets.token_hex(16)
    is_short = len(base) <= _LONGEST_BASE
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base if is_short else _SHORT_BASE))
    temp = folder / "tmp" if is_short else Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    temp.mkdir(exist_ok=True)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", watcher.__file__, str(os.getpid()), token, str(folder), str(temp)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={k: v for k, v in os.environ.items() if k not in (watcher.RUN_MARK, watcher.CLUSTER_MARK)},
        start_new_session=True,
    )
    inductor = Path(base) / f"torchinductor_{psutil.Process().username()}"  # a cache, to be kept between runs
    environment = set_environment(
        {
            watcher.RUN_MARK: token,
            "TMPDIR": str(temp),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(inductor)),
        }
    )
    _guard = Guard(token, folder, temp, base, process, environment)
    return _guard


def stop_guard() -> None:
    """End what the run started and is still there, remove its folders, and let the guard go. Twice does nothing."""
    global _guard
    if _guard is None:
        return
    guard, _guard = _guard, None
    watcher.end(watcher.RUN_MARK, guard.token, [str(guard.folder), str(guard.temp)])
    guard.process.communicate(b"q")
    set_environment(guard.environment)
    tempfile.tempdir = guard.base


def set_environment(values: dict[str, str | None]) -> dict[str, str | None]:
    """Set (None: remove) variables; gives what they were."""
    previous = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    return previous

"""The run's guard: a small process that outlives the driver and ends all remaining processes of the run.

This also works if the driver is killed with kill -9. `guarded()` marks every process that the driver starts afterwards
and starts the guard (`watcher.py`), which waits for the driver's end. At a normal end the driver itself cleans up.
"""

import contextlib
import os
import secrets
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE

import psutil

from verl_lite.errors import UserError
from verl_lite.machine.process_tree import RUN_MARK, ProcessTree
from verl_lite.single_controller import watcher, worker_template
from verl_lite.single_controller.watcher import CLUSTER_MARK

# The path of a Unix socket has at most 107 bytes: base + "/vl-12345678/ray" +
# "/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store".
_LONGEST_BASE = 26  # bytes, of which a letter can have several
_PREFIX = "vl-"
_SHORT_BASE = "/tmp"
_SOCKET = "template"


@dataclass
class Guard:
    """The guard of this process's run.

    Attributes:
        token: random text that marks the run's processes in their environment.
        folder: folder for sockets, with a short name.
        temp: folder for temporary files (TMPDIR), on the disk that the user chose.
        base: previous folder for temporary files of this process.
        watcher: the guard's process, which waits for the end of this one.
        environment: previous values of the environment variables that the guard set.
        template: process from which workers are forked (`worker_template`), if there is one.
        template_env: environment variables with which the template imports the workers' libraries.
    """

    token: str
    folder: Path
    temp: Path
    base: str
    watcher: ProcessTree
    environment: dict[str, str | None]
    template: ProcessTree | None = None
    template_env: Mapping[str, str] = field(default_factory=dict)

    def interpreter(self, env: Mapping[str, str]) -> str | None:
        """Returns the command that forks a worker with the variables `env` from the template.

        Returns None if the template cannot be used.
        """
        if self.template is None:
            return None
        # many libraries read environment variables only at their import, which the template has done already
        was_imported_with_env = env.items() <= self.template_env.items()
        if not was_imported_with_env:
            return None

        # -I and -S: this process only hands over its streams, so it looks for no packages
        socket = str(self.folder / _SOCKET)
        return shlex.join([sys.executable, "-I", "-S", worker_template.__file__, socket])


_guard: Guard | None = None


def current_guard() -> Guard | None:
    """Returns the guard of the run that this process drives, or None."""
    return _guard


@contextmanager
def guarded() -> Iterator[Guard]:
    """Ends all processes that were started inside the context when the context or this process ends.

    Inside another `guarded` context, the outer context does this.
    """
    if _guard is not None:
        yield _guard
        return
    try:
        guard = start_guard()
        # temporary files of this process belong to the run too
        tempfile.tempdir = str(guard.temp)
        yield guard
    finally:
        stop_guard()


@contextmanager
def worker_template_running(env: Mapping[str, str]) -> Iterator[None]:
    """Starts a worker template with the variables `env`, and a guard that ends it, unless there are already."""
    with guarded() as guard:
        if guard.template is not None:
            yield
            return
        try:
            # the template finds the modules of this process
            python_path = os.pathsep.join(filter(None, sys.path))
            guard.template_env = env
            guard.template = ProcessTree(
                [sys.executable, worker_template.__file__, str(guard.folder / _SOCKET)],
                {**os.environ, **env, "PYTHONPATH": python_path, CLUSTER_MARK: guard.token},
                stdin=PIPE,
                stdout=DEVNULL,
                stderr=DEVNULL,
            )
            yield
        finally:
            end_template()


def preload(*names: str) -> None:
    """Lets the run's worker template, if there is one, import modules or call functions (`module:function`)."""
    if _guard is None or _guard.template is None:
        return
    template_input = _guard.template.process.stdin
    assert template_input is not None
    # without a template, each worker imports them itself
    with contextlib.suppress(BrokenPipeError):
        template_input.write("".join(f"{name}\n" for name in names).encode())
        template_input.flush()


def end_template() -> None:
    """Ends the worker template of the run, if there is one, and the workers that were forked from it."""
    if _guard is None or _guard.template is None:
        return
    template = _guard.template
    _guard.template = None
    # kills it, because it would notice the end of its input only after its imports, which take seconds: the message
    # about a wrong option would wait for them
    template.end()
    assert template.process.stdin is not None
    # closing writes the names of modules that it has not read
    with contextlib.suppress(BrokenPipeError):
        template.process.stdin.close()


def start_guard() -> Guard:
    """Starts the guard of this process, which must have none.

    Processes that are started afterwards write temporary files to the guard's folder; this process does not.
    """
    global _guard
    assert _guard is None, "one run at a time"
    token = secrets.token_hex(16)
    base, folder, temp = _temporary_folders()

    # without the marks of a run, so that the guard does not end itself
    unmarked = {name: value for name, value in os.environ.items() if name not in (RUN_MARK, CLUSTER_MARK)}
    # -I and -S: the guard uses only the standard library, and ignores what the user's environment adds to Python
    watching = ProcessTree(
        [sys.executable, "-I", "-S", watcher.__file__, str(os.getpid()), token, str(folder), str(temp)],
        unmarked,
        stdin=PIPE,
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    # a cache that stays between runs
    inductor = Path(base) / f"torchinductor_{psutil.Process().username()}"
    environment = set_environment(
        {
            RUN_MARK: token,
            "TMPDIR": str(temp),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(inductor)),
        }
    )
    _guard = Guard(token, folder, temp, base, watching, environment)
    return _guard


def _temporary_folders() -> tuple[str, Path, Path]:
    """Returns the folder for temporary files of this process, and the run's new folders for sockets and files."""
    try:
        base = tempfile.gettempdir()
        return base, *_new_folders(base)
    except OSError as error:
        # a full disk or quota, a folder of another user, or a container without a writable /tmp
        folder = os.environ.get("TMPDIR", "")
        raise UserError(
            f"TMPDIR={folder!r}: no folder for temporary files can be created ({error}). Make room, or set TMPDIR to a "
            f"folder that you can write to. If its path has at most {_LONGEST_BASE} bytes, nothing is written to "
            f"{_SHORT_BASE}"
        ) from error


def _new_folders(base: str) -> tuple[Path, Path]:
    """Creates the run's folder for sockets and its folder for temporary files."""
    if len(os.fsencode(base)) <= _LONGEST_BASE:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        temp = folder / "tmp"
        try:
            temp.mkdir()
        except OSError:
            folder.rmdir()
            raise
        return folder, temp
    # The sockets need a shorter path. The temporary files, which can be large, stay on the disk that the user chose.
    temp = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_SHORT_BASE))
    except OSError:
        temp.rmdir()
        raise
    return folder, temp


def stop_guard() -> None:
    """Ends the run's remaining processes, removes its folders and ends the guard. A second call does nothing."""
    global _guard
    if _guard is None:
        return
    guard = _guard
    _guard = None
    watcher.end(RUN_MARK, guard.token, [str(guard.folder), str(guard.temp)])
    # a byte: this process has cleaned up
    guard.watcher.process.communicate(b"q")
    guard.watcher.end()
    set_environment(guard.environment)
    tempfile.tempdir = guard.base


def set_environment(values: dict[str, str | None]) -> dict[str, str | None]:
    """Sets environment variables (None removes one) and returns their previous values."""
    previous = {name: os.environ.get(name) for name in values}
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    return previous

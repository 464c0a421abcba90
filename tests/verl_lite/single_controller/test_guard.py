"""The guard of a run: nothing of it is left, however it ends, and nothing else is touched.

Drivers are forks of the test's process, so that they need not import anything.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.workers.processes import gone
from verl_lite.errors import UserError
from verl_lite.machine.process_table import marked_processes
from verl_lite.machine.process_tree import RUN_MARK
from verl_lite.single_controller import guard
from verl_lite.single_controller.guard import current_guard, guarded, start_guard

SOON_S = 20.0


@pytest.fixture(autouse=True)
def own_temp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short, so that it is used for sockets as well."""
    folder = Path(tempfile.mkdtemp(prefix="vg-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    shutil.rmtree(folder)


def driver() -> dict[str, Any]:
    """A run that has started a process in a session of its own and a fork, and then waits."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        guard = start_guard()
        started = [subprocess.Popen(["sleep", "100"], start_new_session=True).pid]
        fork = os.fork()
        if fork == 0:
            time.sleep(100)
            os._exit(0)
        started.append(fork)
        facts = {
            "started": started,
            "watcher": guard.watcher.process.pid,
            "folder": str(guard.folder),
            "token": guard.token,
        }
        os.write(writer, json.dumps(facts).encode())
        time.sleep(100)
        os._exit(0)
    os.close(writer)
    facts = json.loads(os.read(reader, 10_000))
    os.close(reader)
    return {"pid": pid, **facts}


def test_kill_9_of_a_driver_ends_what_it_started_and_its_forks(own_temp: Path) -> None:
    run = driver()
    assert not any(gone(pid, 0) for pid in run["started"]) and Path(run["folder"]).exists()
    os.kill(run["pid"], signal.SIGKILL)
    os.waitpid(run["pid"], 0)
    assert all(gone(pid, SOON_S) for pid in (*run["started"], run["watcher"]))
    assert not list(own_temp.iterdir())


def test_without_room_for_temporary_files_the_message_names_the_remedy(
    own_temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(os.environ)

    def full(*_: Any, **where: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", where["dir"])

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "mkdtemp", full)
        with pytest.raises(UserError, match=rf"TMPDIR='{own_temp}'.*No space left on device.*set TMPDIR to"), guarded():
            pass
    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", None)
        patched.setattr(tempfile, "_get_default_tempdir", lambda: full(dir="/tmp"))
        with pytest.raises(UserError, match="No space left on device"), guarded():
            pass
    assert current_guard() is None and dict(os.environ) == environment


def test_a_short_folder_is_empty_if_there_is_no_room_for_files(own_temp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a quota of one folder."""
    mkdir = Path.mkdir

    def refuse_second(path: Path, *args: Any, **named: Any) -> None:
        if path.name == "tmp":
            raise OSError(errno.EDQUOT, "Disk quota exceeded", str(path))
        mkdir(path, *args, **named)

    monkeypatch.setattr(Path, "mkdir", refuse_second)
    with pytest.raises(UserError, match="Disk quota exceeded"), guarded():
        pass
    assert not list(own_temp.iterdir())


def test_a_long_folder_is_empty_if_there_is_no_room_for_sockets(
    own_temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long_folder = own_temp / ("x" * 40)
    long_folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long_folder))
    monkeypatch.setattr(guard, "_SHORT_BASE", str(own_temp / "missing"))
    with pytest.raises(UserError, match="missing"), guarded():
        pass
    assert not list(long_folder.iterdir())


def test_a_normal_end_leaves_nothing_and_restores_the_environment(own_temp: Path) -> None:
    before = dict(os.environ)
    with guarded() as guard:
        child = subprocess.Popen(["sleep", "100"], start_new_session=True)
        inner = tempfile.mkdtemp()
        assert Path(inner).parent == guard.temp and guard.temp.parent == guard.folder
        with guarded() as same:
            assert same is guard and current_guard() is guard
        assert marked_processes(RUN_MARK, guard.token) == [child.pid]
    assert child.wait(SOON_S) == -signal.SIGKILL and guard.watcher.process.returncode == 0
    assert current_guard() is None and dict(os.environ) == before and tempfile.gettempdir() == str(own_temp)
    assert not list(own_temp.iterdir())


# the second has 7 letters, which are 21 bytes
@pytest.mark.parametrize("name", ["x" * 60, "\u4e34\u65f6\u6587\u4ef6\u76ee\u5f55\u7532"])
def test_with_a_long_tmpdir_sockets_go_elsewhere_and_files_stay(
    name: str, own_temp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = own_temp / name
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # torch sets it where its compiler was imported
    with guarded() as guard:
        assert guard.folder.parent == Path("/tmp") and guard.temp.parent == long
        assert len(str(guard.folder)) <= 42 and os.environ["TMPDIR"] == str(guard.temp)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(str(long / "torchinductor_"))
    assert not guard.folder.exists() and not list(long.iterdir())


def test_a_process_that_overwrote_its_environment_is_known_by_its_files(own_temp: Path) -> None:
    """As setproctitle does in Ray's agents: zeros where the environment was."""
    overwrite = (
        "import ctypes, sys, time\n"
        "fields = open('/proc/self/stat').read().rpartition(')')[2].split()\n"
        "start, end = int(fields[47]), int(fields[48])\n"
        "ctypes.memset(start, 0, end - start)\n"
        "file = open(sys.argv[1], 'w')\n"
        "print('ready', flush=True)\n"
        "time.sleep(100)\n"
    )
    (own_temp / "elsewhere").touch()
    children = []
    with guarded() as guard:
        for path in (guard.folder / "agent.log", own_temp / "elsewhere"):
            argv = [sys.executable, "-S", "-c", overwrite, str(path)]
            child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
            children.append(child)
        assert marked_processes(RUN_MARK, guard.token) == []
    assert children[0].wait(SOON_S) == -signal.SIGKILL
    assert children[1].poll() is None  # not ours, as far as anybody can tell
    children[1].kill()
    children[1].wait()

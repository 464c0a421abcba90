"""Leases of devices: exclusive, told to others, gone with the process, safe between users of one folder."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from verl_lite.errors import UserError
from verl_lite.machine.lease import Holder, LeaseTaken, leased, leased_file, leases_folder, take_devices

ROOT = Path(__file__).resolve().parents[3]
ANN = Holder(77, "ann", "/home/ann/runs/x", "2026-01-01 10:00:00")
HOLD = """
import os, sys, time
from pathlib import Path
from verl_lite.machine.lease import Holder, leased
with leased(sys.argv[1], Holder.this_process("a/run"), folder=Path(sys.argv[2])):
    print("held", flush=True)
    time.sleep(60)
"""


def hold(name: str, folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, name, str(folder)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_device_has_one_holder_and_its_file_tells_who(tmp_path: Path) -> None:
    holder = Holder.this_process("/runs/mine")
    with leased("GPU-1", ANN, folder=tmp_path):
        with pytest.raises(LeaseTaken) as caught, leased("GPU-1", holder, folder=tmp_path):
            pass
        assert caught.value.holder == ANN
        assert str(caught.value) == "pid 77 of user ann, run /home/ann/runs/x, since 2026-01-01 10:00:00"
        with leased("GPU-2", holder, folder=tmp_path):
            assert sorted(path.name for path in tmp_path.iterdir()) == ["GPU-1", "GPU-2"]
    assert not list(tmp_path.iterdir())
    assert holder.pid == os.getpid() and holder.user


def test_the_lease_of_a_killed_process_is_free(tmp_path: Path) -> None:
    process = hold("GPU-1", tmp_path)
    with pytest.raises(LeaseTaken, match=f"pid {process.pid} of user .*, run a/run, since "):
        with leased("GPU-1", ANN, folder=tmp_path):
            pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    with leased("GPU-1", ANN, folder=tmp_path):
        assert (tmp_path / "GPU-1").read_text().count("ann") == 2
    assert not list(tmp_path.iterdir())


def test_a_fork_of_the_holder_does_not_keep_what_the_holder_gave_back(tmp_path: Path) -> None:
    with leased("GPU-1", ANN, folder=tmp_path):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    with leased("GPU-1", ANN, folder=tmp_path):
        pass
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_shared_leases_keep_only_exclusive_ones_out(tmp_path: Path) -> None:
    with leased("GPU-1", ANN, shared=True, folder=tmp_path), leased("GPU-1", ANN, shared=True, folder=tmp_path):
        with pytest.raises(LeaseTaken), leased("GPU-1", ANN, folder=tmp_path):
            pass
    with leased("GPU-1", ANN, folder=tmp_path):
        pass


def test_many_processes_at_once_one_at_a_time(tmp_path: Path) -> None:
    """Taking, removing and taking again from several processes: never two holders."""
    work = """
import sys, time
from pathlib import Path
from verl_lite.machine.lease import Holder, LeaseTaken, leased
folder, inside, taken = Path(sys.argv[1]), Path(sys.argv[2]), 0
until = time.monotonic() + 1
while time.monotonic() < until:
    try:
        with leased("GPU-1", Holder(1, "u", "r", "s"), folder=folder):
            inside.touch(exist_ok=False)  # somebody else inside: FileExistsError
            taken += 1
            inside.unlink()
    except LeaseTaken:
        pass
print(taken)
"""
    (tmp_path / "leases").mkdir()
    argv = [sys.executable, "-c", work, str(tmp_path / "leases"), str(tmp_path / "inside")]
    processes = [subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    counts = [int(process.communicate(timeout=120)[0]) for process in processes]
    assert all(process.returncode == 0 for process in processes) and min(counts) > 0


def test_the_folder_is_for_all_users_and_nothing_else_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_LITE_LEASES", str(tmp_path / "leases"))
    before = os.umask(0o077)
    try:
        with leased("GPU-1", ANN):
            assert stat.S_IMODE((tmp_path / "leases").stat().st_mode) == 0o1777
            assert stat.S_IMODE((tmp_path / "leases" / "GPU-1").stat().st_mode) == 0o666
    finally:
        os.umask(before)
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / "leases" / "GPU-2").symlink_to(precious)
    with pytest.raises(OSError), leased("GPU-2", ANN):
        pass
    assert precious.read_text() == "keep"
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    for wrong in (tmp_path / "elsewhere", precious):
        monkeypatch.setenv("VERL_LITE_LEASES", str(wrong))
        with pytest.raises(UserError, match="VERL_LITE_LEASES"):
            leases_folder()


@pytest.mark.parametrize(
    "text", ["", "nonsense", "[]", '{"pid": 3}', '{"pid": 3, "user": 1, "run": "\\u001b[2J", "since": ""}']
)
def test_what_others_wrote_is_only_shown(text: str, tmp_path: Path) -> None:
    with leased("GPU-1", ANN, folder=tmp_path):
        (tmp_path / "GPU-1").write_text(text)
        with pytest.raises(LeaseTaken) as caught, leased("GPU-1", ANN, folder=tmp_path):
            pass
    assert "\x1b" not in str(caught.value)
    assert str(caught.value) == "a run that does not tell its name" or "pid 3 of user 1" in str(caught.value)


def test_the_first_free_ones_are_taken_or_none(tmp_path: Path) -> None:
    candidates = [("a", None), ("b", "is busy"), ("c", None), ("d", None)]
    with leased("a", ANN, folder=tmp_path), ExitStack() as stack:
        taken, refused = take_devices(candidates, 1, ANN, stack, folder=tmp_path)
        assert taken == ["c"] and list(refused) == ["a", "b"] and refused["a"].startswith("is held by pid 77")
        with ExitStack() as second:
            taken, refused = take_devices(candidates, 2, ANN, second, folder=tmp_path)
            assert taken == ["d"] and list(refused) == ["a", "b", "c"]
            with leased("d", ANN, folder=tmp_path):  # too few: nothing is held
                pass
            taken, _ = take_devices(candidates, 3, ANN, second, shared=True, folder=tmp_path)
            assert taken == ["a", "c", "d"]  # knowingly beside their holders
    assert not list(tmp_path.iterdir())


def test_a_lock_file_of_any_place(tmp_path: Path) -> None:
    with leased_file(tmp_path / "in_use", ANN):
        with pytest.raises(LeaseTaken), leased_file(tmp_path / "in_use", ANN):
            pass

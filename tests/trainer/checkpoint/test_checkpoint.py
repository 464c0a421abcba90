"""Checkpoint folders: whole or absent at whatever instant the writer is killed; found again; retained; room on disk."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import stat
import time
from collections import namedtuple
from pathlib import Path

import pytest

from tests.trainer.checkpoint.written_checkpoint import write_checkpoint
from trainer.checkpoint.files import (
    MARKER,
    DiskFull,
    find_checkpoint,
    prune,
    read_state,
    saved_steps,
)

Usage = namedtuple("Usage", "total used free")


def save(run_dir: Path, step: int) -> Path:
    return write_checkpoint(run_dir, step, lambda folder: (folder / "actor").mkdir(), {"step": step})


def save_megabyte(folder: Path) -> None:
    (folder / "actor").mkdir()
    (folder / "actor" / "shard").write_bytes(bytes(1_000_000))


def test_a_failing_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise OSError("disk on fire")

    with pytest.raises(OSError, match="disk on fire"):
        write_checkpoint(tmp_path, 2, fail, {})
    assert list(saved_steps(tmp_path)) == [1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", MARKER]
    found = find_checkpoint(tmp_path, "auto", None)
    assert found is not None and read_state(found)["step"] == 1


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC])
def test_a_quota_is_a_full_disk_although_the_disk_has_room(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of bytes or files. The error comes from a worker, whose message may not tell."""
    save(tmp_path, 1)

    def exhausted(_: int) -> None:
        raise OSError(number, os.strerror(number))

    def fail(folder: Path) -> None:
        (folder / "half").touch()
        raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(os, "fsync", exhausted)
    with pytest.raises(DiskFull, match="a quota or the number of files is exhausted") as caught:
        write_checkpoint(tmp_path, 2, fail, {})
    assert isinstance(caught.value.__cause__, RuntimeError)
    # the files are written, and the quota ends within what `publish` adds
    with pytest.raises(DiskFull):
        save(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", MARKER]


def test_a_marker_without_room_leaves_the_checkpoints_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    write = Path.write_text

    def full(path: Path, text: str, **options: str) -> int:
        if MARKER in path.name:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2)
    assert list(saved_steps(tmp_path)) == [1] and (tmp_path / MARKER).read_text() == "1"


def test_a_file_system_that_cannot_sync_folders_holds_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def of_files_only(number: int) -> None:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(number)

    monkeypatch.setattr(os, "fsync", of_files_only)
    save(tmp_path, 1)
    assert find_checkpoint(tmp_path, "auto", None) == tmp_path / "global_step_1"


def write_for_ever(run_dir: Path) -> None:
    """Checkpoint after checkpoint, two of them a second time, as a resumed run does."""
    for step in itertools.chain((1, 2, 3, 2, 3), itertools.count(4)):
        content = str(step).encode() * 2000

        def fill(folder: Path, content: bytes = content) -> None:
            for name in ("actor", "critic"):
                (folder / name).mkdir()
                for shard in range(4):
                    (folder / name / f"shard{shard}").write_bytes(content)

        write_checkpoint(run_dir, step, fill, {"step": step, "text": str(step) * 2000})
        prune(run_dir, 2)


def start_writer(run_dir: Path) -> int:
    """Its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            write_for_ever(run_dir)
        finally:
            os._exit(1)
    return pid


def is_whole(folder: Path) -> bool:
    state = read_state(folder)
    shards = [folder / name / f"shard{shard}" for name in ("actor", "critic") for shard in range(4)]
    expected = str(state["step"]).encode() * 2000
    return folder.name == f"global_step_{state['step']}" and all(path.read_bytes() == expected for path in shards)


@pytest.mark.slow
def test_killed_at_any_instant_a_whole_checkpoint_is_there(tmp_path: Path) -> None:
    """A process writes one checkpoint after the other and is killed with SIGKILL, 60 times, at random instants."""
    rng = random.Random(0)
    had_one = False
    leftovers = 0
    for _ in range(60):
        writer = start_writer(tmp_path)
        time.sleep(rng.uniform(0.0, 0.08))
        os.kill(writer, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == -signal.SIGKILL
        leftovers += any(path.name.startswith(".global_step") for path in tmp_path.iterdir())
        for folder in saved_steps(tmp_path).values():
            assert is_whole(folder), folder
        found = find_checkpoint(tmp_path, "auto", None)
        assert found is not None or not had_one, "a checkpoint was lost"
        had_one |= found is not None
        assert found is None or is_whole(found)
        assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".global_step")]
        if rng.random() < 0.5:
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
            had_one = False
    assert leftovers >= 20, "the kills did not hit the saves: the test shows nothing"


def test_a_checkpoint_that_was_about_to_be_replaced_comes_back(tmp_path: Path) -> None:
    """Killed between the two renames of a step that a resumed run came by again."""
    for name in ("global_step_2", ".global_step_3.old", ".global_step_3.draft"):
        (tmp_path / name).mkdir()
    (tmp_path / ".global_step_3.old" / "data.pt").write_text("old")
    found = find_checkpoint(tmp_path, "auto", None)
    assert found == tmp_path / "global_step_3" and (found / "data.pt").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_2", "global_step_3"]


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    for step in (2, 9, 10):
        save(tmp_path, step)
        prune(tmp_path, 2)
    assert sorted(saved_steps(tmp_path)) == [9, 10]
    prune(tmp_path, None)
    assert sorted(saved_steps(tmp_path)) == [9, 10]


def test_no_room_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, 1, save_megabyte, {})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 900_000, 900_000))
    with pytest.raises(DiskFull, match=r"need about 0.001 GB there, and 0.0009 GB are free"):
        write_checkpoint(tmp_path, 2, lambda folder: pytest.fail("it began"), {})
    assert list(saved_steps(tmp_path)) == [1]

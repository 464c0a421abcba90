"""Checkpoint folders: written whole or not at all, found again, the oldest removed only after the newest is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.checkpoint import CheckpointNotFound, find_checkpoint, read_state, saved_steps, write_checkpoint


def save(run_dir: Path, step: int, keep: int | None = None) -> Path:
    return write_checkpoint(run_dir, step, lambda folder: (folder / "actor").mkdir(), {"step": step}, keep)


def test_write_and_find(tmp_path: Path) -> None:
    folder = save(tmp_path, 3)
    assert folder == tmp_path / "global_step_3"
    assert (folder / "actor").is_dir()
    assert read_state(folder) == {"step": 3}
    assert find_checkpoint(tmp_path, "auto", None) == folder
    assert find_checkpoint(tmp_path, "disable", None) is None
    assert find_checkpoint(tmp_path, "resume_path", str(folder)) == folder


def test_a_failing_save_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1, keep=1)

    def fail(folder: Path) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path, 2, fail, {}, keep=1)
    assert list(saved_steps(tmp_path)) == [1]
    found = find_checkpoint(tmp_path, "auto", None)
    assert found is not None and read_state(found) == {"step": 1}


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    for step in (2, 9, 10):
        save(tmp_path, step, keep=2)
    assert sorted(saved_steps(tmp_path)) == [9, 10]


def test_a_missing_checkpoint_names_key_and_remedy(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path, "auto", None) is None
    with pytest.raises(CheckpointNotFound, match=r"trainer\.resume_from_path.*global_step_N"):
        find_checkpoint(tmp_path, "resume_path", str(tmp_path / "nothing"))

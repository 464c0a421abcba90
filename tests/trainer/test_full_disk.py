"""What a run writes beside its training never ends it, and never hides why it ended."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from tests.trainer.evaluate.test_chunks import sample
from trainer.crash_dump import dump_on_failure
from trainer.evaluate.sample_files import SampleFiles


def test_samples_that_find_no_room_are_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    told: list[str] = []
    (tmp_path / "file").touch()
    files = SampleFiles(tmp_path, 1 << 20, told.append, rollout_dir=str(tmp_path / "file"))
    with monkeypatch.context() as patched:
        patched.setattr(pyarrow.parquet, "write_table", full)
        for step in (1, 2):
            files.write_training([sample("a", "s")], step)
    assert len(told) == 2 and f"{tmp_path}/samples/train cannot be written: No space left on device; " in told[0]
    assert "GB are free there. The training goes on without these files" in told[0] and f"{tmp_path}/file" in told[1]
    files.write_training([sample("a", "s")], 3)
    assert [path.name for path in tmp_path.glob("samples/train/*.parquet")] == ["000003.parquet"]


def test_a_dump_that_finds_no_room_does_not_become_the_cause(tmp_path: Path) -> None:
    class Steps:
        global_step, epoch = 3, 0

    class Failing:
        steps, saver = Steps(), None

    (tmp_path / "crash").touch()  # no folder can be made there
    trainer: Any = Failing()
    with pytest.raises(ZeroDivisionError) as caught, dump_on_failure(trainer, tmp_path):
        raise ZeroDivisionError("the cause")
    assert "No crash dump was kept" in caught.value.__notes__[0] and "GB are free" in caught.value.__notes__[0]

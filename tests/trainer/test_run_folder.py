"""One run folder, one run at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from trainer.run import locked_folder
from verl_lite.errors import UserError


def test_a_folder_in_use_is_refused_with_the_name_of_its_user(tmp_path: Path) -> None:
    with locked_folder(tmp_path, pytest.fail):
        with pytest.raises(UserError, match=f"in use by pid {os.getpid()} of user .* trainer.experiment_name"):
            with locked_folder(tmp_path, pytest.fail):
                pass
    with locked_folder(tmp_path, pytest.fail):
        pass
    assert (tmp_path / "in_use").read_text() == "", "who had it is no longer told"


def test_where_there_are_no_locks_the_run_goes_on_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    told: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", no_locks)
        with locked_folder(tmp_path, told.append):
            assert "cannot be locked (No locks available)" in told[0]


def test_the_command_that_goes_on_says_nothing_twice(tmp_path: Path) -> None:
    from trainer.run import how_to_continue

    given = ["python", "-m", "trainer.main_ppo", "trainer.default_local_dir=x", "trainer.resume_mode=disable"]
    said = how_to_continue(given, tmp_path).splitlines()[-1].split()
    assert said == [*given[:3], f"trainer.default_local_dir={tmp_path}", "trainer.resume_mode=auto"]

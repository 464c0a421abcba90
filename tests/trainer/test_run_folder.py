"""One run folder, one run at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.run import held_folder
from verl_lite.errors import UserError


def test_a_folder_in_use_is_refused_with_the_name_of_its_user(tmp_path: Path) -> None:
    with held_folder(tmp_path):
        with pytest.raises(UserError, match=f"in use by pid {os.getpid()} of user .* trainer.experiment_name"):
            with held_folder(tmp_path):
                pass
    with held_folder(tmp_path):
        pass
    assert not list(tmp_path.iterdir())

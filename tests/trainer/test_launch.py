"""The run folder: made where it can be, refused in a sentence where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.run import make_run_dir
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.errors import UserError


def config_of(folder: Path, resume_mode: str = "disable") -> RewardFlowConfig:
    config = RewardFlowConfig()
    config.trainer.default_local_dir, config.trainer.resume_mode = str(folder), resume_mode
    return config


def test_the_folder_is_made(tmp_path: Path) -> None:
    made = make_run_dir(config_of(tmp_path / "runs" / "one"))
    assert made == tmp_path / "runs" / "one"


def test_a_folder_that_holds_a_run_is_refused_unless_it_is_resumed(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="holds a run already, and trainer.resume_mode=disable"):
        make_run_dir(config_of(tmp_path))
    assert make_run_dir(config_of(tmp_path, "auto")) == tmp_path


def test_a_place_that_cannot_be_written_to_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"trainer\.default_local_dir=.*run cannot be written to \(Not a directory\)"):
        make_run_dir(config_of(tmp_path / "file" / "run"))
    with pytest.raises(UserError, match=r"cannot be written to \(No such file or directory\)"):
        make_run_dir(config_of(Path("/proc/self/fdinfo/run")))  # where nobody, root included, makes a folder

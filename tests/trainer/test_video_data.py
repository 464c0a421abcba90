"""`python -m trainer.video_data FILE.csv`: what it lists, and how it ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.trainer.made_clips import grey_frames, write_animation, write_folder, write_table
from trainer.video_data import main

SMALL = "data.num_frames=5"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path = tmp_path / "clips"
    write_folder(tmp_path / "a", grey_frames(6))
    write_animation(tmp_path / "b.gif", np.tile(grey_frames(25), (3, 1, 1, 1)))
    write_table(tmp_path, [["a", "a cat, asleep"], ["b.gif", "a dog"]])
    return tmp_path


def line_of(text: str, word: str) -> str:
    return next(" ".join(line.split()) for line in text.split("\n") if word in line)


def test_what_becomes_of_each_clip(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), SMALL]) == 0
    printed = capsys.readouterr().out
    assert line_of(printed, "/a ") == f"0 {folder.name}/a 6 48 x 32 48 x 32"
    assert line_of(printed, "b.gif") == f"1 {folder.name}/b.gif 75 48 x 32 48 x 32"
    assert "2 of 2 rows can be used" in printed
    write_table(folder, [["b.gif", "a dog"]])
    assert main([str(folder), "data.num_frames=9", "data.height=16", "data.width=16"]) == 0
    assert "75 48 x 32 16 x 16" in line_of(capsys.readouterr().out, "b.gif")


def test_rows_that_cannot_be_used_are_listed_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(folder, [["a", "p"], *[[f"none{n}.gif", "p"] for n in range(7)]])
    held = write_table(folder / "held", [["../b.gif", "p"], ["../none", "p"]])
    assert main([str(folder), SMALL, f"data.val_files={held}"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("cannot be used") == printed.count("there is no such file") == 8
    assert "2 of 10 rows can be used" in printed
    assert f"data.val_files: {held}, row 1" in printed
    write_folder(folder / "tall", grey_frames(5, 64, 32))
    write_table(folder, [["a", "p"], ["tall", "p"]])
    assert main([str(folder), SMALL]) == 1
    assert "data.height=32 data.width=48" in capsys.readouterr().out


def test_how_it_is_called(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for argv in ([], ["data.num_frames=5"], ["--what"]):
        assert main(argv) == 2 and "usage: python -m trainer.video_data FILE.csv" in capsys.readouterr().err
    assert main(["--help-config"]) == 0 and "data.num_frames" in capsys.readouterr().out
    assert main([str(folder), "data.num_frams=5"]) == 2
    assert "did you mean data.num_frames" in capsys.readouterr().err
    assert main([str(folder), "data.num_frames=6"]) == 2 and "expected 4 k + 1" in capsys.readouterr().err

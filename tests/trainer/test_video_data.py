"""`python -m trainer.video_data FILE.csv`: what it lists, what it writes, and how it ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.trainer.made_clips import grey_frames, options, write_animation, write_folder, write_table
from trainer.clips import dataset
from trainer.clips.dataset import VideoDataset
from trainer.clips.reading import ClipError
from trainer.video_data import main, summary

SMALL = "data.num_frames=5"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path = tmp_path / "clips"
    tmp_path.mkdir()
    write_folder(tmp_path / "a", grey_frames(6))
    write_animation(tmp_path / "b.gif", np.tile(grey_frames(25), (3, 1, 1, 1)))
    write_table(tmp_path, [["a", "a cat, asleep", "x"], ["b.gif", "a dog", "y"]], ["video", "prompt", "who"])
    return tmp_path


def lines_of(text: str, word: str) -> list[str]:
    return [" ".join(line.split()) for line in text.split("\n") if word in line]


def test_good_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder), SMALL]) == 0
    printed = capsys.readouterr().out
    name = folder.name
    assert lines_of(printed, f"{name}/a ") == [f"0 {name}/a 6 48 x 32 0 1 2 3 4 48 x 32"]
    assert lines_of(printed, f"{name}/b.gif") == [f"1 {name}/b.gif 75 10 48 x 32 0 1 2 3 4 48 x 32"]
    assert "2 of 2 rows can be used: steps of an epoch 1, samples of a step 2" in printed


def test_frames_that_are_taken_with_gaps_and_a_batch_of_repeats(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder), "data.num_frames=9", "data.fps=4", "data.train_max_samples=1"]) == 1  # too short
    printed = capsys.readouterr().out
    assert f"row 0 (line 2) of {folder}/metadata.csv, {folder}/a: it has 6 frames, and data.num_frames=9" in printed
    write_table(folder, [["b.gif", "a dog"]])
    command = [str(folder), "data.num_frames=9", "data.fps=4", "data.repeat=10", "data.height=16", "data.width=16"]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "75 10 48 x 32 0 2 ... 20 16 x 16" in lines_of(printed, "b.gif")[0]  # 0, 2.5, 5 ... at 10 frames a second
    assert "steps of an epoch 2, samples of a step 8" in printed


def test_clips_of_the_validation_are_looked_at_and_count_in_no_epoch(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "usable.csv"
    held = write_table(folder / "held", [["../a", "a cat"], ["../none", "p"]])
    assert main([str(folder), SMALL, f"data.val_files={held}", f"out={out}"]) == 1
    printed = capsys.readouterr().out
    assert (
        "3 of 4 rows can be used: steps of an epoch 1, samples of a step 2" in printed and f"2 rows in {out}" in printed
    )
    assert f"data.val_files: row 1 (line 3) of {held}" in printed


def test_the_memory_that_is_told_is_that_of_clips_and_batches(folder: Path) -> None:
    data = VideoDataset(options(folder, height=512, width=1024, train_batch_size=2))
    memory = summary(data, data.selections()).split("\n")[1]
    # 5 x 512 x 1024 x 3 bytes are 7.5 MiB; in single precision 4 times as many, for each of 2 samples
    assert memory == ("memory: 7.5 MiB a decoded clip, 0.01 GiB all of them (kept: data.cache_gb=4), 60 MiB a batch")


def test_rows_that_cannot_be_used_are_listed_all_and_left_out_of_the_new_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [["a", "a cat, asleep", "x"], *[[f"none{n}.gif", "p", "-"] for n in range(3)], ["b.gif", "a dog", "y"]]
    write_table(folder, rows, ["video", "prompt", "who"])
    out = folder / "good" / "usable.csv"
    out.parent.mkdir()
    assert main([str(folder), SMALL, "shown=1", f"out={out}"]) == 1
    printed = capsys.readouterr().out
    assert len(lines_of(printed, "cannot be used")) == 3 and not lines_of(printed, "b.gif")
    assert len(lines_of(printed, "there is no such file")) == 3
    assert "2 of 5 rows can be used" in printed and f"2 rows in {out}" in printed
    data = VideoDataset(options(out))
    data.check()
    assert [(row.path, row.prompt, row.extra) for row in data.rows] == [
        (folder / "a", "a cat, asleep", {"who": "x"}),
        (folder / "b.gif", "a dog", {"who": "y"}),
    ]
    assert main([str(folder), SMALL, f"out={out}"]) == 2
    assert "the name of a new file is expected" in capsys.readouterr().err


def test_damage_behind_the_first_frame_is_found_by_decoding(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([str(folder), SMALL]) == 0
    monkeypatch.setattr(dataset, "read_frames", lambda path, *rest: (_ for _ in ()).throw(ClipError("it is damaged")))
    assert main([str(folder), SMALL, "decode=true"]) == 1
    assert "it is damaged" in capsys.readouterr().out


def test_clips_of_two_sizes_are_no_success(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(folder / "tall", grey_frames(5, 64, 32))
    write_table(folder, [["a", "p"], ["tall", "p"]])
    assert main([str(folder), SMALL]) == 1
    assert "data.height=32 data.width=48" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [[], ["data.num_frames=5"], ["--what"]])
def test_without_a_file_it_says_how_it_is_called(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "usage: python -m trainer.video_data FILE.csv" in capsys.readouterr().err


def test_options_are_listed_and_wrong_ones_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help-config"]) == 0
    assert "data.num_frames" in capsys.readouterr().out
    assert main([str(folder), "data.num_frams=5"]) == 2
    assert "did you mean data.num_frames" in capsys.readouterr().err
    assert main([str(folder), "data.num_frames=6"]) == 2
    assert "such as 5 or 9" in capsys.readouterr().err

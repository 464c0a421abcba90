"""Clips and prompts: what a csv gives, what is refused before the start, and which batch comes at which step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.trainer.made_clips import STEP, grey_frames, options, which, write_animation, write_folder, write_table
from trainer.diffusion.clips.dataset import VideoDataset, batch_of_step, noise_seeds, read_tables
from trainer.loop.steps import EpochSteps
from verl_lite.config.diffusion import FlowTrainerConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from verl_lite.schema import check


def batch_at(data: VideoDataset, step: int) -> DataProto:
    run = FlowTrainerConfig(seed=3, total_training_steps=6)
    steps = EpochSteps(len(data), data.config.train_batch_size, run, shuffle=data.config.shuffle)
    return batch_of_step(data, steps, step, None)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Three clips of 32 x 48 pixels: a folder of 6 frames, a gif of 7, an apng of 8, which begin at 0, 1, 2."""
    write_folder(tmp_path / "a", grey_frames(6))
    write_animation(tmp_path / "b.gif", grey_frames(8)[1:])
    write_animation(tmp_path / "c.apng", grey_frames(10)[2:])
    return write_table(tmp_path, [["a", "a cat"], ["b.gif", "a dog"], ["c.apng", "a bird"]])


def test_rows_of_several_files_with_paths_beside_each(tmp_path: Path) -> None:
    first = write_table(
        tmp_path / "one", [["a.mp4", "a cat, asleep", "x"], ["sub/b", "two\nlines", "y"]], ["clip", "text", "who"]
    )
    second = tmp_path / "two" / "metadata.csv"
    second.parent.mkdir()
    second.write_bytes(f"\ufeffclip,text\r\n{tmp_path}/c.gif, é \r\n".encode())
    names = {"video_key": "clip", "prompt_key": "text"}
    rows = read_tables(options(first, second.parent, **names))  # a folder stands for its metadata.csv
    assert [row.path for row in rows] == [tmp_path / "one/a.mp4", tmp_path / "one/sub/b", tmp_path / "c.gif"]
    assert [row.prompt for row in rows] == ["a cat, asleep", "two\nlines", "é"]
    assert rows[1].place == f"data.train_files: {first}, row 1"
    assert rows[2].place == f"data.train_files: {second}, row 0"
    assert len(read_tables(options(first, train_max_samples=1, **names))) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "Empty CSV file"),
        ("video,prompt\n", "no rows"),
        ("file,prompt\na,b\n", "Column 'video'"),
        ("video,prompt\na,b\nc,a cat, asleep\n", "double quotes"),
        ("video,prompt\na\n", "Expected 2 columns, got 1"),
        ("video,prompt\n ,b\n", "row 0: the video or the prompt is empty"),
        ("video,prompt\na,\xe9\n", "UTF-8"),
        (None, "No such file"),
    ],
)
def test_what_can_be_wrong_with_a_csv(tmp_path: Path, text: str | None, words: str) -> None:
    table = tmp_path / "metadata.csv"
    if text is not None:
        table.write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError) as error:
        read_tables(options(tmp_path))
    assert str(table) in str(error.value) and words in str(error.value)


def test_a_batch_has_the_columns_of_the_schema(table: Path) -> None:
    data = VideoDataset(options(table))
    data.check()
    assert len(data) == 3 and which(data.frames(1)) == [1, 2, 3, 4, 5]
    batch = data.batch([2, 0, 2], [7, 2**63 - 1, 8])
    check(batch, ["video", "prompt", "noise_seed", "row"], "test")
    video = batch.batch["video"]
    assert video.shape == (3, 5, 3, 32, 48) and video.dtype == torch.float32 and video.is_contiguous()
    torch.testing.assert_close(video[0, :, 1, 4, 4], torch.arange(2, 7) * STEP / 255)
    assert batch.batch["noise_seed"].tolist() == [7, 2**63 - 1, 8] and batch.batch["row"].tolist() == [2, 0, 2]
    assert batch.non_tensor_batch["prompt"].tolist() == ["a bird", "a cat", "a bird"]


def test_all_that_is_wrong_with_files_is_said_at_once_with_rows(table: Path) -> None:
    write_folder(table.parent / "short", grey_frames(3))
    rows = [["a", "p"], ["missing.mp4", "p"], ["short", "p"], *[[f"none{n}.mp4", "p"] for n in range(5)]]
    path = write_table(table.parent, rows)
    with pytest.raises(UserError) as error:
        VideoDataset(options(path)).check()
    lines = str(error.value).split("\n")
    assert f"data.train_files: {path}, row 1, {table.parent}/missing.mp4: there is no such file" in lines[0]
    assert "row 2" in lines[1] and "it has 3 frames, and data.num_frames=5" in lines[1]
    assert len(lines) == 6 and "and 2 more, of 8 rows; trainer.dry_run=true lists all" in lines[5]
    with pytest.raises(UserError) as error:
        VideoDataset(options(path)).check(list_all=True)
    assert len(str(error.value).split("\n")) == 7


def test_the_table_has_the_frames_and_both_sizes_of_each_clip(table: Path) -> None:
    write_animation(table.parent / "long.gif", np.tile(grey_frames(25), (3, 1, 1, 1)))
    path = write_table(table.parent, [["a", "a cat"], ["long.gif", "a dog"]])
    rows = VideoDataset(options(path, height=16, width=16)).table().splitlines()
    assert [row.split() for row in rows[1:]] == [
        ["0", f"{table.parent.name}/a", "6", "48", "x", "32", "16", "x", "16"],
        ["1", f"{table.parent.name}/long.gif", "75", "48", "x", "32", "16", "x", "16"],
    ]


def test_clips_of_several_sizes_are_refused_with_the_setting_to_give(table: Path) -> None:
    write_folder(table.parent / "tall", grey_frames(5, 64, 32))
    path = write_table(table.parent, [["a", "p"], ["tall", "p"], ["b.gif", "p"]])
    with pytest.raises(UserError, match=r"2 at 48 x 32, 1 at 32 x 64.*row 1.*data.height=32 data.width=48"):
        VideoDataset(options(path)).check()
    data = VideoDataset(options(path, height=32, width=48))
    data.check()
    assert data.batch([0, 1, 2], [0, 0, 0]).batch["video"].shape == (3, 5, 3, 32, 48)


def test_clips_of_the_validation_are_checked_and_never_trained_on(table: Path) -> None:
    write_folder(table.parent / "held" / "d", grey_frames(9)[3:])
    held = write_table(table.parent / "held", [["d", "a fish"], ["none.mp4", "p"]])
    config = options(table, val_files=[str(held)], train_max_samples=2, train_batch_size=8)
    with pytest.raises(UserError, match=r"data.val_files: .*row 1, .*none.mp4: there is no such file"):
        VideoDataset(config).check()
    write_table(table.parent / "held", [["d", "a fish"]])
    data = VideoDataset(config)
    # a row of its own: workers keep what the reward knows of a clip by its row
    assert len(data) == 2 and list(data.validation) == [2] and data.rows[2].prompt == "a fish"
    alone = VideoDataset(options(table, train_max_samples=2))
    assert list(alone.validation) == [0, 1]
    assert data.fingerprint() == alone.fingerprint()  # a run may be resumed with other clips of the validation
    assert sorted(batch_at(data, 1).non_tensor_batch["prompt"]) == ["a cat", "a dog"]


def test_each_sample_has_a_noise_of_its_own() -> None:
    seen = [seed for step in (1, 2) for seed in noise_seeds(step, [0, 1, 0, 1, 0], seed=1)]
    seen += noise_seeds(1, [0], seed=2)
    assert len(set(seen)) == 11 and all(0 <= seed < 2**63 for seed in seen)
    assert noise_seeds(1, [0, 1], seed=1) == seen[:2]  # whatever else is in the batch
    assert noise_seeds(5, [3, 3], seed=1, constant=24) == [24, 24]


def test_a_file_that_is_damaged_behind_its_header_ends_the_step_with_its_row(table: Path) -> None:
    data = VideoDataset(options(table, train_batch_size=1, shuffle=False))
    data.check()
    gif = table.parent / "b.gif"
    gif.write_bytes(gif.read_bytes()[:100])
    batch_at(data, 1)
    with pytest.raises(UserError, match=r"row 1, .*b.gif: "):
        batch_at(data, 2)

"""Clips and prompts: what a row gives, what is refused before the start, and which batch comes at which step."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.made_clips import STEP, grey_frames, options, which, write_animation, write_folder, write_table
from trainer.clips import dataset
from trainer.clips.dataset import VideoDataset, VideoLoader, collate, noise_seeds
from trainer.clips.reading import read_frames
from trainer.diffusion.build import steps_of, validation_batch
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.errors import UserError
from verl_lite.schema import check


def loader_of(data: VideoDataset, seed: int, noise_seed: int | None, last_step: int) -> VideoLoader:
    run = RewardFlowConfig(data=data.config)
    run.trainer.seed, run.trainer.total_training_steps = seed, last_step
    return VideoLoader(data, steps_of(run, data), noise_seed)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Three clips of 32 x 48 pixels: a folder of 6 frames, a gif of 7, an apng of 8, which begin at 0, 1, 2."""
    write_folder(tmp_path / "a", grey_frames(6))
    write_animation(tmp_path / "b.gif", grey_frames(8)[1:])
    write_animation(tmp_path / "c.apng", grey_frames(10)[2:])
    rows = [["a", "a cat", "x"], ["b.gif", "a dog", "y"], ["c.apng", "a bird", "z"]]
    return write_table(tmp_path, rows, ["video", "prompt", "person"])


def test_a_row_is_a_clip(table: Path) -> None:
    data = VideoDataset(options(table))
    data.check()
    assert len(data) == 3
    clip = data[1]
    assert clip.video.shape == (5, 32, 48, 3) and clip.video.dtype == np.uint8 and which(clip.video) == [1, 2, 3, 4, 5]
    assert (clip.prompt, clip.row, clip.path.name, clip.extra) == ("a dog", 1, "b.gif", {"person": "y"})
    assert data[-1].row == 2
    with pytest.raises(ValueError, match="read-only"):
        clip.video[:] = 0


def test_a_batch_has_the_columns_of_the_schema(table: Path) -> None:
    data = VideoDataset(options(table))
    batch = collate([data[2], data[0]], [7, 2**63 - 1])
    check(batch, ["video", "prompt", "noise_seed", "row", "extra_info"], "test")
    video = batch.batch["video"]
    assert video.shape == (2, 5, 3, 32, 48) and video.dtype == torch.float32 and video.is_contiguous()
    torch.testing.assert_close(video[0, :, 1, 4, 4], torch.arange(2, 7) * STEP / 255)
    assert batch.batch["noise_seed"].tolist() == [7, 2**63 - 1] and batch.batch["row"].tolist() == [2, 0]
    assert batch.non_tensor_batch["prompt"].tolist() == ["a bird", "a cat"]
    assert batch.non_tensor_batch["extra_info"].tolist() == [{"person": "z"}, {"person": "x"}]


def test_colours_stay_in_their_channels(tmp_path: Path) -> None:
    frames = np.zeros((1, 16, 16, 3), dtype=np.uint8)
    frames[..., 0], frames[0, 0, 5] = 255, (0, 0, 255)
    write_folder(tmp_path / "a", frames)
    data = VideoDataset(options(write_table(tmp_path, [["a", "red"]]), num_frames=1))
    video = collate([data[0]], [0]).batch["video"]
    assert video[0, 0, :, 9, 9].tolist() == [1, 0, 0] and video[0, 0, :, 0, 5].tolist() == [0, 0, 1]


# --------------------------------------------------------------------------------------------------- before the start


def test_all_that_is_wrong_with_files_is_said_at_once_with_rows(table: Path) -> None:
    write_folder(table.parent / "short", grey_frames(3))
    rows = [["a", "p"], ["missing.mp4", "p"], ["short", "p"], *[[f"none{n}.mp4", "p"] for n in range(5)]]
    path = write_table(table.parent, rows)
    with pytest.raises(UserError) as error:
        VideoDataset(options(path)).check()
    lines = str(error.value).split("\n")
    assert lines[0] == (
        f"data.train_files: row 1 (line 3) of {path}, {table.parent}/missing.mp4: there is no such file or folder"
    )
    assert "row 2 (line 4)" in lines[1] and "it has 3 frames, and data.num_frames=5" in lines[1]
    assert len(lines) == 6 and "and 2 more, of 8 rows" in lines[5]
    with pytest.raises(UserError, match=r"row 2 \(line 4\) of .* it has 3 frames"):
        VideoDataset(options(path))[2]


def test_clips_of_several_sizes_are_refused_with_the_setting_to_give(table: Path) -> None:
    write_folder(table.parent / "tall", grey_frames(5, 64, 32))
    path = write_table(table.parent, [["a", "p"], ["tall", "p"], ["b.gif", "p"]])
    with pytest.raises(UserError) as error:
        VideoDataset(options(path)).check()
    text = str(error.value)
    assert "2 sizes (width x height) at data.max_pixels=230400: 2 at 48 x 32, 1 at 32 x 64" in text
    assert "row 1 (line 3)" in text and "data.height=32 data.width=48" in text
    data = VideoDataset(options(path, height=32, width=48))
    data.check()
    assert {data[row].video.shape for row in range(3)} == {(5, 32, 48, 3)}


def test_clips_of_the_validation_are_read_and_checked_and_never_trained_on(table: Path) -> None:
    write_folder(table.parent / "held" / "d", grey_frames(9)[3:])
    held = write_table(table.parent / "held", [["d", "a fish"], ["none.mp4", "p"]])
    config = options(table, val_files=[str(held)], train_max_samples=2, train_batch_size=8)
    with pytest.raises(UserError, match=r"data.val_files: row 1 \(line 3\) of .*none.mp4: there is no such file"):
        VideoDataset(config).check()
    write_table(table.parent / "held", [["d", "a fish"]])
    data = VideoDataset(config)
    data.check()
    assert len(data) == 2 and [data.rows[row].prompt for row in data.validation] == ["a fish"]
    alone = VideoDataset(options(table, train_max_samples=2))
    assert [alone.rows[row].prompt for row in alone.validation] == ["a cat", "a dog"]
    assert data.fingerprint() == alone.fingerprint()  # a run may be resumed with other clips of the validation
    with loader_of(data, 1, None, 1) as loader:
        assert sorted(loader.batch(1).non_tensor_batch["prompt"]) == ["a cat", "a dog"]
    run = RewardFlowConfig(data=config)
    run.trainer.val_clips = 1
    shown = validation_batch(run, data)
    # a row of its own: workers keep what the reward knows of a clip by its row
    assert shown.batch["row"].tolist() == [2] and shown.non_tensor_batch["prompt"].tolist() == ["a fish"]
    torch.testing.assert_close(shown.batch["video"][0, :, 0, 0, 0], torch.arange(3, 8) * STEP / 255)


def test_each_sample_has_a_noise_of_its_own() -> None:
    seen = [seed for step in (1, 2) for seed in noise_seeds(step, [0, 1, 0, 1, 0], seed=1)]
    seen += noise_seeds(1, [0], seed=2)
    assert len(set(seen)) == 11 and all(0 <= seed < 2**63 for seed in seen)
    assert noise_seeds(1, [0, 1], seed=1) == seen[:2]  # whatever else is in the batch
    assert noise_seeds(5, [3, 3], seed=1, constant=24) == [24, 24]
    for seed in seen:
        torch.Generator().manual_seed(seed)


# ----------------------------------------------------------------------------------------------------------- the loader


def same(first: Any, second: Any) -> None:
    for name in ("video", "noise_seed", "row"):
        torch.testing.assert_close(first.batch[name], second.batch[name], rtol=0, atol=0)
    assert first.non_tensor_batch["prompt"].tolist() == second.non_tensor_batch["prompt"].tolist()
    assert first.meta_info == second.meta_info


def test_a_run_that_is_resumed_gets_the_same_batches(table: Path) -> None:
    config = options(table, train_batch_size=2)
    with loader_of(VideoDataset(config), 3, None, 6) as loader:
        whole = {step: loader.batch(step) for step in range(1, 7)}
    assert [len(batch) for batch in whole.values()] == [2, 1] * 3
    assert [batch.meta_info["global_step"] for batch in whole.values()] == [1, 2, 3, 4, 5, 6]
    with loader_of(VideoDataset(config), 3, None, 6) as loader:
        for step in (4, 5, 6, 2):  # any step, in any order
            same(loader.batch(step), whole[step])


def test_the_next_step_is_decoded_meanwhile_and_nothing_after_the_last(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    finished = threading.Semaphore(0)

    def noting(path: Path, *rest: Any) -> Any:
        frames = read_frames(path, *rest)
        decoded.append(path.name)
        finished.release()
        return frames

    monkeypatch.setattr(dataset, "read_frames", noting)
    config = options(table, train_batch_size=1, shuffle=False, cache_gb=0.0)
    with loader_of(VideoDataset(config), 1, 24, 2) as loader:
        assert loader.batch(1).batch["noise_seed"].tolist() == [24]
        for _ in range(2):
            assert finished.acquire(timeout=30)
        assert sorted(decoded) == ["a", "b.gif"]  # the second without having been asked for
        loader.batch(2)
    assert sorted(decoded) == ["a", "b.gif"]


@pytest.mark.parametrize(("clips_kept", "times"), [(3, 3), (2, 3 + 2), (0, 3 * 3)])
def test_clips_are_kept_within_the_memory_that_is_given(
    table: Path, monkeypatch: pytest.MonkeyPatch, clips_kept: int, times: int
) -> None:
    """Three epochs over three clips: those that found no room are decoded each time."""
    decoded: list[Path] = []
    monkeypatch.setattr(dataset, "read_frames", lambda path, *rest: (decoded.append(path), read_frames(path, *rest))[1])
    bytes_per_clip = 5 * 32 * 48 * 3
    data = VideoDataset(options(table, cache_gb=(clips_kept + 0.5) * bytes_per_clip / 2**30))
    for _ in range(3):
        assert [which(data[row].video)[0] for row in range(3)] == [0, 1, 2]
    assert len(decoded) == times


def test_a_file_that_is_damaged_behind_its_header_ends_the_step_with_its_row(table: Path) -> None:
    config = options(table, train_batch_size=1, shuffle=False)
    data = VideoDataset(config)
    data.check()
    gif = table.parent / "b.gif"
    with loader_of(data, 1, None, 3) as loader:
        gif.write_bytes(gif.read_bytes()[:100])
        loader.batch(1)
        with pytest.raises(UserError, match=r"row 1 \(line 3\) of .*b.gif: "):
            loader.batch(2)

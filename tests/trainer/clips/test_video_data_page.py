"""trainer/VIDEO_DATA.md stays true: its csv is read, its options exist, its sizes and figures are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.trainer.made_clips import grey_frames, options, write_animation, write_folder, write_video
from trainer.clips.dataset import VideoDataset
from trainer.clips.reading import fitted_size
from trainer.clips.writing import FPS, WAITING_BYTES
from trainer.video_data import main
from verl_lite.config import schema_of
from verl_lite.config.diffusion import RewardFlowConfig, VideoDataConfig

PAGE = (Path(__file__).parents[3] / "trainer" / "VIDEO_DATA.md").read_text()


def test_the_csv_and_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = re.findall(r"```csv\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "metadata.csv").write_text(text)
    write_video(tmp_path / "walk.mp4", grey_frames(25), rate=24)
    write_animation(tmp_path / "smile.gif", grey_frames(25), 50)
    write_folder(tmp_path / "faces" / "0012", grey_frames(20))
    data = VideoDataset(options(tmp_path / "metadata.csv"))
    data.check()
    assert data[0].prompt == "A woman walks to the window, and turns" and data[2].extra == {"person": "cleo"}
    (command,) = re.findall(r"python -m trainer.video_data (clips.*)", PAGE)
    arguments = command.replace("clips/metadata.csv", str(tmp_path)).split()
    assert main(arguments) == 0 and "3 of 3 rows" in capsys.readouterr().out


def test_every_option_exists() -> None:
    keys = schema_of(RewardFlowConfig).keys
    named = set(re.findall(r"`((?:data|trainer|sampler)\.\w+)", PAGE)) - {"data.fps=16"}
    assert named - {"trainer.main_reward_flow", "trainer.video_data"} <= set(keys)
    of_data = {name for name in keys if name.startswith("data.")}
    assert of_data - named <= {"data.train_batch_size", "data.train_max_samples", "data.shuffle"}


def test_sizes_are_those_that_clips_come_to() -> None:
    assert fitted_size(720, 1280, max_pixels=230_400, multiple=16) == (352, 640)
    assert VideoDataConfig().max_pixels == 230_400 and VideoDataConfig().num_frames == 17
    for frames, width, height, decoded, batch in re.findall(
        r"\| (\d+) frames of (\d+) x (\d+) \| ([\d.]+) MiB \| ([\d.]+) MiB", PAGE
    ):
        mib = int(frames) * int(width) * int(height) * 3 / 2**20
        assert f"{mib:.1f}" == decoded and f"{4 * mib:.1f}" == batch


def test_bounds_are_those_of_the_page() -> None:
    assert f"{VideoDataConfig().cache_gb:g} GiB, in the driver" in PAGE
    assert f"At most {WAITING_BYTES // 2**30} GiB of frames wait" in PAGE and f"H.264, {FPS} frames a second" in PAGE

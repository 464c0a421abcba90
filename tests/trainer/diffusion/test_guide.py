"""trainer/DIFFUSION.md stays true: its csv is read, its reward scores, its figures are of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.trainer.made_clips import grey_frames, write_folder, write_video
from trainer.diffusion.clips.dataset import VideoDataset
from trainer.diffusion.clips.writing import FPS
from verl_lite.config.diffusion import FlowRewardConfig, VideoDataConfig
from verl_lite.visual_rewards import VISUAL_REWARDS, build_visual_reward, score_frames

PAGE = (Path(__file__).parents[3] / "trainer" / "DIFFUSION.md").read_text(encoding="utf-8")


def test_the_csv_is_read(tmp_path: Path) -> None:
    (text,) = re.findall(r"```csv\n(.*?)```", PAGE, flags=re.DOTALL)
    (tmp_path / "metadata.csv").write_text(text)
    for name in ("walk.mp4", "smile.mov"):
        write_video(tmp_path / name, grey_frames(25), rate=24)
    write_folder(tmp_path / "faces" / "0012", grey_frames(20))
    data = VideoDataset(VideoDataConfig(train_files=[str(tmp_path / "metadata.csv")]))
    data.check()
    assert [row.prompt for row in data.rows] == [
        "A woman walks to the window, and turns",
        "A man smiles",
        "A girl looks up",
    ]


def test_the_reward_of_the_guide_scores() -> None:
    [block] = [block for block in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "Brightness" in block]
    try:
        exec(block, {"__name__": "guide"})
        clip = torch.full((2, 3, 4, 4), 0.2, requires_grad=True)
        reward = build_visual_reward(FlowRewardConfig(name="brightness", kwargs={"target": 0.7}))
        assert score_frames(reward, clip, reward.prepare(clip)).value.item() == pytest.approx(-0.1)
    finally:
        VISUAL_REWARDS.pop("brightness", None)
    assert set(VISUAL_REWARDS) <= set(re.findall(r"^\| `(\w+)` \|", PAGE, flags=re.MULTILINE))


def test_figures_are_those_of_the_code() -> None:
    data = VideoDataConfig()
    assert data.max_pixels == 480 * 480 and data.num_frames == 17
    assert f"H.264, {FPS} frames a second" in PAGE
    mib = 81 * 480 * 480 * 3 / 2**20
    assert f"{mib:.0f} MiB, and {4 * mib:.0f} MiB in a batch" in " ".join(PAGE.split())

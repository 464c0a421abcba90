"""Options of video data: each mistake is one sentence with key, value and what to give instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from verl_lite.config.checks import ranges
from verl_lite.config.checks.video import fits_pipeline, pipeline_multiple, video_data
from verl_lite.config.diffusion import RewardFlowConfig, VideoDataConfig


def problems(**values: Any) -> list[str]:
    config = RewardFlowConfig(data=VideoDataConfig(**({"train_files": ["a.csv"]} | values)))
    return [*ranges(config), *video_data(config.data)]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"num_frames": 1},
        {"num_frames": 81, "fps": 16.0},
        {"height": 480, "width": 832},
        {"height": 704, "width": 1280, "side_multiple": 32},
        {"max_pixels": 256, "cache_gb": 0.0, "train_max_samples": 1},
    ],
)
def test_options_that_fit(values: dict[str, Any]) -> None:
    assert problems(**values) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"train_files": []}, ["data.train_files is empty", "metadata.csv"]),
        ({"num_frames": 16}, ["data.num_frames=16", "4 k + 1", "data.num_frames=13 or 17"]),
        ({"num_frames": 80}, ["data.num_frames=77 or 81"]),
        ({"num_frames": 2}, ["data.num_frames=1 or 5"]),
        ({"num_frames": 0}, ["data.num_frames=0", "data.num_frames=1"]),
        ({"num_frames": -3}, ["data.num_frames=-3"]),
        ({"train_batch_size": 0}, ["data.train_batch_size=0", "at least 1"]),
        ({"repeat": 0}, ["data.repeat=0"]),
        ({"train_max_samples": 0}, ["data.train_max_samples=0", "-1 (all)"]),
        ({"cache_gb": -1.0}, ["data.cache_gb=-1.0"]),
        ({"fps": 0.0}, ["data.fps=0.0", "above 0"]),
        ({"video_key": "prompt"}, ["data.video_key and data.prompt_key are both prompt"]),
        ({"height": 480}, ["data.height=480 needs data.width"]),
        ({"width": 480}, ["data.width=480 needs data.height"]),
        ({"height": 470, "width": 832}, ["data.height=470", "data.side_multiple=16", "data.height=464"]),
        ({"height": 480, "width": 8}, ["data.width=8", "data.width=16"]),
        ({"height": 720, "width": 1280, "side_multiple": 32}, ["data.height=720", "data.height=704"]),
        ({"max_pixels": 200}, ["data.max_pixels=200", "256"]),
        ({"side_multiple": 0}, ["data.side_multiple=0"]),
    ],
)
def test_a_mistake_is_one_sentence(values: dict[str, Any], words: list[str]) -> None:
    found = problems(**values)
    assert len(found) == 1
    for word in words:
        assert word in found[0]


def pipeline(folder: Path, vae: dict[str, Any], patch: Any = (1, 2, 2)) -> Path:
    for name, options in (("vae", vae), ("transformer", {"patch_size": patch})):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(options))
    return folder


def test_sides_are_those_of_the_pipeline(tmp_path: Path) -> None:
    """The autoencoder of Wan2.2-TI2V-5B makes 16 pixels into one, that of A14B 8; a patch is 2 of those."""
    small = pipeline(tmp_path / "5b", {"_class_name": "AutoencoderKLWan", "scale_factor_spatial": 16})
    large = pipeline(tmp_path / "14b", {"_class_name": "AutoencoderKLWan"})
    assert (pipeline_multiple(small), pipeline_multiple(large)) == (32, 16)
    fits, sixteen = VideoDataConfig(side_multiple=32), VideoDataConfig()
    assert not [*fits_pipeline(fits, small), *fits_pipeline(fits, large), *fits_pipeline(sixteen, large)]
    (found,) = fits_pipeline(sixteen, small)
    assert "data.side_multiple=16: a multiple of 32" in found and str(small) in found
    (found,) = fits_pipeline(VideoDataConfig(height=720, width=1280), small)
    assert "data.height=720: a multiple of 32" in found
    assert not [*fits_pipeline(VideoDataConfig(height=704, width=1280), small)]


def test_a_pipeline_whose_files_do_not_say_is_not_judged(tmp_path: Path) -> None:
    assert pipeline_multiple(tmp_path) is None
    assert pipeline_multiple(pipeline(tmp_path / "a", {"_class_name": "Other"})) is None
    assert pipeline_multiple(pipeline(tmp_path / "b", {"scale_factor_spatial": 8}, patch=2)) is None
    assert not [*fits_pipeline(VideoDataConfig(side_multiple=3), tmp_path)]

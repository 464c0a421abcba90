"""Settings of reward flow that cannot work are refused at once: key, value, what was expected, what to change."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_lite.config import ConfigError, diffusion_checks, load_schema
from verl_lite.config.diffusion import RewardFlowConfig


@pytest.fixture(autouse=True)
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusion_checks, "PACKAGES", ())


def pipeline(folder: Path, **scheduler: Any) -> str:
    """A folder that looks like a pipeline."""
    for name in ("transformer", "vae", "scheduler"):
        (folder / name).mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "WanImageToVideoPipeline"}))
    options = {"_class_name": "FlowMatchEulerDiscreteScheduler"} | scheduler
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(options))
    return str(folder)


def problems(folder: str, *options: str, count: int = 1, available: int = 2) -> list[str]:
    common = [f"model.path={folder}", "data.train_files=x.csv", "trainer.device=cpu", "trainer.backend=inline"]
    config = load_schema([*common, *options], RewardFlowConfig).config
    try:
        diffusion_checks.validate_reward_flow(config, count=count, available=available)
    except ConfigError as error:
        return error.problems
    return []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield pipeline(tmp_path_factory.mktemp("pipeline") / "tiny")


def test_the_defaults_are_fine(folder: str) -> None:
    assert problems(folder) == []


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("sampler.final_timestep=8", "final_timestep=8 and sampler.num_inference_steps=8: expected 0 <= mid"),
        ("sampler.mid_timestep=8", "sampler.mid_timestep=8 with sampler.final_timestep=7 and"),
        ("sampler.num_inference_steps=4", "num_inference_steps=4: expected 0 <= mid_timestep <= final"),
        ("sampler.shift=.inf", "sampler.shift=inf: a number above 0 is expected"),
        ("sampler.noise_seed=-1", "sampler.noise_seed=-1: a whole number from 0"),
        ("data.num_frames=16", "data.num_frames=16: expected 4 k + 1, such as 13 or 17"),
        ("data.height=30", "data.height=30, data.width=None: expected null for both, or multiples"),
        ("data.max_pixels=100", "data.max_pixels=100: expected at least 256"),
        ("data.prompt_key=video", "data.video_key and data.prompt_key are both video"),
        ("model.target_modules=[]", "model.target_modules is empty"),
        ("model.fused_loras.high=x", "model.fused_loras.high=x: expected transformer or transformer_2"),
        ("model.fused_loras.transformer=/no/x", "model.fused_loras.transformer=/no/x: "),
        ("reward.name=cosine_identiti", "did you mean cosine_identity"),
        ("trainer.resume_mode=resume_path", "resume_mode=resume_path and resume_from_path"),
        ("trainer.nnodes=2", "trainer.nnodes=2 needs a Ray cluster"),
    ],
)
def test_what_cannot_work_is_told(folder: str, option: str, told: str) -> None:
    found = problems(folder, option)
    assert any(told in problem for problem in found), found


def test_all_problems_come_together(folder: str) -> None:
    found = problems(folder, "sampler.shift=0", "model.lora_rank=0", "data.num_frames=16")
    assert len(found) == 3


def test_sides_fit_the_multiple_and_the_pipeline(tmp_path: Path, folder: str) -> None:
    [found] = problems(folder, "data.height=40", "data.width=32")
    assert "data.height=40, data.width=32: expected null for both, or multiples" in found
    wan = tmp_path / "wan"
    pipeline(wan)
    (wan / "vae" / "config.json").write_text(json.dumps({"_class_name": "AutoencoderKLWan"}))
    (wan / "transformer" / "config.json").write_text(json.dumps({"patch_size": [1, 4, 4]}))
    [found] = problems(str(wan), "data.side_multiple=16")
    assert "data.side_multiple=16: expected a multiple of 32" in found
    assert problems(str(wan), "data.height=64", "data.width=32") == []


def test_a_folder_that_is_no_pipeline_is_told(tmp_path: Path) -> None:
    (tmp_path / "half" / "vae").mkdir(parents=True)
    (tmp_path / "half" / "model_index.json").write_text("{}")
    for name in ("none", "half"):
        [found] = problems(str(tmp_path / name))
        assert "is not an image-to-video pipeline" in found and "hf download" in found and "-Diffusers" in found


def test_a_pipeline_without_flow_matching_is_refused(tmp_path: Path) -> None:
    ddim = pipeline(tmp_path / "ddim", _class_name="DDIMScheduler", prediction_type="epsilon")
    [found] = problems(ddim)
    assert "its scheduler is DDIMScheduler with prediction_type=epsilon" in found
    [found] = problems(pipeline(tmp_path / "grid", _class_name="DDIMScheduler", use_flow_sigmas=True))
    assert "prediction_type=None" in found  # the grid of a flow says nothing of what the model predicts
    # what Wan2.2's own folders have
    unipc = {"_class_name": "UniPCMultistepScheduler", "prediction_type": "flow_prediction", "use_flow_sigmas": True}
    assert problems(pipeline(tmp_path / "unipc", **unipc)) == []


def test_the_high_noise_experts_steps_do_not_learn(tmp_path: Path) -> None:
    two = pipeline(tmp_path / "two")
    index = {"transformer_2": ["diffusers", "WanTransformer3DModel"], "boundary_ratio": 0.9}
    (tmp_path / "two" / "model_index.json").write_text(json.dumps(index))
    assert problems(two, "sampler.mid_timestep=3") == []  # timesteps 1000, 972 and 937 are above the boundary
    [found] = problems(two, "sampler.mid_timestep=2")
    assert "sampler.mid_timestep=2: the high-noise expert" in found
    assert "runs the first 3 steps; expected 3 or more" in found
    assert problems(two, "sampler.mid_timestep=2", "model.boundary_ratio=0.95") == []


@pytest.mark.parametrize("option", ["model.activation_offload=true", "model.vae_tiling=true", "data.cache_gb=2"])
def test_an_option_that_is_gone_is_told_what_to_do_instead(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option.partition('=')[0]}=.*remove it: .*"):
        load_schema(["model.path=x", option], RewardFlowConfig)


def test_missing_packages_are_named_with_the_extra(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusion_checks, "PACKAGES", ("diffusers",))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert any("diffusers: not installed" in problem for problem in problems(folder))


def test_without_model_or_data_the_recipe_is_the_default() -> None:
    loaded = load_schema([], RewardFlowConfig, recipe_loader=lambda name: {}, default_recipe="reward_flow")
    assert loaded.config.recipe == "reward_flow"
    assert (loaded.config.trainer.experiment_name or "").startswith("reward_flow-")
    assert loaded.config.trainer.default_local_dir == f"runs/reward_flow/{loaded.config.trainer.experiment_name}"
    own = load_schema(["model.path=x"], RewardFlowConfig, recipe_loader=lambda name: {}, default_recipe="reward_flow")
    assert own.config.recipe is None

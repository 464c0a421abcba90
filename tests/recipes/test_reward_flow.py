"""The embedded run of reward flow: its settings fit each other, and it learns through its command."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from recipes.reward_flow import recipe
from trainer.main_reward_flow import main
from trainer.observe.tracking import read_metrics
from trainer.recipe import recipe_overrides
from verl_lite.config import load_schema
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.config.diffusion_checks import validate_reward_flow as validate

CORE = "val-core/cosine_identity/reward/mean@1"


def test_the_settings_are_known_and_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("av")
    for part in ("model_index.json", "transformer/config.json", "vae/config.json"):
        (tmp_path / "model" / part).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / part).write_text('{"some": 1}')
    monkeypatch.setattr(recipe, "MADE", SimpleNamespace(folder=tmp_path))
    loaded = load_schema([], RewardFlowConfig, recipe_loader=recipe_overrides, default_recipe="reward_flow")
    assert loaded.provenance["model.path"] == "recipe:reward_flow"
    validate(loaded.config, count=2, available=2)
    assert set(loaded.config.reward.kwargs) == {"embedder"}


def test_wrong_options_are_told_before_the_world_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recipe, "MADE", SimpleNamespace(folder=tmp_path / "world"))
    monkeypatch.setattr(recipe, "prepare", lambda config: pytest.fail("made"))
    folder = f"trainer.default_local_dir={tmp_path}"
    assert main([folder, "trainer.backend=inline", "trainer.device=cpu", "sampler.final_timestep=9"]) == 2
    assert "sampler.final_timestep=9" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_learns_and_leaves_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("diffusers")
    pytest.importorskip("av")
    run_dir = tmp_path / "run"
    arguments = ["trainer.backend=inline", "trainer.device=cpu", "trainer.logger=[console,jsonl]"]
    arguments += ["trainer.total_training_steps=20", "trainer.video_freq=-1", f"trainer.default_local_dir={run_dir}"]
    assert main(arguments) == 0
    steps = read_metrics(run_dir / "metrics.jsonl")
    assert steps[1]["actor/kl_loss"] == 0 and steps[20]["actor/kl_loss"] > 0
    assert abs(steps[0][CORE]) < 0.2 and steps[20][CORE] > steps[0][CORE] + 0.15, steps[20]
    for name in ("curve.png", "before_after.png", "config.yaml"):
        assert (run_dir / name).stat().st_size > 1000, name
    assert len(list((run_dir / "videos" / "step_20").glob("*.mp4"))) == 16
    assert (run_dir / "global_step_20" / "lora" / "pytorch_lora_weights.safetensors").is_file()
    printed = capsys.readouterr().out
    assert "step 20/20  score" in printed and "load_lora_weights" in printed

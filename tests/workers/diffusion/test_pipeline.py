"""Pipelines in diffusers format: what is loaded, what the sampler makes of it, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.diffusion.actor_cases import CPU, policy_of
from tests.workers.diffusion.tiny_wan import FRAMES, SIDE, clips, flow_config, planned, tiny_pipeline
from verl_lite.errors import UserError
from workers.diffusion.pipeline import load_pipeline

diffusers = pytest.importorskip("diffusers")


@pytest.fixture(scope="module")
def folders(path: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("pipelines")
    return {
        "i2v": path,
        "i2v wan": tiny_pipeline(root / "i2v_wan", vae="wan"),
        "ti2v wan": tiny_pipeline(root / "ti2v_wan", layout="ti2v", vae="wan"),
    }


class RollGrid(diffusers.FlowMatchEulerDiscreteScheduler):  # type: ignore[misc, name-defined]
    """diffusers' scheduler on ROLL's sigmas, which its pipeline cannot be asked for."""

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:  # type: ignore[override]
        steps = num_inference_steps
        super().set_timesteps(sigmas=[1 - i / steps for i in range(steps)], device=device)


@pytest.mark.parametrize("layout", ["i2v wan", "ti2v wan"])
def test_frames_are_those_of_diffusers_own_pipeline(
    folders: dict[str, str], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # its cleaning of prompts needs a package more; these have nothing to clean
    monkeypatch.setattr("diffusers.pipelines.wan.pipeline_wan_i2v.prompt_clean", str)
    policy = policy_of(folders[layout])
    data = planned(clips(2), world=1, micro_batch_size=2)[0]
    inputs, _ = policy.prepare_inputs(data, CPU)
    with torch.no_grad():
        frames = policy(inputs, is_scored=False)["frames"]
    pipeline = diffusers.WanImageToVideoPipeline.from_pretrained(folders[layout])
    pipeline.scheduler = RollGrid(shift=5.0)
    pipeline.set_progress_bar_config(disable=True)
    for row in range(2):
        expected = pipeline(
            image=data.batch["video"][row, :1],
            prompt=data.non_tensor_batch["prompt"][row],
            height=SIDE, width=SIDE, num_frames=FRAMES, num_inference_steps=4, guidance_scale=1.0,
            latents=inputs.noise[row : row + 1].clone(), output_type="pt", max_sequence_length=6,
        ).frames[0]  # fmt: skip
        torch.testing.assert_close(frames[row], expected, rtol=0, atol=1e-5)


def test_fused_adapters_are_in_the_weights_before_training_begins(folders: dict[str, str], tmp_path: Path) -> None:
    name = "blocks.0.attn1.to_q"
    down, up = torch.randn(2, 24), torch.randn(24, 2)
    state = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    diffusers.WanImageToVideoPipeline.save_lora_weights(tmp_path, transformer_lora_layers=state)
    config = flow_config(folders["i2v"])
    before = load_pipeline(config.model, torch.float32)
    names = {"transformer": "high_noise", "transformer_2": "low_noise"}
    for expert in ("transformer", "transformer_2"):
        config.model.fused_loras = {expert: str(tmp_path / "pytorch_lora_weights.safetensors")}
        after = load_pipeline(config.model, torch.float32)
        for which in ("transformer", "transformer_2"):
            weight = getattr(before, names[which]).get_parameter(f"{name}.weight")
            expected = weight + up @ down if which == expert else weight
            torch.testing.assert_close(getattr(after, names[which]).get_parameter(f"{name}.weight"), expected)
        assert not any("lora" in key for key, _ in getattr(after, names[expert]).named_parameters())


def test_prompts_are_encoded_once_and_alone(folders: dict[str, str]) -> None:
    policy = policy_of(folders["i2v"])
    calls: list[int] = []
    policy.encode_prompts.text_encoder.register_forward_hook(lambda *_: calls.append(1))
    both = policy.encode_prompts(["a red face", "a blue face smiles"], CPU)
    again = policy.encode_prompts(["a  blue face smiles", "a red face", "a red face"], CPU)
    assert len(calls) == 3  # the one with two blanks is another text
    assert torch.equal(again[0], both[1]) and torch.equal(again[1], both[0])
    assert both.shape == (2, 6, 16) and both[0, 4:].abs().max() == 0 and both[0, 3].abs().max() > 0


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_modules": ["to_q", "q_proj"]}, r"model.target_modules=.*q_proj matches no linear layer.*attn1.to_q"),
        ({"target_modules": []}, "model.target_modules=.*an empty list"),
        ({"fused_loras": {"transformer_3": "x"}}, "fused_loras.*transformer_3"),
        ({"layout": "ti2v wan", "boundary_ratio": 0.9}, "model.boundary_ratio=0.9: expected .* null with one"),
    ],
)
def test_settings_that_cannot_work(folders: dict[str, str], options: dict[str, Any], message: str) -> None:
    chosen = dict(options)
    with pytest.raises(UserError, match=message):
        policy_of(folders[chosen.pop("layout", "i2v")], **chosen)


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("boundary_ratio", None, "boundary_ratio=None: expected a number with two experts"),
        ("text_encoder", [None, None], "names no text_encoder"),
        ("vae", ["no.such.module", "Codec"], "vae is no.such.module.Codec, which cannot be imp"),
        ("expand_timesteps", True, "12 input channels; expected 4 for the TI2V layout of Wan2.2"),
        ("transformer_2", "without weights", "component transformer_2 .* cannot be loaded"),
    ],
)
def test_a_folder_that_is_no_such_pipeline(path: str, tmp_path: Path, entry: str, value: Any, message: str) -> None:
    """With another entry in its index, or without an expert's weights."""
    folder = shutil.copytree(path, tmp_path / "changed")
    index = json.loads((folder / "model_index.json").read_text())
    if value == "without weights":
        for file in (folder / entry).glob("*.safetensors"):
            file.unlink()
    else:
        (folder / "model_index.json").write_text(json.dumps(index | {entry: value}))
    with pytest.raises(UserError, match=message):
        load_pipeline(flow_config(str(folder)).model, torch.float32)


def test_clips_of_another_size_than_the_decoder_gives(folders: dict[str, str]) -> None:
    policy, data = policy_of(folders["i2v"]), planned(clips(1), 1, 1)[0]
    for video, message in ((data.batch["video"][:, :4], "num_frames=4"), (data.batch["video"][..., :12], "width=12")):
        wrong = data.select()
        wrong.batch["video"] = video
        with pytest.raises(UserError, match=message):
            policy.prepare_inputs(wrong, CPU)


def test_a_clip_that_the_reward_cannot_use_is_named(folders: dict[str, str]) -> None:
    policy, data = policy_of(folders["i2v"]), planned(clips(2), 1, 2)[0]
    data.batch["video"][1] = 1.0
    with pytest.raises(UserError, match="row 1, .*MeanColourReward: all of it is white"):
        policy.prepare_inputs(data, CPU)

"""The plan of reward flow: published counts, frozen parts by hand, a measured step, and the guide."""

from __future__ import annotations

import json
import re
import shlex
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from trainer import diffusion_plan
from trainer.planner.diffusion import UMT5_XXL, count, launch_plan, plan, published_shape, read_shape
from trainer.planner.memory import GIB, MemoryPlan
from verl_lite.config import load_schema, schema_of
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.errors import UserError

pytest.importorskip("diffusers")
A14B, TI2V = "wan2.2-i2v-a14b", "wan2.2-ti2v-5b"


def config(**options: Any) -> RewardFlowConfig:
    """Clips of 5 frames of 64 x 64, unless others are asked for."""
    made = RewardFlowConfig()
    made.data.num_frames = options.pop("num_frames", 5)
    if made.data.num_frames == 5:
        made.data.height = made.data.width = 64
    for name, value in options.items():
        assert hasattr(made.model, name)
        setattr(made.model, name, value)
    return made


@cache
def planned(name: str = A14B, slots: int = 1, **options: Any) -> MemoryPlan:
    return plan(config(**options), published_shape(name), slots)


def test_counts_are_the_published_ones_and_frozen_parts_by_hand() -> None:
    """Wan2.2's names say 14 B and 5 B; Wan-VAE has 127 M, Wan2.2-VAE 705 M, umt5-xxl's encoder 5.68 B. bf16: 2 bytes
    each; of the adapter 12 (weight and two moments)."""
    shard = "low-noise expert, this rank's shard"
    one, eight = planned(), planned(slots=8, offload_frozen=True)
    expert, adapter = 2 * 14_288_901_184, 40 * 32 * (8 * (5120 + 5120) + 2 * (5120 + 13824))
    assert one.always[shard] == one.always["high-noise expert"] == eight.host["high-noise expert"] == expert
    assert one.always["text encoder"] == eight.host["text encoder"] == 2 * 5_680_910_336
    assert one.always["adapter, Adam"] == 12 * adapter and eight.always[shard] == expert / 8
    assert not one.host and "high-noise expert" not in eight.always
    assert planned(TI2V).always[shard] == 2 * 4_999_787_712
    for name, autoencoder in ((A14B, 127e6), (TI2V, 705e6)):
        assert count(published_shape(name).vae) == pytest.approx(autoencoder, rel=2e-3)


def test_what_the_steps_keep_by_hand() -> None:
    """Blocks recomputed, steps not: of each of 4 steps 40 inputs of its tokens x 5120 in bf16, and little besides."""
    some = planned(checkpoint_steps=False)
    tokens = 2 * 4 * 4
    assert some.phases["decoding"]["kept of the steps"] == pytest.approx(4 * 40 * tokens * 5120 * 2, rel=0.15)
    assert planned().peak < some.peak < planned(checkpoint_steps=False, checkpoint_decode=False).peak


@pytest.mark.slow
def test_planned_is_what_a_step_takes(tmp_path: Path) -> None:
    """The bytes of live tensors at the peak of a train step within 5%."""
    from tests.bench.reward_flow_live import configured, measure, wan_pipeline

    found = measure(configured(wan_pipeline(tmp_path / "wan", layers=2, channels=8), 9, 48, ()), warm_up=False)
    assert found.planned == pytest.approx(found.live, rel=0.05)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--like", TI2V, "data.num_frames=5", "data.height=64", "data.width=64", "--memory_gb"]
    assert diffusion_plan.main([*arguments, "8"]) == 1
    out = capsys.readouterr().out
    assert "clip 5 x 64 x 64; 1 device" in out and "does not fit 8.0 GiB" in out and "not on a GPU" in out
    assert diffusion_plan.main([*arguments, "0"]) == 2


def test_shapes_from_a_folder(tmp_path: Path) -> None:
    """Config files alone."""
    wan = ["diffusers", "WanTransformer3DModel"]
    vae = ["diffusers", "AutoencoderKLWan"]
    files: dict[str, dict[str, Any]] = {
        "model_index.json": {"vae": vae, "text_encoder": ["transformers", "UMT5EncoderModel"], "transformer_2": wan},
        "transformer/config.json": {
            "num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 40,
            "in_channels": 36, "out_channels": 16, "text_dim": 4096, "patch_size": [1, 2, 2],
        },
        "vae/config.json": {"base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4]},
        "text_encoder/config.json": UMT5_XXL,
    }  # fmt: skip
    files["model_index.json"]["boundary_ratio"] = 0.9
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    made = config()
    made.model.path = str(tmp_path)
    assert launch_plan(made, 1) == f"{planned().device_bytes / GIB:.0f} GiB (calculated)"
    (tmp_path / "text_encoder" / "config.json").unlink()
    with pytest.raises(UserError, match=r"text_encoder.*config.json is missing.*--like"):
        read_shape(str(tmp_path))
    assert launch_plan(made, 1) == ""


# -- the guide ---------------------------------------------------------------------------------------------------------

GUIDE = Path(__file__).parents[3] / "trainer" / "DIFFUSION.md"


def commands(module: str) -> list[list[str]]:
    """The arguments of the guide's commands that run `module`."""
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    found = [shlex.split(block.replace("\\\n", " ")) for block in blocks]
    return [words[3:] for words in found if words[:3] == ["python", "-m", module]]


def test_every_key_of_the_guide_exists_and_fits() -> None:
    """Whole command lines, and each key in backticks."""
    lines = commands("trainer.main_reward_flow")
    assert len(lines) == 1
    for line in lines:
        loaded = load_schema(line, RewardFlowConfig).config
        assert list(loaded.sampler.check()) == []
        assert loaded.model.offload_frozen
        assert set(loaded.model.fused_loras) <= {"transformer", "transformer_2"}
    keys = re.findall(r"`((?:model|data|sampler|actor|trainer|reward)\.[a-z_0-9]+)=?[^`]*`", GUIDE.read_text("utf-8"))
    assert set(keys) <= set(schema_of(RewardFlowConfig).keys)


@pytest.mark.slow
def test_memory_in_the_guide_is_the_planner_s() -> None:
    """The first row of the table of devices, to the GiB that it is rounded to; the command of the guide fits."""
    [row] = re.findall(r"^\| 17 \| (.*) \|$", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    cells = [int(cell) for cell in row.split(" | ")]
    for cell, (name, slots, offloads) in zip(cells[1::3], ((TI2V, 1, True), (A14B, 8, False)), strict=True):
        made = config(num_frames=17, offload_frozen=offloads)
        made.reward.kwargs = {"embedder": "glintr100.onnx"}
        assert cell == round(plan(made, published_shape(name), slots).device_bytes / GIB)
    (line,) = commands("trainer.diffusion_plan")
    assert diffusion_plan.main([*line, "data.num_frames=17"]) == 0

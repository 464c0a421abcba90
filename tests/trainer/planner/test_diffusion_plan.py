"""The plan of reward flow: published counts, bytes by hand, a measured step, and the guide."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from trainer import diffusion_plan
from trainer.planner.diffusion import (
    PUBLISHED,
    UMT5_XXL,
    PipelineShape,
    expert_memory,
    launch_plan,
    plan,
    read_shape,
)
from trainer.planner.memory import GIB
from verl_lite.config import load_schema, schema_of
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.errors import UserError

pytest.importorskip("diffusers")
A14B, TI2V = PUBLISHED["wan2.2-i2v-a14b"], PUBLISHED["wan2.2-ti2v-5b"]
TARGETS = tuple(RewardFlowConfig().model.target_modules)


@pytest.mark.parametrize(
    ("shape", "parameters", "autoencoder", "latents", "tokens"),
    [(A14B, 14.3e9, 127e6, (21, 60, 60), 18900), (TI2V, 5.0e9, 705e6, (21, 30, 30), 4725)],
    ids=["a14b", "5b"],
)
def test_counts_are_the_published_ones(
    shape: PipelineShape, parameters: float, autoencoder: float, latents: tuple[int, int, int], tokens: int
) -> None:
    """Wan2.2's names say 14 B and 5 B; Wan-VAE has 127 M, Wan2.2-VAE 705 M, umt5-xxl's encoder 5.68 B. Blocks beyond
    the third are like the third: counted on the meta device with all of them."""
    expert, whole = expert_memory(shape, latents, 32, TARGETS, 2), shape.network(shape.transformer["num_layers"])
    assert expert.parameters == sum(parameter.numel() for parameter in whole.parameters())
    assert expert.parameters == pytest.approx(parameters, rel=2e-3) and expert.tokens == tokens
    assert shape.frozen_parameters == (pytest.approx(autoencoder, rel=2e-3), pytest.approx(5.68e9, rel=1e-3))


def test_what_a_block_and_its_adapter_keep_by_hand() -> None:
    """bf16: three norms in fp32; query and key before their norms, query, key, value, output twice; one before the
    activation function; what layers with an adapter read once, and rank 32 inside them; log-sum-exp of attention."""
    expert = expert_memory(A14B, (21, 60, 60), 32, TARGETS, 2)
    wide, inner, text = 18900 * 5120, 18900 * 13824, 512 * 5120
    kept = 3 * 4 * wide + 2 * (9 * wide + 3 * text) + 2 * inner + 2 * (3 * wide + inner)
    kept += 2 * 32 * (8 * 18900 + 2 * 512) + 2 * 4 * 18900 * 40
    assert expert.block == pytest.approx(kept, rel=0.01)
    assert expert.adapter == 40 * 32 * (8 * (5120 + 5120) + 2 * (5120 + 13824))


@pytest.mark.slow
def test_planned_is_what_a_step_takes(tmp_path: Path) -> None:
    """The bytes of live tensors at the peak of a train step within 20%, without and with what saves memory."""
    from tests.bench.reward_flow_live import configured, measure, wan_pipeline

    path = wan_pipeline(tmp_path / "wan", layers=2, channels=8)
    for names in ((), ("checkpoint_steps", "enable_gradient_checkpointing", "checkpoint_decode")):
        found = measure(configured(path, 9, 48, names), warm_up=False)
        assert found.planned == pytest.approx(found.live, rel=0.2)


# -- the plan ----------------------------------------------------------------------------------------------------------


def config(**options: Any) -> RewardFlowConfig:
    made = RewardFlowConfig()
    made.data.num_frames = options.pop("num_frames", 81)
    for name, value in options.items():
        assert hasattr(made.model, name)
        setattr(made.model, name, value)
    return made


def test_frozen_parts_by_hand() -> None:
    """bf16: 2 bytes each; the adapter 16 (weight, gradient, two moments), and one block's gathered."""
    one, eight, offloaded = plan(config(), A14B, 1), plan(config(), A14B, 8), plan(config(offload_frozen=True), A14B, 1)
    expert = 2 * 14_288_901_184
    adapter = 40 * 32 * (8 * (5120 + 5120) + 2 * (5120 + 13824))
    assert one.always["high-noise expert"] == eight.always["high-noise expert"] == expert
    assert one.always["text encoder"] == 2 * 5_680_910_336
    assert one.always["adapter, gradient, Adam"] == pytest.approx(16 * adapter + 4 * adapter / 40)
    name = "low-noise expert, this rank's shard"
    assert eight.always[name] == one.always[name] / 8 == expert / 8
    assert "high-noise expert" not in offloaded.always and offloaded.host["high-noise expert"] == expert


def test_every_option_saves_where_it_should() -> None:
    """Each alone, from all off: the peak falls; recomputing steps and decoding together needs both."""
    off = dict.fromkeys(("checkpoint_steps", "checkpoint_decode", "enable_gradient_checkpointing"), False)
    whole = plan(config(**off), A14B, 1).peak
    for name in off:
        assert plan(config(**off | {name: True}), A14B, 1).peak < whole
    default = plan(config(), A14B, 1)
    assert default.peak < 0.15 * whole and default.worst.name == "backward of decoding"


def test_kept_of_the_steps_by_hand() -> None:
    """Blocks recomputed, steps not: 4 steps of 40 inputs of 18900 x 5120 in bf16, and the output layer's in fp32."""
    phases = {phase.name: phase for phase in plan(config(checkpoint_steps=False), A14B, 1).phases}
    latents = 16 * 21 * 60 * 60 * 4
    expected = 4 * (40 * 18900 * 5120 * 2 + 18900 * 5120 * 4 + 3 * latents)
    assert phases["decoding"].parts["kept of the steps"] == pytest.approx(expected, rel=0.01)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--like", "wan2.2-ti2v-5b", "--memory_gb", "80", "data.num_frames=33", "data.side_multiple=32"]
    assert diffusion_plan.main(arguments) == 0
    out = capsys.readouterr().out
    assert "1 expert of 5.00 B parameters, adapter 80.6 M; clip 33 x 480 x 480: 2025 tokens; 1 device" in out
    assert "fits 80.0 GiB" in out
    assert diffusion_plan.main([*arguments[:3], "8"]) == 1
    assert "does not fit 8.0 GiB" in capsys.readouterr().out
    assert diffusion_plan.main([*arguments[:3], "0"]) == 2


def test_shapes_from_a_folder(tmp_path: Path) -> None:
    """Config files alone; a decoder that is no AutoencoderKLWan is counted by the headers of its weights."""
    files = {
        "model_index.json": {"transformer_2": ["diffusers", "WanTransformer3DModel"], "expand_timesteps": False},
        "transformer/config.json": {
            "num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 40,
            "in_channels": 36, "out_channels": 16, "text_dim": 4096, "patch_size": [1, 2, 2],
        },
        "vae/config.json": {"_class_name": "AutoencoderKLWan", "base_dim": 96, "z_dim": 16, "dim_mult": [1, 2, 4, 4]},
        "text_encoder/config.json": UMT5_XXL,
    }  # fmt: skip
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    made = config()
    made.model.path = str(tmp_path)
    assert plan(made, read_shape(str(tmp_path)), 1) == plan(made, A14B, 1)
    assert launch_plan(made, 1) == f"{plan(made, A14B, 1).device_bytes / GIB:.0f} GiB (calculated)"
    (tmp_path / "vae" / "config.json").write_text(json.dumps({"_class_name": "Other"}))
    header = json.dumps({"weight": {"dtype": "F32", "shape": [3, 5], "data_offsets": [0, 60]}}).encode()
    (tmp_path / "vae" / "w.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(60))
    assert read_shape(str(tmp_path)).decoder_parameters == 15
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


def test_memory_in_the_guide_is_the_planner_s() -> None:
    """Both tables, to the GiB that they are rounded to."""
    rows = [line.strip("| ").split(" | ") for line in GUIDE.read_text(encoding="utf-8").splitlines() if "| " in line]
    frames = {int(cells[0]): [int(cell) for cell in cells[1:]] for cells in rows if cells[0].isdigit()}
    assert sorted(frames) == [17, 33, 81]
    for number, cells in frames.items():
        cases = [(shape, slots, off) for shape, slots in ((TI2V, 1), (A14B, 1), (A14B, 8)) for off in (False, True)]
        for cell, (shape, slots, off) in zip(cells, cases, strict=True):
            made = config(num_frames=number, offload_frozen=off)
            made.reward.kwargs = {"embedder": "glintr100.onnx"}
            assert cell == round(plan(made, shape, slots).device_bytes / GIB)


def test_the_planner_s_command_in_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = commands("trainer.diffusion_plan")
    assert diffusion_plan.main(line) == 0
    assert "fits 140.0 GiB" in capsys.readouterr().out

"""The planner's counts against the modules of diffusers and transformers on the meta device, and against a step."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from trainer import diffusion_plan
from trainer.planner.diffusion import (
    GIB,
    PUBLISHED,
    UMT5_XXL,
    PipelineShape,
    launch_plan,
    plan,
    read_shape,
    show,
)
from trainer.planner.diffusion_shapes import (
    TransformerShape,
    VaeShape,
    decode_memory,
    step_memory,
    umt5_parameters,
)
from verl_lite.config import load_schema, schema_of
from verl_lite.config.diffusion import DiffusionModelConfig, RewardFlowConfig
from verl_lite.errors import UserError
from workers.diffusion.lora import add_adapter

A14B, TI2V = PUBLISHED["wan2.2-i2v-a14b"], PUBLISHED["wan2.2-ti2v-5b"]


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def transformer(shape: TransformerShape, layers: int | None = None) -> Any:
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        return diffusers.WanTransformer3DModel(
            num_attention_heads=shape.num_attention_heads,
            attention_head_dim=shape.attention_head_dim,
            ffn_dim=shape.ffn_dim,
            num_layers=layers or shape.num_layers,
            in_channels=shape.in_channels,
            out_channels=shape.out_channels,
            text_dim=shape.text_dim,
        )


def vae(shape: VaeShape) -> Any:
    diffusers = pytest.importorskip("diffusers")
    config = {name: getattr(shape, name) for name in VaeShape.__dataclass_fields__}
    config |= {name: list(value) for name, value in config.items() if isinstance(value, tuple)}
    is_patched = shape.in_channels == 12
    with torch.device("meta"):
        return diffusers.AutoencoderKLWan(
            **config,
            patch_size=2 if is_patched else None,
            latents_mean=[0.0] * shape.z_dim,
            latents_std=[1.0] * shape.z_dim,
        )


# -- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "experts", "autoencoder", "clip"),
    [(A14B, 14.3e9, 127e6, 18900), (TI2V, 5.0e9, 705e6, 4725)],
    ids=["a14b", "5b"],
)
def test_counts_are_the_published_ones(shape: PipelineShape, experts: float, autoencoder: float, clip: int) -> None:
    """Wan2.2's names say 14 B and 5 B; Wan-VAE has 127 M, Wan2.2-VAE 705 M, umt5-xxl's encoder 5.68 B.

    Tokens of 81 frames of 480 x 480: 21 latent frames of 30 x 30 (VAE 8 x 8, patch 2 x 2), or of 15 x 15 (16 x 16).
    """
    assert shape.vae is not None
    assert shape.transformer.parameters == pytest.approx(experts, rel=2e-3)
    assert shape.vae.parameters == pytest.approx(autoencoder, rel=2e-3)
    assert shape.text_parameters == pytest.approx(5.68e9, rel=1e-3)
    assert shape.transformer.tokens(shape.vae.latents(81, 480, 480)) == clip


@pytest.mark.slow
@pytest.mark.parametrize("shape", [A14B, TI2V], ids=["a14b", "5b"])
def test_real_sizes_on_the_meta_device(shape: PipelineShape) -> None:
    """Whole experts from their config get an adapter as the worker gives it, and all counts are the planner's."""
    expert = transformer(shape.transformer)
    assert count(expert) == shape.transformer.parameters
    assert count(expert.blocks[0]) == shape.transformer.block_parameters
    assert shape.vae is not None
    assert count(vae(shape.vae)) == shape.vae.parameters
    model = DiffusionModelConfig(lora_rank=32)
    add_adapter(expert, model)
    learnt = [parameter for parameter in expert.parameters() if parameter.requires_grad]
    assert sum(parameter.numel() for parameter in learnt) == shape.transformer.adapter_parameters(
        32, model.target_modules
    )
    assert {parameter.dtype for parameter in learnt} == {torch.float32}


def test_text_encoder_on_the_meta_device() -> None:
    from transformers import UMT5Config, UMT5EncoderModel

    sizes: dict[str, Any] = dict(UMT5_XXL)
    config = UMT5Config(**sizes, feed_forward_proj="gated-gelu")
    with torch.device("meta"):
        encoder = UMT5EncoderModel(config)
    assert count(encoder) == umt5_parameters(config.to_dict()) == A14B.text_parameters


# -- activations -------------------------------------------------------------------------------------------------------


class SavedBytes:
    """Bytes of the storages that autograd saves, weights left out."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []

    def hooks(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
            storage = tensor.untyped_storage()
            self.storages[storage._cdata] = storage.nbytes()
            self.alive.append(tensor.detach())  # so that no address is used twice
        return tensor.detach()

    @property
    def total(self) -> int:
        return sum(self.storages.values())


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and RMS norm keep what their CUDA kernels keep: on the meta device PyTorch takes them apart."""

    def flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, False)[0]

    monkeypatch.setattr(F, "scaled_dot_product_attention", flash)
    monkeypatch.setattr(F, "rms_norm", FusedNorm.apply)


class FusedNorm(torch.autograd.Function):
    """Keeps its input as it came."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float | None) -> torch.Tensor:
        ctx.save_for_backward(x)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("shape", [A14B, TI2V], ids=["a14b", "5b"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_what_a_block_keeps(shape: PipelineShape, dtype: torch.dtype) -> None:
    """81 frames of 480 x 480: the difference of three blocks and one, as saved by autograd, is two blocks."""
    assert shape.vae is not None
    latents = shape.vae.latents(81, 480, 480)
    tokens = shape.transformer.tokens(latents)
    found = []
    for layers in (1, 3):
        expert = transformer(shape.transformer, layers).to(dtype)
        add_adapter(expert, DiffusionModelConfig(lora_rank=32))
        x = torch.empty(1, shape.transformer.in_channels, *latents, dtype=dtype, device="meta", requires_grad=True)
        timestep = torch.empty((1, tokens) if shape.expand_timesteps else (1,), device="meta")
        prompt = torch.empty(1, 512, 4096, dtype=dtype, device="meta")
        saved = SavedBytes()
        with saved.hooks():
            expert(x, timestep, prompt)
        found.append(saved.total)
    counted = step_memory(shape.transformer, tokens, 32, dtype.itemsize, timestep_per_token=shape.expand_timesteps)
    assert counted.block == pytest.approx((found[1] - found[0]) / 2, rel=0.01)


@pytest.mark.usefixtures("on_cuda")
@pytest.mark.parametrize("shape", [A14B, TI2V], ids=["a14b", "5b"])
def test_what_decoding_keeps(shape: PipelineShape) -> None:
    """480 x 480 in bf16: three latent frames, and the last of them alone."""
    assert shape.vae is not None
    decoder, found = vae(shape.vae).to(torch.bfloat16).requires_grad_(False), []
    for time in (2, 3):
        latents = (time, *shape.vae.latents(1, 480, 480)[1:])
        z = torch.empty(1, shape.vae.z_dim, *latents, dtype=torch.bfloat16, device="meta", requires_grad=True)
        saved = SavedBytes()
        with saved.hooks():
            decoder.decode(z)
        found.append(saved.total)
        counted = decode_memory(shape.vae, latents, 2)
        assert counted.chunks == pytest.approx(saved.total, rel=0.02)
    assert counted.chunk == pytest.approx(found[1] - found[0], rel=0.02)


@pytest.mark.slow
def test_planned_is_what_a_step_takes(tmp_path: Path) -> None:
    """The bytes of live tensors at the peak of a train step within 20%, without and with what saves memory."""
    pytest.importorskip("diffusers")
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
    always = plan(config(), A14B, 1).always
    assert always["high-noise expert"] == 2 * A14B.transformer.parameters
    assert always["text encoder"] == 2 * A14B.text_parameters
    # rank 32; in each of 40 blocks 8 layers of 5120 + 5120 and two of 5120 + 13824
    adapter = 40 * 32 * (8 * (5120 + 5120) + 2 * (5120 + 13824))
    assert always["adapter, gradient, Adam"] == pytest.approx(16 * adapter + 4 * adapter / 40)
    offloaded = plan(config(offload_frozen=True), A14B, 1)
    assert "high-noise expert" not in offloaded.always
    assert offloaded.host["high-noise expert"] == 2 * A14B.transformer.parameters


def test_sharding_divides_the_expert_that_learns_alone() -> None:
    one, eight = plan(config(), A14B, 1), plan(config(), A14B, 8)
    name = "low-noise expert, this rank's shard"
    assert eight.always[name] == one.always[name] / 8
    assert eight.always["high-noise expert"] == one.always["high-noise expert"]


def test_every_option_saves_where_it_should() -> None:
    """Each alone, from all off: the peak falls; recomputing steps and decoding together needs both."""
    off = dict.fromkeys(("checkpoint_steps", "checkpoint_decode", "enable_gradient_checkpointing"), False)
    whole = plan(config(**off), A14B, 1).peak
    for name in off:
        assert plan(config(**off | {name: True}), A14B, 1).peak < whole
    default = plan(config(), A14B, 1)
    assert default.peak < 0.15 * whole
    assert default.worst.name == "backward of decoding"


def test_kept_of_the_steps_by_hand() -> None:
    """Blocks recomputed, steps not: 4 steps of 40 inputs of 18900 x 5120 in bf16, and the output layer's in fp32."""
    phases = {phase.name: phase for phase in plan(config(checkpoint_steps=False), A14B, 1).phases}
    latents = 16 * 21 * 60 * 60 * 4
    expected = 4 * (40 * 18900 * 5120 * 2 + 18900 * 5120 * 4 + 3 * latents)
    assert phases["decoding"].parts["kept of the steps"] == pytest.approx(expected)


def test_verdict_in_words() -> None:
    text = show(config(), A14B, 1, 80)
    assert "does not fit 80 GiB" in text
    assert "fits 140 GiB" in show(config(), A14B, 1, 140)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--like", "wan2.2-ti2v-5b", "--memory_gb", "80", "data.num_frames=33", "data.side_multiple=32"]
    assert diffusion_plan.main(arguments) == 0
    out = capsys.readouterr().out
    assert "1 expert of 5.00 B parameters, adapter 80.6 M; clip 33 x 480 x 480: 2025 tokens; 1 device" in out
    assert diffusion_plan.main([*arguments[:3], "8"]) == 1
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
    assert read_shape(str(tmp_path)) == A14B
    made = config()
    made.model.path = str(tmp_path)
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
    assert "fits 140 GiB" in capsys.readouterr().out

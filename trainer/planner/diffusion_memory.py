"""Predicts the memory of a reward-flow run on one device, for each module and each phase of a step.

Inputs are the options of `trainer.main_reward_flow` and the config files in `model.path` (no weights are read) or those
of a published model. The training code (`workers.diffusion.reward_policy`) runs a step on the meta device: tensors
have shapes but no data. The plan counts the bytes of all tensors that are alive at the same time. `python -m
tests.bench reward_flow_memory` compares the plan with a measured step.
"""

import json
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from trainer.planner.memory_table import GIB, MemoryPlan
from trainer.planner.networks import BF16, FP32, MOMENTS, ranks_of_a_copy
from verl_lite.config.diffusion import RewardFlowConfig
from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject
from verl_lite.visual_rewards.base import VisualScore
from workers.diffusion.lora import add_adapter
from workers.diffusion.pipeline import LONGEST_PROMPT, DiffusionParts, LatentCodec, component_class
from workers.diffusion.reward_policy import FlowInputs, RewardFlowPolicy

# glintr100 (65 M parameters) and scrfd_10g (4 M), fp32
FACE_MODEL_BYTES = 280_000_000
# activations of an IResNet-100 at 112 x 112, fp32; estimated
FACE_BYTES_PER_FRAME = 100_000_000

# entries of `bytes_of_steps` besides the phases
KEPT = "kept for the backward pass"
FROZEN = "frozen elements"
TRAINABLE = "trainable elements"

Size = tuple[int, int, int]
"""(frames, height, width)."""

ComponentConfig = JsonObject
"""The content of a config file of diffusers or transformers."""

# huggingface/diffusers, scripts/convert_wan_to_diffusers.py (Wan2.2-I2V-14B-720p, Wan2.2-TI2V-5B,
# vae22_diffusers_config); google/umt5-xxl, config.json
UMT5_XXL: ComponentConfig = {
    "d_model": 4096,
    "d_kv": 64,
    "num_heads": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "vocab_size": 256384,
    "feed_forward_proj": "gated-gelu",
}
_A14B: ComponentConfig = {
    "attention_head_dim": 128,
    "text_dim": 4096,
    "num_attention_heads": 40,
    "ffn_dim": 13824,
    "num_layers": 40,
    "in_channels": 36,
    "out_channels": 16,
}
_5B: ComponentConfig = {
    "attention_head_dim": 128,
    "text_dim": 4096,
    "num_attention_heads": 24,
    "ffn_dim": 14336,
    "num_layers": 30,
    "in_channels": 48,
    "out_channels": 48,
}
_VAE22: ComponentConfig = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "is_residual": True,
    "patch_size": 2,
    "in_channels": 12,
    "out_channels": 12,
    "scale_factor_spatial": 16,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}
_COMPONENTS: ComponentConfig = {
    "vae": ["diffusers", "AutoencoderKLWan"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
}
PUBLISHED: dict[str, dict[str, ComponentConfig]] = {
    "wan2.2-i2v-a14b": {
        "model_index": {
            **_COMPONENTS,
            "transformer_2": ["diffusers", "WanTransformer3DModel"],
            "boundary_ratio": 0.9,
        },
        "transformer": _A14B,
        "vae": {},
        "text_encoder": UMT5_XXL,
    },
    "wan2.2-ti2v-5b": {
        "model_index": {**_COMPONENTS, "expand_timesteps": True},
        "transformer": _5B,
        "vae": _VAE22,
        "text_encoder": UMT5_XXL,
    },
}
"""Contents of the config files of a model's folder, by the name of the model."""


@dataclass(frozen=True, eq=False)
class PipelineShape:
    """Shapes of a pipeline.

    Attributes:
        transformer: Config of the transformer. It is built later, with fewer layers.
        vae, text_encoder: Frozen modules on the meta device.
        experts: Number of transformers.
        expand_timesteps: See `DiffusionParts`.
        text_tokens: Length to which prompts are padded.
        boundary_ratio: See `DiffusionParts`.
    """

    transformer: ComponentConfig
    vae: nn.Module
    text_encoder: nn.Module
    experts: int
    expand_timesteps: bool
    text_tokens: int
    boundary_ratio: float | None


@lru_cache
def published_shape(name: str) -> PipelineShape:
    """Returns the shape of a model in `PUBLISHED`."""
    return _shape(PUBLISHED[name])


def read_shape(path: str) -> PipelineShape:
    """Reads the shape of the pipeline in a folder from its config files. Raises UserError if one is missing."""
    folder = Path(path).expanduser()
    files = {}
    for name in ("transformer", "vae", "text_encoder"):
        files[name] = folder / name / "config.json"
    files["model_index"] = folder / "model_index.json"
    tokenizer_file = folder / "tokenizer" / "tokenizer_config.json"
    if tokenizer_file.is_file():
        files["tokenizer"] = tokenizer_file

    # the tokenizer's config is optional: without it, prompts have LONGEST_PROMPT tokens
    configs = {}
    for name, file in files.items():
        if not file.is_file():
            raise UserError(
                f"model.path: {file} is missing; expected a pipeline in diffusers format, or --like "
                f"{', '.join(PUBLISHED)}"
            )
        configs[name] = json.loads(file.read_text(encoding="utf-8"))
    return _shape(configs)


def _shape(configs: Mapping[str, ComponentConfig]) -> PipelineShape:
    """Returns the shape of a pipeline with these config files, by the name of the component."""
    index = configs["model_index"]
    # [null, null] also means that there is none
    second_transformer = index.get("transformer_2") or [None]
    has_two_experts = bool(second_transformer[0])
    tokenizer_config = configs.get("tokenizer", {})
    # `PromptEncoder` pads prompts to this length
    model_max_length = int(tokenizer_config.get("model_max_length") or LONGEST_PROMPT)
    return PipelineShape(
        transformer=configs["transformer"],
        vae=_on_meta("vae", index["vae"], configs["vae"]),
        text_encoder=_on_meta("text_encoder", index["text_encoder"], configs["text_encoder"]),
        experts=2 if has_two_experts else 1,
        expand_timesteps=bool(index.get("expand_timesteps", False)),
        boundary_ratio=index.get("boundary_ratio"),
        text_tokens=min(LONGEST_PROMPT, model_max_length),
    )


def _on_meta(name: str, entry: list[str], config: ComponentConfig) -> nn.Module:
    """Builds a frozen component of diffusers or transformers on the meta device.

    Args:
        name: Name of the component.
        entry: Its entry in model_index.json: the library and the class.
        config: Its config file.

    Raises:
        UserError: If its class cannot be built from a config.
    """
    component = component_class(name, entry)
    with torch.device("meta"):
        if hasattr(component, "from_config"):  # of diffusers
            module = component.from_config(config)
        elif hasattr(component, "config_class"):  # of transformers
            module = component(component.config_class(**config))
        else:
            raise UserError(f"model.path: cannot plan the memory of {name}: {'.'.join(entry)} has no from_config")
    return module.requires_grad_(False)


def count(module: nn.Module, *, learns: bool = False) -> int:
    """Returns the number of a module's parameter elements, or with learns=True of its trainable ones."""
    elements = 0
    for parameter in module.parameters():
        if parameter.requires_grad or not learns:
            elements += parameter.numel()
    return elements


# -- a step on the meta device -----------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages that operations inside the context allocate: current (`now`) and `peak`."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._counted: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Runs an operation and counts the storages that it allocates."""
        # a view, and the result of an operation in place, have the storage of an argument, which is counted already
        argument_storages = {_storage_key(tensor) for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            key = _storage_key(tensor)
            if key in argument_storages or key in self._counted:
                continue
            # several tensors can be views of one storage, which is allocated and freed once
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            self._counted.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, key, size)
        return result

    def _remove(self, key: int, size: int) -> None:
        """Subtracts a storage that was freed. Its key may then be that of another storage."""
        self._counted.discard(key)
        self.now -= size

    @contextmanager
    def peak_of(self, peaks: dict[str, float], name: str) -> Iterator[None]:
        """Stores the peak of live bytes inside the context as peaks[name]."""
        self.peak = self.now
        with self, _fused_kernels():
            yield
        peaks[name] = float(self.peak)


def _tensors(values: object) -> Iterator[torch.Tensor]:
    """Yields the tensors in nested tuples, lists and dicts."""
    for value in tree_iter(values):
        if isinstance(value, torch.Tensor):
            yield value


def _storage_key(tensor: torch.Tensor) -> int:
    """Returns a number that all views of one storage share while that storage is alive."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _fused_kernels() -> Iterator[None]:
    """Makes attention and RMS norm save the same tensors for backward as their fused kernels on a GPU.

    On the meta device PyTorch decomposes both into operations that save more.
    """

    def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: object) -> torch.Tensor:
        outputs = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, False, False)
        return outputs[0]

    def norm(
        x: torch.Tensor,
        shape: Sequence[int],
        weight: torch.Tensor | None = None,
        eps: float | None = None,
    ) -> torch.Tensor:
        outputs = torch.ops.aten._fused_rms_norm(x, shape, weight, eps)
        return outputs[0]

    # the modules look both functions up in torch.nn.functional at each call
    original_attention = F.scaled_dot_product_attention
    original_norm = F.rms_norm
    F.scaled_dot_product_attention = attention  # type: ignore[assignment]
    F.rms_norm = norm  # type: ignore[assignment]
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original_attention
        F.rms_norm = original_norm


def policy_of(config: RewardFlowConfig, shape: PipelineShape, dtype: torch.dtype, layers: int) -> RewardFlowPolicy:
    """Builds the trained network on the meta device.

    Args:
        config: Options of the run.
        shape: Shapes of the pipeline.
        dtype: The compute dtype.
        layers: Number of blocks per transformer.
    """
    from diffusers import WanTransformer3DModel

    experts: list[WanTransformer3DModel] = []
    for _ in range(shape.experts):
        with torch.device("meta"):
            expert = WanTransformer3DModel.from_config({**shape.transformer, "num_layers": layers})
        experts.append(expert.requires_grad_(False))
    # the text encoder stays as it is: `plan` computes its bytes from the number of its elements
    for module in (*experts, shape.vae):
        # diffusers' own `to` would log a warning
        nn.Module.to(module, dtype)

    # the low-noise one, as in `load_pipeline`
    trained_expert = experts[-1]
    add_adapter(trained_expert, config.model)
    if config.model.enable_gradient_checkpointing:
        trained_expert.enable_gradient_checkpointing()
    parts = DiffusionParts(
        low_noise=trained_expert,
        high_noise=experts[0] if shape.experts > 1 else None,
        codec=LatentCodec(shape.vae),
        text_encoder=shape.text_encoder,
        tokenizer=SimpleNamespace(model_max_length=shape.text_tokens),
        boundary_ratio=config.model.boundary_ratio or shape.boundary_ratio,
        expand_timesteps=shape.expand_timesteps,
    )
    # `plan` counts offloaded modules
    model_without_offload = replace(config.model, offload_frozen=False)
    without_offload = replace(config, model=model_without_offload)
    policy = RewardFlowPolicy(parts, _WeightlessReward(), without_offload, torch.device("meta"))
    return policy.train()


class _WeightlessReward:
    """A reward without weights, which no phase computes. `plan` adds the bytes of the configured reward."""

    def prepare(self, reference_frames: torch.Tensor) -> object:
        raise NotImplementedError

    def score(self, frames: torch.Tensor, reference: object) -> VisualScore:
        raise NotImplementedError

    def to(self, device: object) -> None:
        """Does nothing, as there are no weights to move."""


def clip_of(config: RewardFlowConfig) -> Size:
    """Returns the clip's (frames, height, width); a square of `data.max_pixels` if no size is configured."""
    data = config.data
    largest_side = int(math.sqrt(data.max_pixels))
    side = largest_side // data.side_multiple * data.side_multiple
    return data.num_frames, data.height or side, data.width or side


def bytes_of_coding(policy: RewardFlowPolicy, video: torch.Tensor) -> tuple[dict[str, float], torch.Tensor]:
    """Returns the peak of live bytes in each phase of encoding, decoding and reward, and `FlowInputs.condition`.

    The peaks do not include tensors that the denoising steps keep.
    """
    peaks: dict[str, float] = {}
    with torch.no_grad(), LiveBytes().peak_of(peaks, "first frame"):
        condition = policy._condition(video)

    live = LiveBytes()
    latents = _empty_latents(policy, video)
    with live.peak_of(peaks, "decoding"):
        # any scalar of the frames has the same backward pass; a variable for the frames would keep them alive in it
        loss = policy.decode(latents.requires_grad_()).mean()
    # the reward runs on the decoded frames, before their backward pass
    peaks["reward"] = float(live.now)
    with live.peak_of(peaks, "backward of decoding"):
        loss.backward()
    return peaks, condition


def _empty_latents(policy: RewardFlowPolicy, video: torch.Tensor) -> torch.Tensor:
    """Returns latents for a video of the shape (B, frames, channels, height, width)."""
    batch, frames, _, height, width = video.shape
    latent_shape = policy.codec.latent_shape(frames, height, width)
    return torch.empty(batch, *latent_shape, device="meta")


def bytes_of_steps(
    policy: RewardFlowPolicy,
    video: torch.Tensor,
    condition: torch.Tensor,
    tokens: int,
) -> dict[str, float]:
    """Returns the peak of live bytes in each phase of the denoising steps.

    The result also has the bytes that the steps keep for the backward pass (KEPT), and the numbers of frozen and of
    trainable elements of the trained expert (FROZEN, TRAINABLE). `_step_bytes` extrapolates them all in the same way.
    """
    trained_expert = policy.model
    noise = _empty_latents(policy, video)
    clips = len(video)
    prompts = torch.empty(clips, tokens, trained_expert.config.text_dim, device="meta")
    inputs = FlowInputs(
        noise=noise,
        condition=condition,
        prompts=prompts,
        references=[],
        places=torch.empty(0),
        rows=clips,
        is_counting=True,
    )

    trainable = count(trained_expert, learns=True)
    peaks = {
        FROZEN: float(count(trained_expert) - trainable),
        TRAINABLE: float(trainable),
        "high-noise steps": 0.0,
    }
    # one counter for all phases, because the tensors that the steps keep are alive in the backward pass
    live = LiveBytes()
    high_noise_expert = policy._high_noise[0]
    if high_noise_expert is not None:
        # the high-noise expert is frozen, and its steps keep nothing for a backward pass
        with torch.no_grad(), live.peak_of(peaks, "high-noise steps"):
            # without a variable for the velocity, which would keep its tensors alive in the later phases
            policy._velocity(high_noise_expert, inputs)(noise, 1.0)
    with live.peak_of(peaks, "steps"):
        latents, divergence = policy._sample(inputs, True)
    peaks[KEPT] = float(live.now)
    with live.peak_of(peaks, "backward of the steps"):
        (latents.mean() + divergence.mean()).backward()
    return peaks


def plan(config: RewardFlowConfig, shape: PipelineShape, slots: int, *, size: int = BF16) -> MemoryPlan:
    """Predicts the memory of a training step. See `_step_bytes` for its measurement on the meta device.

    Args:
        config: Options of the run.
        shape: Shapes of the pipeline.
        slots: Ranks of the run; the host memory is computed as if all of them were on one node.
        size: Bytes of an element in the compute dtype: 2 for bf16 (CUDA), 4 for fp32 (CPU).
    """
    dtype = torch.float32 if size == FP32 else torch.bfloat16
    step = _step_bytes(config, shape, dtype)
    always = _constant_bytes(config, shape, slots, size, step)

    # an embedder or detector in an ONNX file is taken for the published face models
    face_bytes = 0.0
    has_onnx_model = any(".onnx" in str(value) for value in config.reward.kwargs.values())
    if has_onnx_model:
        num_frames, _, _ = clip_of(config)
        face_bytes = float(FACE_BYTES_PER_FRAME * num_frames)
        always["reward"] = float(FACE_MODEL_BYTES)

    # frozen modules that only one phase uses are on the host meanwhile, or always on the device
    other_experts = shape.experts - 1
    moved = {
        "high-noise expert": other_experts * size * step.frozen_elements,
        "text encoder": float(size * count(shape.text_encoder)),
    }
    host: dict[str, float] = {}
    if config.model.offload_frozen:
        host = _without_zeros(moved)
    else:
        always |= moved

    peaks = step.peaks
    # what the steps keep stays until their backward pass, whose own peak includes it
    kept_by_steps = {"kept by the steps": step.kept_by_steps}
    phases = {
        "prompts": {"text encoder": host.get("text encoder", 0.0)},
        "first frame": {"VAE": peaks["first frame"]},
        "high-noise steps": {
            "high-noise expert": host.get("high-noise expert", 0.0),
            "activations": peaks["high-noise steps"],
        },
        "steps": {"activations": peaks["steps"]},
        "decoding": kept_by_steps | {"activations": peaks["decoding"]},
        "reward": kept_by_steps | {"frames": peaks["reward"], "faces": face_bytes},
        "backward of decoding": kept_by_steps | {"activations": peaks["backward of decoding"]},
        "backward of the steps": {"activations": peaks["backward of the steps"]},
    }
    return MemoryPlan(_without_zeros(always), phases, host=host)


def _without_zeros(sizes: Mapping[str, float]) -> dict[str, float]:
    """Returns the sizes that are not 0."""
    return {name: size for name, size in sizes.items() if size}


@dataclass(frozen=True)
class _StepBytes:
    """The measured bytes of a step, and the sizes of the trained expert.

    Attributes:
        peaks: Peak of live bytes by phase.
        kept_by_steps: Bytes that the denoising steps keep for the backward pass.
        frozen_elements: Number of the expert's frozen parameters.
        trainable_elements: Number of its trainable parameters.
        gathered_elements: Number of frozen parameters in its root and in two blocks.
        gathered_trainable: Number of trainable parameters in its root and in two blocks.
    """

    peaks: dict[str, float]
    kept_by_steps: float
    frozen_elements: float
    trainable_elements: float
    gathered_elements: float
    gathered_trainable: float


def _constant_bytes(
    config: RewardFlowConfig,
    shape: PipelineShape,
    slots: int,
    size: int,
    step: _StepBytes,
) -> dict[str, float]:
    """Returns the bytes of the trained expert and of the VAE, which are on the device in every phase.

    Args:
        config: Options of the run.
        shape: Shapes of the pipeline.
        slots: Ranks of the run.
        size: Bytes of an element in the compute dtype.
        step: The measured bytes of a step.
    """
    fsdp = config.actor.fsdp_config
    ranks = ranks_of_a_copy(fsdp, slots)
    # without resharding, FSDP keeps all gathered blocks from the forward to the end of the backward pass
    gathered = step.frozen_elements
    if fsdp.reshard_after_forward:
        # the adapter is in fp32
        gathered = step.gathered_elements + FP32 / size * step.gathered_trainable
    return {
        "low-noise expert, this rank's shard": size * step.frozen_elements / ranks,
        "gathered: root and two blocks": size * gathered,
        "adapter, Adam": (FP32 + MOMENTS) * step.trainable_elements / ranks,
        "VAE": float(size * count(shape.vae)),
    }


def _step_bytes(config: RewardFlowConfig, shape: PipelineShape, dtype: torch.dtype) -> _StepBytes:
    """Runs a step with transformers of two and of three blocks, and extrapolates to all blocks."""
    num_frames, height, width = clip_of(config)
    clips = config.actor.micro_batch_size_per_gpu
    video = torch.empty(clips, num_frames, 3, height, width, device="meta")

    policy_with_two = policy_of(config, shape, dtype, layers=2)
    policy_with_three = policy_of(config, shape, dtype, layers=3)
    coding_peaks, condition = bytes_of_coding(policy_with_two, video)
    two_blocks = bytes_of_steps(policy_with_two, video, condition, shape.text_tokens)
    three_blocks = bytes_of_steps(policy_with_three, video, condition, shape.text_tokens)

    # all blocks are alike, so each further block adds the difference between the two measured transformers
    more_blocks = int(shape.transformer["num_layers"]) - 2
    steps = {}
    for name, value in two_blocks.items():
        per_block = three_blocks[name] - value
        steps[name] = value + more_blocks * per_block
    return _StepBytes(
        peaks=coding_peaks | steps,
        kept_by_steps=steps[KEPT],
        frozen_elements=steps[FROZEN],
        trainable_elements=steps[TRAINABLE],
        # FSDP gathers the root and two blocks at a time, which are a transformer of two blocks
        gathered_elements=two_blocks[FROZEN],
        gathered_trainable=two_blocks[TRAINABLE],
    )


def launch_plan(config: RewardFlowConfig, slots: int) -> str:
    """Returns the memory that one device needs, as text for the table at launch; "" if config files are missing."""
    try:
        shape = read_shape(str(config.model.path))
        memory = plan(config, shape, slots)
    except UserError:
        return ""
    return f"{memory.device_bytes / GIB:.0f} GiB (calculated)"

"""What the parts of a Wan pipeline weigh, from their config files alone: parameters, and what the backward pass keeps.

All counts are of numbers or bytes for one sample; `diffusion` beside this file puts them together. They follow the
modules of diffusers 0.42 (WanTransformer3DModel with an adapter on its linear layers, AutoencoderKLWan) and
transformers' UMT5EncoderModel, operation by operation: a frozen linear layer keeps nothing, its adapter its input, a
convolution its padded input, a norm its input in fp32, flash attention query, key, value, output. Tests compare them
with the modules themselves on the meta device.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

FP32 = 4
CACHED_FRAMES = 2  # that a causal convolution of kernel 3 keeps of the chunk before


@dataclass(frozen=True)
class TransformerShape:
    """A WanTransformer3DModel; fields as in its config. text_tokens: length of a prompt's embedding."""

    num_attention_heads: int
    attention_head_dim: int
    ffn_dim: int
    num_layers: int
    in_channels: int
    out_channels: int
    text_dim: int = 4096
    freq_dim: int = 256
    patch_size: tuple[int, int, int] = (1, 2, 2)
    cross_attn_norm: bool = True
    text_tokens: int = 512

    @classmethod
    def of(cls, config: dict[str, Any]) -> TransformerShape:
        """From transformer/config.json."""
        known = {name: config[name] for name in cls.__dataclass_fields__ if name in config}
        known["patch_size"] = tuple(config.get("patch_size", (1, 2, 2)))
        known["out_channels"] = config.get("out_channels") or config["in_channels"]
        return cls(**known)

    @property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.num_attention_heads * self.attention_head_dim

    def tokens(self, latents: Sequence[int]) -> int:
        """Of a clip whose latents are (T, h, w)."""
        return math.prod(size // patch for size, patch in zip(latents, self.patch_size, strict=True))

    @property
    def block_parameters(self) -> int:
        """Of one block, which FSDP gathers at one time."""
        width, inner = self.hidden, self.ffn_dim
        attention = 4 * (width * width + width) + 2 * width
        return 2 * attention + 2 * width * self.cross_attn_norm + 2 * width * inner + inner + width + 6 * width

    @property
    def parameters(self) -> int:
        """All of it, without an adapter."""
        width, patch = self.hidden, math.prod(self.patch_size)
        time = self.freq_dim * width + width + width * width + width + 6 * (width * width + width)
        text = self.text_dim * width + width + width * width + width
        ends = patch * self.in_channels * width + width + width * patch * self.out_channels + patch * self.out_channels
        return self.num_layers * self.block_parameters + time + text + ends + 2 * width

    def linears(self) -> Iterator[tuple[str, int, int]]:
        """Each linear layer: name, inputs, outputs."""
        width, inner = self.hidden, self.ffn_dim
        for block in range(self.num_layers):
            for attention in ("attn1", "attn2"):
                for name in ("to_q", "to_k", "to_v", "to_out.0"):
                    yield f"blocks.{block}.{attention}.{name}", width, width
            yield f"blocks.{block}.ffn.net.0.proj", width, inner
            yield f"blocks.{block}.ffn.net.2", inner, width
        yield "condition_embedder.time_embedder.linear_1", self.freq_dim, width
        yield "condition_embedder.time_embedder.linear_2", width, width
        yield "condition_embedder.time_proj", width, 6 * width
        yield "condition_embedder.text_embedder.linear_1", self.text_dim, width
        yield "condition_embedder.text_embedder.linear_2", width, width
        yield "proj_out", width, math.prod(self.patch_size) * self.out_channels

    def adapter_parameters(self, rank: int, targets: Sequence[str]) -> int:
        """Of an adapter of this rank beside the linear layers that are named so, or whose name ends so, as for peft."""
        return sum(
            rank * (inputs + outputs)
            for name, inputs, outputs in self.linears()
            if any(f".{name}".endswith(f".{target}") for target in targets)
        )


@dataclass(frozen=True)
class StepMemory:
    """Bytes of one denoising step of one sample.

    block_input: what a checkpoint around a block keeps. block: what a block's backward pass needs, recomputed or kept.
    shared: kept once a step for all blocks (modulation of each token, output layer). forward_work, backward_work: what
    comes and goes inside a block, beside those.
    """

    block_input: int
    block: int
    shared: int
    forward_work: int
    backward_work: int


def step_memory(shape: TransformerShape, tokens: int, rank: int, size: int, *, timestep_per_token: bool) -> StepMemory:
    """Of one step.

    tokens: of the clip. rank: of the adapter, on all linear layers of the blocks; computes in its input's dtype.
    size: bytes of a number in the dtype of the weights.
    timestep_per_token: the layout of TI2V, whose modulation is a tensor of all tokens.
    """
    wide, inner = tokens * shape.hidden, tokens * shape.ffn_dim
    text = shape.text_tokens * shape.hidden
    is_alone = size == FP32
    adapters = size * (3 * wide + inner)  # layers that read the same tensor keep it once
    block = (
        (2 + shape.cross_attn_norm) * FP32 * wide  # three norms
        + size * (9 * wide + 3 * text)  # query and key before their norms, query, key, value, output; twice
        + size * inner  # before the activation function
        + adapters
        + size * rank * (8 * tokens + 2 * shape.text_tokens)  # inside the adapters
        + 2 * FP32 * tokens * shape.num_attention_heads  # log-sum-exp of both attentions
        + 8 * FP32 * wide * timestep_per_token  # modulation: table + embedding, 1 + each of two scales
    )
    return StepMemory(
        block_input=size * wide,
        block=block,
        shared=FP32 * wide + 7 * size * wide * timestep_per_token,
        forward_work=(2 * FP32 + size) * inner + (4 if is_alone else 6) * size * wide + 24 * wide * timestep_per_token,
        backward_work=(3 * FP32 if is_alone else 2 * FP32) * inner,
    )


# -- the VAE -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VaeShape:
    """An AutoencoderKLWan; fields as in its config."""

    base_dim: int = 96
    decoder_base_dim: int | None = None
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    is_residual: bool = False
    in_channels: int = 3
    out_channels: int = 3
    scale_factor_spatial: int = 8
    scale_factor_temporal: int = 4

    @classmethod
    def of(cls, config: dict[str, Any]) -> VaeShape:
        """From vae/config.json."""
        known: dict[str, Any] = {}
        for name in cls.__dataclass_fields__:
            value = config.get(name)
            if value is not None:
                known[name] = tuple(value) if isinstance(value, list) else value
        return cls(**known)

    def latents(self, frames: int, height: int, width: int) -> tuple[int, int, int]:
        """(T, h, w) of a clip."""
        space = self.scale_factor_spatial
        return (frames - 1) // self.scale_factor_temporal + 1, height // space, width // space

    def decoder(self) -> Iterator[Layer]:
        """The decoder's layers in order, for a chunk of one latent frame (not the first chunk, which is smaller)."""
        base = self.decoder_base_dim or self.base_dim
        upward, mult = tuple(reversed(self.temperal_downsample)), self.dim_mult
        dims = [base * factor for factor in (mult[-1], *reversed(mult))]
        yield Layer("conv", self.z_dim, dims[0])
        yield from _middle(dims[0])
        frames, scale = 1, 1
        for i, (inputs, outputs) in enumerate(zip(dims[:-1], dims[1:], strict=True)):
            inputs = inputs // 2 if i and not self.is_residual else inputs
            for _ in range(self.num_res_blocks + 1):
                yield from _residual(inputs, outputs, frames, scale)
                inputs = outputs
            if i < len(mult) - 1:
                if upward[i]:
                    yield Layer("time", outputs, 2 * outputs, frames, scale)
                    frames *= 2
                scale *= 2
                yield Layer("upsample", outputs, outputs if self.is_residual else outputs // 2, frames, scale)
        yield Layer("norm", dims[-1], dims[-1], frames, scale)
        yield Layer("conv", dims[-1], self.out_channels, frames, scale)

    def encoder(self) -> Iterator[Layer]:
        """The encoder's layers in order; their frames and scales are left at 1."""
        dims = [self.base_dim * factor for factor in (1, *self.dim_mult)]
        yield Layer("conv", self.in_channels, dims[0])
        for i, (inputs, outputs) in enumerate(zip(dims[:-1], dims[1:], strict=True)):
            for _ in range(self.num_res_blocks):
                yield from _residual(inputs, outputs)
                inputs = outputs
            if i < len(self.dim_mult) - 1:
                yield Layer("upsample", outputs, outputs)  # a convolution of the same size, downwards
                if self.temperal_downsample[i]:
                    yield Layer("time", outputs, outputs)
        yield from _middle(dims[-1])
        yield Layer("norm", dims[-1], dims[-1])
        yield Layer("conv", dims[-1], 2 * self.z_dim)

    @property
    def parameters(self) -> int:
        """Encoder, decoder, and the two 1 x 1 x 1 convolutions between."""
        ends = (2 * self.z_dim) ** 2 + 2 * self.z_dim + self.z_dim**2 + self.z_dim
        return ends + sum(layer.parameters for layer in (*self.encoder(), *self.decoder()))


@dataclass(frozen=True)
class Layer:
    """A layer of the VAE: kind, channels, and its input's frames and scale (times the latents' height and width).

    conv: 3 x 3 x 3, causal. time: 3 x 1 x 1, causal. upsample: 3 x 3 on a picture already twice as large. shortcut:
    1 x 1 x 1. norm: with the activation function behind it. attention: over one frame.
    """

    kind: str
    inputs: int
    outputs: int
    frames: int = 1
    scale: int = 1

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        if self.kind == "norm":
            return self.inputs
        if self.kind == "attention":
            return self.inputs + 3 * self.inputs * (self.inputs + 1) + self.inputs * (self.inputs + 1)
        kernel = {"conv": 27, "time": 3, "upsample": 9, "shortcut": 1}[self.kind]
        return self.inputs * self.outputs * kernel + self.outputs

    def kept(self, height: int, width: int, size: int, *, is_first: bool = False) -> int:
        """Bytes that its backward pass needs, in a dtype of `size` bytes. height, width: of the latents. is_first: of
        the first chunk, which is one frame throughout."""
        high, wide = height * self.scale, width * self.scale
        area, frames = self.inputs * high * wide, 1 if is_first else self.frames
        match self.kind:
            case "conv":
                return size * self.inputs * (frames + CACHED_FRAMES) * (high + 2) * (wide + 2)
            case "time":
                return 0 if is_first else size * area * (frames + CACHED_FRAMES)
            case "norm":  # the norm's input and each pixel's length in fp32, and the activation function's input
                return (FP32 + size) * area * frames + 2 * FP32 * high * wide * frames
            case "attention":  # norm, query, key, value, output, projection
                return (FP32 + 6 * size) * area * frames
            case _:
                return size * area * frames

    def cached(self, height: int, width: int, size: int) -> int:
        """Bytes that it keeps for the next chunk."""
        if self.kind not in ("conv", "time"):
            return 0
        return size * self.inputs * CACHED_FRAMES * height * width * self.scale**2


def _residual(inputs: int, outputs: int, frames: int = 1, scale: int = 1) -> Iterator[Layer]:
    if inputs != outputs:
        yield Layer("shortcut", inputs, outputs, frames, scale)
    for before in (inputs, outputs):
        yield Layer("norm", before, before, frames, scale)
        yield Layer("conv", before, outputs, frames, scale)


def _middle(width: int) -> Iterator[Layer]:
    yield from _residual(width, width)
    yield Layer("attention", width, width)
    yield from _residual(width, width)


@dataclass(frozen=True)
class DecodeMemory:
    """Bytes of decoding one sample.

    chunk: what the backward pass of one chunk needs. cache: what one chunk hands to the next. chunks, caches: of all
    chunks, the first of which are smaller. work: what comes and goes inside a chunk. frames: the clip.
    """

    chunk: int
    cache: int
    chunks: int
    caches: int
    work: int
    frames: int


def decode_memory(shape: VaeShape, latents: tuple[int, int, int], size: int) -> DecodeMemory:
    """Of latents (T, h, w)."""
    time, height, width = latents
    layers = list(shape.decoder())
    chunk = sum(layer.kept(height, width, size) for layer in layers)
    first = sum(layer.kept(height, width, size, is_first=True) for layer in layers)
    cache = sum(layer.cached(height, width, size) for layer in layers)
    frames = (time - 1) * shape.scale_factor_temporal + 1
    work = max(layer.inputs * layer.frames * layer.scale**2 for layer in layers) * height * width * (FP32 + 2 * size)
    return DecodeMemory(
        chunk=int(chunk),
        cache=int(cache),
        chunks=int(first + (time - 1) * chunk),
        caches=int(max(0.0, time - 1.5) * cache),  # the first hands on one frame in place of two
        work=int(work),
        frames=FP32 * 3 * frames * height * width * shape.scale_factor_spatial**2,
    )


# -- the text encoder --------------------------------------------------------------------------------------------------


def umt5_parameters(config: dict[str, Any]) -> int:
    """Of an UMT5EncoderModel, from text_encoder/config.json."""
    width, inner = config["d_model"], config["num_heads"] * config["d_kv"]
    attention = 4 * width * inner + config.get("relative_attention_num_buckets", 32) * config["num_heads"]
    gated = 3 if "gated" in config.get("feed_forward_proj", "gated-gelu") else 2
    layer = attention + gated * width * config["d_ff"] + 2 * width
    return int(config["vocab_size"] * width + config["num_layers"] * layer + width)

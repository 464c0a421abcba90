"""Loads an image-to-video pipeline from a folder in diffusers format, for training a LoRA adapter.

Two layouts are supported, both from Wan2.2. I2V-A14B has two experts: `transformer` denoises at high noise,
`transformer_2` at low noise, and `boundary_ratio` separates them; their input is the noisy latents concatenated with a
mask and the latents of the first frame. TI2V-5B has one expert, which takes one timestep per token; its first latent
frame is replaced by that of the clip. A component whose library in model_index.json is neither diffusers nor
transformers is imported from the module that model_index.json names.

Functions import diffusers where they use it, because the import takes seconds and other runs do not need it.
"""

from __future__ import annotations

import html
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from verl_lite.config.diffusion import EXPERTS, DiffusionModelConfig
from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject
from workers.diffusion.memory_saving import Placement
from workers.policy.model_errors import user_error_on_failure

if TYPE_CHECKING:
    from diffusers import WanTransformer3DModel

INDEX = "model_index.json"
NEEDED = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
"""Components without which a folder is no supported pipeline."""
LONGEST_PROMPT = 512
"""Maximum number of prompt tokens of a Wan transformer."""


class LatentCodec:
    """Converts clips to latents and back with a video VAE; latents are normalised as the transformer expects them.

    Args:
        vae: frozen AutoencoderKLWan of diffusers, or a module with the same `decode` and `config` and a method
            `encode_video(video) -> latents`. It computes in the dtype of its weights; latents and frames are fp32.
    """

    def __init__(self, vae: nn.Module) -> None:
        # one of the two classes in the docstring, which have members that nn.Module does not declare
        self.vae: Any = vae
        config: Any = self.vae.config
        self.channels = int(config.z_dim)
        self.temporal_factor = int(config.scale_factor_temporal)
        self.spatial_factor = int(config.scale_factor_spatial)
        # one number per channel of the latents (b, C, T, h, w)
        means = torch.tensor(config.latents_mean, dtype=torch.float32)
        stds = torch.tensor(config.latents_std, dtype=torch.float32)
        self._mean = means.view(1, -1, 1, 1, 1)
        self._std = stds.view(1, -1, 1, 1, 1)

    def latent_shape(self, frames: int, height: int, width: int, multiple: int = 1) -> tuple[int, int, int, int]:
        """Returns the shape (C, T, h, w) of a clip's latents.

        Args:
            frames, height, width: size of the clip in pixels.
            multiple: required divisor of h and w (the patch size of the transformer).

        Raises:
            UserError: decoding the latents would not restore the clip's size.
        """
        # the first frame has a latent frame of its own, and each later latent frame holds several frames
        latent_frames_after_first, frames_left = divmod(frames - 1, self.temporal_factor)
        side_multiple = self.spatial_factor * multiple
        if frames_left or height % side_multiple or width % side_multiple:
            raise UserError(
                f"data.num_frames={frames}, data.height={height}, data.width={width}: this pipeline takes "
                f"{self.temporal_factor} k + 1 frames whose sides are multiples of {side_multiple} (data.side_multiple)"
            )
        latent_height = height // self.spatial_factor
        latent_width = width // self.spatial_factor
        return self.channels, latent_frames_after_first + 1, latent_height, latent_width

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """Returns normalised latents (b, C, T, h, w), the posterior mode, of clips (b, 3, F, H, W) in [-1, 1]."""
        video = video.to(self.vae.dtype)
        # diffusers' autoencoder returns a distribution, other codecs only latents
        if hasattr(self.vae, "encode_video"):
            latents = self.vae.encode_video(video)
        else:
            latents = self.vae.encode(video).latent_dist.mode()
        mean = self._mean.to(latents.device)
        std = self._std.to(latents.device)
        return (latents.float() - mean) / std

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Decodes normalised latents (b, C, T, h, w) into frames (b, F, 3, H, W) in [-1, 1]; differentiable."""
        mean = self._mean.to(latents.device)
        std = self._std.to(latents.device)
        vae_latents = (latents * std + mean).to(self.vae.dtype)
        # a tuple, whose first entry is the video (b, 3, F, H, W)
        decoded = self.vae.decode(vae_latents, return_dict=False)
        video = decoded[0].float()
        return video.clamp(-1, 1).transpose(1, 2)


class PromptEncoder:
    """Embeds prompts with a frozen text encoder and caches the embeddings on the host.

    Each prompt is encoded alone, so its embedding does not depend on the other prompts of a batch.

    Args:
        tokenizer: tokenizer of the text encoder.
        text_encoder: frozen module, registered here with `placement`.
        placement: moves the encoder to the device when a prompt is not in the cache.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, text_encoder: nn.Module, placement: Placement) -> None:
        self.tokenizer = tokenizer
        self.text_encoder = text_encoder
        self.placement = placement
        self.length = min(LONGEST_PROMPT, int(tokenizer.model_max_length))
        # (tokens, D) by prompt, on the host
        self._embeddings: dict[str, torch.Tensor] = {}
        placement.add(text_encoder)

    def __call__(self, prompts: Sequence[str], device: torch.device) -> torch.Tensor:
        """Returns embeddings (b, L, D), padded with zeros after each prompt's tokens as in diffusers' pipeline."""
        # the encoder is moved to the device once for all new prompts, and not at all if there is none
        new_prompts = set(prompts) - set(self._embeddings)
        if new_prompts:
            with self.placement.at_work(self.text_encoder):
                for prompt in new_prompts:
                    self._embeddings[prompt] = self._encode(prompt)

        rows = []
        for prompt in prompts:
            embedding = self._embeddings[prompt].to(device)
            num_padding = self.length - len(embedding)
            padded = nn.functional.pad(embedding, (0, 0, 0, num_padding))
            rows.append(padded)
        return torch.stack(rows)

    def _encode(self, prompt: str) -> torch.Tensor:
        """Returns the embedding (tokens, D) of one prompt on the host, without the padding."""
        # the cleaning of diffusers' Wan pipeline, which unescapes twice
        unescaped = html.unescape(html.unescape(prompt))
        plain = " ".join(unescaped.split())
        tokens = self.tokenizer(
            [plain], return_tensors="pt", padding="max_length", max_length=self.length, truncation=True
        )
        ids = tokens.input_ids.to(self.placement.device)
        mask = tokens.attention_mask.to(self.placement.device)
        outputs = self.text_encoder(ids, mask)
        states = outputs.last_hidden_state[0]
        num_tokens = int(mask.sum())
        return states[:num_tokens].cpu()


@dataclass
class DiffusionParts:
    """The components of a pipeline, frozen and on the CPU.

    Attributes:
        low_noise: the expert of the last denoising steps, which gets the adapter.
        high_noise: the expert of the steps with t >= 1000 boundary_ratio, which is not trained; None for a single
            expert.
        codec: the video VAE.
        text_encoder: embeds the prompts.
        tokenizer: tokenizer of the text encoder.
        boundary_ratio: separates the steps of two experts; None for a single expert.
        expand_timesteps: True for the layout of TI2V-5B, False for that of I2V-A14B.
    """

    low_noise: WanTransformer3DModel
    high_noise: WanTransformer3DModel | None
    codec: LatentCodec
    text_encoder: nn.Module
    tokenizer: PreTrainedTokenizerBase
    boundary_ratio: float | None
    expand_timesteps: bool


def load_pipeline(model: DiffusionModelConfig, dtype: torch.dtype) -> DiffusionParts:
    """Loads the pipeline in the folder `model.path` and merges `model.fused_loras` into its experts.

    Args:
        model: options of the model.
        dtype: dtype of the weights, except those that a model's class keeps in fp32.

    Raises:
        UserError: the folder does not contain an image-to-video pipeline of a supported layout.
    """
    disable_progress_bar()
    folder = Path(str(model.path)).expanduser()
    index: JsonObject = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    components = _component_names(index)
    missing = [name for name in NEEDED if name not in components]
    if missing:
        raise UserError(
            f"model.path={model.path!r}: {INDEX} names no {', '.join(missing)}; expected the folder of an "
            "image-to-video pipeline in diffusers format, as save_pretrained writes it"
        )
    expert_names = [name for name in EXPERTS if name in components]
    unknown = set(model.fused_loras) - set(expert_names)
    if unknown:
        raise UserError(
            f"model.fused_loras: {sorted(unknown)} are not experts of this pipeline; expected {expert_names}"
        )

    experts: list[WanTransformer3DModel] = []
    for name in expert_names:
        expert = _load(folder, name, index[name], dtype)
        if name in model.fused_loras:
            _fuse(expert, model.fused_loras[name], f"model.fused_loras.{name}")
        experts.append(expert)
    # in the order of EXPERTS: of two experts, `transformer` denoises at high noise and `transformer_2` at low noise
    high_noise = None
    stored_boundary_ratio = None
    if len(experts) > 1:
        high_noise = experts[0]
        stored_boundary_ratio = index.get("boundary_ratio")

    parts = DiffusionParts(
        low_noise=experts[-1],
        high_noise=high_noise,
        codec=LatentCodec(_load(folder, "vae", index["vae"], dtype)),
        text_encoder=_load(folder, "text_encoder", index["text_encoder"], dtype),
        tokenizer=_load(folder, "tokenizer", index["tokenizer"], None),
        boundary_ratio=model.boundary_ratio or stored_boundary_ratio,
        expand_timesteps=bool(index.get("expand_timesteps", False)),
    )
    for module in (*experts, parts.codec.vae, parts.text_encoder):
        module.eval().requires_grad_(False)
    _check_layout(parts, str(model.path))
    return parts


def _component_names(index: JsonObject) -> set[str]:
    """Returns the names of the components in a model_index.json, whose entries are pairs of library and class."""
    names = set()
    for name, entry in index.items():
        # diffusers writes [null, null] for an optional component that the pipeline does not have
        if isinstance(entry, list) and len(entry) == 2 and entry[0]:
            names.add(name)
    return names


def _check_layout(parts: DiffusionParts, path: str) -> None:
    """Raises UserError if the experts do not match `boundary_ratio` or the input channels of a Wan2.2 layout."""
    num_experts = 1 if parts.high_noise is None else 2
    needs_boundary = num_experts == 2
    has_boundary = parts.boundary_ratio is not None
    if has_boundary != needs_boundary:
        raise UserError(
            f"model.boundary_ratio={parts.boundary_ratio}: expected a number with two experts (0.9), null with one; "
            f"{path} has {num_experts}"
        )
    codec = parts.codec
    if parts.expand_timesteps:
        layout = "TI2V"
        expected = codec.channels
    else:
        layout = "I2V"
        # noisy latents, mask and latents of the first frame
        expected = 2 * codec.channels + codec.temporal_factor
    for expert in (parts.low_noise, parts.high_noise):
        if expert is None:
            continue
        config = expert.config
        # Wan2.1 conditions on an image encoder, which no component of the pipeline here computes
        if getattr(config, "image_dim", None) is not None or config.in_channels != expected:
            raise UserError(
                f"model.path={path!r}: its transformer has {config.in_channels} input channels; expected {expected} "
                f"for the {layout} layout of Wan2.2 with {codec.channels} latent "
                "channels, and no image encoder (image_dim) as in Wan2.1"
            )


def _load(folder: Path, name: str, entry: list[str], dtype: torch.dtype | None) -> Any:
    """Loads a component with `from_pretrained`.

    Args:
        folder: folder of the pipeline.
        name: name of the component and of its subfolder.
        entry: its library and class in model_index.json.
        dtype: dtype of its weights; None for a component without weights.
    """
    # the keyword differs between the libraries, and a class of another library may have none
    library = entry[0]
    options = {}
    if dtype is not None and library == "transformers":
        options["dtype"] = dtype
    elif dtype is not None and library == "diffusers":
        options["torch_dtype"] = dtype

    remedy = f"expected a folder that {'.'.join(entry)}.from_pretrained can read"
    component = component_class(name, entry)
    with user_error_on_failure(f"model.path: the component {name} ({folder / name}) cannot be loaded", remedy):
        loaded = component.from_pretrained(str(folder / name), **options)
    if dtype is None or options:
        return loaded
    return loaded.to(dtype)


def component_class(name: str, entry: list[str]) -> Any:
    """Imports the class of component `name`.

    Args:
        name: name of the component.
        entry: its library and class in model_index.json.

    Raises:
        UserError: the class cannot be imported.
    """
    library, class_name = entry
    if name == "tokenizer" and library == "transformers":
        # releases of transformers name tokenizer classes differently
        class_name = "AutoTokenizer"
    try:
        module = importlib.import_module(library)
        return getattr(module, class_name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"{INDEX}: {name} is {library}.{class_name}, which cannot be imported: {error}") from error


def _fuse(expert: WanTransformer3DModel, file: str, option: str) -> None:
    """Merges the adapter in `file` into the expert's weights.

    Args:
        expert: the transformer, which then has no adapter.
        file: safetensors in the format of diffusers or one that it can convert.
        option: configuration key that names the file, for messages.
    """
    from diffusers.loaders import WanLoraLoaderMixin

    remedy = "expected LoRA weights for this expert, as safetensors"
    with user_error_on_failure(f"{option}={file!r} cannot be merged", remedy):
        path = str(Path(file).expanduser())
        state, metadata = WanLoraLoaderMixin.lora_state_dict(path, return_lora_metadata=True)
        # diffusers loads a file without a matching weight with only a warning
        expert.load_lora_adapter(state, metadata=metadata, adapter_name="fused")
        if not getattr(expert, "peft_config", None):
            raise UserError(f"{option}={file!r}: none of its weights matches a layer of {type(expert).__name__}")
        # without the adapter's layers, `add_adapter` finds the plain linear layers again
        expert.fuse_lora(adapter_names=["fused"])
        expert.unload_lora()

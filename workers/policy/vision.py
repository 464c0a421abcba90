"""Vision-language models: the images of a prompt as a column of a batch, and the parts of a network that read them.

Supported are the families of `VISION_FAMILIES`, whose networks consist of a vision tower and a language model with
M-RoPE (a token has three positions: temporal, height and width). `ImageInputs` has the images of one prompt. All
samples of the prompt refer to the same object, so that dispatch, checkpoints and crash dumps store its tensors once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from workers.engine.packing import ModelInputs

MULTI_MODAL_INPUTS = "multi_modal_inputs"
VISION_FAMILIES = {"qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen3_vl": "Qwen3VLForConditionalGeneration"}
"""Class of the whole network by model_type."""

# AutoModelForCausalLM then builds these networks too, so that their whole checkpoints are trained, sent and exported
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.update(VISION_FAMILIES)


@dataclass(frozen=True, eq=False)
class ImageInputs:
    """The images of a prompt as the network reads them.

    Attributes:
        pixel_values: (N, D) patches of all images, in the compute dtype.
        image_grid_thw: (I, 3) patches of each image along time, height and width.
        position_ids: (3, L) int32 positions of the prompt's L tokens.
        next_position: position of the first token after the prompt.
        digest: distinguishes prompts with equal tokens and different images.
        files: the images as encoded files, for vLLM, reward functions and reports.
    """

    pixel_values: torch.Tensor
    image_grid_thw: torch.Tensor
    position_ids: torch.Tensor
    next_position: int
    digest: int
    files: tuple[bytes, ...]

    @property
    def shift(self) -> int:
        """Difference between the position of a token after the prompt and its number in the sequence."""
        return self.next_position - self.position_ids.shape[1]


torch.serialization.add_safe_globals([ImageInputs])  # prompts that wait are part of a checkpoint


def has_vision(config: PretrainedConfig) -> bool:
    """Returns True if this is the config of a supported vision-language model."""
    return config.model_type in VISION_FAMILIES


def placeholder_ids(config: PretrainedConfig) -> list[int]:
    """Returns the tokens that stand for images and videos; none for a model of text.

    No policy may sample them, because the network would expect pixels for them.
    """
    if not has_vision(config):
        return []
    return [config.image_token_id, config.video_token_id]


def attention_of_text(config: PretrainedConfig, name: str) -> str | dict[str, str]:
    """Returns the argument of transformers' `set_attn_implementation` that sets the attention function of the language
    model. The attention of a vision tower is not causal and always uses SDPA."""
    if not has_vision(config):
        return name
    return {"": name, "text_config": name, "vision_config": "sdpa"}


def prompt_positions(
    network: PreTrainedModel, token_ids: torch.Tensor, image_grid_thw: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Returns `ImageInputs.position_ids` and next_position of a prompt (L,), by the rule of the network, which may be
    on the meta device."""
    input_ids = token_ids.unsqueeze(0)
    # 1 for an image, 0 for text
    token_types = (input_ids == network.config.image_token_id).int()
    positions, shift = network.base_model.get_rope_index(
        input_ids, mm_token_type_ids=token_types, image_grid_thw=image_grid_thw
    )
    # an image advances the position by its longer side, not by its number of tokens
    next_position = len(token_ids) + int(shift)
    return positions[:, 0].int(), next_position


def join_images(images: Sequence[ImageInputs]) -> dict[str, torch.Tensor]:
    """Returns the images of several prompts as keyword arguments of the network."""
    if not images:
        return {}
    return {
        "pixel_values": torch.cat([image.pixel_values for image in images]),
        "image_grid_thw": torch.cat([image.image_grid_thw for image in images]),
    }


def with_images(
    inputs: ModelInputs,
    images: Sequence[ImageInputs | None],
    position_ids: torch.Tensor,
    image_token_id: int,
) -> ModelInputs:
    """Returns the inputs with the images of their prompts, in the order of the tokens, and with positions (3, ...).

    Args:
        inputs: the micro-batch without images.
        images: the images of each row; None for a row of text.
        position_ids: (b, P+R) number of each token in its sequence.
        image_token_id: the token that stands for a patch of an image.
    """
    num_rows, width = inputs.token_index.shape
    prompt_width = width - inputs.response_shape[1]
    # text has three equal positions; a row with images continues after the position that its prompt ends with
    # (b, P+R, 3)
    positions = position_ids.unsqueeze(2).repeat(1, 1, 3)
    for row, row_images in enumerate(images):
        if row_images is None:
            continue
        start = prompt_width - row_images.position_ids.shape[1]
        positions[row] += row_images.shift
        positions[row, start:prompt_width] = row_images.position_ids.T

    origin = inputs.origin
    has_origin = origin < num_rows * width
    # (T, 3)
    arranged_positions = inputs.position_ids.flatten().unsqueeze(1).repeat(1, 3)
    flat_positions = positions.flatten(0, 1)
    arranged_positions[has_origin] = flat_positions[origin[has_origin]]

    ids = inputs.input_ids.flatten()
    is_image = ids == image_token_id
    # the pixels in the order of the image tokens; a shared prompt has them once
    rows_of_image_tokens = origin[is_image & has_origin] // width
    used_images = []
    for row in torch.unique_consecutive(rows_of_image_tokens).tolist():
        row_images = images[row]
        assert row_images is not None
        used_images.append(row_images)
    # rows without a prediction keep their tokens in the padded form, but not their pixels
    used_ids = ids.masked_fill(is_image & ~has_origin, 0)
    return replace(
        inputs,
        input_ids=used_ids.view_as(inputs.input_ids),
        position_ids=arranged_positions.T.reshape(3, *inputs.input_ids.shape),
        images=join_images(used_images),
    )


def prompt_digests(images: Sequence[ImageInputs | None]) -> torch.Tensor:
    """Returns (b,) `ImageInputs.digest` of each row, 0 for rows of text."""
    digests = torch.zeros(len(images), dtype=torch.long)
    for row, row_images in enumerate(images):
        if row_images is not None:
            digests[row] = row_images.digest
    return digests


def unused_tower(network: PreTrainedModel) -> torch.Tensor:
    """Returns 0 times the features of a dummy image of one token, on which all parameters of the vision tower depend.

    Ranks that have no image in a micro-batch use it, because a sharded tower gathers its weights from all ranks.
    """
    config = network.config.vision_config
    device = network.get_input_embeddings().weight.device
    # of the smallest image, whose patches the tower merges into one token
    side = config.spatial_merge_size
    patch_width = config.in_channels * config.temporal_patch_size * config.patch_size**2
    pixels = torch.zeros(side**2, patch_width, device=device)
    grid = torch.tensor([[1, side, side]], device=device)
    outputs = network.base_model.get_image_features(pixels, grid, return_dict=True)
    # Qwen3-VL also passes features of inner layers to the decoder, which are outputs of parameters of their own
    inner_features = getattr(outputs, "deepstack_features", None) or ()
    features = tree_leaves([outputs.pooler_output, inner_features])
    sums = [feature.float().sum() for feature in features]
    return torch.stack(sums).sum() * 0.0

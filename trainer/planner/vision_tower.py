"""Memory and arithmetic of the vision tower of a vision-language model (`workers.policy.vision`).

A token of an image stands for a square of patches, which the tower reads. The number of images is not part of a
configuration, so all tokens of a prompt are assumed to be tokens of images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

FP32 = 4


@dataclass(frozen=True)
class TowerShape:
    """Sizes of a vision tower. `size` in its methods is bytes per element.

    Attributes:
        values: Elements of a patch in pixel_values.
        per_token: Patches of a token.
        pixels: Area of a patch.
        output: Width of the features of a token.
        mergers: Number of modules that turn patches into features of tokens.
        has_gate: True for RMSNorm and MLPs with a gate, False for LayerNorm and two linear layers.
        windowed: Number of blocks whose attention covers `window` patches instead of the image.
        largest_image: Number of patches of the largest image; None: as many as the prompt has.
    """

    parameters: int
    blocks: int
    block_parameters: int
    hidden: int
    inner: int
    values: int
    per_token: int
    pixels: int
    output: int
    mergers: int = 1
    has_gate: bool = True
    windowed: int = 0
    window: int = 0
    largest_image: int | None = None

    @property
    def root_parameters(self) -> int:
        """Parameters outside the blocks, which FSDP gathers with the root of the network."""
        return self.parameters - self.blocks * self.block_parameters

    def pixel_bytes(self, tokens: float, size: int) -> float:
        """Returns the bytes of pixel_values."""
        patches = tokens * self.per_token
        return patches * self.values * size

    def feature_bytes(self, tokens: float, size: int) -> float:
        """Returns the bytes of the outputs, which exist until the end of the forward pass: the features and the hidden
        states of the last block."""
        features = self.mergers * self.output
        hidden_states = self.per_token * self.hidden
        return tokens * float(size * (features + hidden_states))

    def work_bytes(self, tokens: float, size: int) -> float:
        """Returns the temporary bytes of a block's forward: input, its norm, and the larger of the attention (query,
        key, value, and six fp32 tensors of the rotary positions) and the MLP."""
        input_and_norm = 2 * size * self.hidden
        attention = 3 * size * self.hidden + 6 * FP32 * self.hidden
        mlp_tensors = 3 if self.has_gate else 2
        mlp = size * mlp_tensors * self.inner
        per_patch = input_and_norm + max(attention, mlp)
        patches = tokens * self.per_token
        return patches * float(per_patch)

    def prefill_bytes(self, tokens: float, size: int) -> float:
        """Returns the bytes of pixels, features and a block's forward while a rollout engine encodes images."""
        pixels = self.pixel_bytes(tokens, size)
        features = self.feature_bytes(tokens, size)
        return pixels + features + self.work_bytes(tokens, size)

    def block_bytes(self, tokens: float, size: int) -> float:
        """Returns the bytes that a trained block keeps for its backward pass: two norms, query, key and value, query
        and key with positions, the outputs of the attention before and after their concatenation, and the tensors
        between the layers of the MLP."""
        norms = 2 * self._norm(size)
        attention = size * 7 * self.hidden
        mlp_tensors = 4 if self.has_gate else 2
        mlp = size * mlp_tensors * self.inner
        patches = tokens * self.per_token
        return patches * float(norms + attention + mlp)

    def kept_bytes(self, tokens: float, size: int, *, is_recomputed: bool) -> float:
        """Returns the bytes that a trained tower keeps for its backward pass, in its blocks and mergers."""
        patches = tokens * self.per_token
        per_merger = self._norm(size) + 2 * size * self.hidden
        mergers = patches * self.mergers * per_merger
        block = self.block_bytes(tokens, size)
        if is_recomputed:
            block = patches * self.hidden * size  # only its input
        return mergers + self.blocks * block

    def _norm(self, size: int) -> int:
        """Returns the bytes per patch that a norm keeps: its input, of an RMSNorm in fp32, the normalized input of an
        RMSNorm, and the result."""
        bytes_per_element = 2 * size
        if self.has_gate:  # RMSNorm
            bytes_per_element += FP32
        return self.hidden * bytes_per_element

    def flops(self, prompts: float, tokens: float) -> float:
        """Returns the operations of a forward pass over the images of `prompts` prompts of `tokens` tokens: two per
        weight and patch (of the mergers: and token), plus attention."""
        patches = tokens * self.per_token
        # attention does not extend over several images
        patches_of_image = patches
        if self.largest_image is not None:
            patches_of_image = min(patches, self.largest_image)
        full_blocks = self.blocks - self.windowed
        # patches to which a patch attends, summed over the blocks
        attended = self.windowed * self.window + full_blocks * patches_of_image

        embedding = self.values * self.hidden
        weights_of_patches = self.blocks * self.block_parameters + embedding
        weights_of_tokens = self.root_parameters - embedding
        flops_per_patch = 2.0 * weights_of_patches + 4.0 * self.hidden * attended
        flops_of_mergers = 2.0 * tokens * weights_of_tokens
        return prompts * (patches * flops_per_patch + flops_of_mergers)


def tower_of(network: PreTrainedModel) -> TowerShape:
    """Returns the shape of the tower of a network of `workers.policy.vision.VISION_FAMILIES`."""
    config = network.config.vision_config
    # all families of `VISION_FAMILIES` call their tower so
    tower = network.base_model.visual
    area = config.patch_size**2

    # Qwen2.5-VL attends within windows in all blocks but some, other towers within the whole image
    windowed = 0
    window = 0
    blocks_with_full_attention = getattr(config, "fullatt_block_indexes", None)
    if blocks_with_full_attention is not None:
        windowed = config.depth - len(blocks_with_full_attention)
        window = config.window_size**2 // area

    # Qwen3-VL also gives features of some blocks in between to the language model, by mergers of their own
    mergers = 1 + len(getattr(config, "deepstack_visual_indexes", ()))
    return TowerShape(
        parameters=num_elements(tower),
        blocks=config.depth,
        block_parameters=num_elements(tower.blocks[0]),
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        values=config.in_channels * config.temporal_patch_size * area,
        per_token=config.spatial_merge_size**2,
        pixels=area,
        output=config.out_hidden_size,
        mergers=mergers,
        has_gate=hasattr(tower.blocks[0].mlp, "gate_proj"),
        windowed=windowed,
        window=window,
    )


def num_elements(module: nn.Module) -> int:
    """Returns the number of elements of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())

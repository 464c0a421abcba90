"""Memory and arithmetic of the vision tower of a vision-language model (`workers.policy.vision`).

A token of an image stands for a square of patches, which the tower reads. The number of images is not part of a
configuration, so all tokens of a prompt are assumed to be tokens of images.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FP32 = 4


@dataclass(frozen=True)
class TowerShape:
    """Sizes of a vision tower. `size` in its methods is bytes per element.

    values: elements of a patch in pixel_values. per_token: patches of a token. pixels: area of a patch. mergers: number
    of modules that turn patches into features of tokens, of width `output`. has_gate: True for RMSNorm and MLPs with a
    gate, False for LayerNorm and two linear layers. windowed: number of blocks whose attention covers `window` patches
    instead of the image. largest_image: its number of patches; None: that of the prompt.
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
        return tokens * self.per_token * self.values * size

    def feature_bytes(self, tokens: float, size: int) -> float:
        """Returns the bytes of the outputs, which exist until the end of the forward pass: the features and the hidden
        states of the last block."""
        return tokens * float(size * (self.mergers * self.output + self.per_token * self.hidden))

    def work_bytes(self, tokens: float, size: int) -> float:
        """Returns the temporary bytes of a block's forward: input, its norm, and the larger of the attention (query,
        key, value, and six fp32 tensors of the rotary positions) and the MLP."""
        attention = 3 * size * self.hidden + 6 * FP32 * self.hidden
        block = 2 * size * self.hidden + max(attention, size * (2 + self.has_gate) * self.inner)
        return tokens * self.per_token * float(block)

    def prefill_bytes(self, tokens: float, size: int) -> float:
        """Returns the bytes of pixels, features and a block's forward while a rollout engine encodes images."""
        return self.pixel_bytes(tokens, size) + self.feature_bytes(tokens, size) + self.work_bytes(tokens, size)

    def block_bytes(self, tokens: float, size: int) -> float:
        """Returns the bytes that a trained block keeps for its backward pass: two norms, query, key and value, query
        and key with positions, the outputs of the attention before and after their concatenation, and the tensors
        between the layers of the MLP."""
        between = size * (7 * self.hidden + (4 if self.has_gate else 2) * self.inner)
        return tokens * self.per_token * float(2 * self._norm(size) + between)

    def kept_bytes(self, tokens: float, size: int, *, is_recomputed: bool) -> float:
        """Returns the bytes that a trained tower keeps for its backward pass, in its blocks and mergers."""
        ends = tokens * self.per_token * self.mergers * (self._norm(size) + 2 * size * self.hidden)
        block = tokens * self.per_token * self.hidden * size if is_recomputed else self.block_bytes(tokens, size)
        return ends + self.blocks * block

    def _norm(self, size: int) -> int:
        """Returns the bytes per patch that a norm keeps: its input, of an RMSNorm in fp32, the normalized input of an
        RMSNorm, and the result."""
        return self.hidden * (FP32 + 2 * size if self.has_gate else 2 * size)

    def flops(self, prompts: float, tokens: float) -> float:
        """Returns the operations of a forward pass over the images of `prompts` prompts of `tokens` tokens: two per
        weight and patch (of the mergers: and token), plus attention."""
        patches, embedding = tokens * self.per_token, self.values * self.hidden
        image = patches if self.largest_image is None else min(patches, self.largest_image)
        attended = self.windowed * self.window + (self.blocks - self.windowed) * image
        weights = self.blocks * self.block_parameters + embedding
        of_patches = patches * (2.0 * weights + 4.0 * self.hidden * attended)
        return prompts * (of_patches + 2.0 * tokens * (self.root_parameters - embedding))


def tower_of(network: PreTrainedModel) -> TowerShape:
    """Returns the shape of the tower of a network of `workers.policy.vision.VISION_FAMILIES`."""
    config, tower = network.config.vision_config, network.base_model.visual
    full = getattr(config, "fullatt_block_indexes", None)
    area = config.patch_size**2
    return TowerShape(
        parameters=sum(each.numel() for each in tower.parameters()),
        blocks=config.depth,
        block_parameters=sum(each.numel() for each in tower.blocks[0].parameters()),
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        values=config.in_channels * config.temporal_patch_size * area,
        per_token=config.spatial_merge_size**2,
        pixels=area,
        output=config.out_hidden_size,
        mergers=1 + len(getattr(config, "deepstack_visual_indexes", ())),
        has_gate=hasattr(tower.blocks[0].mlp, "gate_proj"),
        windowed=0 if full is None else config.depth - len(full),
        window=0 if full is None else config.window_size**2 // area,
    )

"""Batches for the hf engine's prefill: which sequences are encoded together, and the inputs of their forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.utils.rnn import pad_sequence

from workers.policy.vision import ImageInputs, join_images


@dataclass(frozen=True)
class Prompt:
    """Tokens that are encoded once, and the slots of all sequences that begin with them."""

    token_ids: tuple[int, ...]
    images: ImageInputs | None
    slots: list[int] = field(default_factory=list)


def pack(lengths: list[int], token_budget: int) -> Iterator[range]:
    """Splits ascending lengths into batches of neighbours and yields the index range of each batch.

    A batch padded to its longest row has at most `token_budget` tokens, unless it consists of a single row.
    """
    start = 0
    for index, length in enumerate(lengths):
        if index > start and length * (index - start + 1) > token_budget:
            yield range(start, index)
            start = index
    if lengths:
        yield range(start, len(lengths))


def prefill_inputs(prompts: Sequence[Prompt]) -> dict[str, torch.Tensor]:
    """Returns the inputs of a forward over these prompts: token ids (B, L), positions, and their images, if any."""
    ids = padded([prompt.token_ids for prompt in prompts])
    positions = torch.arange(ids.shape[1]).expand(len(prompts), -1)
    images = [prompt.images for prompt in prompts]
    present = [entry for entry in images if entry is not None]
    if not present:
        return {"input_ids": ids, "position_ids": positions}
    return {"input_ids": ids, "position_ids": _image_positions(positions, images)} | join_images(present)


def _image_positions(numbers: torch.Tensor, images: Sequence[ImageInputs | None]) -> torch.Tensor:
    """Returns the positions (3, B, L) of sequences with these images.

    Args:
        numbers: Number of each token in its sequence (B, L).
        images: The images of each sequence.
    """
    positions = numbers.repeat(3, 1, 1)
    for row, inputs in enumerate(images):
        if inputs is not None:
            positions[:, row] += inputs.shift  # tokens of the response
            of_prompt = inputs.position_ids[:, : positions.shape[2]]
            positions[:, row, : of_prompt.shape[1]] = of_prompt
    return positions


def padded(rows: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Returns the token ids as one tensor (B, longest), padded with zeros on the right."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True)

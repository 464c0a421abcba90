"""Batches for the hf engine's prefill: which sequences are encoded together, and the inputs of their forward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch.nn.utils.rnn import pad_sequence

from workers.policy.vision import ImageInputs, join_images

T = TypeVar("T")


@dataclass(frozen=True)
class PrefillPrompt:
    """Tokens that are encoded once, and the slots of all sequences that begin with them."""

    token_ids: tuple[int, ...]
    images: ImageInputs | None
    slots: list[int] = field(default_factory=list)


def batches(rows: Iterable[T], length_of: Callable[[T], int], token_budget: int) -> Iterator[list[T]]:
    """Yields batches of rows of similar length, which need little padding.

    A batch padded to its longest row has at most `token_budget` tokens, unless it consists of a single row.
    """
    batch: list[T] = []
    for row in sorted(rows, key=length_of):
        # the lengths ascend, so that this row is the longest of the batch
        padded_size = length_of(row) * (len(batch) + 1)
        if batch and padded_size > token_budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def prefill_inputs(prompts: Sequence[PrefillPrompt]) -> dict[str, torch.Tensor]:
    """Returns the inputs of a forward over these prompts: token ids (B, L), positions, and their images, if any."""
    ids = padded([prompt.token_ids for prompt in prompts])
    longest = ids.shape[1]
    positions = torch.arange(longest).expand(len(prompts), -1)
    images = [prompt.images for prompt in prompts]
    present = [entry for entry in images if entry is not None]
    if not present:
        return {"input_ids": ids, "position_ids": positions}
    inputs = join_images(present)
    inputs["input_ids"] = ids
    inputs["position_ids"] = _image_positions(positions, images)
    return inputs


def _image_positions(numbers: torch.Tensor, images: Sequence[ImageInputs | None]) -> torch.Tensor:
    """Returns the positions (3, B, L) of sequences with these images.

    Args:
        numbers: Number of each token in its sequence (B, L).
        images: The images of each sequence.
    """
    positions = numbers.repeat(3, 1, 1)
    for row, inputs in enumerate(images):
        if inputs is None:
            continue
        # the positions of the response's tokens; those of the prompt are replaced
        positions[:, row] += inputs.shift
        # cut, because the last token of a prompt without a response is not encoded
        of_prompt = inputs.position_ids[:, : positions.shape[2]]
        num_tokens = of_prompt.shape[1]
        positions[:, row, :num_tokens] = of_prompt
    return positions


def padded(rows: Sequence[tuple[int, ...]]) -> torch.Tensor:
    """Returns the token ids as one tensor (B, longest), padded with zeros on the right."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True)

"""The boundaries of the sequences in a packed row, in the forms that attention and stateful layers need.

`workers.engine.packing` creates them with a packed row; `workers.engine.packed_attention` reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from workers.engine.sequence_parallel import SequenceGroup

MAX_PADDING = 1.25  # maximum ratio of padded to real tokens in a group of sequences of a stateful layer


@dataclass(frozen=True)
class PromptTrees:
    """Rows of tokens for attention, one row per prompt: the prompt once, followed by all its answers.

    A mask keeps the answers to one prompt apart. Short answers to a long prompt need fewer scores and fewer copies in
    this form than with a copy of the prompt for each answer.

    Attributes:
        index: (G, L) position in the packed row of each token; rows are filled up with the packed row's first token.
        mask: (G, 1, L, L) bool, True where a token (third dimension) attends to another one (fourth dimension).
        flat_positions: (T,) position of each token of the packed row in the flattened rows.
    """

    index: torch.Tensor
    mask: torch.Tensor
    flat_positions: torch.Tensor

    def to(self, device: torch.device) -> PromptTrees:
        """Returns a copy on `device`."""
        index = self.index.to(device)
        mask = self.mask.to(device)
        return PromptTrees(index, mask, self.flat_positions.to(device))


class SequenceRows(NamedTuple):
    """Neighbouring sequences of a packed row, arranged in n rows of equal length for a stateful layer.

    Attributes:
        positions: (n, longest) position in the packed row of each token. A shorter sequence repeats its last token.
        real: (sum of lengths,) positions, in the flattened rows, of the tokens that are not repetitions.
    """

    positions: torch.Tensor
    real: torch.Tensor


@dataclass(frozen=True)
class PackedSequences:
    """The boundaries of the sequences in a packed row, computed once per micro-batch.

    If prompts are shared, the sequences overlap in the packed row of T tokens. `runs` and `cu_seqlens` then describe
    the expanded row of U tokens, in which each sequence has its own copy of the prompt.

    Attributes:
        runs: (number of sequences, their common length) of each run of equally long sequences, in packing order.
        cu_seqlens: (sequences + 1,) int32, cumulative sequence lengths, on the device.
        max_length: length of the longest sequence.
        expand: (U,) position in the packed row of each token of the expanded row; None if no prompt is shared.
        collapse: (T,) a position in the expanded row of each token of the packed row; None if no prompt is shared.
        trees: the same sequences with one row per prompt; None on a GPU, and if that needs more scores than `runs`.
        group: the ranks that share the tokens of the packed row; None if each rank has its own row.
    """

    runs: tuple[tuple[int, int], ...]
    cu_seqlens: torch.Tensor
    max_length: int
    expand: torch.Tensor | None = None
    collapse: torch.Tensor | None = None
    trees: PromptTrees | None = None
    group: SequenceGroup | None = None

    def to(self, device: torch.device) -> PackedSequences:
        """Returns a copy on `device`, without `trees` unless it is a CPU: other devices have attention for `runs`."""
        trees = None
        if self.trees is not None and device.type == "cpu":
            trees = self.trees.to(device)
        return replace(
            self,
            cu_seqlens=self.cu_seqlens.to(device),
            expand=moved(self.expand, device),
            collapse=moved(self.collapse, device),
            trees=trees,
        )

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens of the packed row."""
        if self.collapse is None:
            return self._num_expanded_tokens
        return len(self.collapse)

    @property
    def _num_expanded_tokens(self) -> int:
        """U, the number of tokens of the expanded row."""
        return sum(count * length for count, length in self.runs)

    @cached_property
    def groups(self) -> list[SequenceRows]:
        """Groups of sequences of similar length, for layers that need one row per sequence.

        They are computed once for all layers, without synchronising with the device.
        """
        lengths: list[int] = []
        for count, length in self.runs:
            lengths += [length] * count

        groups = []
        start = 0
        first_token = 0  # of the group, in the expanded row
        while start < len(lengths):
            end = _end_of_group(lengths, start)
            group_lengths = lengths[start:end]
            group = self._rows_of(group_lengths, first_token)
            groups.append(group)
            first_token += sum(group_lengths)
            start = end
        return groups

    def _rows_of(self, group_lengths: list[int], first_token: int) -> SequenceRows:
        """Arranges neighbouring sequences in rows.

        Args:
            group_lengths: their lengths, ascending.
            first_token: position of their first token in the expanded row.
        """
        # (n, 1) and (longest,)
        lengths = torch.tensor(group_lengths).unsqueeze(1)
        columns = torch.arange(group_lengths[-1])
        first_tokens = first_token + lengths.cumsum(0) - lengths
        # a causal layer does not see the repetitions of the last token when it computes the tokens before them
        expanded_positions = first_tokens + torch.minimum(columns, lengths - 1)
        is_real = columns < lengths
        real = is_real.flatten().nonzero().squeeze(1)

        # the lengths are on the host, so that nothing waits for the device
        device = self.cu_seqlens.device
        positions = self._in_packed_row(expanded_positions.to(device))
        return SequenceRows(positions, real.to(device))

    @cached_property
    def row(self) -> list[SequenceRows]:
        """All sequences concatenated in one row, with positions (1, U) and real (U,), as the only entry of a list like
        `groups`."""
        expanded = torch.arange(self._num_expanded_tokens, device=self.cu_seqlens.device)
        packed = self._in_packed_row(expanded)
        only_row = SequenceRows(packed.unsqueeze(0), expanded)
        return [only_row]

    def _in_packed_row(self, positions: torch.Tensor) -> torch.Tensor:
        """Converts positions in the expanded row to positions in the packed row."""
        if self.expand is None:
            return positions
        return self.expand[positions]

    @cached_property
    def borders(self) -> dict[str, torch.Tensor]:
        """Keyword arguments with the sequence boundaries of `row`, under the names that stateful layers know.

        seq_idx (1, U) int32 has the sequence number of each token, and cu_seq_lens_q the cumulative lengths, both as in
        transformers' `DataCollatorWithFlattening`. cu_seqlens are the same lengths, for flash-linear-attention.
        """
        [only_row] = self.row
        expanded_positions = only_row.real
        bounds = self.cu_seqlens
        ends = bounds[1:]
        # right=True: the position that is the end of a sequence belongs to the next one
        sequence_numbers = torch.bucketize(expanded_positions.int(), ends, right=True, out_int32=True)
        return {
            "seq_idx": sequence_numbers.unsqueeze(0),
            "cu_seq_lens_q": bounds,
            "cu_seqlens": bounds,
        }


def _end_of_group(lengths: list[int], start: int) -> int:
    """Returns the end of the longest group from `start` on that keeps within MAX_PADDING. `lengths` are ascending."""
    tokens = lengths[start]
    end = start + 1
    while end < len(lengths):
        # the next sequence is the longest of the group
        longest = lengths[end]
        tokens += longest
        padded_tokens = (end + 1 - start) * longest
        if padded_tokens > MAX_PADDING * tokens:
            break
        end += 1
    return end


def moved(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Returns an optional tensor on `device`."""
    if tensor is None:
        return None
    return tensor.to(device)

"""The tiles in which the output layer computes logits: some tokens and a part of the vocabulary at a time."""

from __future__ import annotations

import torch


class LogitTiles:
    """Division of the logits (N, V) into tiles of tile_bytes, or one tile if they need at most kept_bytes.

    Args:
        targets: (N, M) tokens whose logits are needed; M = 0 for none.
        vocab: V.
        itemsize: bytes of a logit.
        chunk_tokens: maximum number of tokens in a tile.
        tile_bytes: size of a tile.
        kept_bytes: size of logits that need no tiles.

    Attributes:
        keep: True if the logits are one tile, which the backward pass can reuse.
        rows: slices of the tokens.
        columns: slices of the vocabulary.
        inside: (tiles of the vocabulary, N, 1) True where the target of a token is in the tile; None unless M = 1.
    """

    def __init__(
        self,
        targets: torch.Tensor,
        vocab: int,
        itemsize: int,
        chunk_tokens: int,
        tile_bytes: int,
        kept_bytes: int,
    ) -> None:
        num_tokens = len(targets)
        num_bytes = num_tokens * vocab * itemsize
        self.keep = num_bytes <= kept_bytes
        height, width = self._tile_shape(num_tokens, vocab, itemsize, chunk_tokens, tile_bytes)
        self.rows = _slices(num_tokens, height)
        self.columns = _slices(vocab, width)
        self._targets = targets
        self._width = width

        # the columns of single targets, in all tiles at once: that needs fewer kernels, but with M targets M times the
        # memory
        self.inside: torch.Tensor | None = None
        if targets.shape[1] == 1:
            first_columns = torch.arange(0, vocab, width, device=targets.device)
            # (tiles, N, 1)
            columns_in_tiles = targets - first_columns.view(-1, 1, 1)
            self.inside = (columns_in_tiles >= 0) & (columns_in_tiles < width)
            self._index = columns_in_tiles.where(self.inside, 0)

    def _tile_shape(
        self,
        num_tokens: int,
        vocab: int,
        itemsize: int,
        chunk_tokens: int,
        tile_bytes: int,
    ) -> tuple[int, int]:
        """Returns the number of tokens and the number of vocabulary entries of a tile, both at least 1."""
        if self.keep:
            return max(1, num_tokens), vocab

        # blocks of equal size: a small last block would use the device badly
        num_blocks = -(-num_tokens // chunk_tokens)
        height = -(-num_tokens // num_blocks)
        num_parts = -(-vocab * height * itemsize // tile_bytes)
        # parts of fewer than 8 entries: one by one
        if num_parts * 8 > vocab:
            return height, 1
        # a multiple of 8 for fast kernels
        num_eights = -(-vocab // (num_parts * 8))
        return height, num_eights * 8

    def targets_in(self, number: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the column (n, M) of each target in a tile, 0 for targets in other tiles, and a bool mask (n, M) of
        the targets in the tile."""
        if self.inside is not None:
            return self._index[number, rows], self.inside[number, rows]
        first_column = self.columns[number].start
        columns_in_tile = self._targets[rows] - first_column
        is_inside = (columns_in_tile >= 0) & (columns_in_tile < self._width)
        # a column is needed in any case; 0 is in every tile
        index = columns_in_tile.where(is_inside, 0)
        return index, is_inside


def _slices(length: int, size: int) -> list[slice]:
    """Divides a range of this length into slices of a size; the last one may be shorter."""
    slices = []
    for start in range(0, length, size):
        end = min(start + size, length)
        slices.append(slice(start, end))
    return slices

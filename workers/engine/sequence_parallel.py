"""Ulysses sequence parallelism: several ranks share the tokens of each packed row (arXiv 2309.14509).

Each rank of a group runs all layers on an equal, contiguous shard of the row's tokens. Around attention, an all-to-all
exchanges shards of tokens for shards of heads, so that each rank computes attention of the whole row for some heads.
The response matrices that a forward returns are summed over the group; each rank then computes the same loss.

The gradient needs no correction by the size of the group. A rank's backward covers the outputs of its own tokens, so
the sum over all ranks, which the engine computes anyway, is the gradient of one copy of the loss.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import all_to_all_single_autograd


@dataclass(frozen=True, eq=False)
class SequenceGroup:
    """The ranks that share the tokens of each row, with this rank's position among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def own_shard(self, tokens: int) -> tuple[int, int]:
        """Returns the first position of this rank's shard of a row of `tokens`, and the size of a shard. The last
        shards can extend beyond the row."""
        # rounded up: all shards have the same size, which the all-to-all needs
        tokens_per_rank = -(-tokens // self.size)
        first_token = self.rank * tokens_per_rank
        return first_token, tokens_per_rank

    def own_heads(self, heads: int) -> slice:
        """Returns the query heads whose attention this rank computes."""
        # heads are a multiple of the ranks, see `shards_of_heads`
        heads_per_rank = heads // self.size
        first = self.rank * heads_per_rank
        return slice(first, first + heads_per_rank)

    def shards_of_heads(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tokens: int,
    ) -> list[torch.Tensor]:
        """Exchanges this rank's tokens of all heads for all `tokens` of its heads.

        Args:
            query: (T / n, H, D).
            key: (T / n, K, D).
            value: (T / n, K, D).
            tokens: number of tokens of the row.

        Returns:
            query (tokens, H / n, D), key and value (tokens, max(K / n, 1), D). A key/value head that several ranks need
            is sent to each of them.

        Raises:
            ValueError: the heads cannot be distributed.
        """
        n = self.size
        heads = query.shape[1]
        key_value_heads = key.shape[1]
        if not _fits(n, heads, key_value_heads):
            raise ValueError(
                f"ulysses_sequence_parallel_size={n}: an attention layer has {heads} query heads and {key_value_heads} "
                f"key/value heads; set one of {valid_sizes(heads, key_value_heads)}"
            )
        # neighbouring query heads share a key/value head, and so do the ranks that get them
        if key_value_heads < n:
            copies = n // key_value_heads
            key = key.repeat_interleave(copies, dim=1)
            value = value.repeat_interleave(copies, dim=1)

        # all three in one exchange: (T / n, n, own heads, D) each, joined to (T / n, n, values)
        heads_by_rank = [tensor.unflatten(1, (n, -1)) for tensor in (query, key, value)]
        # the flattened tensors are copies: they have no name, which would keep them in memory during the exchange
        values_by_rank = torch.cat([tensor.flatten(2) for tensor in heads_by_rank], dim=2)
        # entry i goes to rank i; entry i of what arrives has the tokens of rank i
        sent = values_by_rank.transpose(0, 1).contiguous()
        shards = all_to_all_single_autograd(sent, None, None, self.group)
        # without the tokens that fill up the last shards
        received = shards.flatten(0, 1)[:tokens]

        # query, key and value of this rank's heads
        own_shapes = [tensor.shape[2:] for tensor in heads_by_rank]
        sizes_of_parts = [shape.numel() for shape in own_shapes]
        parts = received.split(sizes_of_parts, dim=1)
        return [part.unflatten(1, shape) for part, shape in zip(parts, own_shapes, strict=True)]

    def shards_of_tokens(self, output: torch.Tensor) -> torch.Tensor:
        """Exchanges all tokens of this rank's heads for its tokens of all heads: (tokens, H / n, D) to (T / n, H, D).
        Tokens beyond the row are 0."""
        num_tokens, _, head_size = output.shape
        _, tokens_per_rank = self.own_shard(num_tokens)
        num_filling = tokens_per_rank * self.size - num_tokens
        flat_output = output.flatten(1)
        padded = F.pad(flat_output, (0, 0, 0, num_filling))

        # entry i goes to rank i; entry i of what arrives has the heads of rank i
        sent = padded.unflatten(0, (self.size, tokens_per_rank))
        received = all_to_all_single_autograd(sent, None, None, self.group)
        heads_by_token = received.transpose(0, 1)
        return heads_by_token.reshape(tokens_per_rank, -1, head_size)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sums parts over the ranks. The gradient of the sum is that of each part, because every rank computes the
        same loss from the sum."""
        return _Sum.apply(values, self.group)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, values: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # not summed over the group, as torch's own all_reduce would: the engine sums the gradients over all ranks
        return gradients[0], None


def sequence_group(size: int) -> SequenceGroup:
    """Returns the group of `size` consecutive ranks that contains this rank. Collective."""
    group, _ = dist.new_subgroups(group_size=size)
    return SequenceGroup(group, dist.get_rank(group), size)


def valid_sizes(heads: int, key_value_heads: int) -> list[int]:
    """Returns the sizes of a group over which attention of these heads can be distributed."""
    return [size for size in range(1, heads + 1) if _fits(size, heads, key_value_heads)]


def _fits(size: int, heads: int, key_value_heads: int) -> bool:
    """Returns True if `size` ranks can share these heads equally, each with the key/value heads of its query heads."""
    # several key/value heads for each rank, or one that several ranks need
    is_multiple = key_value_heads % size == 0 or size % key_value_heads == 0
    return heads % size == 0 and is_multiple

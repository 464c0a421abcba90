"""The planner: assigns rows to ranks and micro-batches, and counts the denominators of the loss.

The driver plans once for all ranks, from the sequence lengths alone. Every rank runs the same number of forward passes
(FSDP would hang otherwise). The denominators are counted over the whole mini-batch before it is split, so the gradient
does not depend on the split. The rows of an optimizer step depend on the driver's row order and the shuffle seed, never
on the number of ranks.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from verl_lite.protocol import DataProto

Ints = NDArray[np.int64]
PLAN_COLUMNS = ("mini_batch", "micro_batch")

# A layer's matrix multiplications cost 24 h^2 operations per token and its attention 4 h L. They are equal for L = 6 h,
# here with h = 4096. Only the order of magnitude matters for the balance.
ATTENTION_PARITY_LENGTH = 24_576
BALANCE_TOLERANCE = 1.002  # heaviest rank over mean at which swapping stops
MAX_SWAPS_PER_SET = 8


class _Bounds(NamedTuple):
    """Upper bounds of one micro-batch on one rank."""

    max_tokens: int
    max_rows: int


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: number of forward passes per rank, and global denominators of the loss."""

    num_micro_batches: int
    num_tokens: int  # valid response tokens on all ranks
    num_sequences: int  # samples with at least one valid token
    num_distilled: int = 0  # valid response tokens that have a teacher


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """The assignment of `num_rows` rows to n slots, n / world_size per rank, in rank order.

    order: (n,) row of each slot; a padding slot repeats the shortest row.
    is_padding: (n,) bool, slots without weight.
    mini_batch, micro_batch: (n, epochs) optimizer step of each slot, and forward pass within the step; -1 for a padding
        slot that an epoch does not need (only with a shuffle and several epochs).
    schedule: mini-batches by epoch. Each rank has at least one slot in each micro-batch.
    """

    num_rows: int
    world_size: int
    order: Ints
    is_padding: NDArray[np.bool_]
    mini_batch: Ints
    micro_batch: Ints
    schedule: list[list[MiniBatch]]

    def apply(self, data: DataProto) -> DataProto:
        """Returns a new batch with the rows in their slots.

        Adds is_padding (n,) bool, mini_batch and micro_batch (n, epochs) int64, and meta_info["schedule"]. Sets
        response_mask, if present, to 0 on padding. Raises ValueError unless data has `num_rows` rows.
        """
        if len(data) != self.num_rows:
            raise ValueError(f"BatchPlan.apply: the batch has {len(data)} rows, {self.num_rows} were planned.")
        planned = data.select_idxs(self.order)
        columns = {name: torch.from_numpy(getattr(self, name)).clone() for name in (*PLAN_COLUMNS, "is_padding")}
        if "is_padding" in planned:
            columns["is_padding"] |= torch.as_tensor(planned.batch.pop("is_padding").cpu())
        if "response_mask" in planned:
            mask = planned.batch["response_mask"]
            padding = torch.from_numpy(self.is_padding).to(mask.device)
            planned.batch["response_mask"] = mask.masked_fill(padding.unsqueeze(-1), 0)
        planned.meta_info["schedule"] = self.schedule
        return planned.union(DataProto.from_dict(columns))

    def restore(self, data: DataProto) -> DataProto:
        """Returns the ranks' results for the planned batch in the order of the original rows, without padding.

        Removes the columns that `apply` added, if present. Raises ValueError unless data has n rows.
        """
        if len(data) != len(self.order):
            raise ValueError(f"BatchPlan.restore: the batch has {len(data)} rows, {len(self.order)} were planned.")
        places = np.flatnonzero(~self.is_padding)
        restored = data.select_idxs(places[np.argsort(self.order[places])])
        added = [name for name in PLAN_COLUMNS if name in restored]
        if "is_padding" in restored and not bool(restored.batch["is_padding"].any()):
            added.append("is_padding")
        restored.pop(batch_keys=added)
        restored.meta_info.pop("schedule", None)
        return restored


def plan_batch(
    lengths: ArrayLike,
    *,
    world_size: int,
    mini_batch_size: int | Sequence[int] | None,
    max_token_len: int | None = None,
    micro_batch_size: int | None = None,
    epochs: int = 1,
    shuffle_seed: int | None = None,
    balance: bool = True,
    num_tokens: ArrayLike,
    num_distilled: ArrayLike | None = None,
    samples: Sequence[str] | None = None,
) -> BatchPlan:
    """Plans `epochs` passes over a batch.

    lengths: (B,) number of prompt and response tokens of each row. num_tokens: (B,) number of tokens in the loss.
        num_distilled: (B,) the part of them that has a teacher; None = 0.
    mini_batch_size: sequences per optimizer step over all ranks, where the last step may be smaller; a list with the
        number of sequences of each step, which must sum to B; None = all sequences in one step.
    max_token_len, micro_batch_size: bounds of a micro-batch on one rank, in tokens and in sequences; None = no bound.
    samples: (B,) sample of each row; the rows of a sample in an optimizer step count as one sequence; None = each row
        is a sample.
    shuffle_seed: draws the mini-batches of each epoch at random; None = rows in order, the same in each epoch.
    balance: give ranks rows of equal total cost L + L^2 / ATTENTION_PARITY_LENGTH within a mini-batch; else rows in
        order. With a shuffle, rows keep their ranks of the first epoch; later epochs are not balanced.
    Raises ValueError for an empty batch, a bound below 1, a row longer than max_token_len, or a wrong sum of steps.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    tokens = np.asarray(num_tokens, dtype=np.int64)
    distilled = np.zeros_like(tokens) if num_distilled is None else np.asarray(num_distilled, dtype=np.int64)
    num_rows = len(sizes)
    of_sample = np.arange(num_rows) if samples is None else np.unique(np.asarray(samples, str), return_inverse=True)[1]
    _check(sizes, tokens, max_token_len, mini_batch_size)
    at_least_one = {"world_size": world_size, "micro_batch_size": micro_batch_size, "epochs": epochs}
    for name, value in (at_least_one | {"mini_batch_size": mini_batch_size}).items():
        if value is not None and (min(value) if isinstance(value, Sequence) else value) < 1:
            raise ValueError(f"plan_batch: {name}={value}; expected at least 1.")
    bounds = _Bounds(max_token_len or int(sizes.sum() + num_rows * sizes.max()), micro_batch_size or num_rows)
    steps = _draw_mini_batches(num_rows, mini_batch_size, epochs, shuffle_seed)
    owner = _assign_ranks(sizes, steps[:, 0], world_size, balance)
    rows, mini_batch = _fill_ranks(sizes, owner, steps, world_size, bounds)
    is_padding = rows < 0
    order = np.where(is_padding, int(sizes.argmin()), rows)
    micro_batch, numbers = _split_into_micro_batches(sizes[order], mini_batch, bounds)
    # the slots of a micro-batch are contiguous in the first epoch, so that a rank reads slices
    keys = zip(micro_batch[..., 0], mini_batch[..., 0], strict=True)
    places = (np.arange(world_size)[:, None], np.stack([np.lexsort(key) for key in keys]))
    return BatchPlan(
        num_rows=num_rows,
        world_size=world_size,
        order=order[places].reshape(-1),
        is_padding=is_padding[places].reshape(-1),
        mini_batch=mini_batch[places].reshape(-1, epochs),
        micro_batch=micro_batch[places].reshape(-1, epochs),
        schedule=[_schedule(steps[:, epoch], tokens, distilled, of_sample, numbers[epoch]) for epoch in range(epochs)],
    )


def plan_samples(number: int, world_size: int, micro_batch_size: int) -> BatchPlan:
    """Plans one optimizer step over samples of equal cost."""
    ones = np.ones(number, dtype=np.int64)
    return plan_batch(
        ones, world_size=world_size, mini_batch_size=None, micro_batch_size=micro_batch_size, num_tokens=ones
    )


def balanced_partition(costs: ArrayLike, parts: int) -> Ints:
    """Splits items into `parts` sets of equal size and nearly equal cost: (parts, k) indices, k = ceil(B / parts).

    Uses the largest differencing method of Karmarkar and Karp (1982), starting from chunks of `parts` items with one
    item for each set, and then swaps items. Indices from len(costs) on are fillers of cost 0, at most one per set.
    """
    given = np.asarray(costs, dtype=np.float64)
    size = -(-len(given) // parts)
    filled = np.concatenate([given, np.zeros(parts * size - len(given))])
    chunks = np.argsort(-filled, kind="stable").reshape(size, parts)
    heap = [(filled[own[-1]] - filled[own[0]], i, filled[own], own[:, None]) for i, own in enumerate(chunks)]
    heapq.heapify(heap)
    for created in range(size, 2 * size - 1):
        _, _, sums, sets = heapq.heappop(heap)
        _, _, other_sums, other_sets = heapq.heappop(heap)
        sums, sets = sums + other_sums[::-1], np.hstack([sets, other_sets[::-1]])  # pair the heaviest with the lightest
        descending = np.argsort(-sums, kind="stable")
        sums = sums[descending]
        heapq.heappush(heap, (sums[-1] - sums[0], created, sums, sets[descending]))
    return _swap(heap[0][3], filled, len(given))


def _swap(sets: Ints, costs: NDArray[np.float64], num_items: int) -> Ints:
    """Swaps items between the heaviest and the lightest set while that reduces their gap; fillers do not move."""
    sets = sets.copy()
    sums = costs[sets].sum(axis=1)
    enough = sums.mean() * BALANCE_TOLERANCE
    for _ in range(MAX_SWAPS_PER_SET * len(sets)):
        heavy, light = int(sums.argmax()), int(sums.argmin())
        gap = sums[heavy] - sums[light]
        if sums[heavy] <= enough:
            break
        given, taken = costs[sets[heavy]], costs[sets[light]]
        by_cost = np.argsort(taken)
        # for each item of the heavy set, find the item of the light set whose swap moves closest to half of the gap
        right = np.searchsorted(taken[by_cost], given - gap / 2).clip(1, max(1, len(taken) - 1))
        nearest = np.concatenate([by_cost[right - 1], by_cost[right % len(taken)]])
        items = np.tile(np.arange(len(given)), 2)
        moved = given[items] - taken[nearest]
        allowed = (sets[heavy][items] < num_items) & (sets[light][nearest] < num_items) & (moved > 0) & (moved < gap)
        if not allowed.any():
            break
        best = int(np.where(allowed, np.abs(moved - gap / 2), np.inf).argmin())
        i, j = items[best], nearest[best]
        sets[heavy, i], sets[light, j] = sets[light, j], sets[heavy, i]
        sums[heavy] -= moved[best]
        sums[light] += moved[best]
    return sets


def _draw_mini_batches(num_rows: int, size: int | Sequence[int] | None, epochs: int, seed: int | None) -> Ints:
    """Returns the optimizer step of each row, (B, epochs)."""
    steps = np.empty((num_rows, epochs), dtype=np.int64)
    if isinstance(size, Sequence):
        by_position = np.repeat(np.arange(len(size)), size)
    else:
        by_position = np.arange(num_rows) // (size or num_rows)
    for epoch in range(epochs):
        order = slice(None) if seed is None else np.random.default_rng([seed, epoch]).permutation(num_rows)
        steps[order, epoch] = by_position
    return steps


def _assign_ranks(lengths: Ints, steps: Ints, world_size: int, balance: bool) -> Ints:
    """Returns the rank of each row, (B,). Within a mini-batch the ranks' row counts differ by at most one."""
    owner = np.zeros(len(lengths), dtype=np.int64)
    costs = lengths + lengths.astype(np.float64) ** 2 / ATTENTION_PARITY_LENGTH
    for rows in _positions_by_value(steps, int(steps.max()) + 1):
        if balance:
            for rank, members in enumerate(balanced_partition(costs[rows], world_size)):
                owner[rows[members[members < len(rows)]]] = rank
        else:
            for rank, part in enumerate(np.array_split(rows, world_size)):
                owner[part] = rank
    return owner


def _fill_ranks(lengths: Ints, owner: Ints, steps: Ints, world_size: int, bounds: _Bounds) -> tuple[Ints, Ints]:
    """Returns the rows of each rank (W, n / W), padded with -1, and their mini-batches (W, n / W, epochs).

    Each rank gets the slots that its forward passes need. If all epochs have the same mini-batches, every rank gets
    equally many slots of each mini-batch. Otherwise the ranks' row counts in a mini-batch differ: a rank gets padding
    only where it has fewer rows than forward passes, and its unused padding slots are excluded (-1) from that epoch.
    """
    epochs, num_steps = steps.shape[1], int(steps.max()) + 1
    by_rank = _positions_by_value(owner, world_size)
    counts = np.stack([[np.bincount(steps[own, e], minlength=num_steps) for own in by_rank] for e in range(epochs)])
    if (steps == steps[:, :1]).all():
        wanted = np.broadcast_to(counts.max(axis=1, keepdims=True), counts.shape)
    else:
        wanted = counts.copy()  # (epochs, W, steps)
        for epoch in range(epochs):
            for rank, own in enumerate(by_rank):
                for step, rows in enumerate(_positions_by_value(steps[own, epoch], num_steps)):
                    wanted[epoch, rank, step] = len(_pack(lengths[own[rows]].tolist(), bounds))
        wanted = np.maximum(counts, wanted.max(axis=1, keepdims=True))
    per_rank = int(wanted.sum(axis=2).max())
    rows = np.full((world_size, per_rank), -1, dtype=np.int64)
    mini_batch = np.full((world_size, per_rank, epochs), -1, dtype=np.int64)
    for rank, own in enumerate(by_rank):
        rows[rank, : len(own)] = own
        mini_batch[rank, : len(own)] = steps[own]
        for epoch in range(epochs):
            filled = np.repeat(np.arange(num_steps), wanted[epoch, rank] - counts[epoch, rank])
            mini_batch[rank, len(own) : len(own) + len(filled), epoch] = filled
    return rows, mini_batch


def _schedule(
    steps: Ints, num_tokens: Ints, num_distilled: Ints, samples: Ints, num_micro_batches: list[int]
) -> list[MiniBatch]:
    tokens, distilled = (np.bincount(steps, weights=each).astype(np.int64) for each in (num_tokens, num_distilled))
    counted = np.unique(np.stack([steps, samples])[:, num_tokens > 0], axis=1)[0]
    sequences = np.bincount(counted, minlength=len(tokens))
    counts = (each.tolist() for each in (tokens, sequences, distilled))
    return [MiniBatch(*each) for each in zip(num_micro_batches, *counts, strict=True)]


def _positions_by_value(values: Ints, number: int) -> list[Ints]:
    """Returns the ascending positions of each value 0..number-1; other values (-1) are ignored."""
    ascending = np.argsort(values, kind="stable")
    bounds = np.searchsorted(values[ascending], np.arange(number + 1))
    return [ascending[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def _split_into_micro_batches(lengths: Ints, mini_batch: Ints, bounds: _Bounds) -> tuple[Ints, list[list[int]]]:
    """Returns the micro-batch of each slot (W, n / W, epochs), and the number of micro-batches by epoch and mini-batch.

    The number is the same on all ranks. lengths: (W, n / W); mini_batch: (W, n / W, epochs).
    """
    world_size, _, epochs = mini_batch.shape
    micro_batch = np.where(mini_batch < 0, -1, 0)
    numbers: list[list[int]] = []
    for epoch in range(epochs):
        num_steps = int(mini_batch[..., epoch].max()) + 1
        places = [_positions_by_value(mini_batch[rank, :, epoch], num_steps) for rank in range(world_size)]
        numbers.append([])
        for step in range(num_steps):
            bins = _split_mini_batch([lengths[rank, places[rank][step]].tolist() for rank in range(world_size)], bounds)
            numbers[-1].append(len(bins[0]))
            for rank, own in enumerate(bins):
                for position, members in enumerate(own[1:], start=1):
                    micro_batch[rank, places[rank][step][members], epoch] = position
    return micro_batch, numbers


def _split_mini_batch(lengths: list[list[int]], bounds: _Bounds) -> list[list[list[int]]]:
    """Returns, for each rank, the positions of its rows by micro-batch. Every rank gets the largest number required.

    The first micro-batch of each rank is its heaviest, so that ranks wait little for each other and a token bound that
    is too large for the device fails immediately.
    """
    packed = [_pack(own, bounds) for own in lengths]
    number = max(len(bins) for bins in packed)
    if number == 1:
        return packed
    result = []
    for own, bins in zip(lengths, packed, strict=True):
        spread = _pack_evenly(own, number, bounds) or _split(bins, number)
        loads = [sum(own[i] for i in members) for members in spread]
        result.append([spread[i] for i in sorted(range(number), key=lambda i: -loads[i])])
    return result


def _pack(lengths: list[int], bounds: _Bounds) -> list[list[int]]:
    """Packs items into few bins within the bounds: each item, longest first, goes to the fullest bin with room."""
    if len(lengths) <= bounds.max_rows and sum(lengths) <= bounds.max_tokens:
        return [list(range(len(lengths)))]
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, bin), ascending, of bins with room for another row
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        found = bisect_left(room, (lengths[item], -1))
        if found < len(room):
            free, number = room.pop(found)
        else:
            free, number = bounds.max_tokens, len(bins)
            bins.append([])
        bins[number].append(item)
        if len(bins[number]) < bounds.max_rows:
            insort(room, (free - lengths[item], number))
    return bins


def _pack_evenly(lengths: list[int], number: int, bounds: _Bounds) -> list[list[int]] | None:
    """Packs items into exactly `number` nonempty bins of similar load: each item, longest first, to the emptiest bin.

    Returns None if that violates a bound, so that a tighter packing is needed. Requires at least `number` items.
    """
    bins: list[list[int]] = [[] for _ in range(number)]
    loads = [(0, 0, i) for i in range(number)]  # (tokens, rows, bin): an empty bin comes before any other
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not loads or loads[0][0] + lengths[item] > bounds.max_tokens:
            return None
        tokens, count, i = loads[0]
        bins[i].append(item)
        if count + 1 < bounds.max_rows:
            heapq.heapreplace(loads, (tokens + lengths[item], count + 1, i))
        else:
            heapq.heappop(loads)
    return bins


def _split(bins: list[list[int]], number: int) -> list[list[int]]:
    """Halves the bins with the most items until there are `number` bins, none empty. Requires `number` items."""
    bins = list(bins)
    while len(bins) < number:
        largest = max(range(len(bins)), key=lambda i: len(bins[i]))
        bins[largest], half = bins[largest][::2], bins[largest][1::2]
        bins.append(half)
    return bins


def _check(lengths: Ints, num_tokens: Ints, max_token_len: int | None, steps: int | Sequence[int] | None) -> None:
    if lengths.ndim != 1 or lengths.shape != num_tokens.shape or not len(lengths):
        raise ValueError(f"plan_batch: lengths {lengths.shape} and num_tokens {num_tokens.shape} must be (B,), B > 0.")
    if isinstance(steps, Sequence) and sum(steps) != len(lengths):
        raise ValueError(f"plan_batch: {steps=} contain {sum(steps)} sequences; the batch has {len(lengths)}.")
    longest = int(lengths.max())
    if max_token_len is not None and longest > max_token_len:
        raise ValueError(
            f"actor.ppo_max_token_len_per_gpu={max_token_len}: row {int(lengths.argmax())} alone has {longest} tokens. "
            f"Set it (or the log_prob_max_token_len_per_gpu of this pass) to at least {longest}, "
            "or lower data.max_prompt_length or data.max_response_length."
        )

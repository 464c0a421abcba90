"""The planner: assigns rows to ranks and micro-batches, and counts the denominators of the loss.

The driver plans once for all ranks, from the sequence lengths alone. Every rank runs the same number of forward passes
(FSDP would hang otherwise). The denominators are counted over the whole mini-batch before it is split, so the gradient
does not depend on the split. The rows of an optimizer step depend on the driver's row order and the shuffle seed, never
on the number of ranks.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from verl_lite.partition import Ints, balanced_partition
from verl_lite.protocol import DataProto

PLAN_COLUMNS = ("mini_batch", "micro_batch")

# A layer's matrix multiplications cost 24 h^2 operations per token and its attention 4 h L. They are equal for L = 6 h,
# here with h = 4096. Only the order of magnitude matters for the balance.
ATTENTION_PARITY_LENGTH = 24_576


class _RowCounts(NamedTuple):
    """What each row adds to the denominators of the loss, all (B,)."""

    num_tokens: Ints
    num_distilled: Ints
    samples: Ints  # numbers of the samples, from 0


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

    Attributes:
        order: (n,) row of each slot; a padding slot repeats the shortest row.
        is_padding: (n,) bool, slots without weight.
        mini_batch: (n, epochs) optimizer step of each slot; -1 for a padding slot that an epoch does not need (only
            with a shuffle and several epochs).
        micro_batch: (n, epochs) forward pass of each slot within the step; -1 where mini_batch is -1.
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
        columns = {
            "mini_batch": torch.from_numpy(self.mini_batch).clone(),
            "micro_batch": torch.from_numpy(self.micro_batch).clone(),
            "is_padding": torch.from_numpy(self.is_padding).clone(),
        }
        if "is_padding" in planned:
            # rows that were padding before the plan remain padding
            columns["is_padding"] |= torch.as_tensor(planned.batch.pop("is_padding").cpu())
        if "response_mask" in planned:
            mask = planned.batch["response_mask"]
            padding = torch.from_numpy(self.is_padding).to(mask.device)
            # padding has no token, so that it has no weight in any loss
            planned.batch["response_mask"] = mask.masked_fill(padding.unsqueeze(-1), 0)
        planned.meta_info["schedule"] = self.schedule
        return planned.union(DataProto.from_dict(columns))

    def restore(self, data: DataProto) -> DataProto:
        """Returns the ranks' results for the planned batch in the order of the original rows, without padding.

        Removes the columns that `apply` added, if present. Raises ValueError unless data has n rows.
        """
        if len(data) != len(self.order):
            raise ValueError(f"BatchPlan.restore: the batch has {len(data)} rows, {len(self.order)} were planned.")
        real_slots = np.flatnonzero(~self.is_padding)
        original_rows = self.order[real_slots]
        slots_by_row = real_slots[np.argsort(original_rows)]
        restored = data.select_idxs(slots_by_row)
        added_columns = [name for name in PLAN_COLUMNS if name in restored]
        # the batch had padding of its own before `apply` if any of its rows is still marked
        if "is_padding" in restored and not bool(restored.batch["is_padding"].any()):
            added_columns.append("is_padding")
        restored.pop(batch_keys=added_columns)
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

    Args:
        lengths: (B,) number of prompt and response tokens of each row.
        world_size: number of ranks.
        mini_batch_size: sequences per optimizer step over all ranks, where the last step may be smaller; a list with
            the number of sequences of each step, which must sum to B; None = all sequences in one step.
        max_token_len: maximum number of tokens in a micro-batch on one rank; None = no bound.
        micro_batch_size: maximum number of sequences in a micro-batch on one rank; None = no bound.
        epochs: number of passes.
        shuffle_seed: draws the mini-batches of each epoch at random; None = rows in order, the same in each epoch.
        balance: give ranks rows of equal total cost L + L^2 / ATTENTION_PARITY_LENGTH within a mini-batch; else rows in
            order. With a shuffle, rows keep their ranks of the first epoch; later epochs are not balanced.
        num_tokens: (B,) number of tokens of each row in the loss.
        num_distilled: (B,) the part of num_tokens that has a teacher; None = 0.
        samples: (B,) sample of each row; the rows of a sample in an optimizer step count as one sequence; None = each
            row is a sample.

    Raises:
        ValueError: the batch is empty, a bound is below 1, a row is longer than max_token_len, or the sequences of the
            steps do not sum to B.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    counts = _row_counts(num_tokens, num_distilled, samples)
    _require_fitting_rows(sizes, counts.num_tokens, max_token_len, mini_batch_size)
    _require_positive(
        world_size=world_size, micro_batch_size=micro_batch_size, epochs=epochs, mini_batch_size=mini_batch_size
    )
    num_rows = len(sizes)
    # more than all tokens, also with padding slots
    no_bound = int(sizes.sum() + num_rows * sizes.max())
    bounds = _Bounds(max_token_len or no_bound, micro_batch_size or num_rows)

    # the steps come first and do not depend on the ranks, so that the gradient does not either
    steps = _draw_mini_batches(num_rows, mini_batch_size, epochs, shuffle_seed)
    owner = _assign_ranks(sizes, steps[:, 0], world_size, balance)
    rows, mini_batch = _fill_ranks(sizes, owner, steps, world_size, bounds)

    is_padding = rows < 0
    # the shortest row is the cheapest padding
    shortest_row = int(sizes.argmin())
    order = np.where(is_padding, shortest_row, rows)
    micro_batch, num_micro_batches = _split_into_micro_batches(sizes[order], mini_batch, bounds)

    slots = _slots_by_micro_batch(mini_batch, micro_batch)
    schedule = []
    for epoch in range(epochs):
        schedule.append(_schedule(steps[:, epoch], counts, num_micro_batches[epoch]))
    return BatchPlan(
        num_rows=num_rows,
        world_size=world_size,
        order=order[slots].reshape(-1),
        is_padding=is_padding[slots].reshape(-1),
        mini_batch=mini_batch[slots].reshape(-1, epochs),
        micro_batch=micro_batch[slots].reshape(-1, epochs),
        schedule=schedule,
    )


def plan_samples(number: int, world_size: int, micro_batch_size: int) -> BatchPlan:
    """Plans one optimizer step over samples of equal cost."""
    ones = np.ones(number, dtype=np.int64)
    return plan_batch(
        ones,
        world_size=world_size,
        mini_batch_size=None,
        micro_batch_size=micro_batch_size,
        num_tokens=ones,
    )


def _row_counts(num_tokens: ArrayLike, num_distilled: ArrayLike | None, samples: Sequence[str] | None) -> _RowCounts:
    tokens = np.asarray(num_tokens, dtype=np.int64)
    distilled = np.zeros_like(tokens)
    if num_distilled is not None:
        distilled = np.asarray(num_distilled, dtype=np.int64)
    # without samples each row is one
    sample_numbers = np.arange(tokens.size)
    if samples is not None:
        names = np.asarray(samples, str)
        _, sample_numbers = np.unique(names, return_inverse=True)
    return _RowCounts(tokens, distilled, sample_numbers)


def _draw_mini_batches(num_rows: int, size: int | Sequence[int] | None, epochs: int, seed: int | None) -> Ints:
    """Returns the optimizer step of each row, (B, epochs)."""
    if isinstance(size, Sequence):
        num_steps = len(size)
        step_by_position = np.repeat(np.arange(num_steps), size)
    else:
        step_by_position = np.arange(num_rows) // (size or num_rows)

    steps = np.empty((num_rows, epochs), dtype=np.int64)
    for epoch in range(epochs):
        order = np.arange(num_rows)
        if seed is not None:
            # a generator of its own for each epoch, so that a resumed run draws the same order
            order = np.random.default_rng([seed, epoch]).permutation(num_rows)
        steps[order, epoch] = step_by_position
    return steps


def _assign_ranks(lengths: Ints, steps: Ints, world_size: int, balance: bool) -> Ints:
    """Returns the rank of each row, (B,). Within a mini-batch the ranks' row counts differ by at most one."""
    owner = np.zeros(len(lengths), dtype=np.int64)
    costs = lengths + lengths.astype(np.float64) ** 2 / ATTENTION_PARITY_LENGTH
    num_steps = int(steps.max()) + 1
    for rows in _positions_by_value(steps, num_steps):
        # mini-batch by mini-batch, because ranks wait for each other at each optimizer step
        positions_of_ranks: Iterable[Ints]
        if balance:
            positions_of_ranks = balanced_partition(costs[rows], world_size)
        else:
            positions_of_ranks = np.array_split(np.arange(len(rows)), world_size)
        for rank, positions in enumerate(positions_of_ranks):
            is_item = positions < len(rows)  # and not a filler
            own_rows = rows[positions[is_item]]
            owner[own_rows] = rank
    return owner


def _fill_ranks(lengths: Ints, owner: Ints, steps: Ints, world_size: int, bounds: _Bounds) -> tuple[Ints, Ints]:
    """Gives each rank as many slots as its forward passes need.

    If all epochs have the same mini-batches, every rank gets equally many slots of each mini-batch. Otherwise the
    ranks' row counts in a mini-batch differ: a rank gets padding only where it has fewer rows than forward passes, and
    its unused padding slots are excluded (-1) from that epoch.

    Args:
        lengths: (B,) tokens of each row.
        owner: (B,) rank of each row.
        steps: (B, epochs) optimizer step of each row.
        world_size: W, the number of ranks.
        bounds: bounds of a micro-batch.

    Returns:
        The rows of each rank (W, n / W), padded with -1, and their mini-batches (W, n / W, epochs).
    """
    epochs = steps.shape[1]
    num_steps = int(steps.max()) + 1
    rows_of_ranks = _positions_by_value(owner, world_size)
    slot_counts, row_counts = _slot_counts(lengths, rows_of_ranks, steps, bounds)

    # the epoch and the rank that need most, because all ranks get equally many slots
    slots_per_rank = int(slot_counts.sum(axis=2).max())
    # own rows first, followed by padding slots, of which an epoch uses as many as it needs
    rows = np.full((world_size, slots_per_rank), -1, dtype=np.int64)
    mini_batch = np.full((world_size, slots_per_rank, epochs), -1, dtype=np.int64)
    for rank, own_rows in enumerate(rows_of_ranks):
        num_own = len(own_rows)
        rows[rank, :num_own] = own_rows
        mini_batch[rank, :num_own] = steps[own_rows]
        for epoch in range(epochs):
            padding_counts = slot_counts[epoch, rank] - row_counts[epoch, rank]
            padding_steps = np.repeat(np.arange(num_steps), padding_counts)
            num_used = num_own + len(padding_steps)
            mini_batch[rank, num_own:num_used, epoch] = padding_steps
    return rows, mini_batch


def _slot_counts(lengths: Ints, rows_of_ranks: list[Ints], steps: Ints, bounds: _Bounds) -> tuple[Ints, Ints]:
    """Returns the slots that each rank gets in each step, and the rows that it has there, both (epochs, W, steps)."""
    epochs = steps.shape[1]
    num_steps = int(steps.max()) + 1
    row_counts = np.zeros((epochs, len(rows_of_ranks), num_steps), dtype=np.int64)
    for epoch in range(epochs):
        for rank, own_rows in enumerate(rows_of_ranks):
            own_steps = steps[own_rows, epoch]
            row_counts[epoch, rank] = np.bincount(own_steps, minlength=num_steps)

    # equal mini-batches in all epochs
    steps_of_first_epoch = steps[:, :1]
    if (steps == steps_of_first_epoch).all():
        most_rows = row_counts.max(axis=1, keepdims=True)
        return np.broadcast_to(most_rows, row_counts.shape), row_counts
    # each forward pass of any rank needs a row on every rank
    pass_counts = _pass_counts(lengths, rows_of_ranks, steps, bounds)
    most_passes = pass_counts.max(axis=1, keepdims=True)
    return np.maximum(row_counts, most_passes), row_counts


def _pass_counts(lengths: Ints, rows_of_ranks: list[Ints], steps: Ints, bounds: _Bounds) -> Ints:
    """Returns the forward passes that each rank needs in each step, (epochs, W, steps)."""
    epochs = steps.shape[1]
    num_steps = int(steps.max()) + 1
    counts = np.zeros((epochs, len(rows_of_ranks), num_steps), dtype=np.int64)
    for epoch in range(epochs):
        for rank, own_rows in enumerate(rows_of_ranks):
            own_lengths = lengths[own_rows]
            own_steps = steps[own_rows, epoch]
            for step, positions in enumerate(_positions_by_value(own_steps, num_steps)):
                lengths_of_step = own_lengths[positions].tolist()
                micro_batches = _pack(lengths_of_step, bounds)
                counts[epoch, rank, step] = len(micro_batches)
    return counts


def _slots_by_micro_batch(mini_batch: Ints, micro_batch: Ints) -> tuple[Ints, Ints]:
    """Returns an index that orders the slots of each rank by mini-batch and micro-batch of the first epoch, so that a
    rank reads contiguous rows.

    Args:
        mini_batch: (W, n / W, epochs).
        micro_batch: (W, n / W, epochs).
    """
    world_size = len(mini_batch)
    ranks = np.arange(world_size)[:, None]
    first_mini_batch = mini_batch[..., 0]
    first_micro_batch = micro_batch[..., 0]
    # the last key is the first criterion; the slots of each rank are sorted by themselves
    orders = np.lexsort((first_micro_batch, first_mini_batch))
    return ranks, orders


def _schedule(steps: Ints, counts: _RowCounts, num_micro_batches: list[int]) -> list[MiniBatch]:
    """Counts the denominators of each optimizer step.

    Args:
        steps: (B,) step of each row.
        counts: what each row adds.
        num_micro_batches: forward passes of each step.
    """
    # with weights bincount adds in fp64, which is exact up to 2^53
    tokens = np.bincount(steps, weights=counts.num_tokens).astype(np.int64)
    distilled = np.bincount(steps, weights=counts.num_distilled).astype(np.int64)

    # a sample that has several rows with tokens in a step counts once
    has_token = counts.num_tokens > 0
    step_and_sample = np.stack([steps[has_token], counts.samples[has_token]])
    steps_of_samples, _ = np.unique(step_and_sample, axis=1)
    # as long as the list of steps, because the last ones may have no token
    sequences = np.bincount(steps_of_samples, minlength=len(tokens))

    mini_batches = []
    for step, number in enumerate(num_micro_batches):
        mini_batch = MiniBatch(
            num_micro_batches=number,
            num_tokens=int(tokens[step]),
            num_sequences=int(sequences[step]),
            num_distilled=int(distilled[step]),
        )
        mini_batches.append(mini_batch)
    return mini_batches


def _positions_by_value(values: Ints, number: int) -> list[Ints]:
    """Returns the ascending positions of each value 0..number-1; other values (-1) are ignored."""
    order = np.argsort(values, kind="stable")
    ascending_values = values[order]
    bounds = np.searchsorted(ascending_values, np.arange(number + 1))
    positions = []
    for value in range(number):
        start, stop = bounds[value : value + 2]
        positions.append(order[start:stop])
    return positions


def _split_into_micro_batches(lengths: Ints, mini_batch: Ints, bounds: _Bounds) -> tuple[Ints, list[list[int]]]:
    """Splits the mini-batches of each rank into micro-batches, of which all ranks have the same number.

    Args:
        lengths: (W, n / W) tokens of each slot.
        mini_batch: (W, n / W, epochs) mini-batch of each slot.
        bounds: bounds of a micro-batch.

    Returns:
        The micro-batch of each slot (W, n / W, epochs), and the number of micro-batches by epoch and mini-batch.
    """
    micro_batch = np.where(mini_batch < 0, -1, 0)
    numbers: list[list[int]] = []
    for epoch in range(mini_batch.shape[2]):
        mini_batch_of_epoch = mini_batch[..., epoch]
        num_steps = int(mini_batch_of_epoch.max()) + 1
        # by rank and step
        slots = [_positions_by_value(steps, num_steps) for steps in mini_batch_of_epoch]
        numbers_of_epoch = []
        for step in range(num_steps):
            lengths_of_ranks = []
            for rank, slots_by_step in enumerate(slots):
                own_lengths = lengths[rank, slots_by_step[step]]
                lengths_of_ranks.append(own_lengths.tolist())
            bins_of_ranks = _split_mini_batch(lengths_of_ranks, bounds)
            numbers_of_epoch.append(len(bins_of_ranks[0]))

            for rank, bins in enumerate(bins_of_ranks):
                for number, members in enumerate(bins):
                    slots_of_bin = slots[rank][step][members]
                    micro_batch[rank, slots_of_bin, epoch] = number
        numbers.append(numbers_of_epoch)
    return micro_batch, numbers


def _split_mini_batch(lengths: list[list[int]], bounds: _Bounds) -> list[list[list[int]]]:
    """Returns, for each rank, the positions of its rows by micro-batch. Every rank gets the largest number required.

    The first micro-batch of each rank is its heaviest, so that ranks wait little for each other and a token bound that
    is too large for the device fails immediately.
    """
    packed = [_pack(own_lengths, bounds) for own_lengths in lengths]
    # a rank with fewer forward passes than the others would hang in FSDP's collectives
    number = max(len(bins) for bins in packed)
    if number == 1:
        return packed
    result = []
    for own_lengths, bins in zip(lengths, packed, strict=True):
        # an even split may violate the token bound where the tight packing does not
        micro_batches = _pack_evenly(own_lengths, number, bounds) or _split(bins, number)
        micro_batches.sort(key=lambda members: -sum(own_lengths[position] for position in members))
        result.append(micro_batches)
    return result


def _pack(lengths: list[int], bounds: _Bounds) -> list[list[int]]:
    """Packs items into few bins within the bounds: each item, longest first, goes to the fullest bin with room."""
    num_items = len(lengths)
    if num_items <= bounds.max_rows and sum(lengths) <= bounds.max_tokens:
        return [list(range(num_items))]
    bins: list[list[int]] = []
    # (free tokens, bin) of the bins with room for another row, ascending, so that the fullest comes first
    room: list[tuple[int, int]] = []
    for item in _longest_first(lengths):
        # the first entry with enough free tokens; -1 comes before every bin's number
        entry = bisect_left(room, (lengths[item], -1))
        # none: a new bin, whose entry is the last, because no bin has more free tokens
        if entry == len(room):
            bins.append([])
            room.append((bounds.max_tokens, len(bins) - 1))
        free, number = room.pop(entry)
        bins[number].append(item)
        if len(bins[number]) < bounds.max_rows:
            insort(room, (free - lengths[item], number))
    return bins


def _longest_first(lengths: list[int]) -> list[int]:
    """Returns the positions of the lengths in descending order; equal lengths keep their order."""
    return sorted(range(len(lengths)), key=lambda position: -lengths[position])


def _pack_evenly(lengths: list[int], number: int, bounds: _Bounds) -> list[list[int]] | None:
    """Packs items into exactly `number` nonempty bins of similar load: each item, longest first, to the emptiest bin.

    Returns None if that violates a bound, so that a tighter packing is needed. Requires at least `number` items.
    """
    bins: list[list[int]] = [[] for _ in range(number)]
    # a heap of (tokens, rows, bin), in which an empty bin comes before any other
    loads = [(0, 0, position) for position in range(number)]
    for item in _longest_first(lengths):
        # all bins have the largest number of rows
        if not loads:
            return None
        tokens, num_rows, position = loads[0]
        if tokens + lengths[item] > bounds.max_tokens:
            return None
        bins[position].append(item)
        if num_rows + 1 < bounds.max_rows:
            heapq.heapreplace(loads, (tokens + lengths[item], num_rows + 1, position))
        else:
            heapq.heappop(loads)
    return bins


def _split(bins: list[list[int]], number: int) -> list[list[int]]:
    """Halves the bins with the most items until there are `number` bins, none empty. Requires `number` items."""
    bins = list(bins)
    while len(bins) < number:
        sizes = [len(items) for items in bins]
        largest = sizes.index(max(sizes))
        items = bins[largest]
        # every second item and not the first half, because `_pack` adds the longest items first
        bins[largest] = items[::2]
        bins.append(items[1::2])
    return bins


def _require_positive(**options: int | Sequence[int] | None) -> None:
    """Raises ValueError if an option, or an entry of a list, is below 1."""
    for name, value in options.items():
        smallest = min(value) if isinstance(value, Sequence) else value
        if smallest is not None and smallest < 1:
            raise ValueError(f"plan_batch: {name}={value}; expected at least 1.")


def _require_fitting_rows(
    lengths: Ints, num_tokens: Ints, max_token_len: int | None, steps: int | Sequence[int] | None
) -> None:
    """Raises ValueError if the batch is empty, a row exceeds the bound, or the steps have another number of rows."""
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


def compute_seqlen_metrics(plan: BatchPlan, lengths: np.ndarray) -> dict[str, float]:
    """Returns statistics of the number of tokens per rank, under verl's names.

    global_seqlen/{min,max,minmax_diff,mean} assume that ranks take the rows in order; global_seqlen/balanced_{min,max}
    are those of the plan.

    Args:
        plan: the plan of a pass.
        lengths: (B,) tokens of each row in the plan.
    """
    parts = np.array_split(lengths, plan.world_size)
    in_order = np.array([part.sum() for part in parts])
    planned_lengths = np.where(plan.is_padding, 0, lengths[plan.order])
    lengths_by_rank = planned_lengths.reshape(plan.world_size, -1)
    balanced = lengths_by_rank.sum(1)
    return {
        "global_seqlen/min": float(in_order.min()),
        "global_seqlen/max": float(in_order.max()),
        "global_seqlen/mean": float(in_order.mean()),
        "global_seqlen/minmax_diff": float(np.ptp(in_order)),
        "global_seqlen/balanced_min": float(balanced.min()),
        "global_seqlen/balanced_max": float(balanced.max()),
    }

"""The planner: which rank computes which row in which micro-batch, and what the loss is divided by.

The driver plans once, for all ranks, from sequence lengths alone; ranks obey and never count for themselves. So every
rank runs the same number of forward passes (FSDP would wait for ever otherwise), any number of rows goes with any
number of ranks, and the denominators are those of the whole mini-batch, counted before anything is split: the gradient
does not depend on how the batch was cut. Which rows share an optimizer step follows from the driver's row order and the
shuffle seed, never from the number of ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from verl_lite.protocol import DataProto

Ints = NDArray[np.int64]
PLAN_COLUMNS = ("mini_batch", "micro_batch")

# Matrix multiplications of a layer cost 24 h^2 operations per token, attention 4 h L: equal at a length of 6 h, here
# for h = 4096. For the balance only the order of magnitude matters.
ATTENTION_PARITY_LENGTH = 24_576
BALANCE_TOLERANCE = 1.002  # heaviest rank over mean at which swapping stops
MAX_SWAPS_PER_SET = 8


class _Bounds(NamedTuple):
    """Of one micro-batch on one rank."""

    max_tokens: int
    max_rows: int


@dataclass(frozen=True)
class MiniBatch:
    """One optimizer step: forward passes of each rank, and the global denominators of its loss."""

    num_micro_batches: int
    num_tokens: int  # valid response tokens on all ranks
    num_sequences: int  # sequences with at least one of them


@dataclass(frozen=True, eq=False)
class BatchPlan:
    """Where each of `num_rows` rows goes. n places, n / world_size for each rank, in rank order.

    order: (n,) the row that stands at each place; a padding place repeats the shortest row.
    is_padding: (n,) bool, places without weight.
    mini_batch, micro_batch: (n, epochs), the optimizer step of each place and the forward pass within it; -1 for a
        padding place that an epoch has no use for (only with a shuffle and several epochs).
    schedule: by epoch, by mini-batch. Each rank has at least one place in each micro-batch.
    """

    num_rows: int
    world_size: int
    order: Ints
    is_padding: NDArray[np.bool_]
    mini_batch: Ints
    micro_batch: Ints
    schedule: list[list[MiniBatch]]

    def apply(self, data: DataProto) -> DataProto:
        """The rows at their places, as a new batch.

        Adds is_padding (n,) bool, mini_batch and micro_batch (n, epochs) int64, meta_info["schedule"]; response_mask,
        where present, is 0 on padding. Raises ValueError unless data has the rows that were planned.
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
        """What ranks returned for the planned batch, in the order of the original rows, without padding.

        The columns that `apply` added are gone, if they are there. Raises ValueError unless data has n rows.
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
) -> BatchPlan:
    """Plans `epochs` passes over a batch.

    lengths: (B,) tokens of each row, prompt and response; num_tokens: (B,) those that the loss counts.
    mini_batch_size: sequences per optimizer step, over all ranks; None = all. The last one may be smaller. Or the
        sequences of each step, which are all of them together.
    max_token_len, micro_batch_size: bounds of a micro-batch on one rank, in tokens and in sequences; None = no bound.
    shuffle_seed: draws the mini-batches of each epoch at random; None = rows in order, the same in each epoch.
    balance: give ranks rows of equal total cost L + L^2 / ATTENTION_PARITY_LENGTH within a mini-batch; else rows in
        order. With a shuffle and several epochs, rows stay where the first puts them; later ones are balanced by luck.
    Raises ValueError for an empty batch, a bound below 1, a row longer than max_token_len, or steps that are not the
    batch.
    """
    sizes, tokens = np.asarray(lengths, dtype=np.int64), np.asarray(num_tokens, dtype=np.int64)
    num_rows = len(sizes)
    _check(sizes, tokens, max_token_len, mini_batch_size)
    at_least_one = {"world_size": world_size, "micro_batch_size": micro_batch_size, "epochs": epochs}
    for name, value in (at_least_one | {"mini_batch_size": mini_batch_size}).items():
        if value is not None and (min(value) if isinstance(value, Sequence) else value) < 1:
            raise ValueError(f"plan_batch: {name}={value}; expected at least 1.")
    bounds = _Bounds(max_token_len or int(sizes.sum() + num_rows * sizes.max()), micro_batch_size or num_rows)
    steps = _draw_mini_batches(num_rows, mini_batch_size, epochs, shuffle_seed)
    owner = _assign_ranks(sizes, steps[:, 0], world_size, balance)
    rows, mini_batch, micro_batch, numbers = _place(sizes, owner, steps, world_size, bounds)
    order = np.where(rows < 0, int(sizes.argmin()), rows)
    # micro-batches of the first epoch stand together, so that a rank reads slices
    keys = zip(micro_batch[..., 0], mini_batch[..., 0], strict=True)
    places = (np.arange(world_size)[:, None], np.stack([np.lexsort(key) for key in keys]))
    return BatchPlan(
        num_rows=num_rows,
        world_size=world_size,
        order=order[places].reshape(-1),
        is_padding=(rows < 0)[places].reshape(-1),
        mini_batch=mini_batch[places].reshape(-1, epochs),
        micro_batch=micro_batch[places].reshape(-1, epochs),
        schedule=[_schedule(steps[:, epoch], tokens, numbers[epoch]) for epoch in range(epochs)],
    )


def balanced_partition(costs: ArrayLike, parts: int) -> Ints:
    """Splits items into `parts` sets of equal size and nearly equal cost: (parts, k) indices, k = ceil(B / parts).

    Sorted items are dealt out to and fro, then items of the heaviest and the lightest set change places while that
    helps. Indices of len(costs) and above are fillers of cost 0, at most one in each set.
    """
    given = np.asarray(costs, dtype=np.float64)
    size = -(-len(given) // parts)
    filled = np.concatenate([given, np.zeros(parts * size - len(given))])
    dealt = np.argsort(-filled, kind="stable").reshape(size, parts)
    dealt[1::2] = dealt[1::2, ::-1]
    return _swap(dealt.T, filled, len(given))


def _swap(sets: Ints, costs: NDArray[np.float64], num_items: int) -> Ints:
    """Swaps items between the heaviest and the lightest set while that helps; fillers stay where they are."""
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
        # for each item of the heavy set, the item of the light one that comes nearest to moving half of the gap
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
    """(B, epochs): the optimizer step of each row."""
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
    """(B,) rank of each row; within a mini-batch the ranks' row counts differ by at most one."""
    owner = np.zeros(len(lengths), dtype=np.int64)
    costs = lengths + lengths.astype(np.float64) ** 2 / ATTENTION_PARITY_LENGTH
    for rows in _by_value(steps, int(steps.max()) + 1):
        if balance:
            for rank, members in enumerate(balanced_partition(costs[rows], world_size)):
                owner[rows[members[members < len(rows)]]] = rank
        else:
            for rank, part in enumerate(np.array_split(rows, world_size)):
                owner[part] = rank
    return owner


def _place(
    lengths: Ints, owner: Ints, steps: Ints, world_size: int, bounds: _Bounds
) -> tuple[Ints, Ints, Ints, list[list[int]]]:
    """Rows of each rank (W, n / W), filled up with -1, their mini-batch and micro-batch (W, n / W, epochs), and the
    number of micro-batches by epoch and mini-batch.

    Where all epochs draw the same mini-batches, ranks have the same number of places in each. Otherwise one rank has
    more rows of a mini-batch than another; it takes padding only where it has fewer rows than forward passes, and what
    is left of its padding takes no part (-1) in that epoch.
    """
    epochs, num_steps, shortest = steps.shape[1], int(steps.max()) + 1, int(lengths.min())
    by_rank = _by_value(owner, world_size)
    is_same = bool((steps == steps[:, :1]).all())
    position = np.empty_like(owner)  # of each row on its rank; padding follows
    for own in by_rank:
        position[own] = np.arange(len(own))
    found: list[tuple[int, Ints, int, int, int]] = []  # rank, positions, epoch, mini-batch, micro-batch
    numbers: list[list[int]] = [[] for _ in range(epochs)]
    for epoch in range(epochs):
        ends = [len(own) for own in by_rank]
        for step, rows in enumerate(_by_value(steps[:, epoch], num_steps)):
            members = [rows[own] for own in _by_value(owner[rows], world_size)]
            at_least = max(map(len, members)) if is_same else 1
            bins = _cut([lengths[own].tolist() for own in members], shortest, at_least, bounds)
            numbers[epoch].append(len(bins[0]))
            for rank, own in enumerate(members):
                padding = sum(map(len, bins[rank])) - len(own)
                standing = np.append(position[own], np.arange(ends[rank], ends[rank] + padding))
                ends[rank] += padding
                found += [(rank, standing[chosen], epoch, step, micro) for micro, chosen in enumerate(bins[rank])]
    per_rank = 1 + max(int(standing.max()) for _, standing, *_ in found)
    placed = np.full((world_size, per_rank), -1, dtype=np.int64)
    for rank, own in enumerate(by_rank):
        placed[rank, : len(own)] = own
    mini_batch, micro_batch = np.full((2, world_size, per_rank, epochs), -1, dtype=np.int64)
    for rank, standing, epoch, step, micro in found:
        mini_batch[rank, standing, epoch] = step
        micro_batch[rank, standing, epoch] = micro
    return placed, mini_batch, micro_batch, numbers


def _cut(lengths: list[list[int]], shortest: int, at_least: int, bounds: _Bounds) -> list[list[list[int]]]:
    """For each rank its rows' positions by micro-batch, of which all ranks have as many as the neediest one.

    Positions behind a rank's rows are padding of length `shortest`: up to `at_least` places, and one in each
    micro-batch. The first micro-batch of each rank is its heaviest: ranks wait little for each other, and a budget that
    is too large for the device shows at once.
    """
    lengths = [own + [shortest] * (at_least - len(own)) for own in lengths]
    number = max(max(-(-sum(own) // bounds.max_tokens), -(-len(own) // bounds.max_rows), 1) for own in lengths)
    while True:
        filled = [own + [shortest] * (number - len(own)) for own in lengths]
        spread = [_spread(own, number, bounds) for own in filled]
        if all(spread):
            break
        number += 1
    loads = [[sum(own[i] for i in members) for members in bins] for own, bins in zip(filled, spread, strict=True)]
    return [
        [bins[i] for i in sorted(range(number), key=lambda i: -load[i])]
        for bins, load in zip(spread, loads, strict=True)
    ]


def _schedule(steps: Ints, num_tokens: Ints, num_micro_batches: list[int]) -> list[MiniBatch]:
    tokens = np.bincount(steps, weights=num_tokens).astype(np.int64)
    sequences = np.bincount(steps, weights=num_tokens > 0).astype(np.int64)
    return [MiniBatch(*each) for each in zip(num_micro_batches, tokens.tolist(), sequences.tolist(), strict=True)]


def _by_value(values: Ints, number: int) -> list[Ints]:
    """Positions of each value 0..number-1, ascending."""
    ascending = np.argsort(values, kind="stable")
    bounds = np.searchsorted(values[ascending], np.arange(number + 1))
    return [ascending[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]


def _spread(lengths: list[int], number: int, bounds: _Bounds) -> list[list[int]]:
    """Exactly `number` bins of similar load, none empty: each item, longest first, into the emptiest bin. No bin at all
    if that breaks a bound. There are at least `number` items."""
    if number == 1 and len(lengths) <= bounds.max_rows and sum(lengths) <= bounds.max_tokens:
        return [list(range(len(lengths)))]
    bins: list[list[int]] = [[] for _ in range(number)]
    loads = [(0, 0, i) for i in range(number)]  # (tokens, rows, bin): an empty bin comes before any other
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not loads or loads[0][0] + lengths[item] > bounds.max_tokens:
            return []
        tokens, count, i = loads[0]
        bins[i].append(item)
        if count + 1 < bounds.max_rows:
            heapq.heapreplace(loads, (tokens + lengths[item], count + 1, i))
        else:
            heapq.heappop(loads)
    return bins


def _check(lengths: Ints, num_tokens: Ints, max_token_len: int | None, steps: int | Sequence[int] | None) -> None:
    if lengths.ndim != 1 or lengths.shape != num_tokens.shape or not len(lengths):
        raise ValueError(f"plan_batch: lengths {lengths.shape} and num_tokens {num_tokens.shape} must be (B,), B > 0.")
    if isinstance(steps, Sequence) and sum(steps) != len(lengths):
        raise ValueError(f"plan_batch: {steps=} are {sum(steps)} sequences; the batch has {len(lengths)}.")
    longest = int(lengths.max())
    if max_token_len is not None and longest > max_token_len:
        raise ValueError(
            f"actor.ppo_max_token_len_per_gpu={max_token_len}: row {int(lengths.argmax())} alone has {longest} tokens. "
            f"Set it (or the log_prob_max_token_len_per_gpu of this pass) to at least {longest}, "
            "or lower data.max_prompt_length or data.max_response_length."
        )

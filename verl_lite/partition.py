"""Splits items of different costs into sets of equal size and nearly equal cost. `seqlen_balance` assigns rows to ranks
with it."""

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]

# heaviest set over mean at which swapping stops
BALANCE_TOLERANCE = 1.002
# a bound, because each swap may reduce the gap by very little
MAX_SWAPS_PER_SET = 8


class _PartialPartition(NamedTuple):
    """A partition of some of the items, in the heap of `balanced_partition`.

    Attributes:
        negative_gap: lightest minus heaviest set, by which the partition with the largest gap is the first in the heap.
        number: order of creation, which decides between equal gaps.
        sums: (parts,) costs of the sets, descending.
        sets: (parts, items) indices of the items.
    """

    negative_gap: float
    number: int
    sums: NDArray[np.float64]
    sets: Ints


def balanced_partition(costs: ArrayLike, parts: int) -> Ints:
    """Splits items into `parts` sets of equal size and nearly equal cost.

    Uses the largest differencing method of Karmarkar and Karp (1982), starting from chunks of `parts` items with one
    item for each set, and then swaps items.

    Args:
        costs: (B,).
        parts: number of sets.

    Returns:
        (parts, k) indices of the items of each set, with k = B / parts, rounded up. Indices from B on are fillers of
        cost 0, at most one per set.
    """
    item_costs = np.asarray(costs, dtype=np.float64)
    num_items = len(item_costs)
    # rounded up
    size = -(-num_items // parts)
    fillers = np.zeros(parts * size - num_items)
    costs_with_fillers = np.concatenate([item_costs, fillers])
    descending_items = np.argsort(-costs_with_fillers, kind="stable")

    # a partition for each `parts` items of similar cost, one item in each set
    heap = []
    for number, items in enumerate(descending_items.reshape(size, parts)):
        sums = costs_with_fillers[items]
        gap = sums[0] - sums[-1]
        heap.append(_PartialPartition(-gap, number, sums, sets=items[:, None]))
    heapq.heapify(heap)

    # each step joins the two partitions with the largest gaps, until one is left
    for number in range(size, 2 * size - 1):
        first = heapq.heappop(heap)
        second = heapq.heappop(heap)
        # the heaviest set of one joins the lightest set of the other
        joined_sums = first.sums + second.sums[::-1]
        joined_sets = np.hstack([first.sets, second.sets[::-1]])
        descending = np.argsort(-joined_sums, kind="stable")
        sums = joined_sums[descending]
        sets = joined_sets[descending]
        gap = sums[0] - sums[-1]
        heapq.heappush(heap, _PartialPartition(-gap, number, sums, sets))
    return _swap(heap[0].sets, costs_with_fillers, num_items)


def _swap(sets: Ints, costs: NDArray[np.float64], num_items: int) -> Ints:
    """Swaps items between the heaviest and the lightest set while that reduces their gap; fillers do not move.

    Args:
        sets: (parts, k) indices of the items of each set.
        costs: (parts * k,) costs of the items and fillers.
        num_items: number of items; fillers have the indices from this number on.
    """
    sets = sets.copy()
    sums = costs[sets].sum(axis=1)
    enough = sums.mean() * BALANCE_TOLERANCE
    for _ in range(MAX_SWAPS_PER_SET * len(sets)):
        heavy = int(sums.argmax())
        light = int(sums.argmin())
        if sums[heavy] <= enough:
            break
        gap = sums[heavy] - sums[light]
        heavy_costs = costs[sets[heavy]]
        light_costs = costs[sets[light]]

        # A swap is best if it moves half of the gap. For each item of the heavy set, there are two candidates: the
        # items of the light set whose costs are next below and next above the cost of the ideal partner.
        size = len(light_costs)
        by_cost = np.argsort(light_costs)
        ideal_costs = heavy_costs - gap / 2
        above = np.searchsorted(light_costs[by_cost], ideal_costs)
        # at least 1 and below `size`, so that both exist; a set of one item has only one of them, twice: `% size`
        above = above.clip(1, max(1, size - 1))
        partners = np.concatenate([by_cost[above - 1], by_cost[above % size]])
        items = np.tile(np.arange(size), 2)
        moved = heavy_costs[items] - light_costs[partners]

        # a swap that moves the whole gap or more only exchanges the two sets' roles
        reduces_gap = (moved > 0) & (moved < gap)
        are_items = (sets[heavy][items] < num_items) & (sets[light][partners] < num_items)
        is_allowed = are_items & reduces_gap
        if not is_allowed.any():
            break
        distances = np.abs(moved - gap / 2)
        best = int(np.where(is_allowed, distances, np.inf).argmin())
        item = items[best]
        partner = partners[best]
        sets[heavy, item], sets[light, partner] = sets[light, partner], sets[heavy, item]
        sums[heavy] -= moved[best]
        sums[light] += moved[best]
    return sets

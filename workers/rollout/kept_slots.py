"""Which slots of a KV cache hold finished requests, kept for requests that continue them (the next turn of a
conversation begins with all of the turn before it).

Slots of running sequences are the first ones; a kept slot is always behind them. Keys and values are not moved here:
methods say what has to be moved.
"""

from __future__ import annotations

from collections.abc import Sequence

Move = tuple[int, int, int]
"""(destination, source, positions that matter)"""


class KeptSlots:
    """slots: how many there are. The oldest kept one makes room where room is needed."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._number = 0
        self._kept: dict[int, tuple[int, tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, slot: int, encoded: tuple[int, ...]) -> None:
        """The slot holds the keys and values of these tokens, and nobody runs in it."""
        self._number += 1
        if encoded:
            self._kept[slot] = (self._number, encoded)

    def longest_prefix(self, encoded: Sequence[int]) -> int | None:
        """The kept slot that holds most of the beginning of these tokens, all of what it holds."""
        best, best_length = None, 0
        for slot, (_, kept) in self._kept.items():
            length = len(kept)
            if best_length < length <= len(encoded) and encoded[length - 1] == kept[-1] and encoded[:length] == kept:
                best, best_length = slot, length
        return best

    def length(self, slot: int) -> int:
        """Tokens that a kept slot holds."""
        return len(self._kept[slot][1])

    def claim(self, slot: int, target: int) -> int | None:
        """Kept slot `slot` is to run in `target`; returns the length of what was kept in `target` and changes places
        with it, None if nothing was.
        """
        del self._kept[slot]
        if slot == target or target not in self._kept:
            return None
        self._kept[slot] = self._kept.pop(target)
        return len(self._kept[slot][1])

    def vacate(self, start: int, end: int) -> list[Move]:
        """Slots start to end - 1 are to run new requests: moves of what is kept in them, the newest if not all fit."""
        moves: list[Move] = []
        leaving = sorted((self._kept.pop(slot), slot) for slot in range(start, end) if slot in self._kept)
        free = [slot for slot in range(end, self._slots) if slot not in self._kept] if leaving else []
        for entry, slot in reversed(leaving):
            if free:
                room = free.pop()
            else:
                room = min((other for other in self._kept if other >= end), key=self._kept.__getitem__, default=-1)
                if room < 0 or self._kept[room] > entry:
                    break  # what is left is older than all that is kept
            self._kept[room] = entry
            moves.append((room, slot, len(entry[1])))
        return moves

    def clear(self) -> None:
        """Nothing is kept."""
        self._kept.clear()

"""The smallest part of a case that still fails in the same way."""

from __future__ import annotations

from collections.abc import Callable

from tests.fuzz.cases import Case


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = 40) -> Case:
    """Leaves out one part after the other as long as `fails` says that the rest fails too.

    What remains fails, and without any one of its parts it does not (unless the tries ran out).
    """
    shrunk = True
    while shrunk:
        shrunk = False
        for place in range(len(case.parts) - 1, -1, -1):
            tries -= 1
            if tries < 0:
                return case
            smaller = case.only(case.parts[:place] + case.parts[place + 1 :])
            if fails(smaller):
                case, shrunk = smaller, True
    return case

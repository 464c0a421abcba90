"""Tests here register trackers of their own; afterwards the registry is as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainer.tracking import TRACKERS


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    before = dict(TRACKERS)
    yield
    TRACKERS.clear()
    TRACKERS.update(before)

"""Runs that end with their test, whatever happens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.tiny_run import TinyRun


@pytest.fixture
def runs() -> Iterator[list[TinyRun]]:
    started: list[TinyRun] = []
    yield started
    for run in started:
        run.close()

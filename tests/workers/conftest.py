"""Tiny models and ranks that the tests of workers share: both take seconds to make."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.tiny_model import tiny_qwen2
from tests.workers.ranks import Ranks

OnRanks = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("model"), hidden=32, heads=4, kv_heads=2)


@pytest.fixture(scope="session")
def tied_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("tied"), hidden=32, heads=4, tie_word_embeddings=True)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with Ranks(4, timeout_s=600) as pool:
        yield pool


@pytest.fixture(scope="session")
def two_ranks(ranks: Ranks) -> OnRanks:
    """Runs a function on two of them."""
    return functools.partial(ranks.run, size=2)

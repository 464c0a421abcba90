"""Pools of environments, ended with the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.workers.env_cases import MakePool, templates
from verl_lite.config import EnvPoolConfig
from workers.agents.env_pool import EnvPool


@pytest.fixture
def make_pool() -> Iterator[MakePool]:
    pools = []

    def make(num_workers: int = 0, *, others: Any = None, **options: Any) -> EnvPool:
        pools.append(EnvPool(EnvPoolConfig(num_workers=num_workers, **options), templates(**(others or {}))))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()

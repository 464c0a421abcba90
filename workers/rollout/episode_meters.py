"""Engine and pool as episodes use them, with what a dashboard wants to know counted on the way."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Protocol

from verl_lite.metrics import Metric
from workers.envs.reply import EnvReply
from workers.rollout.base import Completion, Request, RolloutEngine
from workers.rollout.episodes import Pool


class EngineMeter:
    """A rollout engine; the part of it that episodes use."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._busy_s, self._steps, self._sequences, self._tokens = 0.0, 0, 0, 0

    def submit(self, request: Request) -> None:
        self._engine.submit(request)

    def abort(self, request_ids: Sequence[str]) -> list[Completion]:
        return self._engine.abort(request_ids)

    @property
    def unfinished(self) -> int:
        return self._engine.unfinished

    def step(self) -> list[Completion]:
        started, running = time.perf_counter(), self._engine.unfinished
        completions = self._engine.step()
        self._busy_s += time.perf_counter() - started
        self._steps += 1
        self._sequences += running
        self._tokens += sum(len(completion.token_ids) for completion in completions)
        return completions

    def take(self, seconds: float) -> dict[str, Metric]:
        """Metrics since the last call; seconds: that episodes were driven meanwhile."""
        metrics = {
            "rollout/engine_busy_frac": Metric.mean(self._busy_s, seconds),
            "rollout/engine_sequences": Metric.mean(self._sequences, self._steps),
            "rollout/tokens_per_second_per_gpu": Metric.mean(self._tokens, seconds),
        }
        self._busy_s, self._steps, self._sequences, self._tokens = 0.0, 0, 0, 0
        return metrics


class Environments(Pool, Protocol):
    """A pool: `workers.envs.pool.EnvPool`."""

    @property
    def processes_replaced(self) -> int: ...


class PoolMeter:
    """A pool of environments; the part of it that episodes use."""

    def __init__(self, pool: Environments) -> None:
        self._pool = pool
        self._seconds: list[float] = []

    def reset(self, key: Hashable, tag: str, seed: int, render: bool = False) -> None:
        self._pool.reset(key, tag, seed, render)

    def step(self, key: Hashable, action: str) -> None:
        self._pool.step(key, action)

    def discard(self, key: Hashable) -> None:
        self._pool.discard(key)

    def poll(self, timeout_s: float = 0.0) -> Sequence[EnvReply]:
        replies = self._pool.poll(timeout_s)
        self._seconds += [reply.seconds for reply in replies]
        return replies

    def take(self) -> dict[str, Metric]:
        """Metrics since the last call; processes_replaced counts from the start of the run."""
        seconds, self._seconds = self._seconds, []
        metrics = {"env/processes_replaced": Metric.sum(self._pool.processes_replaced)}
        if seconds:
            metrics["env/step_seconds/mean"] = Metric.mean(sum(seconds), len(seconds))
            metrics["env/step_seconds/max"] = Metric.max(max(seconds))
        return metrics

"""The inside of a reward process: reads samples from the pool, scores them, sends results back.

Started by `workers.rewards.handle` as a bare interpreter: it imports neither torch nor the caller's main module. It
tells through a page of shared memory which sample's code runs and since when: that is how the pool knows, when it has
to kill this process or finds it dead, which sample was the culprit. Async functions are in `workers.rewards.loop`.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection

from verl_lite.config import RewardConfig
from verl_lite.registry import import_modules
from verl_lite.rewards import RewardItem, RewardResult, Scorer, Style, load_scorer
from verl_lite.rewards.load import ListScorer, SampleScorer
from workers.children.inside import end_if_forked, redirect_prints, settle_in

PROGRESS = struct.Struct("dq")
"""The shared page: since when (`time.monotonic`, one clock for all processes), and the ticket of the sample whose code
runs, or NO_SAMPLE."""

NO_SAMPLE = -1

_FLUSH_S = 0.05

Ticket = int
"""The number under which the pool sent a sample."""


@dataclass(frozen=True)
class ProcessOptions:
    """What a reward process has to know. modules: to import, for the rewards that they register. log_path: where prints
    of the reward function go; None = nowhere."""

    config: RewardConfig
    modules: tuple[str, ...]
    log_path: str | None


@dataclass(frozen=True)
class Loaded:
    """The process is ready. style: how its function takes samples: one after the other, many at once, or as a list."""

    style: Style


@dataclass(frozen=True)
class NotLoaded:
    """The reward function cannot be used. error: the traceback."""

    error: str


@dataclass(frozen=True)
class Report:
    """Results by ticket. None: the call with a whole list failed, so that each of them has to be called alone.

    is_spoiled: something goes on in the process that should have ended; it has to be replaced.
    """

    results: list[tuple[Ticket, RewardResult | None]]
    is_spoiled: bool = False


Message = Loaded | NotLoaded | Report


def main(connection_fd: int, progress_fd: int, parent_pid: int) -> None:
    """Serves until the pool closes its end. First message: `ProcessOptions`, answered with Loaded or NotLoaded."""
    settle_in(parent_pid)
    connection = Connection(connection_fd)
    progress = mmap.mmap(progress_fd, PROGRESS.size)
    options: ProcessOptions = connection.recv()
    redirect_prints(options.log_path, "reward")
    try:
        scorer = load(options.config, options.modules)
    except Exception:  # the user's module may raise anything; the pool reports it
        connection.send(NotLoaded(traceback.format_exc()))
        return
    connection.send(Loaded(scorer.style))
    if scorer.style == "async":
        from workers.rewards.loop import serve_concurrently

        serve_concurrently(connection, progress, scorer, options.config.timeout_s)
    elif scorer.style == "batch":
        _serve_lists(connection, progress, scorer)
    else:
        _serve_one_by_one(connection, progress, scorer)


def load(config: RewardConfig, modules: tuple[str, ...]) -> Scorer:
    """Imports `modules`, for the rewards that they register, and gives the reward of the run."""
    import_modules(modules)
    return load_scorer(config)


def _serve_one_by_one(connection: Connection, progress: mmap.mmap, scorer: SampleScorer) -> None:
    pid = os.getpid()
    while batch := _receive(connection):
        results: list[tuple[Ticket, RewardResult | None]] = []
        flushed = time.monotonic()
        for ticket, item in batch:
            if time.monotonic() - flushed > _FLUSH_S:
                connection.send(Report(results))
                results, flushed = [], time.monotonic()
            write_progress(progress, ticket)
            results.append((ticket, scorer.score(item)))
            end_if_forked(pid)
        write_progress(progress, NO_SAMPLE)
        connection.send(Report(results))


def _serve_lists(connection: Connection, progress: mmap.mmap, scorer: ListScorer) -> None:
    pid = os.getpid()
    while batch := _receive(connection):
        tickets = [ticket for ticket, _ in batch]
        outcomes: list[RewardResult | None] = [None] * len(batch)
        write_progress(progress, tickets[0])
        try:
            outcomes = list(scorer.score([item for _, item in batch]))
        except Exception:  # the one door to untrusted code, as in `PlainScorer`
            if len(batch) == 1:
                outcomes = [RewardResult.failure(traceback.format_exc())]
        end_if_forked(pid)
        write_progress(progress, NO_SAMPLE)
        connection.send(Report(list(zip(tickets, outcomes, strict=True))))


def _receive(connection: Connection) -> list[tuple[Ticket, RewardItem]]:
    """The next samples; empty when the pool has closed its end."""
    try:
        return connection.recv()
    except EOFError:
        return []


def write_progress(page: mmap.mmap, ticket: Ticket) -> None:
    """Notes that the code of this sample runs from now on. In one piece: `pack_into` would first fill the page with
    zeros, and a pool that looks at that instant would see a sample that began at time 0, long overdue."""
    page[: PROGRESS.size] = PROGRESS.pack(time.monotonic(), ticket)

"""Many calls of an async reward function at a time, in one event loop: a reward process whose function awaits.

Each call has `timeout_s` from its beginning. Then it is cancelled and the others go on; nobody is killed. A call that
blocks the loop instead of awaiting is told apart: before each step of a task the shared page names the sample that the
task belongs to, so that the pool can kill the process and blame the right one.
"""

from __future__ import annotations

import asyncio
import contextvars
import mmap
import os
import types
from collections.abc import Coroutine, Generator
from multiprocessing.connection import Connection
from typing import Any

from verl_lite.rewards import RewardItem, RewardResult
from verl_lite.rewards.load import AwaitingScorer
from workers.children.inside import end_if_forked
from workers.rewards.process import NO_SAMPLE, Report, Ticket, write_progress

_CANCEL_S = 1.0

_sample: contextvars.ContextVar[Ticket] = contextvars.ContextVar("sample", default=NO_SAMPLE)
"""The ticket of the sample in whose task the code runs; tasks that it starts inherit it."""


def serve_concurrently(connection: Connection, progress: mmap.mmap, scorer: AwaitingScorer, timeout_s: float) -> None:
    """Scores whatever comes, at once, until the pool closes its end."""
    asyncio.run(_Loop(connection, progress, scorer, timeout_s).serve())


class _Loop:
    """The samples under way, and what they share."""

    def __init__(self, connection: Connection, progress: mmap.mmap, scorer: AwaitingScorer, timeout_s: float) -> None:
        self._connection, self._progress = connection, progress
        self._scorer, self._timeout_s = scorer, timeout_s
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps weak references only

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._make_task)
        closed = loop.create_future()
        loop.add_reader(self._connection.fileno(), self._receive, closed)
        await closed
        os._exit(0)  # the pool is gone; what still runs is nobody's

    def _receive(self, closed: asyncio.Future[None]) -> None:
        try:
            batch: list[tuple[Ticket, RewardItem]] = self._connection.recv()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._connection.fileno())
            closed.set_result(None)
            return
        for ticket, item in batch:
            context = contextvars.copy_context()
            context.run(_sample.set, ticket)
            task = asyncio.get_running_loop().create_task(self._score(ticket, item), context=context)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _score(self, ticket: Ticket, item: RewardItem) -> None:
        """Reports one sample, at its deadline at the latest."""
        call = asyncio.get_running_loop().create_task(self._scorer.score(item))
        done, pending = await asyncio.wait({call}, timeout=self._timeout_s)
        if pending:
            how = f"took longer than reward.timeout_s={self._timeout_s:g} seconds"
            result = RewardResult.failure(f"The reward function {how}; it was cancelled.", timed_out=True)
            call.cancel()
            done, pending = await asyncio.wait({call}, timeout=_CANCEL_S)
        elif call.cancelled():
            result = RewardResult.failure("The reward function cancelled itself (asyncio.CancelledError).")
        else:
            result = call.result()
        self._connection.send(Report([(ticket, result)], is_spoiled=bool(pending)))

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        return asyncio.Task(self._watched(coroutine), loop=loop, **more)

    async def _watched(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await _steps(coroutine, self._progress, _sample.get(), os.getpid())


@types.coroutine
def _steps(
    coroutine: Coroutine[Any, Any, Any], progress: mmap.mmap, ticket: Ticket, pid: int
) -> Generator[Any, None, Any]:
    """Runs a coroutine as `await` does; the page names its sample while it runs, and none while it waits."""
    thrown: BaseException | None = None
    while True:
        write_progress(progress, ticket)
        try:
            waits_for = coroutine.send(None) if thrown is None else coroutine.throw(thrown)
        except StopIteration as end:
            return end.value
        except (SystemExit, KeyboardInterrupt) as end:  # now, while the page names the culprit
            os._exit(end.code if isinstance(end, SystemExit) and isinstance(end.code, int) else 1)
        finally:
            end_if_forked(pid)
            write_progress(progress, NO_SAMPLE)
        thrown = None
        try:
            yield waits_for
        except BaseException as error:  # a cancellation, which is the coroutine's to handle
            thrown = error

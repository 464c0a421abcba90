"""Coroutines run from functions that are not async, also where a notebook already runs an event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from verl_lite.machine.event_loop import run_async


def test_a_notebook_runs_coroutines() -> None:
    async def double(number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    async def cell() -> int:
        # as in a cell, a function that is not async calls it while the loop of this thread runs
        return run_async(double(4))

    assert asyncio.run(cell()) == run_async(double(4)) == 8


@pytest.mark.parametrize("error", [SystemExit(3), KeyError("x")])
def test_an_exception_passes_through_also_one_that_ends_the_loop(error: BaseException) -> None:
    async def fail() -> None:
        await asyncio.gather(asyncio.sleep(60), leave())

    async def leave() -> None:
        raise error

    with pytest.raises(type(error)):
        run_async(fail())
    assert not [thread for thread in threading.enumerate() if "run_loop" in thread.name]


def test_an_interrupt_cancels_the_coroutine() -> None:
    ended = threading.Event()

    async def request() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.set()

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_async(request(), interrupt)
    assert ended.wait(5)

"""Runs a coroutine from a function that is not async, also in a notebook."""

import asyncio
import queue
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

_POLL_S = 0.2
_END_S = 5.0  # for closing connections

T = TypeVar("T")


def run_async(coroutine: Coroutine[object, None, T], check: Callable[[], None] = lambda: None) -> T:
    """Runs a coroutine to its end in a thread of its own, because a notebook has a running event loop in this one.

    Args:
        coroutine: the coroutine.
        check: called in this thread while it waits. An exception that it raises, and a KeyboardInterrupt, cancel the
            coroutine and pass through.
    """
    loops: queue.SimpleQueue[asyncio.AbstractEventLoop] = queue.SimpleQueue()
    # receives an exception that ends the loop itself, such as SystemExit; other exceptions end only the coroutine
    ended_loop = Future[T]()

    def run_loop() -> None:
        try:
            with asyncio.Runner() as runner:
                loops.put(runner.get_loop())
                runner.get_loop().run_forever()
        except BaseException as error:
            ended_loop.set_exception(error)

    # a daemon, because a look-up of a name that hangs must not hold up the exit of the process
    thread = threading.Thread(target=run_loop, daemon=True)
    thread.start()
    loop = loops.get()
    result = asyncio.run_coroutine_threadsafe(coroutine, loop)
    try:
        while True:
            done, _ = wait([result, ended_loop], timeout=_POLL_S, return_when="FIRST_COMPLETED")
            if done:
                return done.pop().result()
            check()
    finally:
        result.cancel()
        # the loop is closed if an exception has ended it
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(loop.stop)
        thread.join(_END_S)

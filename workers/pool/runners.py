"""How a process runs its calls: in threads, or all at once in an event loop."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Protocol

from verl_lite.errors import UserError
from workers.pool.channel import Call, Reply

NOBODY = -1

_TRACEBACK_CHARS = 8000
_CANCEL_S = 1.0

_session: contextvars.ContextVar[int] = contextvars.ContextVar("session", default=NOBODY)
"""The session in whose task the code runs; tasks that it starts inherit it."""

Deliver = Callable[[Reply], None]
Note = Callable[[int, int], None]
"""Told whenever a thread, by its number, begins with the code of a session, or is through with it (NOBODY)."""


class Handler(Protocol):
    """The work of a process.

    info: told to the pool when the process is ready. is_async: `run` gives coroutines, which run at the same time.
    """

    info: Any
    is_async: bool

    def run(self, session: int, payload: Any) -> Any:
        """A call; its value is pickled, and what it raises is the reply's error."""
        ...

    def end(self, session: int) -> None:
        """Nothing more comes from this session. Called in a thread of its own."""
        ...


class ThreadRunner:
    """Runs calls in at most `threads` threads; the first of them is the caller of `serve` with `has_caller`."""

    def __init__(
        self,
        handler: Handler,
        threads: int,
        deliver: Deliver,
        note: Note = lambda slot, session: None,
        *,
        has_caller: bool,
    ) -> None:
        self._handler, self._deliver, self._note = handler, deliver, note
        self._changed = threading.Condition()
        self._queue: deque[Call] = deque()
        self._busy_lanes: set[str] = set()
        self._threads_max, self._threads, self._idle = threads, int(has_caller), 0
        self._is_closed = False

    def submit(self, call: Call) -> None:
        """Queues a call and returns at once."""
        with self._changed:
            self._queue.append(call)
            if len(self._queue) > self._idle and self._threads < self._threads_max:
                threading.Thread(target=self.serve, args=(self._threads,), daemon=True).start()
                self._threads += 1
            self._changed.notify()

    def close(self) -> None:
        """Ends the threads that have nothing to do."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def serve(self, slot: int = 0) -> None:
        """Runs calls until `close`."""
        while (call := self._next()) is not None:
            self._note(slot, call.session)
            reply = self._perform(call)
            self._note(slot, NOBODY)
            with self._changed:
                if call.lane is not None:
                    self._busy_lanes.remove(call.lane)
                    self._changed.notify()
            self._deliver(reply)

    def _next(self) -> Call | None:
        """The first call in the queue that may run now. Blocks until there is one."""
        with self._changed:
            self._idle += 1
            try:
                while not self._is_closed:
                    for place, call in enumerate(self._queue):
                        if call.lane not in self._busy_lanes:
                            del self._queue[place]
                            self._busy_lanes |= {call.lane} if call.lane is not None else set()
                            return call
                    self._changed.wait()
                return None
            finally:
                self._idle -= 1

    def _perform(self, call: Call) -> Reply:
        started = time.monotonic()
        try:
            value = self._handler.run(call.session, call.payload)
        except UserError as error:
            return Reply(call.session, seconds=time.monotonic() - started, error=str(error))
        except BaseException:  # the one door to untrusted code, which may even raise SystemExit
            return Reply(
                call.session, seconds=time.monotonic() - started, error=traceback.format_exc()[-_TRACEBACK_CHARS:]
            )
        return Reply(call.session, value, time.monotonic() - started)


class LoopRunner:
    """Runs calls at once, in the event loop of the caller of `serve`.

    Each has `timeout_s` from its beginning; then it is cancelled and the others go on. One that blocks the loop instead
    of awaiting is told apart: before each step of a task `note` gets the session that the task belongs to. spoiled: is
    called when a call ignores its cancellation. overdue: what is said of a cancelled call.
    """

    def __init__(
        self,
        handler: Handler,
        timeout_s: float,
        overdue: str,
        deliver: Deliver,
        note: Note,
        spoiled: Callable[[], None],
    ) -> None:
        self._handler, self._timeout_s, self._overdue = handler, timeout_s, overdue
        self._deliver, self._note, self._spoiled = deliver, note, spoiled
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps weak references only
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._make_task)

    def submit(self, call: Call) -> None:
        """Starts a call, from any thread."""
        self._loop.call_soon_threadsafe(self._begin, call)

    def serve(self) -> None:
        """Runs calls for ever."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _begin(self, call: Call) -> None:
        context = contextvars.copy_context()
        context.run(_session.set, call.session)
        task = self._loop.create_task(self._perform(call), context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _perform(self, call: Call) -> None:
        started = time.monotonic()
        work = self._loop.create_task(self._handler.run(call.session, call.payload))
        done, pending = await asyncio.wait({work}, timeout=self._timeout_s)
        value, error = None, None
        if pending:
            error = f"{self._overdue}; it was cancelled."
            work.cancel()
            _, pending = await asyncio.wait({work}, timeout=_CANCEL_S)
        elif work.cancelled():
            error = "It cancelled itself (asyncio.CancelledError)."
        elif (raised := work.exception()) is not None:
            error = "".join(traceback.format_exception(raised))[-_TRACEBACK_CHARS:]
        else:
            value = work.result()
        self._deliver(Reply(call.session, value, time.monotonic() - started, error, is_timeout=not done))
        if pending:
            self._spoiled()

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **more: Any) -> asyncio.Task[Any]:
        return asyncio.Task(self._watched(coroutine), loop=loop, **more)

    async def _watched(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await _steps(coroutine, self._note, _session.get())


@types.coroutine
def _steps(coroutine: Coroutine[Any, Any, Any], note: Note, session: int) -> Generator[Any, None, Any]:
    """Runs a coroutine as `await` does, and notes its session while it runs, and nobody while it waits."""
    thrown: BaseException | None = None
    while True:
        note(0, session)
        try:
            waits_for = coroutine.send(None) if thrown is None else coroutine.throw(thrown)
        except StopIteration as end:
            return end.value
        except (SystemExit, KeyboardInterrupt) as end:  # of this task alone, not of the loop
            raise RuntimeError(f"{type(end).__name__}: {end}") from end
        finally:
            note(0, NOBODY)
        thrown = None
        try:
            yield waits_for
        except BaseException as error:  # a cancellation, which is the coroutine's to handle
            thrown = error

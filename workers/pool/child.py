"""The inside of a supervised process: takes calls from its pool, runs them in threads or all at once in an event loop,
and sends what they came to. Started by `workers.pool.process` as a bare interpreter: it imports neither torch nor the
caller's main module.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import faulthandler
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol, cast

from verl_lite.errors import UserError
from workers.pool.channel import CONTROL, Page, Reply, packed, unpacked

STACK_SIGNAL = signal.SIGUSR1
"""On this signal the process writes down the stacks of its threads, whatever it is doing."""

_REPLY_BYTES_MAX = 64 << 20
_TRACEBACK_CHARS = 8000
_PONG_AFTER_S = 0.2
_CANCEL_S = 1.0
_SWITCH_INTERVAL_S = 0.001
_PR_SET_PDEATHSIG = 1

_session: contextvars.ContextVar[int] = contextvars.ContextVar("session", default=CONTROL)
"""The session in whose task the code runs; tasks that it starts inherit it."""

Deliver = Callable[[Reply], None]
Note = Callable[[int, int], None]
"""Told whenever a thread, by its number, begins with the code of a session, or is through with it (CONTROL)."""


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


def main(socket_fd: int, page_fd: int, stacks_fd: int, parent_pid: int, threads: int, timeout_s: float) -> None:
    """Serves until the pool closes its end. The first message is pickled, and gives the `Handler` when it is called."""
    die_with_parent(parent_pid)
    faulthandler.enable(stacks_fd)
    faulthandler.register(STACK_SIGNAL, stacks_fd)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    connection, page, pid, sending = Connection(socket_fd), Page(page_fd, threads), os.getpid(), threading.Lock()
    os.register_at_fork(after_in_child=lambda: die_with_parent(pid))
    os.register_at_fork(after_in_child=connection.close)  # the pool must not take the child for this process

    def note(slot: int, session: int) -> None:
        if os.getpid() != pid:  # a fork inside untrusted code came back, and only one may go on
            os._exit(1)
        page.note(slot, session)

    def deliver(reply: Reply) -> None:
        message = packed(reply.session, _pickled(reply))
        with sending:
            connection.send_bytes(message)

    def read() -> None:
        try:
            while True:
                number, message = unpacked(connection.recv_bytes())
                if number == CONTROL:
                    time.sleep(_PONG_AFTER_S)  # those that were held up by another, which just ended, end now too
                    deliver(Reply(CONTROL))
                elif message:
                    runner.submit(number, pickle.loads(message))
                else:
                    handler.end(number)
        except EOFError:
            os._exit(0)  # the pool is gone; what still runs is nobody's
        except BaseException:  # user code closed the connection, or what came cannot be read
            os._exit(1)

    try:
        handler: Handler = pickle.loads(unpacked(connection.recv_bytes())[1])()
    except BaseException:  # the user's modules may raise anything; the pool reports it
        return deliver(Reply(CONTROL, error=traceback.format_exc()))
    runner: ThreadRunner | LoopRunner
    if handler.is_async:
        runner = LoopRunner(handler, timeout_s, deliver, note)
    else:
        runner = ThreadRunner(handler, threads, deliver, note)
    deliver(Reply(CONTROL, handler.info))
    threading.Thread(target=read, name="pool-reader", daemon=True).start()
    runner.serve()


def perform(session: int, work: Callable[[], Any]) -> Reply:
    """Runs a call here and now. Nothing is raised."""
    started, value, error = time.monotonic(), None, None
    try:
        value = work()
    except UserError as raised:
        error = str(raised)
    except BaseException:  # the one door to untrusted code, which may even raise SystemExit
        error = traceback.format_exc()[-_TRACEBACK_CHARS:]
    return Reply(session, value, time.monotonic() - started, error)


class ThreadRunner:
    """Runs calls in at most `threads` threads; the first of them is the caller of `serve`, the main thread, in which
    user code may use signals."""

    def __init__(self, handler: Handler, threads: int, deliver: Deliver, note: Note) -> None:
        self._handler, self._deliver, self._note = handler, deliver, note
        self._queue: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._slots = iter(range(1, threads))  # of threads that are not started yet

    def submit(self, session: int, payload: Any) -> None:
        """Queues a call and returns at once."""
        self._queue.put((session, payload))
        if (slot := next(self._slots, None)) is not None:
            threading.Thread(target=self.serve, args=(slot,), daemon=True).start()

    def serve(self, slot: int = 0) -> None:
        """Runs calls for ever."""
        while True:
            session, payload = self._queue.get()
            self._note(slot, session)
            reply = perform(session, partial(self._handler.run, session, payload))
            self._note(slot, CONTROL)
            self._deliver(reply)


class LoopRunner:
    """Runs calls at once, in the event loop of the caller of `serve`.

    Each has `timeout_s` from its beginning; then it is cancelled and the others go on. One that blocks the loop instead
    of awaiting is told apart: before each step of a task `note` gets the session that the task belongs to.
    """

    def __init__(self, handler: Handler, timeout_s: float, deliver: Deliver, note: Note) -> None:
        self._handler, self._timeout_s, self._deliver, self._note = handler, timeout_s, deliver, note
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps weak references only
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(
            lambda loop, work, **more: asyncio.Task(self._watched(cast(Any, work)), loop=loop, **more)
        )

    def submit(self, session: int, payload: Any) -> None:
        """Starts a call, from any thread."""
        self._loop.call_soon_threadsafe(self._begin, session, payload)

    def serve(self) -> None:
        """Runs calls for ever."""
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _begin(self, session: int, payload: Any) -> None:
        context = contextvars.copy_context()
        context.run(_session.set, session)
        task = self._loop.create_task(self._perform(session, payload), context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _perform(self, session: int, payload: Any) -> None:
        work = self._loop.create_task(self._handler.run(session, payload))
        done, pending = await asyncio.wait({work}, timeout=self._timeout_s)
        if done:
            return self._deliver(perform(session, work.result))
        work.cancel()
        _, pending = await asyncio.wait({work}, timeout=_CANCEL_S)
        self._deliver(Reply(session, error="it was cancelled", is_timeout=True))
        if pending:
            os._exit(1)  # it ignores its cancellation: what it holds ends with the process, and the others begin anew

    async def _watched(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return await _steps(coroutine, self._note, _session.get())


@types.coroutine
def _steps(coroutine: Coroutine[Any, Any, Any], note: Note, session: int) -> Generator[Any, None, Any]:
    """Runs a coroutine as `await` does, and notes its session while it runs, and nobody while it waits."""
    step: Callable[[], Any] = partial(coroutine.send, None)
    while True:
        note(0, session)
        try:
            waits_for = step()
        except StopIteration as end:
            return end.value
        except (SystemExit, KeyboardInterrupt) as end:  # of this task alone, not of the loop
            raise RuntimeError(f"{type(end).__name__}: {end}") from end
        finally:
            note(0, CONTROL)
        step = partial(coroutine.send, None)
        try:
            yield waits_for
        except BaseException as error:  # a cancellation, which is the coroutine's to handle
            step = partial(coroutine.throw, error)


def _pickled(reply: Reply) -> bytes:
    try:
        message = pickle.dumps(reply)
    except Exception as error:  # whatever objects untrusted code gives may raise anything
        reason = f"What it gave cannot go to another process: {type(error).__name__}: {error}"
    else:
        if len(message) <= _REPLY_BYTES_MAX:
            return message
        reason = f"What it gave is {len(message) >> 20} MiB long; {_REPLY_BYTES_MAX >> 20} MiB are allowed"
    return pickle.dumps(Reply(reply.session, seconds=reply.seconds, error=reason))


def die_with_parent(parent_pid: int) -> None:
    """On Linux the kernel kills this process when the thread that started it ends, whatever this one is doing then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)

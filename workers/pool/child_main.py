"""The main program of a supervised process: receives calls from its pool, runs them in threads and sends the results.

`workers.pool.process` starts it in a bare interpreter, which imports neither torch nor the caller's main module.
"""

import asyncio
import contextlib
import faulthandler
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine
from functools import partial
from multiprocessing.connection import Connection
from typing import Protocol, TypeVar

from verl_lite.errors import UserError, user_traceback
from verl_lite.machine.process_tree import become_subreaper, die_with_parent
from workers.pool.channel import CONTROL, Reply, packed, unpacked

T = TypeVar("T")
Payload = TypeVar("Payload", contravariant=True)
Value = TypeVar("Value", covariant=True)

STACK_SIGNAL = signal.SIGUSR1
"""Signal on which the process writes the stacks of its threads to a file, even inside C code."""

CONCURRENT = ("async", "threads", "commands")
"""Styles of handlers that run several calls at the same time."""

CANCEL_S = {"async": 1.0, "commands": 15.0}
"""By style of handlers that end late calls themselves, the seconds that this may take."""

_REPLY_BYTES_MAX = 64 << 20
_TRACEBACK_CHARS = 8000
"""Longest traceback in a reply."""
_PONG_AFTER_S = 0.2
"""Seconds between a ping and its answer."""
_SWITCH_INTERVAL_S = 0.001
"""Seconds after which a computing thread leaves the interpreter to another one, such as the one that reads calls."""


class Overdue(Exception):
    """Raised by a handler that ended a call because it took too long. The message says how the call was ended."""


class AsyncCalls:
    """Runs coroutines of many calls in one event loop, in a thread of its own.

    Attributes:
        thread: id of that thread.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        # after a fork only the parent's loop continues
        os.register_at_fork(after_in_child=lambda: self._loop.call_soon(os._exit, 1))
        thread = threading.Thread(target=self._serve, daemon=True)
        thread.start()
        self.thread = thread.ident

    def run(self, work: Coroutine[object, None, T], timeout_s: float, subject: str, option: str) -> T:
        """Runs a coroutine in the loop, and waits for it. Returns its result, or raises its exception.

        Args:
            work: the coroutine.
            timeout_s: time limit in seconds.
            subject: name of the work for the message of Overdue.
            option: option of the time limit, for the message.

        Raises:
            Overdue: the coroutine took longer than the limit and was cancelled.
        """
        limited = self._awaited(work, timeout_s, subject, option)
        future = asyncio.run_coroutine_threadsafe(limited, self._loop)
        return future.result()

    def _serve(self) -> None:
        while True:
            # raised by one task, which stores it as its error; the loop continues for the others
            with contextlib.suppress(SystemExit, KeyboardInterrupt):
                self._loop.run_forever()

    async def _awaited(self, work: Coroutine[object, None, T], timeout_s: float, subject: str, option: str) -> T:
        task = asyncio.ensure_future(work)
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            task.cancel()
            raise Overdue(f"The {subject} took longer than {option}={timeout_s:g} seconds; it was cancelled.")
        return task.result()


class Handler(Protocol[Payload, Value]):
    """Runs the calls of a process.

    Attributes:
        style: how calls run. `threads`: each call in its own thread; `commands`: likewise, and the handler ends late
            calls itself; `async`: all calls in one event loop, and the handler ends late calls itself, unless one of
            them blocks the event loop; any other style: one call at a time.
        thread: thread of the event loop (a `threading.get_ident`); None for the other styles.
    """

    style: str
    thread: int | None

    def run(self, session: int, payload: Payload) -> Value:
        """Runs a call. The returned value is pickled; an exception becomes the reply's error."""
        ...

    def end(self, session: int) -> None:
        """Called when a session has ended, in the thread that reads calls."""
        ...


def main(socket_fd: int, stacks_fd: int, parent_pid: int, threads: int) -> None:
    """Serves calls until the pool closes its end. The first message is a pickled function that creates the `Handler`.

    Args:
        socket_fd: this process's end of the channel.
        stacks_fd: file for the stacks of threads.
        parent_pid: process of the pool.
        threads: maximum number of calls at the same time.
    """
    connection = Connection(socket_fd)
    _prepare_process(connection, stacks_fd, parent_pid)
    child = Child(connection)
    try:
        _, make = unpacked(connection.recv_bytes())
        handler: Handler[object, object] = pickle.loads(make)()
    except BaseException as error:
        # the user's modules may raise anything; the pool reports it
        return child.deliver(Reply(CONTROL, error=error_text(error)))
    runs_concurrently = handler.style in CONCURRENT
    child.serve(handler, threads if runs_concurrently else 1)


def _prepare_process(connection: Connection, stacks_fd: int, parent_pid: int) -> None:
    """Lets this process end with its pool, report its stacks, and survive what user code prints or forks.

    Args:
        connection: this process's end of the channel.
        stacks_fd: file for the stacks of threads.
        parent_pid: process of the pool.
    """
    die_with_parent(parent_pid)
    # daemons of user code stay below this process, and end with it
    become_subreaper()
    # Ray blocks SIGTERM; programs of user code must not inherit that
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    faulthandler.enable(stacks_fd)
    faulthandler.register(STACK_SIGNAL, stacks_fd)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    # user code may print text that the encoding of the machine does not have
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    pid = os.getpid()
    os.register_at_fork(after_in_child=lambda: die_with_parent(pid))
    # the pool must not mistake a fork for this process
    os.register_at_fork(after_in_child=connection.close)


def perform(session: int, work: Callable[[], T]) -> Reply[T]:
    """Runs a call in this thread. Returns its result or its exception as a reply; raises nothing."""
    start_time = time.monotonic()
    try:
        value = work()
    except BaseException as error:
        # untrusted code, called only here, may even raise SystemExit
        seconds = time.monotonic() - start_time
        is_timeout = isinstance(error, Overdue)
        return Reply(session, seconds=seconds, error=error_text(error), is_timeout=is_timeout)
    seconds = time.monotonic() - start_time
    return Reply(session, value, seconds)


def error_text(error: BaseException) -> str:
    """Returns the message of a `UserError` or `Overdue`, and the traceback of any other error."""
    if isinstance(error, UserError | Overdue):
        return str(error)
    return user_traceback(error)[-_TRACEBACK_CHARS:]


class Child:
    """Runs calls in the order of their arrival. The main thread is the first worker thread, so that user code can use
    signals; further threads start when calls arrive."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._pid = os.getpid()
        # held while a message is written, because several threads send replies
        self._sending = threading.Lock()
        # by session with a running call, the thread that runs it
        self._threads: dict[int, int] = {}
        self._calls: queue.SimpleQueue[tuple[int, object]] = queue.SimpleQueue()

    def serve(self, handler: Handler[object, object], threads: int) -> None:
        """Serves calls until the pool closes its end."""
        # the first message tells the pool that calls can be sent, and how they run
        self.deliver(Reply(CONTROL, handler.style))
        read = partial(self._read, handler, threads)
        threading.Thread(target=read, name="pool-reader", daemon=True).start()
        self._work(handler)

    def deliver(self, reply: Reply[object]) -> None:
        """Sends a reply to the pool. Can be called from any thread."""
        message = packed(reply.session, _pickled(reply))
        with self._sending:
            self._connection.send_bytes(message)

    def _read(self, handler: Handler[object, object], threads: int) -> None:
        """Reads messages until the pool closes its end: pings, ends of sessions (empty messages) and calls. Starts a
        thread for each call while there are fewer than `threads`."""
        # the main thread is the first one
        num_threads = 1
        try:
            while True:
                session, message = unpacked(self._connection.recv_bytes())
                if session == CONTROL:
                    # calls that were blocked by another one, which just ended, can end first
                    time.sleep(_PONG_AFTER_S)
                    self.deliver(Reply(CONTROL, self._stacks()))
                elif not message:
                    handler.end(session)
                else:
                    payload = pickle.loads(message)
                    self._calls.put((session, payload))
                    if num_threads < threads:
                        num_threads += 1
                        worker = threading.Thread(target=self._work, args=(handler,), daemon=True)
                        worker.start()
        except EOFError:
            # the pool is gone, and nobody waits for running calls
            os._exit(0)
        except BaseException:
            # user code closed the connection, or a message cannot be read
            os._exit(1)

    def _work(self, handler: Handler[object, object]) -> None:
        """Runs calls one after the other. Never returns."""
        while True:
            session, payload = self._calls.get()
            # for `_stacks`: the thread in which this call runs, which for a coroutine is that of the event loop
            self._threads[session] = handler.thread or threading.get_ident()
            reply = perform(session, partial(handler.run, session, payload))
            # untrusted code forked; only the parent continues
            if os.getpid() != self._pid:
                os._exit(1)
            del self._threads[session]
            self.deliver(reply)

    def _stacks(self) -> dict[int, str]:
        """Returns the stack of each running call by session."""
        frames = sys._current_frames()
        stacks = {}
        for session, thread in self._threads.copy().items():
            if thread in frames:
                stacks[session] = "".join(traceback.format_stack(frames[thread]))
        return stacks


def _pickled(reply: Reply[object]) -> bytes:
    """Pickles a reply. A value that cannot be pickled, or is too long, becomes an error."""
    try:
        message = pickle.dumps(reply)
    except Exception as error:
        # pickling objects of untrusted code can raise anything
        reason = f"The returned value cannot be pickled: {type(error).__name__}: {error}"
    else:
        if len(message) <= _REPLY_BYTES_MAX:
            return message
        reason = f"The returned value has {len(message) >> 20} MiB; at most {_REPLY_BYTES_MAX >> 20} MiB are allowed"
    return pickle.dumps(Reply(reply.session, seconds=reply.seconds, error=reason))

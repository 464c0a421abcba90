"""The inside of a supervised process: takes calls from its pool, runs them in threads, and sends what they came to.
Started by `workers.pool.process` as a bare interpreter: it imports neither torch nor the caller's main module.
"""

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
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Protocol

from verl_lite.errors import UserError, user_traceback
from workers.pool.channel import CONTROL, Reply, packed, unpacked

STACK_SIGNAL = signal.SIGUSR1
"""On this signal the process writes down the stacks of its threads, whatever it is doing."""

CONCURRENT = ("async", "threads")
"""Styles of handlers that take several calls at a time."""

_REPLY_BYTES_MAX = 64 << 20
_TRACEBACK_CHARS = 8000
_PONG_AFTER_S = 0.2
_SWITCH_INTERVAL_S = 0.001
_PR_SET_PDEATHSIG = 1


class Overdue(Exception):
    """A handler ended a call because it took too long; says what it did to it."""


class Handler(Protocol):
    """The work of a process.

    style: told to the pool when the process is ready. `threads`: each call has a thread; `async`: the code of all calls
    runs in `thread` (by `threading.get_ident`), in an event loop; else it takes one call at a time.
    """

    style: str
    thread: int | None

    def run(self, session: int, payload: Any) -> Any:
        """A call; its value is pickled, and what it raises is the reply's error."""
        ...

    def end(self, session: int) -> None:
        """Nothing more comes from this session. Called in a thread of its own."""
        ...


def main(socket_fd: int, stacks_fd: int, parent_pid: int, threads: int) -> None:
    """Serves until the pool closes its end. The first message is pickled, and gives the `Handler` when it is called."""
    die_with_parent(parent_pid)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray's processes hear no SIGTERM; what user code starts here does
    faulthandler.enable(stacks_fd)
    faulthandler.register(STACK_SIGNAL, stacks_fd)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    connection, pid = Connection(socket_fd), os.getpid()
    os.register_at_fork(after_in_child=lambda: die_with_parent(pid))
    os.register_at_fork(after_in_child=connection.close)  # the pool must not take the child for this process
    child = Child(connection)
    try:
        handler: Handler = pickle.loads(unpacked(connection.recv_bytes())[1])()
    except BaseException as error:  # the user's modules may raise anything; the pool reports it
        return child.deliver(Reply(CONTROL, error=error_text(error)))
    child.serve(handler, threads if handler.style in CONCURRENT else 1)


def perform(session: int, work: Callable[[], Any]) -> Reply:
    """Runs a call here and now. Nothing is raised."""
    started, value, error, is_timeout = time.monotonic(), None, None, False
    try:
        value = work()
    except BaseException as raised:  # the one door to untrusted code, which may even raise SystemExit
        error, is_timeout = error_text(raised), isinstance(raised, Overdue)
    return Reply(session, value, time.monotonic() - started, error, is_timeout)


def error_text(error: BaseException) -> str:
    """The message of an error that says what to change; the traceback of any other."""
    return str(error) if isinstance(error, UserError | Overdue) else user_traceback(error)[-_TRACEBACK_CHARS:]


class Child:
    """Runs the calls that come in their order, each in a thread. The first thread is the main thread, in which user
    code may use signals; more start with the calls."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._pid, self._sending = connection, os.getpid(), threading.Lock()
        self._threads: dict[int, int] = {}  # of the sessions whose code runs
        self._calls: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def serve(self, handler: Handler, threads: int) -> None:
        """Serves until the pool closes its end."""
        self.deliver(Reply(CONTROL, handler.style))
        threading.Thread(target=self._read, args=(handler, threads), name="pool-reader", daemon=True).start()
        self._work(handler)

    def deliver(self, reply: Reply) -> None:
        """Sends it to the pool; from any thread."""
        message = packed(reply.session, _pickled(reply))
        with self._sending:
            self._connection.send_bytes(message)

    def _read(self, handler: Handler, threads: int) -> None:
        try:
            while True:
                number, message = unpacked(self._connection.recv_bytes())
                if number == CONTROL:
                    time.sleep(_PONG_AFTER_S)  # those that were held up by another, which just ended, end now too
                    self.deliver(Reply(CONTROL, self._stacks()))
                elif not message:
                    handler.end(number)
                else:
                    self._calls.put((number, pickle.loads(message)))
                    if (threads := threads - 1) > 0:
                        threading.Thread(target=self._work, args=(handler,), daemon=True).start()
        except EOFError:
            os._exit(0)  # the pool is gone; what still runs is nobody's
        except BaseException:  # user code closed the connection, or what came cannot be read
            os._exit(1)

    def _work(self, handler: Handler) -> None:
        while True:
            session, payload = self._calls.get()
            self._threads[session] = handler.thread or threading.get_ident()
            reply = perform(session, partial(handler.run, session, payload))
            if os.getpid() != self._pid:  # a fork inside untrusted code came back, and only one may go on
                os._exit(1)
            del self._threads[session]
            self.deliver(reply)

    def _stacks(self) -> dict[int, str]:
        """Where the code of each session is."""
        frames, running = sys._current_frames(), self._threads.copy().items()
        return {x: "".join(traceback.format_stack(frames[thread])) for x, thread in running if thread in frames}


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
    """Has Linux kill this process when the thread that started it ends, whatever this process is doing then.

    Other systems have no such call. There `Child._read` ends the process when the pool's end of the pipe is closed.
    """
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)

"""The inside of a supervised process: takes calls from its pool, runs them, sends what they came to.

Started by `workers.pool.process` as a bare interpreter: it imports neither torch nor the caller's main module. A page
of shared memory tells which sessions' code runs, in which threads and since when: that is how the pool knows what is
overdue, and who was at work when it finds this process dead.
"""

from __future__ import annotations

import ctypes
import faulthandler
import io
import mmap
import os
import pickle
import signal
import struct
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NoReturn, cast

from workers.pool.channel import CONTROL, Control, Loaded, NotLoaded, Pong, ProcessEnd, Reply, Spoiled, Start
from workers.pool.runners import NOBODY, Handler, LoopRunner, ThreadRunner

STACK_SIGNAL = signal.SIGUSR1
"""On this signal the process writes the stacks of its threads to stderr, whatever it is doing."""

_PRINTED_BYTES_MAX = 10 << 20
_LAST_LINE = b"\n[more output of this process is dropped]\n"
_REPLY_BYTES_MAX = 64 << 20
_PONG_AFTER_S = 0.2
_SWITCH_INTERVAL_S = 0.001
_PR_SET_PDEATHSIG = 1
_CULPRIT = struct.Struct("<q")
_SLOT = struct.Struct("<dqQ")


@dataclass(frozen=True)
class Running:
    """A call under way. since: by `time.monotonic`, one clock for all processes. thread: `threading.get_ident()`."""

    session: int
    since: float
    thread: int


class Page:
    """The shared page. culprit: the session whose code is ending the process; and a slot for each thread."""

    def __init__(self, fd: int, threads: int) -> None:
        self._page = mmap.mmap(fd, self.size(threads))

    @staticmethod
    def size(threads: int) -> int:
        """In bytes."""
        return _CULPRIT.size + threads * _SLOT.size

    def clear(self, threads: int) -> None:
        """Before the process starts."""
        self.culprit = NOBODY
        for slot in range(threads):
            self.note(slot, NOBODY)

    def note(self, slot: int, session: int) -> None:
        """The calling thread runs this session's code from now on. In one piece (`pack_into` would fill the place with
        zeros first), and the time first: a reader in between sees an earlier session that has just begun."""
        place = _CULPRIT.size + slot * _SLOT.size
        self._page[place : place + _SLOT.size] = _SLOT.pack(time.monotonic(), session, threading.get_ident())

    def running(self) -> list[Running]:
        """All calls under way."""
        slots = _SLOT.iter_unpack(self._page[_CULPRIT.size :])
        return [Running(session, since, thread) for since, session, thread in slots if session != NOBODY]

    @property
    def culprit(self) -> int:
        return int(_CULPRIT.unpack_from(self._page)[0])

    @culprit.setter
    def culprit(self, session: int) -> None:
        self._page[: _CULPRIT.size] = _CULPRIT.pack(session)

    def close(self) -> None:
        self._page.close()


def main(socket_fd: int, page_fd: int, threads: int, parent_pid: int) -> None:
    """Serves until the pool closes its end. First message: `Start`, answered with Loaded or NotLoaded."""
    die_with_parent(parent_pid)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    channel, page = ProcessEnd(socket_fd), Page(page_fd, threads)
    pid = os.getpid()
    os.register_at_fork(after_in_child=lambda: die_with_parent(pid))
    os.register_at_fork(after_in_child=channel.leave)
    _name_who_exits(page, pid)
    first = channel.receive()
    if first is None:
        return
    start: Start = pickle.loads(first[1])
    sys.stdout = sys.stderr = capped_log(start.log_path)
    try:
        handler: Handler = pickle.loads(start.make)()
    except BaseException:  # the user's modules may raise anything; the pool reports it
        channel.send(CONTROL, pickle.dumps(NotLoaded(traceback.format_exc())))
        return
    _serve(start, handler, channel, page)


def _serve(start: Start, handler: Handler, channel: ProcessEnd, page: Page) -> None:
    pid = os.getpid()

    def note(slot: int, session: int) -> None:
        if os.getpid() != pid:  # a fork inside untrusted code came back, and only one may go on
            os._exit(1)
        page.note(slot, session)

    def tell(message: Control) -> None:
        channel.send(CONTROL, pickle.dumps(message))

    def deliver(reply: Reply) -> None:
        channel.send(reply.session, _packed(reply))

    runner: ThreadRunner | LoopRunner
    if handler.is_async:
        runner = LoopRunner(handler, start.timeout_s, start.overdue, deliver, note, lambda: tell(Spoiled()))
    else:
        runner = ThreadRunner(handler, start.threads, deliver, note, has_caller=True)

    def read() -> None:
        while (frame := channel.receive()) is not None:
            number, packed = frame
            if number == CONTROL:
                time.sleep(_PONG_AFTER_S)  # those that were held up by another, which just ended, end now too
                tell(Pong(_stacks(page)))
            elif packed:
                runner.submit(pickle.loads(packed))
            else:
                handler.end(number)
        os._exit(0)  # the pool is gone; what still runs is nobody's

    tell(Loaded(handler.info))
    threading.Thread(target=read, name="pool-reader", daemon=True).start()
    runner.serve()


def _packed(reply: Reply) -> bytes:
    try:
        packed = pickle.dumps(reply)
    except Exception as error:  # whatever objects untrusted code gives may raise anything
        reason = f"What it gave cannot go to another process: {type(error).__name__}: {error}"
    else:
        if len(packed) <= _REPLY_BYTES_MAX:
            return packed
        reason = f"What it gave is {len(packed) >> 20} MiB long; {_REPLY_BYTES_MAX >> 20} MiB are allowed"
    return pickle.dumps(Reply(reply.session, seconds=reply.seconds, error=reason))


def _stacks(page: Page) -> dict[int, str]:
    frames = sys._current_frames()
    threads = {call.session: frames[call.thread] for call in page.running() if call.thread in frames}
    return {session: "".join(traceback.format_stack(frame)) for session, frame in threads.items()}


def die_with_parent(parent_pid: int) -> None:
    """On Linux the kernel kills this process when the thread that started it ends, whatever this one is doing then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before the call above
        os._exit(1)


def _name_who_exits(page: Page, pid: int) -> None:
    """From now on `os._exit` notes on the page whose code calls it, which no signal and no stack would tell."""
    leave = os._exit

    def exit_with_note(status: int) -> NoReturn:
        if os.getpid() == pid:
            here = [call.session for call in page.running() if call.thread == threading.get_ident()]
            page.culprit = here[0] if here else NOBODY
        leave(status)

    os._exit = exit_with_note


def capped_log(path: str | None, limit: int = _PRINTED_BYTES_MAX) -> io.TextIOWrapper:
    """A stream for what untrusted code prints, up to a number of bytes; then one line says so and the rest is dropped.

    The processes that replace one another write into one file, which is begun anew when it is longer than that. A disk
    that is full drops what is printed.
    """
    return io.TextIOWrapper(cast(BinaryIO, _CappedFile(path, limit)), "utf-8", "replace", write_through=True)


class _CappedFile(io.RawIOBase):
    def __init__(self, path: str | None, limit: int) -> None:
        self._left, self._file = limit, None
        if path is not None:
            is_long = Path(path).exists() and Path(path).stat().st_size > limit
            self._file = open(path, "wb" if is_long else "ab", buffering=0)

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        if self._file is not None and self._left > 0:
            self._left -= len(data)
            try:
                self._file.write(data if self._left > 0 else _LAST_LINE)
            except OSError:
                pass
        return len(data)

"""Ctrl-C without a loss: the first one ends the run after the step at hand, with a checkpoint; the second at once.

SIGTERM, which schedulers send before they take a machine back, counts as Ctrl-C, and so does SIGHUP, which comes when
the terminal is closed.
"""

from __future__ import annotations

import os
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def stopping_on_signal(stop: Callable[[], None], tell: Callable[[str], None]) -> Iterator[None]:
    """Inside, the first of these signals calls `stop`; after it a second one raises KeyboardInterrupt.

    tell: shows a sentence to the user. What was ignored (nohup) stays ignored. Outside the main thread, where Python
    takes no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}

    def first(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            leave_terminal()
        for each, handler in before.items():
            signal.signal(each, handler if callable(handler) else signal.default_int_handler)
        tell(f"{signal.Signals(number).name}: stopping after this step, with a checkpoint; once more to stop at once")
        stop()

    for number in before:
        signal.signal(number, first)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_terminal() -> None:
    """Sends what would go to a terminal nowhere: the terminal is gone, and writing to it would be an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            os.dup2(nowhere, stream)
    os.close(nowhere)

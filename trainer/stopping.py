"""Ctrl-C without a loss: the first one ends the run after the step at hand, with a checkpoint; the second at once.

SIGTERM, which schedulers send before they take a machine back, counts as Ctrl-C.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stopping_on_signal(stop: Callable[[], None], tell: Callable[[str], None]) -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM calls `stop`; after it a second one raises KeyboardInterrupt.

    tell: shows a sentence to the user. Outside the main thread, where Python takes no signals, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def first(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.default_int_handler)
        tell(f"{signal.Signals(number).name}: stopping after this step, with a checkpoint; once more to stop at once")
        stop()

    for number in SIGNALS:
        signal.signal(number, first)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

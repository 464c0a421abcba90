"""How a command ends: done, stopped by a signal, wrong input, or a failure, whose first cause is printed last.

The one door of the commands that train. What a run started has ended and is cleaned up by the time anything is said
here: runs are contexts, and whatever ends them passes through these on its way.

Exit status: 0 done, 2 the user's input was wrong (one message, no traceback), 128 + the signal, 1 anything else.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from trainer.environment import prepare_driver
from trainer.stopping import leave_terminal
from verl_lite.errors import ClusterLostError, UserError, circumstances

WRONG_INPUT = 2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def command(main: Callable[[list[str]], int]) -> Callable[..., int]:
    """Decorator: makes the `main(argv=None)` of a command from a function of the words after `python -m NAME`. It runs
    in a prepared process (`trainer.environment`), and so imports what is heavy itself; for its end see `run_command`.
    """

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        prepare_driver()
        return run_command(lambda: main(sys.argv[1:] if argv is None else argv))

    return run


def run_command(command: Callable[[], int]) -> int:
    """Runs a command; returns its exit status. An error that is not the user's goes on, and is printed when nobody
    takes it, so that a debugger can."""
    sys.excepthook = print_failure
    with signals_interrupt() as received:
        try:
            return command()
        except UserError as error:
            print(f"\n{type(error).__name__}: {error}", file=sys.stderr)
            return WRONG_INPUT
        except KeyboardInterrupt:
            number = received[0] if received else signal.SIGINT
            print(f"\nStopped by {number.name}; nothing of the run is left running.", file=sys.stderr)
            return 128 + number
        except ClusterLostError as error:
            print_failure(type(error), error, error.__traceback__)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # Ray's part of this process cannot end in good order without a head; the guard cleans up


@contextmanager
def signals_interrupt() -> Iterator[list[signal.Signals]]:
    """Inside, SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt, so that the run ends in good order; another one
    during that ends the process at once, and the run's guard cleans up. Gives the list of those received.

    A signal that was ignored before (nohup) stays ignored. Outside the main thread nothing changes.
    """
    received: list[signal.Signals] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if received:
            os._exit(128 + number)
        received.append(signal.Signals(number))
        if number == signal.SIGHUP:
            leave_terminal()
        raise KeyboardInterrupt  # the one exception that Ray lets through while the driver waits

    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler not in (signal.SIG_IGN, None):
            signal.signal(number, interrupt)
    try:
        yield received
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: set by a library, and out of Python's reach
                signal.signal(number, handler)


def print_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Takes the place of `sys.excepthook`."""
    sys.stdout.flush()
    print(failure_text(error), file=sys.stderr, flush=True)


def failure_text(error: BaseException) -> str:
    """What to print about the error that ended a run: where the driver was, what else is known, then the traceback of
    the worker that raised it, and in the last line role, rank, phase and the error itself."""
    place = circumstances(error)
    told = traceback.TracebackException.from_exception(error)
    notes, told.__notes__ = getattr(error, "__notes__", []), None
    parts = ["".join(told.format()).rstrip()]
    parts += [note for note in notes if place.traceback is None or place.traceback not in note]
    if place.traceback is not None:
        parts.append(f"The first cause, {place}:\n{place.traceback}")
    first_line = (str(error).splitlines() or [""])[0]
    summary = f"The run failed: {place}: " if str(place) else "The run failed: "
    log = f"\n  its log: {place.log}" if place.log else ""
    parts.append(f"{summary}{type(error).__name__}: {first_line}{log}")
    return "\n" + "\n\n".join(parts)

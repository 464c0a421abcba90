"""How a command begins and ends: the environment of its process; done, stopped, wrong input, or a failure, whose first
cause is printed last.

The one door of all commands. What a run started has ended and is cleaned up by the time anything is said here: runs are
contexts, and whatever ends them passes through these on its way. Imports nothing heavy: it runs before torch does.

Exit status: 0 done, 2 the user's input was wrong (one message, no traceback), 128 + the signal, 1 anything else.
"""

import argparse
import atexit
import contextlib
import functools
import os
import re
import shlex
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from verl_lite.errors import ClusterLostError, UserError, circumstances, printable

NOTHING_LEFT = "nothing is left to do"  # said of a run that has all its steps
WRONG_INPUT = 2
INTERRUPTED = 130  # exit status of a run that its user stopped, as shells have it
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C; batch systems; the terminal is closed
WORKERS = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1"),
    **dict.fromkeys(("HF_HUB_DISABLE_TELEMETRY", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"), "1"),
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in the worker's process
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_LAUNCHER = re.compile(r"<frozen runpy>|\btrainer/(cli|start|run|main_\w+)\.py$")  # files above the training loop
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the second is all that vLLM 0.26 reads
DRIVER = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the numbers of CUDA_VISIBLE_DEVICES mean what nvidia-smi shows
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there is CUDA does not yet fix which devices are seen
    "OMP_NUM_THREADS": "1",
}


def worker_environment(cpu: bool, threads: int, *, sleeps: bool = True) -> dict[str, str]:
    """What a worker process is started with; on a GPU what the user has set of it stays.

    threads: of its computing (two pools on two cores slow each other 40 times). sleeps: its rollout engine gives its
    memory back between rollouts, with an allocator that does not go with expandable segments.
    """
    environment = {**WORKERS, "OMP_NUM_THREADS": str(threads)}
    if cpu:
        return environment | {"TORCHDYNAMO_DISABLE": "1"}
    if not sleeps and not any(name in os.environ for name in ALLOCATOR):
        environment |= dict.fromkeys(ALLOCATOR, "expandable_segments:True")
    return environment


def prepare_driver() -> None:
    """Sets this process's environment; what the user has set stays."""
    for name, value in (WORKERS | DRIVER).items():
        os.environ.setdefault(name, value)


def command(main: Callable[[list[str]], int]) -> Callable[..., int]:
    """Decorator: makes the `main(argv=None)` of a command from a function of the words after `python -m NAME`. It runs
    in a prepared process, and so imports what is heavy itself; for its end see `run_command`."""

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        prepare_driver()
        return run_command(lambda: main(sys.argv[1:] if argv is None else argv))

    return run


def out_as_word(argv: list[str], key: str) -> list[str]:
    """The words of a command whose options are key=value, with `--out FILE` as the word key=FILE at their end."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", action="append", default=[])
    given, rest = parser.parse_known_args(argv)
    return [*rest, *(f"{key}={file}" for file in given.out)]


def leave(status: int) -> NoReturn:
    """Ends the process of a command that is done, as Python would but for taking the modules apart, which takes more
    than a second; as Python does where a debugger or a profiler looks on."""
    if sys.gettrace() or sys.getprofile():
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]  # threads that still write are waited for
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_command(command: Callable[[], int]) -> int:
    """Runs a command; returns its exit status. An error that is not the user's goes on, and is printed when nobody
    takes it, so that a debugger can."""
    sys.excepthook = print_failure
    with signals_interrupt() as received:
        try:
            return command()
        except UserError as error:
            print(printable(f"\n{type(error).__name__}: {error}"), file=sys.stderr)
            return WRONG_INPUT
        except KeyboardInterrupt as stopped:
            number = received[0] if received else signal.SIGINT
            sys.stdout.flush()
            print(f"\nStopped by {number.name}; nothing of the run is left running.", file=sys.stderr)
            print("".join(f"{note}\n" for note in getattr(stopped, "__notes__", ())), end="", file=sys.stderr)
            return 128 + number
        except ClusterLostError as error:
            print_failure(type(error), error, error.__traceback__)
            if error.again is not None:  # all that the run started has ended
                print(f"Starting again from the last checkpoint, in this process: {shlex.join(error.again)}")
            sys.stdout.flush()
            sys.stderr.flush()
            if error.again is not None:
                os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *error.again])
            os._exit(1)  # Ray's part of this process cannot end in good order without a head; the guard cleans up


@contextmanager
def file_mask(mask: str, folder: Path) -> Iterator[None]:
    """Makes `folder`, if it is not there. It, and what this process and those that it starts make inside, lack the
    permissions of `mask` (octal). The folders above it, in which others stand too, lack what the user's own umask takes
    away as well."""
    own, wanted = os.umask(0o077), int(mask, 8)
    try:
        os.umask(own & wanted)
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.umask(wanted)
        folder.mkdir(exist_ok=True)
        yield
    finally:
        os.umask(own)


@contextmanager
def signals_interrupt() -> Iterator[list[signal.Signals]]:
    """Inside, SIGINT, SIGTERM and SIGHUP raise KeyboardInterrupt, so that the run ends in good order; another one
    during that ends the process at once, and the run's guard cleans up. Gives the list of those received."""
    received: list[signal.Signals] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if received:
            with contextlib.suppress(OSError, RuntimeError):  # the signal may have come while the stream was written to
                sys.stdout.flush()
            name = signal.Signals(number).name
            os.write(2, f"\nStopped at once by {name}; the run's guard ends what is left of it.\n".encode())
            os._exit(128 + number)
        received.append(signal.Signals(number))
        raise KeyboardInterrupt  # the one exception that Ray lets through while the driver waits

    with _handled_by(interrupt):
        yield received


@contextmanager
def stopping_on_signal(stop: Callable[[], None], tell: Callable[[str], None]) -> Iterator[None]:
    """Ctrl-C without a loss. Inside, the first of these signals calls `stop`, which ends the run after the step at hand
    with a checkpoint; after it a second one raises KeyboardInterrupt. tell: shows a sentence to the user."""

    def first(number: int, frame: FrameType | None) -> None:
        for each, handler in before.items():
            signal.signal(each, handler if callable(handler) else signal.default_int_handler)
        name = signal.Signals(number).name
        tell(f"{name}: stopping after this step, with a checkpoint; once more to stop at once, without one")
        stop()

    with _handled_by(first) as before:
        yield


@contextmanager
def _handled_by(handle: Callable[[int, FrameType | None], None]) -> Iterator[dict[signal.Signals, Any]]:
    """Inside, `handle` is called at these signals, after SIGHUP without a terminal. Gives the handlers that it stands
    in for. A signal that was ignored before (nohup) stays ignored; outside the main thread, where Python takes no
    signals, nothing changes."""

    def called(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:  # the terminal is gone, and writing to it would be an error
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for stream in (1, 2):
                if stat.S_ISCHR(os.fstat(stream).st_mode):
                    os.dup2(nowhere, stream)
        handle(number, frame)

    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in SIGNALS if is_main}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, called)
    try:
        yield before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Takes the place of `sys.excepthook`."""
    sys.stdout.flush()
    print(failure_text(error), file=sys.stderr, flush=True)


def failure_text(error: BaseException) -> str:
    """The message about the error that ended a run: the traceback of the worker or of the user's code that raised it,
    else the driver's, from the training loop on; then the notes, and in the last line role, rank, phase and error."""
    place, notes = circumstances(error), getattr(error, "__notes__", [])
    if place.traceback is not None:  # the driver only waited for what failed there
        parts = [f"The first cause, {place}:\n{place.traceback.rstrip()}"]
        notes = [note for note in notes if place.traceback not in note and note not in place.traceback]
    else:
        told = traceback.TracebackException.from_exception(error)
        told.__notes__ = None
        while len(told.stack) > 1 and _LAUNCHER.search(told.stack[0].filename):
            del told.stack[0]
        parts = ["".join(told.format()).rstrip()]
    parts += notes
    known, first_line = f"{place}: " if str(place) else "", str(error).partition("\n")[0]
    log = f"\n  its log: {place.log}" if place.log else ""
    parts.append(f"The run failed: {known}{type(error).__name__}: {first_line}{log}")
    return printable("\n" + "\n\n".join(parts))

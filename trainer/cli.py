"""Start and end of every command: sets the process environment, handles signals, and turns errors into messages and an
exit status. The first cause of a failure is printed last.

Runs are context managers, so everything that a run started has ended and is cleaned up before this module prints its
message. The module imports nothing heavy, because it runs before torch is imported.

Exit status: 0 success, 2 invalid user input (one message, no traceback), 128 + the signal number, 1 any other failure.
"""

import argparse
import atexit
import contextlib
import functools
import importlib.metadata
import io
import os
import re
import shlex
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

from verl_lite.errors import ClusterLostError, UserError, circumstances, printable
from verl_lite.machine.launcher import refuse_launcher

# part of the message about a run that already has all its steps
NOTHING_LEFT = "nothing is left to do"
WRONG_INPUT = 2
MOST_DEFAULT_CPU_SLOTS = 2
# exit status of a run that its user stopped: the shell's convention for SIGINT
INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # Ctrl-C; batch systems; a closed terminal
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that users of batch systems choose as the warning before a time limit (`--signal=USR1@300`). Only commands
handle them: a program that calls `train` may use them for something else."""
WORKERS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # the engine lives in the worker's process
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
_LAUNCHER = re.compile(r"<frozen runpy>|\btrainer/(cli|main_\w+|launch/\w+|evaluate/\w+)\.py$")
"""Files above the training loop."""
_OWN_PACKAGES = ("verl_lite", "workers", "trainer", "recipes")
Handler = Callable[[int, FrameType | None], object] | int | None
"""A handler of a signal, as in the types of Python's `signal`."""
SPINNING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables that set how long an idle compute thread spins before it sleeps."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables with the settings of torch's CUDA allocator. vLLM 0.26 reads only the second."""
DRIVER = {
    # CUDA_VISIBLE_DEVICES counts devices in the order of nvidia-smi
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # torch.cuda.is_available() then does not fix the set of visible devices
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "OMP_NUM_THREADS": "1",
}


def worker_environment(cpu: bool, threads: int, *, sleeps: bool = True) -> dict[str, str]:
    """Returns the environment variables of a worker process. On a GPU, allocator settings of the user take precedence.

    Args:
        cpu: True for a worker without a GPU.
        threads: compute threads of the worker. Two thread pools on the same two cores slow each other down 40 times.
        sleeps: the rollout engine frees its memory between rollouts. Its allocator does not support expandable
            segments.
    """
    environment = {**WORKERS, "OMP_NUM_THREADS": str(threads)}
    if cpu:
        environment["TORCHDYNAMO_DISABLE"] = "1"
        is_set_by_user = any(name in os.environ for name in SPINNING)
        if not is_set_by_user:
            # threads that spin while they wait for each other stop a worker almost completely if others use the cores,
            # too
            environment[SPINNING[0]] = "1000"
        return environment

    is_set_by_user = any(name in os.environ for name in ALLOCATOR)
    if not sleeps and not is_set_by_user:
        environment |= dict.fromkeys(ALLOCATOR, "expandable_segments:True")
    return environment


def prepare_driver() -> None:
    """Sets the environment variables of the driver process that the user has not set.

    Raises:
        UserError: under a launcher that starts the command several times, such as torchrun.
    """
    refuse_launcher(os.environ)
    variables = WORKERS | DRIVER
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@contextmanager
def process_variables() -> Iterator[None]:
    """In this context the environment has the variables of `prepare_driver`; afterwards it has the user's values."""
    names = [*WORKERS, *DRIVER]
    before = {name: os.environ[name] for name in names if name in os.environ}
    prepare_driver()
    try:
        yield
    finally:
        for name in names:
            if name in before:
                os.environ[name] = before[name]
            else:
                os.environ.pop(name, None)


def command(main: Callable[[list[str]], int]) -> Callable[..., int]:
    """Decorator that turns a function of the arguments after `python -m NAME` into the `main(argv=None)` of a command.

    The function runs after the environment is set, so it should import heavy modules in its body. `run_command` turns
    its exceptions into an exit status.
    """

    @functools.wraps(main)
    def run(argv: list[str] | None = None) -> int:
        def prepared_main() -> int:
            prepare_driver()
            if argv is None:
                return main(sys.argv[1:])
            return main(argv)

        return run_command(prepared_main)

    return run


def out_as_word(argv: list[str], key: str) -> list[str]:
    """Returns the arguments of a key=value command with `--out FILE` replaced by `key=FILE` at the end."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", action="append", default=[])
    options, other_words = parser.parse_known_args(argv)
    words_of_out = [f"{key}={file}" for file in options.out]
    return other_words + words_of_out


def leave(status: int) -> NoReturn:
    """Ends the process like `sys.exit`, but without Python's module teardown, which takes more than a second. Under a
    debugger or profiler it calls `sys.exit`."""
    if sys.gettrace() or sys.getprofile():
        sys.exit(status)
    # waits for threads that are still writing
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # None if the caller has closed it (`>&-`); its reader may have ended (`| head`)
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    os._exit(status)


def removed_command(name: str, replacement: str) -> Callable[..., int]:
    """Returns the `main` of a removed command, which prints what replaces it and returns WRONG_INPUT.

    Args:
        name: Name of the module that the user started.
        replacement: Command to use instead.
    """

    @command
    def main(argv: list[str]) -> int:
        raise UserError(f"python -m {name} was removed; use: {replacement}")

    return main


def run_command(command: Callable[[], int]) -> int:
    """Runs a command and returns its exit status. Errors other than the user's propagate, so that a debugger can catch
    them, and `sys.excepthook` prints them."""
    sys.excepthook = print_failure
    _escape_unencodable_output()
    with signals_interrupt() as received:
        try:
            return command()
        except UserError as error:
            print(printable(f"\n{type(error).__name__}: {error}"), file=sys.stderr)
            return WRONG_INPUT
        except KeyboardInterrupt as stopped:
            number = received[0] if received else signal.SIGINT
            sys.stdout.flush()
            print(f"\nStopped by {number.name}; all processes of the run have ended.", file=sys.stderr)
            for note in getattr(stopped, "__notes__", ()):
                print(note, file=sys.stderr)
            return 128 + number
        except ClusterLostError as error:
            print_failure(type(error), error, error.__traceback__)
            # everything that the run started has ended
            if error.again is not None:
                print(f"Starting again from the last checkpoint, in this process: {shlex.join(error.again)}")
            sys.stdout.flush()
            sys.stderr.flush()
            if error.again is not None:
                os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *error.again])
            # Ray's client cannot shut down cleanly without its head node; the run's guard cleans up
            os._exit(1)


def _escape_unencodable_output() -> None:
    """Lets standard output escape the characters that its encoding lacks, as standard error does.

    In a locale without UTF-8, a run would otherwise end at the first answer with such a character.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def file_mask(mask: str, folder: Path) -> Iterator[None]:
    """Context manager that creates `folder` and sets the umask of this process, and of processes that it starts, to
    `mask` (octal). New parent folders, which others may use too, have all permissions that `mask` or the user's umask
    grants."""
    # the umask can only be read by setting another one
    users_mask = os.umask(0o077)
    folder_mask = int(mask, 8)
    try:
        os.umask(users_mask & folder_mask)
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.umask(folder_mask)
        folder.mkdir(exist_ok=True)
        yield
    finally:
        os.umask(users_mask)


@contextmanager
def signals_interrupt() -> Iterator[list[signal.Signals]]:
    """In this context SIGNALS and WARNINGS raise KeyboardInterrupt, so that the run shuts down cleanly. A second
    signal ends the process at once, and the run's guard cleans up. Yields the list of received signals."""
    received: list[signal.Signals] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if received:
            # the signal may have interrupted a write to the stream
            with contextlib.suppress(OSError, RuntimeError):
                sys.stdout.flush()
            name = signal.Signals(number).name
            os.write(2, f"\nStopped at once by {name}; the run's guard ends its remaining processes.\n".encode())
            os._exit(128 + number)
        received.append(signal.Signals(number))
        # the only exception that Ray lets through while the driver waits
        raise KeyboardInterrupt

    with _handled_by(interrupt, (*SIGNALS, *WARNINGS)):
        yield received


@contextmanager
def stopping_on_signal(stop: Callable[[], None], tell: Callable[[str], None]) -> Iterator[None]:
    """In this context the first signal calls `stop`, and a second one raises KeyboardInterrupt.

    Args:
        stop: ends the run with a checkpoint after the current step.
        tell: shows a message to the user.
    """

    def stop_at_first_signal(number: int, frame: FrameType | None) -> None:
        # first, so that a second signal interrupts the run even while the message is shown
        for handled_number, handler in replaced_handlers.items():
            # SIG_DFL would end the process instead of raising KeyboardInterrupt
            if not callable(handler):
                handler = signal.default_int_handler
            signal.signal(handled_number, handler)
        name = signal.Signals(number).name
        tell(f"{name}: stopping after this step, with a checkpoint; repeat it to stop at once, without a checkpoint")
        stop()

    numbers = list(SIGNALS)
    for number in WARNINGS:
        if isinstance(signal.getsignal(number), _SignalHandler):
            numbers.append(number)
    with _handled_by(stop_at_first_signal, numbers) as replaced_handlers:
        yield


@dataclass(frozen=True)
class _SignalHandler:
    """A handler of a signal. After SIGHUP, it discards output to the closed terminal before it calls `handle`."""

    handle: Callable[[int, FrameType | None], None]

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _discard_terminal_output()
        self.handle(number, frame)


@contextmanager
def _handled_by(
    handle: Callable[[int, FrameType | None], None], numbers: Iterable[signal.Signals]
) -> Iterator[dict[signal.Signals, Handler]]:
    """In this context `handle` is called for the signals `numbers`. Yields the handlers that it replaces.

    Signals that were ignored before (nohup) stay ignored. Outside the main thread, where Python does not deliver
    signals, nothing changes.
    """
    replaced_handlers: dict[signal.Signals, Handler] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            handler = signal.getsignal(number)
            # None stands for a handler that was not installed by Python
            if handler not in (signal.SIG_IGN, None):
                replaced_handlers[number] = handler
    for number in replaced_handlers:
        signal.signal(number, _SignalHandler(handle))
    try:
        yield replaced_handlers
    finally:
        for number, handler in replaced_handlers.items():
            signal.signal(number, handler)


def _discard_terminal_output() -> None:
    """Connects output that goes to a terminal with nothing. The terminal is closed, so writing would raise an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            os.dup2(nowhere, stream)


def print_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints `failure_text` of an uncaught exception. Installed as `sys.excepthook`, which determines its arguments."""
    # what the run has printed comes before its error
    sys.stdout.flush()
    text = failure_text(error)
    print(text, file=sys.stderr, flush=True)


def failure_text(error: BaseException) -> str:
    """Returns the message about the error that ended a run.

    It begins with the traceback of the worker or of the user's code that raised the error, or else with the driver's
    traceback below the launch code. Then follow the notes, advice about a package that cannot be imported, and in the
    last line role, rank, phase and error.
    """
    origin = circumstances(error)
    notes = getattr(error, "__notes__", [])
    if origin.traceback is not None:
        # the driver's own traceback only shows where it waited for the failed process
        parts = [f"The first cause, {origin}:\n{origin.traceback.rstrip()}"]
        for note in notes:
            if origin.traceback not in note and note not in origin.traceback:
                parts.append(note)
    else:
        parts = [_traceback_below_launcher(error), *notes]

    location = f"{origin}: " if str(origin) else ""
    advice = _broken_package(error)
    if advice is not None:
        parts.append(advice)
    first_line = str(error).partition("\n")[0]
    log = f"\n  its log: {origin.log}" if origin.log else ""
    parts.append(f"The run failed: {location}{type(error).__name__}: {first_line}{log}")
    return printable("\n" + "\n\n".join(parts))


def _broken_package(error: BaseException) -> str | None:
    """Returns advice if `error` comes from the import of an installed package, else None.

    A package with compiled parts, such as torchvision, fits one build of torch only, and transformers imports it where
    it is installed. transformers' own message then names neither the package nor the cause.
    """
    # the exception that was raised first; user code can make a circle of causes
    cause = error
    seen = {id(error)}
    while True:
        earlier = cause.__context__ if cause.__cause__ is None else cause.__cause__
        if earlier is None or id(earlier) in seen:
            break
        seen.add(id(earlier))
        cause = earlier

    # the innermost module whose import was not finished
    imported = None
    in_import = False
    for frame, _ in traceback.walk_tb(cause.__traceback__):
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            in_import = True
        elif in_import and frame.f_code.co_name == "<module>":
            # code that is executed with globals of its own may have no name
            imported = str(frame.f_globals.get("__name__", "")).partition(".")[0]

    packages = importlib.metadata.packages_distributions() if imported else {}
    if imported is None or imported in _OWN_PACKAGES or imported not in packages:
        return None
    distribution = packages[imported][0]
    package_version = f"{distribution} {importlib.metadata.version(distribution)}"
    return (
        f"The installed package {package_version} cannot be imported: {type(cause).__name__}: {cause}\n"
        f"It may have been built for another version of torch than {importlib.metadata.version('torch')}: install the "
        f"one that fits, or remove it if you do not need it (pip uninstall {distribution})."
    )


def _traceback_below_launcher(error: BaseException) -> str:
    """Returns the driver's traceback without notes and without the calls that only lead to the training loop."""
    driver_trace = traceback.TracebackException.from_exception(error)
    driver_trace.__notes__ = None
    frames = driver_trace.stack
    # the last one stays, because it raised the error
    while len(frames) > 1 and _LAUNCHER.search(frames[0].filename):
        del frames[0]
    return "".join(driver_trace.format()).rstrip()

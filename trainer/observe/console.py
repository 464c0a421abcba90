"""Terminal output of a run: a progress bar with the remaining time, one line per step, and the final report. `--quiet`
hides the progress; `--verbose` also shows the workers' output.

On a terminal the bar stays at the bottom and the lines scroll above it. In a file or pipe there are only plain lines
without control characters, and each line ends with the remaining time.
"""

import errno
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.segment import Segment
from rich.text import Text

from trainer.observe.final_report import validation_line
from verl_lite.config import Verbosity
from verl_lite.errors import printable

_FILE_WIDTH = 120
_POLL_S = 0.5
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# (metric names, format): the first of the names that is logged is shown
_COLUMNS = (
    (("critic/score/mean",), "reward {:6.3f}"),
    (("train/loss",), "loss {:6.3f}"),
    (("actor/face_score",), "score {:6.3f}"),
    (("reward/acc/mean", "critic/acc/mean"), "acc {:5.3f}"),
    (("env/success", "env/own/success"), "success {:5.3f}"),
    (("response_length/mean",), "length {:6.1f}"),
    (("actor/kl_loss", "actor/reward_kl_penalty"), "kl {:8.1e}"),
    (("actor/entropy", "actor/entropy_loss"), "entropy {:5.3f}"),
    (("actor/grad_norm",), "grad {:6.3f}"),
    (("perf/throughput",), "{:7,.0f} tok/s"),
    (("timing_s/step", "perf/time_per_step"), "{:6.2f} s"),
)
# shown only if not 0
_SHARES = (
    (("reward/error_rate",), "{:.1%} of rewards failed"),
    (("env/error_rate",), "{:.1%} of episodes failed"),
    (("actor/no_face_frac",), "{:.1%} of samples without a face"),
)


class Terminal(rich.console.Console):
    """A rich console that is safe for text from data, models and users: `[red]` and `:smile:` are not interpreted as
    markup, and control characters are escaped (`\\x1b[2J`). All formatted terminal output goes through this class.

    Text that cannot be written is dropped, because the work of a command is worth more than its output.

    Attributes:
        loss: Why text was dropped the last time: the reader of a pipe or the terminal is gone, or the disk of a log is
            full. None as long as everything was written.
    """

    loss: OSError | None = None

    def __init__(self, file: IO[str] | None = None, width: int | None = None) -> None:
        super().__init__(file=file, width=width, highlight=False, markup=False, emoji=False)

    def _check_buffer(self) -> None:
        """Writes the printed text, or drops it if it cannot be written."""
        try:
            super()._check_buffer()
        except OSError as error:
            self._drop_text(error)

    def on_broken_pipe(self) -> None:
        """Drops the text of a pipe without a reader. rich's own method ends the process."""
        self._drop_text(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)))

    def _drop_text(self, error: OSError) -> None:
        self.loss = error
        del self._buffer[:]
        # a file without a number has no buffer that could fail again
        with suppress(OSError):
            _empty_buffer(self.file)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escapes control characters in a string before rich measures its width."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escapes control characters in all other renderables, such as `Text`, when they are written."""
        for segment in super().render(renderable, options):
            # rich's own control codes, such as those that move the progress bar, stay
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


def _empty_buffer(file: IO[str]) -> None:
    """Drops the text in the buffer of a file that takes no more, so that the next flush does not fail again.

    Later text is written, if the file then takes it.
    """
    number = file.fileno()
    target = os.dup(number)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, number)
        file.flush()
    finally:
        os.dup2(target, number)
        os.close(nowhere)
        os.close(target)


class Console:
    """Prints the messages, progress and metrics of a run.

    Args:
        file: output stream; None = standard output.
        verbosity: `quiet` hides the progress but shows the launch table, notes and the final report.
    """

    def __init__(self, file: IO[str] | None = None, verbosity: Verbosity = "normal") -> None:
        self.verbosity = verbosity
        self._rich = Terminal(file=file)
        # rich assumes 80 columns for a file or a pipe
        if not self._rich.is_terminal:
            self._rich = Terminal(file=file, width=_FILE_WIDTH)
        self._progress: Progress | None = None
        self._has_told_loss = False
        self._total = 0
        # (time, step) of the last steps, whose pace gives the remaining time
        self._finished: deque[tuple[float, int]] = deque(maxlen=30)

    def print(self, content: RenderableType) -> None:
        """Prints text without wrapping it, or any other rich renderable."""
        # a text is not wrapped, because a path or a command in it may be copied
        is_text = isinstance(content, str | Text)
        # crop=False: a table row that is too long for the terminal wraps instead of being cut off
        self._rich.print(content, soft_wrap=is_text, crop=False)
        if self._rich.loss is not None and not self._has_told_loss:
            self._has_told_loss = True
            self._tell_loss(self._rich.loss)

    def _tell_loss(self, error: OSError) -> None:
        """Notes on standard error that the output cannot be written. Does nothing if that cannot be written, either."""
        with suppress(OSError):
            print(
                f"note: the output of the run cannot be written ({error.strerror}) and is dropped; the run goes on, "
                "and its metrics are in metrics.jsonl of the run folder",
                file=sys.stderr,
                flush=True,
            )

    def progress(self, text: str) -> None:
        """Prints a progress message, unless the console is quiet."""
        if self.verbosity != "quiet":
            self.print(text)

    def note(self, text: str) -> None:
        """Prints one sentence that the user should know but that is not an error."""
        self.print(Text(f"note: {text}", style="yellow"))

    def start(self, total_steps: int) -> None:
        """Starts counting steps and, on a terminal, shows the progress bar."""
        self._total = total_steps
        is_hidden = self.verbosity == "quiet" or not self._rich.is_terminal
        if is_hidden or total_steps <= 0:
            return
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            # None: all columns that the others leave
            BarColumn(None),
            TextColumn("{task.fields[left]}"),
            console=self._rich,
            # few refreshes, because each takes CPU time from the training
            refresh_per_second=2,
        )
        self._progress.add_task("step", total=total_steps, left="starting")
        self._progress.start()

    def advance(self, step: int) -> None:
        """Moves the bar to `step` finished steps."""
        now = time.monotonic()
        if self._finished:
            _, last_step = self._finished[-1]
            if step != last_step + 1:
                # restarts the measurement after a break, such as a validation
                self._finished.clear()
        self._finished.append((now, step))
        if self._progress is not None:
            task = self._progress.task_ids[0]
            remaining_time = self._remaining_time()
            self._progress.update(task, completed=step, left=remaining_time)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Prints the line of a training step with those of its metrics that have a column (reward, length, KL, entropy,
        throughput, seconds, ...), and a second line with the means of a validation."""
        if "training/global_step" in metrics:
            self.progress(self._line_of_step(metrics, step))

        parts = []
        means = validation_line(metrics)
        if means:
            parts.append(means)
        for name, rate in metrics.items():
            if name.endswith("/reward/error_rate") and rate:
                parts.append(f"{name} {rate:.1%}")
        if parts:
            self.progress(f"validation after step {step}: {', '.join(parts)}")

    def _line_of_step(self, metrics: Mapping[str, float], step: int) -> str:
        """Returns the line of a training step, with columns as wide as in the lines of all other steps."""
        step_width = len(str(self._total))
        parts = [f"step {step:>{step_width}}/{self._total}"]
        for names, form in _COLUMNS:
            value = _first_value(metrics, names)
            if value is not None:
                parts.append(form.format(value))
        for names, form in _SHARES:
            value = _first_value(metrics, names)
            if value:
                parts.append(form.format(value))
        # a terminal has the remaining time beside the bar
        remaining_time = self._remaining_time()
        if remaining_time and not self._rich.is_terminal:
            parts.append(remaining_time)
        return "  ".join(parts)

    def _remaining_time(self) -> str:
        """Returns the remaining time at the pace of the last steps; an empty string before two steps have finished."""
        if len(self._finished) < 2 or not self._total:
            return ""
        first_time, first_step = self._finished[0]
        last_time, last_step = self._finished[-1]
        seconds_per_step = (last_time - first_time) / (last_step - first_step)
        seconds_left = seconds_per_step * (self._total - last_step)
        return f"{format_seconds(seconds_left)} left"

    def stop(self) -> None:
        """Removes the progress bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def _first_value(metrics: Mapping[str, float], names: Sequence[str]) -> float | None:
    """Returns the value of the first of these metrics that was logged, or None."""
    for name in names:
        if name in metrics:
            return metrics[name]
    return None


def format_seconds(seconds: float) -> str:
    """Formats a duration as `0:07`, `12:05` or `3:02:15`."""
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds_left:02}"
    return f"{minutes}:{seconds_left:02}"


@contextmanager
def following(folder: Path, console: Console) -> Iterator[None]:
    """In this context, if the console is verbose, shows each new line of the *.log files below `folder`, which hold the
    workers' output, prefixed by the file's name: `actor_rollout-0 | ...`."""
    if console.verbosity != "verbose":
        yield
        return
    # starts at the present ends of the files, which skips the output of an earlier process
    bytes_shown = {}
    for file in folder.rglob("*.log"):
        bytes_shown[file] = file.stat().st_size
    ended = threading.Event()

    def show_lines(output: bytes, file: Path) -> None:
        name = file.relative_to(folder).with_suffix("")
        text = output.decode(errors="replace")
        # without colors, whose control characters the console would show as text
        plain_text = _ESCAPES.sub("", text)
        for line in plain_text.splitlines():
            shown_line = Text(f"{name} | {line}", style="dim")
            console.print(shown_line)

    def follow() -> None:
        is_last = False
        while not is_last:
            # after the end, the files are read once more
            is_last = ended.wait(_POLL_S)
            for file in sorted(folder.rglob("*.log")):
                start = bytes_shown.get(file, 0)
                added = file.read_bytes()[start:]
                if not is_last:
                    end_of_lines = added.rfind(b"\n") + 1
                    # complete lines only
                    added = added[:end_of_lines]
                bytes_shown[file] = start + len(added)
                show_lines(added, file)

    thread = threading.Thread(target=follow, name="log-follower", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

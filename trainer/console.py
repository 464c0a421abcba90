"""What a person sees of a run: a progress bar with the time left, one line per step, and the report at the end; with
`--quiet` no progress, with `--verbose` also what workers print.

On a terminal the bar stays at the bottom and the lines scroll above it. Anywhere else (a file, a pipe) there are plain
lines only, without control characters, and the time left stands in the line.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import rich.console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from trainer.final_report import validation_line
from verl_lite.config import Verbosity

_REFRESH_PER_SECOND = 2  # each refresh takes processor time from the training
_STEPS_OF_ESTIMATE = 30
_WIDTH_OF_FILES = 120
_LOOK_EVERY_S = 0.5
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# label, names of which the first that is logged counts, format
_COLUMNS = (
    ("reward", ("critic/score/mean",), "{:6.3f}"),
    ("score", ("actor/face_score",), "{:6.3f}"),
    ("acc", ("reward/acc/mean", "critic/acc/mean"), "{:5.3f}"),
    ("success", ("env/success",), "{:5.3f}"),
    ("length", ("response_length/mean",), "{:6.1f}"),
    ("kl", ("actor/kl_loss", "actor/reward_kl_penalty"), "{:8.1e}"),
    ("entropy", ("actor/entropy", "actor/entropy_loss"), "{:5.3f}"),
    ("grad", ("actor/grad_norm",), "{:6.3f}"),
    ("tok/s", ("perf/throughput",), "{:7,.0f}"),
    ("s", ("timing_s/step", "perf/time_per_step"), "{:6.2f}"),
)

# shown only where they are not 0
_SHARES = {
    "reward/error_rate": "of rewards failed",
    "env/error_rate": "of episodes failed",
    "actor/no_face_frac": "of samples without a face",
}


class Console:
    """Prints for people. file: where to; None = standard output. verbosity: `quiet` leaves out all progress and keeps
    the beginning, notes and the end."""

    def __init__(self, file: IO[str] | None = None, verbosity: Verbosity = "normal") -> None:
        self.verbosity = verbosity
        self._rich = rich.console.Console(file=file, highlight=False)
        if not self._rich.is_terminal:
            self._rich = rich.console.Console(file=file, highlight=False, width=_WIDTH_OF_FILES)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._total = 0
        self._finished: deque[tuple[float, int]] = deque(maxlen=_STEPS_OF_ESTIMATE)

    @property
    def is_terminal(self) -> bool:
        return self._rich.is_terminal

    def print(self, content: rich.console.RenderableType) -> None:
        """Prints text as it is (no markup, no wrapping), or something that rich can lay out."""
        if isinstance(content, str):
            self._rich.print(Text(content), soft_wrap=True)
        else:
            self._rich.print(content, crop=False)  # a command that is too long wraps; cut off it would be another one

    def progress(self, text: str) -> None:
        """Text on what the run is doing; left out where it is to be quiet."""
        if self.verbosity != "quiet":
            self.print(text)

    def worker_line(self, worker: str, line: str) -> None:
        """A line that a worker printed; what would move the cursor is left out."""
        shown = "".join(letter for letter in _ESCAPES.sub("", line) if letter.isprintable())
        self._rich.print(Text(f"{worker} | {shown}", style="dim"), soft_wrap=True)

    def note(self, text: str) -> None:
        """One sentence worth knowing that is no error."""
        self._rich.print(Text(f"note: {text}", style="yellow"), soft_wrap=True)

    def start(self, total_steps: int) -> None:
        """Begins to count steps; on a terminal the bar appears."""
        self._total = total_steps
        if self.is_terminal and total_steps > 0 and self.verbosity != "quiet":
            self._progress = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[left]}"),
                console=self._rich,
                refresh_per_second=_REFRESH_PER_SECOND,
            )
            self._task = self._progress.add_task("step", total=total_steps, left="starting")
            self._progress.start()

    def advance(self, step: int) -> None:
        """Moves the bar to `step` finished steps."""
        now = time.monotonic()
        if self._finished and step != self._finished[-1][1] + 1:
            self._finished.clear()  # the pace counts from here: what came before was a start or a validation
        self._finished.append((now, step))
        if self._progress is not None and self._task is not None:
            left = self.seconds_left()
            shown = "" if left is None else f"{format_seconds(left)} left"
            self._progress.update(self._task, completed=step, left=shown)

    def step(self, metrics: Mapping[str, float], step: int) -> None:
        """The line of one training step. Shows what is there of reward, length, KL, entropy, speed, seconds."""
        width = len(str(self._total))
        parts = [f"step {step:>{width}}/{self._total}"]
        for label, names, form in _COLUMNS:
            value = next((metrics[name] for name in names if name in metrics), None)
            if value is not None:
                parts.append(
                    f"{form.format(value)} {label}" if label in ("tok/s", "s") else f"{label} {form.format(value)}"
                )
        for name, what in _SHARES.items():
            if metrics.get(name):
                parts.append(f"{metrics[name]:.1%} {what}")
        left = self.seconds_left()
        if not self.is_terminal and left is not None:
            parts.append(f"{format_seconds(left)} left")
        self.progress("  ".join(parts))

    def validation(self, metrics: Mapping[str, float], step: int) -> None:
        """A line with the validation means among `metrics`, if any."""
        failed = {name: rate for name, rate in metrics.items() if name.endswith("/reward/error_rate") and rate}
        parts = [validation_line(metrics), *(f"{name} {rate:.1%}" for name, rate in failed.items())]
        if any(parts):
            self.progress(f"validation after step {step}: {', '.join(filter(None, parts))}")

    def seconds_left(self) -> float | None:
        """Until the last step, at the pace of the last steps; None before the first one is done."""
        if len(self._finished) < 2 or not self._total:
            return None
        (first, from_step), (last, to_step) = self._finished[0], self._finished[-1]
        return (last - first) / max(1, to_step - from_step) * (self._total - to_step)

    def stop(self) -> None:
        """Takes the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


def format_seconds(seconds: float) -> str:
    """`0:07`, `12:05`, `3:02:15`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextmanager
def following(folder: Path, console: Console) -> Iterator[None]:
    """Inside, lines that are added to the *.log files below `folder` are shown, if the console is verbose."""
    if console.verbosity != "verbose":
        yield
        return
    follower = LogFollower(folder, console)
    follower.start()
    try:
        yield
    finally:
        follower.stop()


class LogFollower:
    """With `--verbose`: what workers print, shown while it is written to the files in RUN/logs, which stay as they are.
    Each line has the name of its file in front, `actor_rollout-0 | ...`; a thread looks every half second."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console
        self._read = {file: file.stat().st_size for file in self._files()}  # an earlier process of the run wrote that
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="log-follower", daemon=True)

    def start(self) -> None:
        """Begins to look."""
        self._thread.start()

    def stop(self) -> None:
        """Shows the rest, and ends."""
        self._ended.set()
        self._thread.join()
        self._look(is_last=True)

    def _follow(self) -> None:
        while not self._ended.wait(_LOOK_EVERY_S):
            self._look()

    def _look(self, is_last: bool = False) -> None:
        for file in self._files():
            begin = self._read.get(file, 0)
            try:
                with file.open("rb") as opened:
                    opened.seek(begin)
                    added = opened.read()
            except FileNotFoundError:
                continue  # removed since it was listed
            whole = added if is_last else added[: added.rfind(b"\n") + 1]  # a line is shown when it has ended
            self._read[file] = begin + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self._console.worker_line(str(file.relative_to(self._folder).with_suffix("")), line)

    def _files(self) -> list[Path]:
        return sorted(self._folder.rglob("*.log")) if self._folder.is_dir() else []

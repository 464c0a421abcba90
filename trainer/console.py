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
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

from trainer.final_report import validation_line
from verl_lite.config import Verbosity

_WIDTH_OF_FILES = 120
_LOOK_EVERY_S = 0.5
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# label, names of which the first that is logged counts, format
_COLUMNS = (
    ("reward", ("critic/score/mean",), "{:6.3f}"),
    ("loss", ("train/loss",), "{:6.3f}"),
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
        self._total = 0
        self._finished: deque[tuple[float, int]] = deque(maxlen=30)  # steps that the time left is estimated from

    @property
    def is_terminal(self) -> bool:
        return self._rich.is_terminal

    def print(self, content: rich.console.RenderableType) -> None:
        """Prints text as it is (no markup, no wrapping), or something that rich can lay out."""
        if isinstance(content, str | Text):
            self._rich.print(Text(content) if isinstance(content, str) else content, soft_wrap=True)
        else:
            self._rich.print(content, crop=False)  # a command that is too long wraps; cut off it would be another one

    def progress(self, text: str) -> None:
        """Text on what the run is doing; left out where it is to be quiet."""
        if self.verbosity != "quiet":
            self.print(text)

    def note(self, text: str) -> None:
        """One sentence worth knowing that is no error."""
        self._rich.print(Text(f"note: {text}", style="yellow"), soft_wrap=True)

    def start(self, total_steps: int) -> None:
        """Begins to count steps; on a terminal the bar appears."""
        self._total = total_steps
        if self.is_terminal and total_steps > 0 and self.verbosity != "quiet":
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None))
            left = TextColumn("{task.fields[left]}")
            # each refresh takes processor time from the training
            self._progress = Progress(*columns, left, console=self._rich, refresh_per_second=2)
            self._progress.add_task("step", total=total_steps, left="starting")
            self._progress.start()

    def advance(self, step: int) -> None:
        """Moves the bar to `step` finished steps."""
        if self._finished and step != self._finished[-1][1] + 1:
            self._finished.clear()  # the pace counts from here: what came before was a start or a validation
        self._finished.append((time.monotonic(), step))
        if self._progress is not None:
            left = self.seconds_left()
            shown = "" if left is None else f"{format_seconds(left)} left"
            self._progress.update(self._progress.task_ids[0], completed=step, left=shown)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """The line of a training step: what is there of reward, length, KL, entropy, speed, seconds; and one with the
        means of a validation."""
        if "training/global_step" in metrics:
            self.progress("  ".join(self._parts(metrics, step)))
        failed = {name: rate for name, rate in metrics.items() if name.endswith("/reward/error_rate") and rate}
        parts = [validation_line(metrics), *(f"{name} {rate:.1%}" for name, rate in failed.items())]
        if any(parts):
            self.progress(f"validation after step {step}: {', '.join(filter(None, parts))}")

    def _parts(self, metrics: Mapping[str, float], step: int) -> Iterator[str]:
        yield f"step {step:>{len(str(self._total))}}/{self._total}"
        for label, names, form in _COLUMNS:
            value = next((metrics[name] for name in names if name in metrics), None)
            if value is not None:
                yield f"{form.format(value)} {label}" if label in ("tok/s", "s") else f"{label} {form.format(value)}"
        yield from (f"{metrics[name]:.1%} {what}" for name, what in _SHARES.items() if metrics.get(name))
        left = self.seconds_left()
        if not self.is_terminal and left is not None:
            yield f"{format_seconds(left)} left"

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
    """Inside, if the console is verbose, what workers print is shown while it is written to the *.log files below
    `folder`: each line with the name of its file in front, `actor_rollout-0 | ...`."""
    if console.verbosity != "verbose":
        yield
        return
    read = {file: file.stat().st_size for file in folder.rglob("*.log")}  # an earlier process of the run wrote that
    ended = threading.Event()

    def look(is_last: bool) -> None:
        for file in sorted(folder.rglob("*.log")):
            with file.open("rb") as opened:
                opened.seek(read.get(file, 0))
                added = opened.read()
            whole = added if is_last else added[: added.rfind(b"\n") + 1]  # a line is shown when it has ended
            read[file] = read.get(file, 0) + len(whole)
            for line in _ESCAPES.sub("", whole.decode(errors="replace")).splitlines():
                shown = "".join(letter for letter in line if letter.isprintable())
                console.print(Text(f"{file.relative_to(folder).with_suffix('')} | {shown}", style="dim"))

    def follow() -> None:
        while not ended.wait(_LOOK_EVERY_S):
            look(is_last=False)

    thread = threading.Thread(target=follow, name="log-follower", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        look(is_last=True)

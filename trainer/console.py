"""What a person sees of a run: a progress bar with the time left, one line per step, and the report at the end; with
`--quiet` no progress, with `--verbose` also what workers print.

On a terminal the bar stays at the bottom and the lines scroll above it. Anywhere else (a file, a pipe) there are plain
lines only, without control characters, and the time left stands in the line.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.segment import Segment
from rich.text import Text

from trainer.final_report import validation_line
from verl_lite.config import Verbosity
from verl_lite.errors import printable

_WIDTH_OF_FILES = 120
_LOOK_EVERY_S = 0.5
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")

# names of which the first that is logged counts, how it is shown
_COLUMNS = (
    (("critic/score/mean",), "reward {:6.3f}"),
    (("train/loss",), "loss {:6.3f}"),
    (("actor/face_score",), "score {:6.3f}"),
    (("reward/acc/mean", "critic/acc/mean"), "acc {:5.3f}"),
    (("env/success",), "success {:5.3f}"),
    (("response_length/mean",), "length {:6.1f}"),
    (("actor/kl_loss", "actor/reward_kl_penalty"), "kl {:8.1e}"),
    (("actor/entropy", "actor/entropy_loss"), "entropy {:5.3f}"),
    (("actor/grad_norm",), "grad {:6.3f}"),
    (("perf/throughput",), "{:7,.0f} tok/s"),
    (("timing_s/step", "perf/time_per_step"), "{:6.2f} s"),
)
# shown only where they are not 0
_SHARES = (
    (("reward/error_rate",), "{:.1%} of rewards failed"),
    (("env/error_rate",), "{:.1%} of episodes failed"),
    (("actor/no_face_frac",), "{:.1%} of samples without a face"),
)


class Terminal(rich.console.Console):
    """Rich's console for text of data, models and users: `[red]` and `:smile:` in it are no markup, and its control
    characters are written out (`\\x1b[2J`). All that is laid out for a terminal goes through this class."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Text that is given as a string, before its width is measured."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Everything else, such as a `Text`, when it is written."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


class Console:
    """Prints for people. file: where to; None = standard output. verbosity: `quiet` leaves out all progress and keeps
    the beginning, notes and the end."""

    def __init__(self, file: IO[str] | None = None, verbosity: Verbosity = "normal") -> None:
        self.verbosity = verbosity
        self._rich = Terminal(file=file)
        if not self._rich.is_terminal:
            self._rich = Terminal(file=file, width=_WIDTH_OF_FILES)
        self._progress: Progress | None = None
        self._total = 0
        self._finished: deque[tuple[float, int]] = deque(maxlen=30)  # steps that the time left is estimated from

    def print(self, content: RenderableType) -> None:
        """Prints text as it is (no wrapping), or something that rich can lay out."""
        # nothing is cut off: a command that is too long wraps
        self._rich.print(content, soft_wrap=isinstance(content, str | Text), crop=False)

    def progress(self, text: str) -> None:
        """Text on what the run is doing; left out where it is to be quiet."""
        if self.verbosity != "quiet":
            self.print(text)

    def note(self, text: str) -> None:
        """One sentence worth knowing that is no error."""
        self.print(Text(f"note: {text}", style="yellow"))

    def start(self, total_steps: int) -> None:
        """Begins to count steps; on a terminal the bar appears."""
        self._total = total_steps
        if self._rich.is_terminal and total_steps > 0 and self.verbosity != "quiet":
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(None), TextColumn("{task.fields[left]}"))
            # each refresh takes processor time from the training
            self._progress = Progress(*columns, console=self._rich, refresh_per_second=2)
            self._progress.add_task("step", total=total_steps, left="starting")
            self._progress.start()

    def advance(self, step: int) -> None:
        """Moves the bar to `step` finished steps."""
        if self._finished and step != self._finished[-1][1] + 1:
            self._finished.clear()  # the pace counts from here: what came before was a start or a validation
        self._finished.append((time.monotonic(), step))
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, left=self._left())

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """The line of a training step: what is there of reward, length, KL, entropy, speed, seconds; and one with the
        means of a validation."""
        if "training/global_step" in metrics:
            parts = [f"step {step:>{len(str(self._total))}}/{self._total}"]
            for names, form in (*_COLUMNS, *_SHARES):
                value = next((metrics[name] for name in names if name in metrics), None)
                if value is not None and (value or (names, form) not in _SHARES):
                    parts.append(form.format(value))
            left = "" if self._rich.is_terminal else self._left()
            self.progress("  ".join(filter(None, (*parts, left))))
        failed = {name: rate for name, rate in metrics.items() if name.endswith("/reward/error_rate") and rate}
        parts = [validation_line(metrics), *(f"{name} {rate:.1%}" for name, rate in failed.items())]
        if any(parts):
            self.progress(f"validation after step {step}: {', '.join(filter(None, parts))}")

    def _left(self) -> str:
        """Until the last step, at the pace of the last steps; empty before the first one is done."""
        if len(self._finished) < 2 or not self._total:
            return ""
        (first, from_step), (last, to_step) = self._finished[0], self._finished[-1]
        return f"{format_seconds((last - first) / (to_step - from_step) * (self._total - to_step))} left"

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

    def follow() -> None:
        is_last = False
        while not is_last:
            is_last = ended.wait(_LOOK_EVERY_S)
            for file in sorted(folder.rglob("*.log")):
                added = file.read_bytes()[read.get(file, 0) :]
                whole = added if is_last else added[: added.rfind(b"\n") + 1]  # a line is shown when it has ended
                read[file] = read.get(file, 0) + len(whole)
                for line in _ESCAPES.sub("", whole.decode(errors="replace")).splitlines():
                    console.print(Text(f"{file.relative_to(folder).with_suffix('')} | {line}", style="dim"))

    thread = threading.Thread(target=follow, name="log-follower", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()

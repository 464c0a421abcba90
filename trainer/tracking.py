"""Where the numbers of a run go: the console, files, dashboards. No tracker stops or slows the training.

`trainer.logger` names the trackers; `@register_tracker(name)` adds one. The console and metrics.jsonl are written at
once; all others work behind a thread (`trainer.trackers.background`), and what they do not take is kept in the run
folder for `python -m trainer.sync`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.console import Console, following
from trainer.evaluate.sample import Sample
from trainer.trackers.background import BackgroundTracker
from trainer.trackers.base import IMMEDIATE, TRACKERS, TrackedRun, Tracker, check_trackers, register_tracker
from trainer.trackers.spool import finite
from verl_lite.config import RunOptions

__all__ = ["TRACKERS", "TrackedRun", "Tracking", "read_metrics", "read_samples", "register_tracker"]


class Tracking:
    """All trackers of a run as one; a context that ends them, and the console's progress bar, when it is left. Inside,
    what workers print is shown where the console is verbose.

    Raises UserError for a name in `trainer.logger` that is not known, and for one whose package is missing.
    """

    def __init__(self, run_dir: Path, config: RunOptions, console: Console) -> None:
        names = list(config.trainer.logger)
        check_trackers(names)
        run = TrackedRun.of(run_dir, config, console)
        self._console, self._shows = console, "console" in names
        self._following = following(run.run_dir / "logs", console)
        self._trackers: list[Tracker] = [
            TRACKERS[name](run) if name in IMMEDIATE else BackgroundTracker(name, TRACKERS.get_fn(name), run)
            for name in names
        ]

    def __enter__(self) -> Tracking:
        self._following.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()
        self._following.__exit__(None, None, None)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends numbers of one step. step: training steps done; 0 = before the first."""
        self._console.advance(step)
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def note(self, text: str) -> None:
        """Shows a sentence to the user."""
        self._console.note(text)

    def show(self, text: str) -> None:
        """Prints text of several lines, where the console is a tracker."""
        if self._shows:
            self._console.progress(text)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Sends what the policy wrote, with its scores."""
        for tracker in self._trackers:
            tracker.log_samples(samples, step)

    def finish(self) -> None:
        """Ends all trackers; waits a little for those that are behind."""
        self._console.stop()
        for tracker in self._trackers:
            tracker.finish()


@register_tracker("console")
class ConsoleTracker:
    """One line per training step, and one per data source where something was validated."""

    def __init__(self, run: TrackedRun) -> None:
        self._console = run.console

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if "training/global_step" in metrics:
            self._console.step(metrics, step)
        self._console.validation(metrics, step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """The console shows samples at the end of the run."""

    def finish(self) -> None:
        """Nothing to end."""


@register_tracker("jsonl")
class JsonlTracker:
    """metrics.jsonl, a line {"step", "data"} per call, and samples.jsonl, a line per sample. A resumed run appends.

    A number that is not finite is written as null. A full disk costs a warning, not the run.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._console, self._run_dir, self._warned = run.console, run.run_dir, False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._append("metrics.jsonl", [{"step": step, "data": finite(metrics)}])

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        self._append("samples.jsonl", [finite({**dataclasses.asdict(sample), "step": step}) for sample in samples])

    def finish(self) -> None:
        """Each line is in the file already."""

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        try:
            with (self._run_dir / name).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, default=float) + "\n" for row in rows)
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._console.note(f"tracker jsonl cannot write {self._run_dir / name}: {error}; the run goes on")


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Metrics by step, as `JsonlTracker` wrote them, in order of steps.

    Where a resumed run went back, what was written of later steps before is left out; several lines of one step are
    joined. A last line that was cut off by a crash is ignored.
    """
    steps: dict[int, dict[str, float]] = {}
    for row in _lines(path):
        step = int(row["step"])
        for later in [known for known in steps if known > step]:
            del steps[later]
        steps.setdefault(step, {}).update({name: value for name, value in row["data"].items() if value is not None})
    return steps


def read_samples(path: Path) -> dict[int, list[dict[str, Any]]]:
    """The rows of samples.jsonl by step; of a step that was done again, those of the last time. Nothing without the
    file; a line that was cut off is ignored."""
    steps: dict[int, list[dict[str, Any]]] = {}
    before: int | None = None
    for row in _lines(path) if path.is_file() else ():
        step = int(row["step"])
        if step != before:  # a new batch: it and what comes after it are told anew
            steps = {known: rows for known, rows in steps.items() if known < step}
        steps.setdefault(step, []).append(row)
        before = step
    return steps


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue  # cut off when the machine went down

"""Trackers that misbehave on command, and a run folder for them."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainer.console import Console
from trainer.evaluate.sample import Sample
from trainer.tracking import TRACKERS, TrackedRun, Tracking
from verl_lite.config import PPOConfig, TrainerConfig

SAMPLE = Sample(3, "val-0", "verl_lite/sort", "Sort 21 | now\n", "12", "12", 1.0, 3, "stop", 2, {"acc": 1.0})
OUTAGE = ConnectionError("the server is down")


class Scripted:
    """Keeps what it is given, unless `before` raises or waits; it gets `start`, `log`, `log_samples` or `finish`."""

    def __init__(self, before: Callable[[str], None] = lambda what: None) -> None:
        self.before = before
        self.taken: list[tuple[int, object]] = []

    def __call__(self, run: TrackedRun) -> Scripted:
        self.before("start")
        return self

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self.before("log")
        self.taken.append((step, dict(metrics)))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        self.before("log_samples")
        self.taken.append((step, list(samples)))

    def finish(self) -> None:
        self.before("finish")

    @property
    def steps(self) -> list[int]:
        """Steps of the numbers that it took."""
        return [step for step, given in self.taken if isinstance(given, dict)]


def hanging(where: str, release: threading.Event) -> Callable[[str], None]:
    """A `before` that hangs in one call until it is released."""
    return lambda what: release.wait(30) and None if what == where else None


def raising(where: str, times: int = 10**6) -> Callable[[str], None]:
    """A `before` that raises in the first `times` calls of that kind."""
    left = [times]

    def before(what: str) -> None:
        if what == where and left[0]:
            left[0] -= 1
            raise OUTAGE

    return before


class Run:
    """A run folder whose trackers are the named ones, and what the console printed. tracker: is called `scripted`."""

    def __init__(self, folder: Path, tracker: Scripted | None = None, loggers: Sequence[str] = ("scripted",)) -> None:
        if tracker is not None:
            TRACKERS["scripted"] = tracker
        self.folder, self.file = folder, io.StringIO()
        trainer = TrainerConfig(logger=list(loggers), project_name="p", experiment_name="e")
        self.tracking = Tracking(folder, PPOConfig(trainer=trainer), Console(self.file))

    def train(self, *steps: int, samples: bool = False, **numbers: float) -> str:
        """Logs these training steps; gives what was printed."""
        with self.tracking as tracking:
            for step in steps:
                tracking.log({"training/global_step": float(step), "actor/lr": step / 2, **numbers}, step)
                if samples:
                    tracking.log_samples([SAMPLE], step)
        return self.file.getvalue()

"""Trackers that misbehave on command, and a run folder for them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from trainer.observe.console import Console
from trainer.observe.tracking import TRACKERS, TrackedRun, Tracking
from trainer.validation.sample import Sample
from verl_lite.config import PPOConfig, TrainerConfig

SAMPLE = Sample(3, "val-0", "verl_lite/sort", "Sort 21 | now\n", "12", "12", 1.0, 3, "stop", 2, {"acc": 1.0})


class Scripted:
    """Keeps what it is given, unless `before` raises or waits; it gets `start`, `log`, `log_samples` or `finish`. The
    tracker `scripted` until the test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, before: Callable[[str], object] = lambda what: None) -> None:
        self.before = before
        self.taken: list[tuple[int, object]] = []
        monkeypatch.setitem(TRACKERS, "scripted", self)

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


class Run:
    """A run folder with these trackers, and what the console printed."""

    def __init__(self, folder: Path, loggers: Sequence[str] = ("scripted",)) -> None:
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

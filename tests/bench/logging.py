"""`python -m tests.bench logging [--steps 300] [--step_seconds 1.4]`: what logging costs of a training step.

Logs a step's numbers, as many as a GRPO step with validation has, to console, jsonl and tensorboard, and to these and a
tracker that hangs or raises. Time of the driver's thread is what a step waits; processor time counts the trackers'
threads too, which compete for a core. The limit is 1% of a step of `--step_seconds` (the quickstart's on two cores).
"""

from __future__ import annotations

import argparse
import io
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainer.console import Console
from trainer.metric_docs import metrics
from trainer.tracking import TRACKERS, TrackedRun, Tracking
from verl_lite.config import PPOConfig, TrainerConfig

LIMIT = 0.01


class Scripted:
    """A tracker that does `act` at each call."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def __call__(self, run: TrackedRun) -> Scripted:
        return self

    def log(self, metrics: object, step: int) -> None:
        self.act()

    def log_samples(self, samples: object, step: int) -> None:
        self.act()

    def finish(self) -> None:
        """Nothing to end."""


def numbers() -> dict[str, float]:
    """One step's: every documented name without placeholders, except those of rare options; about 120."""
    names = [name for metric in metrics() if not metric.when for name in metric.names]
    row = {name: 0.123456 + place for place, name in enumerate(names) if "{" not in name}
    return row | {"training/global_step": 1.0, "val-core/gsm8k/acc/mean@8": 0.5}


def measure(loggers: list[str], steps: int) -> tuple[float, float]:
    """(milliseconds of the driver's thread per step, milliseconds of processor time of all threads per step)."""
    row = numbers()
    with tempfile.TemporaryDirectory() as folder:
        config = PPOConfig(trainer=TrainerConfig(logger=loggers, experiment_name="bench"))
        tracking = Tracking(Path(folder), config, Console(io.StringIO()))
        tracking.log(row, 0)  # imports and opens files
        time.sleep(1.0)
        waited, began = 0.0, time.process_time()
        for step in range(1, steps + 1):
            started = time.thread_time()
            tracking.log(row, step)
            waited += time.thread_time() - started
            time.sleep(0.02)  # the step, in which the trackers' threads have time to follow
        time.sleep(0.5)
        busy = time.process_time() - began
        tracking.finish()
    return waited / steps * 1000, busy / steps * 1000


def main(argv: list[str]) -> int:
    """Prints the table; 1 if the default trackers cost more than the limit."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench logging", description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step_seconds", type=float, default=1.4)
    options = parser.parse_args(argv)
    release = threading.Event()

    def refuse() -> None:
        raise ConnectionError("down")

    TRACKERS["hanging"], TRACKERS["raising"] = Scripted(lambda: release.wait(300)), Scripted(refuse)
    default = ["console", "jsonl", "tensorboard"]
    print(f"{len(numbers())} numbers a step, {options.steps} steps; a step is {options.step_seconds:g} s")
    print(f"{'trackers':<42}{'driver ms':>10}{'of a step':>11}{'all threads ms':>16}{'of a step':>11}")
    shares = []
    for loggers in (["jsonl"], default, [*default, "raising"], [*default, "hanging"]):
        waited, busy = measure(loggers, options.steps)
        shares.append(busy / 1000 / options.step_seconds)
        print(
            f"{' '.join(loggers):<42}{waited:>10.2f}{waited / 10 / options.step_seconds:>10.2f}%{busy:>16.2f}"
            f"{shares[-1]:>10.2%}",
            flush=True,
        )
        release.set() if "hanging" in loggers else None
    return int(max(shares[:2]) > LIMIT)

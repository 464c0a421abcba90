"""Messages to a tracker that it did not take: kept in RUN/spool/{tracker}.jsonl, a line each, until it does.

The file is written by the driver and by the tracker's thread, line by line; what was written is on disk whatever
happens next. `python -m trainer.sync RUN` hands the messages over later.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.evaluate.sample import Sample
from trainer.trackers.base import Tracker

FOLDER = "spool"
_FAILURES_IN_A_ROW = 3


@dataclass(frozen=True)
class Message:
    """Numbers of a step, or samples; one of the two."""

    step: int
    metrics: Mapping[str, float] | None = None
    samples: Sequence[Sample] | None = None

    @property
    def is_training_step(self) -> bool:
        """Whether it has the numbers of a training step; else those of a validation, a checkpoint, or samples."""
        return self.metrics is not None and "training/global_step" in self.metrics

    def send(self, tracker: Tracker) -> None:
        """Hands it to the tracker, which may raise anything."""
        if self.metrics is not None:
            tracker.log(self.metrics, self.step)
        if self.samples is not None:
            tracker.log_samples(self.samples, self.step)

    def as_line(self) -> str:
        """JSON; a number that is not finite is null, and read back as NaN."""
        row: dict[str, Any] = {"step": self.step}
        if self.metrics is not None:
            row["metrics"] = finite(self.metrics)
        if self.samples is not None:
            row["samples"] = [finite(dataclasses.asdict(sample)) for sample in self.samples]
        return json.dumps(row, default=float)

    @classmethod
    def of_line(cls, line: str) -> Message:
        """Raises ValueError for a line that is cut off."""
        row = json.loads(line)
        metrics, samples = row.get("metrics"), row.get("samples")
        if metrics is not None:
            metrics = {name: math.nan if value is None else float(value) for name, value in metrics.items()}
        if samples is not None:
            samples = [Sample(**sample) for sample in samples]
        return cls(int(row["step"]), metrics, samples)


class Spool:
    """The messages that one tracker of a run did not take. Safe to use from several threads."""

    def __init__(self, run_dir: Path, tracker: str) -> None:
        self.path = run_dir / FOLDER / f"{tracker}.jsonl"
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._lines())

    def add(self, message: Message) -> None:
        """Appends a message. Raises OSError where the folder cannot be written."""
        with self._lock:
            self.path.parent.mkdir(exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(message.as_line() + "\n")

    def clear(self) -> None:
        """Forgets all messages."""
        with self._lock:
            self._rewrite([])

    def hand_over(
        self, tracker: Tracker, taken_one: Callable[[Message], None] = lambda message: None
    ) -> tuple[int, Exception | None]:
        """Sends all messages in their order and forgets those that were taken; a line that is cut off is forgotten too.

        taken_one: called with each message that was taken. Returns how many were taken, and the last exception if some
        were not. Three failures in a row end it.
        """
        taken, in_a_row, failure = 0, 0, None
        with self._lock:  # not while it is sent: the driver must be able to add
            lines = self._lines()
        left: list[str] = []
        for place, line in enumerate(lines):
            try:
                message = Message.of_line(line)
            except ValueError:
                continue
            try:
                message.send(tracker)
                taken_one(message)
                taken, in_a_row = taken + 1, 0
            except Exception as error:  # a tracker is code of others, which may raise anything
                left.append(line)
                failure, in_a_row = error, in_a_row + 1
            if in_a_row == _FAILURES_IN_A_ROW:
                left += lines[place + 1 :]
                break
        with self._lock:
            self._rewrite(left + self._lines()[len(lines) :])
        return taken, failure

    def _lines(self) -> list[str]:
        return self.path.read_text(encoding="utf-8").splitlines() if self.path.is_file() else []

    def _rewrite(self, lines: list[str]) -> None:
        if not lines:
            self.path.unlink(missing_ok=True)
            return
        new = self.path.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(new, self.path)


class LastStep:
    """The last step that a tracker was given, kept for a run that resumes: one that cannot forget is not given the
    steps again that the resumed run repeats, so that it has each step once and in order."""

    def __init__(self, run_dir: Path, tracker: str) -> None:
        self._path = run_dir / f"{tracker}_step.txt"
        text = self._path.read_text(encoding="utf-8") if self._path.is_file() else ""
        self.before = int(text) if text.strip().isdecimal() else -1  # empty: the machine went down while writing
        self._last = self.before

    @property
    def is_known(self) -> bool:
        """Whether the tracker was given anything of this run."""
        return self._last >= 0

    def has(self, message: Message, tracker: Tracker | None) -> bool:
        """Whether an earlier process gave it, or its spool, this message already. tracker: None = not started yet."""
        if getattr(tracker, "forgets", False):
            return False
        return message.step < self.before or (message.step == self.before and message.is_training_step)

    def note(self, message: Message, tracker: Tracker | None) -> None:
        """The tracker, or its spool, has this message."""
        if message.step > self._last and not getattr(tracker, "forgets", False):
            self._last = message.step
            self._path.write_text(str(message.step), encoding="utf-8")


def spooled_trackers(run_dir: Path) -> list[str]:
    """Names of the trackers that lack something of this run."""
    return sorted(file.stem for file in (run_dir / FOLDER).glob("*.jsonl"))


def finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with null in place of numbers that json has no word for."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}

"""A run's own record: metrics.jsonl and samples.jsonl, which every run writes, and what reads them again. Trackers are
given what stands there, so it is all that they need."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.evaluate.sample import Sample

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"


class Record:
    """Writes metrics.jsonl, a line {"step", "data"} per call, and samples.jsonl, a line per sample. A resumed run
    appends. A number that is not finite is written as null. A full disk costs a warning, not the run."""

    def __init__(self, run_dir: Path, note: Callable[[str], None]) -> None:
        self._run_dir, self._note, self._warned = run_dir, note, False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._append(METRICS, [{"step": step, "data": _finite(metrics)}])

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        self._append(SAMPLES, [_finite({**dataclasses.asdict(sample), "step": step}) for sample in samples])

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row, default=float) + "\n" for row in rows)
        try:
            with (self._run_dir / name).open("a+b") as file:
                if file.tell():
                    file.seek(-1, 2)
                    text = text if file.read(1) == b"\n" else f"\n{text}"  # the machine went down in a line
                file.write(text.encode())
        except OSError as error:
            if not self._warned:
                self._note(f"cannot write {self._run_dir / name}: {error}; the run goes on. Make room on that disk")
            self._warned = True


@dataclass(frozen=True)
class Message:
    """Numbers of a step, or the samples of one. end: where its last line ends in the file."""

    step: int
    end: int
    metrics: Mapping[str, float] | None = None
    samples: tuple[Sample, ...] = ()

    @property
    def is_repeatable(self) -> bool:
        """Whether a run that went back says it anew: not the numbers of a validation or a checkpoint, which join those
        of their step."""
        return self.metrics is None or "training/global_step" in self.metrics


def messages(path: Path, offset: int = 0) -> list[Message]:
    """What the file says from there on, in its order; of steps that were done again, only the last time. A line that
    was cut off by a crash is left out."""
    written: list[Message] = []
    for line in path.read_bytes()[offset:].splitlines(keepends=True) if path.is_file() else ():
        offset += len(line)
        try:
            row = json.loads(line) if line.endswith(b"\n") else {}
        except ValueError:
            row = {}
        if "data" in row:
            data = {name: value for name, value in row["data"].items() if value is not None}
            written.append(Message(int(row["step"]), offset, data))
        elif row:
            same = written.pop().samples if written and written[-1].step == row["step"] else ()
            written.append(Message(int(row["step"]), offset, samples=(*same, Sample(**row))))
    kept: list[Message] = []
    least = repeated = math.inf  # of the steps that come later
    for message in reversed(written):
        if message.step <= least and not (message.is_repeatable and message.step >= repeated):
            least = message.step
            repeated = message.step if message.is_repeatable else repeated
            kept.append(message)
    return kept[::-1]


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Metrics by step, in order of steps; several lines of one step are joined. Where a resumed run went back, what was
    written of later steps before is left out, and so is a line that was cut off by a crash."""
    steps: dict[int, dict[str, float]] = {}
    for message in messages(path):
        steps.setdefault(message.step, {}).update(message.metrics or {})
    return steps


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with null in place of numbers that JSON has no word for."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}

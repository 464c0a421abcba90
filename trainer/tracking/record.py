"""A run's own record, metrics.jsonl, which every run writes, and what reads it again."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
TRAINED = "training/global_step"
"""Among the numbers of a training step; those of a validation or a checkpoint join them."""


class Record:
    """Writes metrics.jsonl, a line {"step", "data"} per call. A resumed run appends. A number that is not finite is
    written as null. A full disk costs a warning, not the run."""

    def __init__(self, run_dir: Path, note: Callable[[str], None]) -> None:
        self._path, self._note, self._warned = run_dir / METRICS, note, False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        text = json.dumps({"step": step, "data": _finite(metrics)}, default=float) + "\n"
        try:
            with self._path.open("a+b") as file:
                if file.tell():
                    file.seek(-1, 2)
                    text = text if file.read(1) == b"\n" else f"\n{text}"  # the machine went down in a line
                file.write(text.encode())
        except OSError as error:
            if not self._warned:
                self._note(f"cannot write {self._path}: {error}; the run goes on. Make room on that disk")
            self._warned = True


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Metrics by step, in order of steps; several lines of one step are joined. Where a resumed run went back, what was
    written of the steps that it did again, and of later ones, is left out, and so is a line that a crash cut off."""
    steps: dict[int, dict[str, float]] = {}
    for row in _rows(path):
        is_anew = TRAINED in row["data"]
        while steps and (last := next(reversed(steps))) >= row["step"] and (is_anew or last > row["step"]):
            steps.popitem()
        found = {name: value for name, value in row["data"].items() if value is not None}
        steps.setdefault(row["step"], {}).update(found)
    return steps


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    for line in filter(None, lines):
        with suppress(ValueError):
            yield json.loads(line)


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with null in place of numbers that JSON has no word for."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}

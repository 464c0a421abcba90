"""The answers of every step, kept in the run folder: samples/train/000012.parquet, samples/val/000012.parquet.

Takes `Sample`s; a row is one. What is of any shape (`ground_truth`, `extra_info`) is json under NAME_json; what the
reward gave beside its score is a column reward/NAME. `trainer.report` and `trainer.inspect` show them, `trainer.score`
scores them anew, pandas and datasets read them as they are. The folder stays below trainer.samples_max_mb: when it is
full every second step of the training's files goes, so that what stays covers the run evenly.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from trainer.checkpoint import beside_training
from trainer.evaluate.sample import Sample

FOLDER, TRAIN, VAL = "samples", "train", "val"
JSON = "_json"
REWARD = "reward/"
_MESSAGES = pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())]))
_COLUMNS: dict[str, pyarrow.DataType] = {
    "step": pyarrow.int64(),
    "uid": pyarrow.string(),
    "sample": pyarrow.int64(),
    "data_source": pyarrow.string(),
    "input": pyarrow.string(),
    "output": pyarrow.string(),
    "gts": pyarrow.string(),
    "score": pyarrow.float64(),
    "response_length": pyarrow.int64(),
    "finish_reason": pyarrow.string(),
    "policy_version": pyarrow.int64(),
    "timed_out": pyarrow.bool_(),
}


class SampleFiles:
    """The samples folder of a run, and beside it two folders of the user's with jsonl, one file a step.

    max_bytes: of the run's folder; 0 = nothing is kept there. tell: shows a sentence. rollout_dir, validation_dir: the
    user's (trainer.{rollout,validation}_data_dir); None = there is none, or agents write their episodes there.
    """

    def __init__(
        self,
        run_dir: Path,
        max_bytes: int,
        tell: Callable[[str], None],
        rollout_dir: str | None = None,
        validation_dir: str | None = None,
    ) -> None:
        self.folder, self.max_bytes, self.tell = run_dir / FOLDER, max_bytes, tell
        self.rollout_dir, self.validation_dir = rollout_dir, validation_dir
        self._has_told = False

    @property
    def keeps_training(self) -> bool:
        """Whether the samples of training are written anywhere."""
        return self.max_bytes > 0 or self.rollout_dir is not None

    def write_training(self, samples: Sequence[Sample], step: int) -> None:
        """Keeps a step's samples in place of what was there of that step."""
        with beside_training(self.folder / TRAIN, self.tell):
            self._write(TRAIN, f"{step:06d}", samples)
        self._append(self.rollout_dir, samples, step)

    def write_validation(self, samples: Sequence[Sample], step: int, way: str = "") -> None:
        """Keeps a validation's samples. way: tells several validations of one step apart, such as greedy."""
        with beside_training(self.folder / VAL, self.tell):
            self._write(VAL, f"{step:06d}{f'-{way}' if way else ''}", samples)
        self._append(self.validation_dir, samples, step)

    def rewind(self, step: int) -> None:
        """Forgets what came after `step`: a run that was resumed there goes through it again."""
        for file in [*self._files(TRAIN), *self._files(VAL)]:
            if step_of(file) > step:
                file.unlink()

    def _write(self, kind: str, name: str, samples: Sequence[Sample]) -> None:
        if not self.max_bytes or not samples:
            return
        folder = self.folder / kind
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f".{name}.draft"
        pyarrow.parquet.write_table(table_of(samples), draft, compression="zstd")
        os.replace(draft, folder / f"{name}.parquet")
        self._thin_out()

    def _thin_out(self) -> None:
        """Deletes every second file, of training first, until the folder is below its limit; the newest one stays."""
        sizes = {file: file.stat().st_size for kind in (TRAIN, VAL) for file in self._files(kind)}
        while sum(sizes.values()) > self.max_bytes and len(sizes) > 1:
            for kind in (TRAIN, VAL):
                gone = [file for file in sizes if file.parent.name == kind][-2::-2]
                if gone:
                    break
            for file in gone:
                file.unlink()
                del sizes[file]
            if not self._has_told:
                self._has_told = True
                self.tell(
                    f"{self.folder} is full (trainer.samples_max_mb={self.max_bytes >> 20}): every second step goes"
                )

    def _files(self, kind: str) -> list[Path]:
        return sorted((self.folder / kind).glob("*.parquet"))

    def _append(self, folder: str | None, samples: Sequence[Sample], step: int) -> None:
        if folder is None:
            return
        with beside_training(Path(folder), self.tell):
            Path(folder).mkdir(parents=True, exist_ok=True)
            with (Path(folder) / f"{step}.jsonl").open("a") as file:
                file.writelines(json.dumps(asdict(sample)) + "\n" for sample in samples)


def step_of(file: Path) -> int:
    """The step that a file of samples is of."""
    return int(file.stem.partition("-")[0])


def table_of(samples: Sequence[Sample]) -> pyarrow.Table:
    """The samples as columns."""
    columns = {
        name: pyarrow.array([getattr(sample, name) for sample in samples], kind) for name, kind in _COLUMNS.items()
    }
    columns["prompt"] = pyarrow.array([_messages(sample.prompt) for sample in samples], _MESSAGES)
    for name in ("ground_truth", "extra_info"):
        columns[f"{name}{JSON}"] = _texts(json.dumps(getattr(sample, name)) for sample in samples)
    for name in sorted({name for sample in samples for name in sample.extra}):
        values = [sample.extra.get(name) for sample in samples]
        are_numbers = all(value is None or isinstance(value, int | float) for value in values)
        columns[f"{REWARD}{name}"] = (
            pyarrow.array(values, pyarrow.float64())
            if are_numbers
            else _texts(None if value is None else str(value) for value in values)
        )
    return pyarrow.table(columns)


def _texts(values: Iterable[str | None]) -> pyarrow.Array:
    return pyarrow.array(list(values), pyarrow.string())


def _messages(prompt: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Chat messages with text as content; content of several parts as json."""
    return [
        {
            "role": str(message.get("role", "")),
            "content": content if isinstance(content := message.get("content", ""), str) else json.dumps(content),
        }
        for message in prompt
    ]

"""The answers of every step, kept in the run folder: samples/train/000012.parquet, samples/val/000012.parquet.

Takes `Sample`s; a row is one. What is of any shape (`ground_truth`, `extra_info`) is json under NAME_json; what the
reward gave beside its score is a column reward/NAME. `trainer.report` and `trainer.inspect` show them, `trainer.score`
scores them anew, pandas and datasets read them as they are. The folder stays below trainer.samples_max_mb: when it is
full every second step of the training's files goes, so that what stays covers the run evenly.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_type_hints

import pyarrow
import pyarrow.parquet

from trainer.checkpoint import beside_training
from trainer.evaluate.sample import Sample

FOLDER, TRAIN, VAL = "samples", "train", "val"
JSON = "_json"
REWARD = "reward/"
_KINDS: dict[Any, pyarrow.DataType] = {
    int: pyarrow.int64(),
    str: pyarrow.string(),
    bool: pyarrow.bool_(),
    float | None: pyarrow.float64(),
    list[dict[str, str]]: pyarrow.list_(pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()})),
}


class SampleFiles:
    """The samples folder of a run, and beside it two folders of the user's with jsonl, one file a step.

    max_bytes: of the run's folder; 0 = nothing is kept there. tell: shows a sentence. rollout_dir, validation_dir: the
    user's (trainer.{rollout,validation}_data_dir); None = there is none.
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
        self._write(TRAIN, f"{step:06d}", samples)
        self._append(self.rollout_dir, samples, step)

    def write_validation(self, samples: Sequence[Sample], step: int, way: str = "") -> None:
        """Keeps a validation's samples. way: tells several validations of one step apart, such as greedy."""
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
        with beside_training(folder, self.tell):
            write_table(table_of(samples), folder / f"{name}.parquet")
            # every second file goes, of training first, until the folder is below its limit; the newest one stays
            sizes = {file: file.stat().st_size for kind in (TRAIN, VAL) for file in self._files(kind)}
            while sum(sizes.values()) > self.max_bytes and len(sizes) > 1:
                of_kind = {kind: [file for file in sizes if file.parent.name == kind][-2::-2] for kind in (TRAIN, VAL)}
                for file in of_kind[TRAIN] or of_kind[VAL]:
                    file.unlink()
                    del sizes[file]
                if not self._has_told:
                    self._has_told = True
                    limit = f"trainer.samples_max_mb={self.max_bytes >> 20}"
                    self.tell(f"{self.folder} is full ({limit}): every second step goes")

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


def write_table(table: pyarrow.Table, path: Path) -> None:
    """A parquet file, there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    pyarrow.parquet.write_table(table, draft, compression="zstd")
    os.replace(draft, path)


def table_of(samples: Sequence[Sample]) -> pyarrow.Table:
    """The samples as columns."""
    kinds = {name: _KINDS[kind] for name, kind in get_type_hints(Sample).items() if kind in _KINDS}
    columns: dict[str, list[Any]] = {name: [getattr(sample, name) for sample in samples] for name in kinds}
    columns["prompt"] = [
        [{key: as_text(message.get(key, "")) for key in ("role", "content")} for message in sample.prompt]
        for sample in samples
    ]
    arrays = {name: pyarrow.array(values, kinds[name]) for name, values in columns.items()}
    for name in ("ground_truth", "extra_info"):
        texts = [json.dumps(getattr(sample, name)) for sample in samples]
        arrays[f"{name}{JSON}"] = pyarrow.array(texts, pyarrow.string())
    return pyarrow.table(arrays | reward_columns([sample.extra for sample in samples]))


def reward_columns(extras: Sequence[Mapping[str, float | str]]) -> dict[str, pyarrow.Array]:
    """A column reward/NAME for all that rewards gave beside their scores; of text where one of its values is."""
    columns = {}
    for name in sorted({name for extra in extras for name in extra}):
        values: list[Any] = [extra.get(name) for extra in extras]
        is_text = any(isinstance(value, str) for value in values)
        if is_text:
            values = [None if value is None else as_text(str(value)) for value in values]
        columns[f"{REWARD}{name}"] = pyarrow.array(values, pyarrow.string() if is_text else pyarrow.float64())
    return columns


def as_text(value: Any) -> str:
    """Text as it is, anything else as json. Half of a surrogate pair, which json can spell and UTF-8 cannot, becomes a
    question mark."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.encode(errors="replace").decode()

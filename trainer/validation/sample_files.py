"""Files with the answers of every step in the run folder.

samples/train/000012.parquet    answers of training step 12
samples/val/000012.parquet      answers of the validation after it
samples/images/DIGEST-N.jpg     images of their prompts

Each row is one `Sample`. Values of any type (`ground_truth`, `extra_info`, `requests`) are json text in the columns
NAME_json, and additional entries of the reward's result are columns reward/NAME. Only files with episodes of programs
have `requests`, and only files with images of prompts have `images`, their file names. `trainer.report` and
`trainer.inspect` show the files, `trainer.score` scores them with another reward, and pandas and datasets can read
them.

The folder stays below trainer.samples_max_mb: when it is full, the files of every second training step are deleted, so
that the remaining files cover the run evenly. Images take at most half of the limit; beyond that, the least recently
used images are deleted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, get_type_hints

import pyarrow
import pyarrow.parquet

from trainer.checkpoint.files import beside_training
from trainer.validation.sample import Sample, image_names, record_of
from verl_lite.images import open_image
from verl_lite.json_types import JsonObject

if TYPE_CHECKING:
    from verl_lite.protocol import DataProto

# names of folders
FOLDER = "samples"
TRAIN = "train"
VAL = "val"
IMAGES = "images"
IMAGE_SIDE = 512  # pixels; larger images are scaled down
JSON = "_json"
REWARD = "reward/"
_MESSAGE = pyarrow.struct({"role": pyarrow.string(), "content": pyarrow.string()})
# type of a field of `Sample` -> type of its column; `table_of` converts the fields of other types
_COLUMN_TYPES: dict[object, pyarrow.DataType] = {
    int: pyarrow.int64(),
    str: pyarrow.string(),
    bool: pyarrow.bool_(),
    float | None: pyarrow.float64(),
    list[dict[str, str]]: pyarrow.list_(_MESSAGE),
}


class SampleFiles:
    """Writes the samples folder of a run, and optionally two folders with one jsonl file per step.

    Args:
        run_dir: The run folder.
        max_bytes: Limit of the samples folder; 0 writes nothing there.
        tell: Shows a message to the user.
        rollout_dir, validation_dir: trainer.{rollout,validation}_data_dir, the jsonl folders; None writes none.
    """

    def __init__(
        self,
        run_dir: Path,
        max_bytes: int,
        tell: Callable[[str], None],
        rollout_dir: str | None = None,
        validation_dir: str | None = None,
    ) -> None:
        self.folder = run_dir / FOLDER
        self.max_bytes = max_bytes
        self.tell = tell
        self.rollout_dir = rollout_dir
        self.validation_dir = validation_dir
        self._has_warned = False
        # the most recently used image is last; after a resume, the order of writing stands in for that of use
        images = (self.folder / IMAGES).glob("*.jpg")
        self._image_sizes: dict[str, int] = {}
        for file in sorted(images, key=lambda file: file.stat().st_mtime):
            self._image_sizes[file.name] = file.stat().st_size

    @property
    def keeps_training(self) -> bool:
        """True if training samples are written to any folder."""
        return self.max_bytes > 0 or self.rollout_dir is not None

    def write_training(self, samples: Sequence[Sample], step: int) -> None:
        """Writes the training samples of a step, replacing an earlier file of the step."""
        self._write(TRAIN, _file_name(step), samples)
        self._append(self.rollout_dir, samples, step)

    def write_validation(self, samples: Sequence[Sample], step: int, way: str = "") -> None:
        """Writes the samples of a validation.

        Args:
            samples: The samples.
            step: The current training step.
            way: Distinguishes several validations of one step, such as "greedy".
        """
        name = _file_name(step)
        if way:
            name += f"-{way}"
        self._write(VAL, name, samples)
        self._append(self.validation_dir, samples, step)

    def write_images(self, batch: DataProto) -> None:
        """Writes the images of a batch's prompts that the folder lacks as JPEG files of at most 512 x 512 pixels."""
        # the encoded images by name, which is a digest: prompts with the same images share their files
        images: dict[str, bytes] = {}
        for inputs in batch.non_tensor_batch.get("multi_modal_inputs", ()):
            if inputs is not None:
                names = image_names(inputs)
                images.update(zip(names, inputs.files, strict=True))
        if not self.max_bytes or not images:
            return

        folder = self.folder / IMAGES
        sizes = self._image_sizes
        # known images are not written again: a new one of 1024 x 768 pixels takes 9 ms on two cores
        new_images = {name: image for name, image in images.items() if name not in sizes}
        new_paths = [folder / name for name in new_images]

        # threads, because Pillow decodes and encodes without holding the interpreter's lock
        with beside_training(folder, self.tell), ThreadPoolExecutor(4) as threads:
            folder.mkdir(parents=True, exist_ok=True)
            new_sizes = threads.map(_write_image, new_paths, new_images.values())
            sizes.update(zip(new_images, new_sizes, strict=True))
            # the most recently used image is last
            for name in images:
                sizes[name] = sizes.pop(name)
            self._delete_unused_images()

    def _delete_unused_images(self) -> None:
        """Deletes the least recently used images until the others take at most half of the limit."""
        sizes = self._image_sizes
        # the other half of the limit is for the samples
        excess = sum(sizes.values()) - self.max_bytes // 2
        for name in list(sizes):
            if excess <= 0:
                break
            (self.folder / IMAGES / name).unlink(missing_ok=True)
            excess -= sizes.pop(name)

    def rewind(self, step: int) -> None:
        """Deletes the files of steps after `step`, which a run that resumes there repeats."""
        for file in self._files(TRAIN) + self._files(VAL):
            if step_of(file) > step:
                file.unlink()

    def _write(self, kind: str, name: str, samples: Sequence[Sample]) -> None:
        """Writes samples to the parquet file `name` in the folder `kind`, TRAIN or VAL."""
        if not self.max_bytes or not samples:
            return
        folder = self.folder / kind
        with beside_training(folder, self.tell):
            table = table_of(samples)
            write_table(table, folder / f"{name}.parquet")
            self._make_room()

    def _make_room(self) -> None:
        """Deletes every second file, training files first, until the folder is below its limit.

        The newest file of each kind stays, even if these files alone exceed the limit.
        """
        train_files = self._files(TRAIN)
        val_files = self._files(VAL)
        # by the sizes on the disk, because a resumed run has not written all of them
        sizes = {}
        for file in train_files + val_files:
            sizes[file] = file.stat().st_size
        room = self.max_bytes - sum(self._image_sizes.values())
        while sum(sizes.values()) > room:
            files = train_files if len(train_files) > 1 else val_files
            # from the second newest backwards, so that the newest stays
            deleted_files = files[-2::-2]
            # the newest files of both kinds alone exceed the limit
            if not deleted_files:
                break
            for file in deleted_files:
                file.unlink()
                files.remove(file)
                del sizes[file]
            if not self._has_warned:
                self._has_warned = True
                limit = f"trainer.samples_max_mb={self.max_bytes >> 20}"
                self.tell(f"{self.folder} is full ({limit}): the samples of every second step are deleted")

    def _files(self, kind: str) -> list[Path]:
        return sorted((self.folder / kind).glob("*.parquet"))

    def _append(self, folder: str | None, samples: Sequence[Sample], step: int) -> None:
        """Appends samples to the jsonl file of a step in a folder. Without a folder, writes nothing."""
        if folder is None:
            return
        lines = []
        for sample in samples:
            record = record_of(sample)
            lines.append(json.dumps(record) + "\n")
        path = Path(folder) / f"{step}.jsonl"
        with beside_training(path.parent, self.tell):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.writelines(lines)


def _write_image(path: Path, data: bytes) -> int:
    """Writes an encoded image as JPEG file and returns the size of the file in bytes."""
    # not needed in runs without images
    from PIL.Image import Resampling

    image = open_image(data)
    # bilinear takes a quarter of the time of the default
    image.thumbnail((IMAGE_SIDE, IMAGE_SIDE), Resampling.BILINEAR)
    # renamed when it is complete, so that a killed run leaves no damaged image
    draft = path.with_name(f".{path.name}.draft")
    image.save(draft, "JPEG", quality=85)
    os.replace(draft, path)
    return path.stat().st_size


def _file_name(step: int) -> str:
    # with zeros, so that the names have the order of the steps
    return f"{step:06d}"


def step_of(file: Path) -> int:
    """Returns the step of a file of samples."""
    return int(file.stem.partition("-")[0])


def write_table(table: pyarrow.Table, path: Path) -> None:
    """Writes a parquet file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # a reader, or a killed run, never sees a part of the file
    draft = path.with_name(f".{path.name}.draft")
    pyarrow.parquet.write_table(table, draft, compression="zstd")
    os.replace(draft, path)


def table_of(samples: Sequence[Sample]) -> pyarrow.Table:
    """Converts samples to a table with one row per sample."""
    arrays = {}
    # explicit types, because a column that is empty in one step would otherwise have another type than in the next
    for name, field_type in get_type_hints(Sample).items():
        if field_type not in _COLUMN_TYPES:
            continue
        values: list[object] = []
        for sample in samples:
            value = getattr(sample, name)
            if name == "prompt":
                value = _messages_as_text(value)
            elif field_type is str:
                value = as_text(value)
            values.append(value)
        arrays[name] = pyarrow.array(values, _COLUMN_TYPES[field_type])

    # json text, because the values can have another type in each row
    json_names = ["ground_truth", "extra_info"]
    if any(sample.requests for sample in samples):
        json_names.append("requests")
    for name in json_names:
        texts = []
        for sample in samples:
            value = getattr(sample, name)
            texts.append(json.dumps(value))
        arrays[name + JSON] = pyarrow.array(texts, pyarrow.string())
    images = [sample.images for sample in samples]
    if any(images):
        arrays["images"] = pyarrow.array(images, pyarrow.list_(pyarrow.string()))
    extras = [sample.extra for sample in samples]
    return pyarrow.table(arrays | reward_columns(extras))


def decoded_columns(row: JsonObject) -> JsonObject:
    """Returns a row of a table with its columns NAME_json decoded as NAME, the inverse of `table_of`."""
    decoded = {}
    for name, text in row.items():
        if name.endswith(JSON) and isinstance(text, str):
            decoded[name.removesuffix(JSON)] = json.loads(text)
    return row | decoded


def _messages_as_text(prompt: Sequence[Mapping[str, object]]) -> list[dict[str, str]]:
    """Returns role and content of each message as text, because the columns of all messages have one type."""
    messages = []
    for message in prompt:
        role = as_text(message.get("role", ""))
        content = as_text(message.get("content", ""))
        messages.append({"role": role, "content": content})
    return messages


def reward_columns(extras: Sequence[Mapping[str, float | str]]) -> dict[str, pyarrow.Array]:
    """Returns a column reward/NAME for each additional entry of the rewards; a text column if any value is text."""
    names: set[str] = set()
    for extra in extras:
        names.update(extra)
    columns = {}
    for name in sorted(names):
        values = [extra.get(name) for extra in extras]
        kind = pyarrow.float64()
        # a parquet column has one type, so a number among texts becomes a text
        if any(isinstance(value, str) for value in values):
            kind = pyarrow.string()
            values = [_text_or_none(value) for value in values]
        columns[REWARD + name] = pyarrow.array(values, kind)
    return columns


def _text_or_none(value: float | str | None) -> str | None:
    if value is None:
        return None
    return as_text(str(value))


def as_text(value: object) -> str:
    """Returns text unchanged and any other value as json. Lone surrogates, which UTF-8 cannot encode, become "?"."""
    if isinstance(value, str):
        text = value
    else:
        text = json.dumps(value, default=str)
    return text.encode(errors="replace").decode()

"""Where rows come from: files, folders of files, folders of `datasets`, names of the Hugging Face hub, a class.

Takes what data.train_files or data.val_files say; gives `RowTable`s. A place that keeps several splits gives the one
that is named behind an @, or the one whose name fits the option. trainer/DATA.md has the spellings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
from transformers import PreTrainedTokenizerBase

from trainer.data.files import SUFFIXES, ListedRows, RowTable, read_data_file
from verl_lite.config import HUB_NAME, DataConfig
from verl_lite.errors import UserError
from verl_lite.registry import accepts, takes
from verl_lite.user_code import load_object

if TYPE_CHECKING:
    import datasets

SPLITS: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("test", "validation", "val", "valid", "dev", "eval", "testing", "evaluation"),
}
"""Names of the split that an option takes where none is asked for, the first that there is."""

_SPLIT_WORD = re.compile(rf"(?<![a-z0-9])({'|'.join(name for names in SPLITS.values() for name in names)})(?![a-z0-9])")
_DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
_MEDIA_FEATURES = ("Image", "Video", "Audio")


def open_sources(
    places: Sequence[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, split: str
) -> list[RowTable]:
    """The rows of each place, unchecked. split: "train" or "val", the option that the places are from.

    Raises UserError for a place that is not there or cannot be read.
    """
    if config.custom_cls.path is not None:
        return [_rows_of_class(places, config, tokenizer, split)]
    return [table for place in places for table in _open(place, f"data.{split}_files", split)]


@dataclass(frozen=True)
class _Place:
    """`base:config@split`, taken apart."""

    text: str
    base: str
    config: str | None
    split: str | None

    @staticmethod
    def parse(text: str) -> _Place:
        if Path(text).expanduser().exists():  # a path may hold any character
            return _Place(text, text, None, None)
        front, _, split = text.partition("@")
        base, _, config = front.partition(":")
        return _Place(text, base, config or None, split or None)


def _open(text: str, option: str, split: str) -> list[RowTable]:
    place = _Place.parse(text)
    folder = Path(place.base).expanduser()
    if folder.is_dir():
        return _open_folder(place, folder, option, split)
    if HUB_NAME.fullmatch(text) and folder.suffix not in SUFFIXES:
        return [_open_hub(place, option, split)]
    try:
        return [read_data_file(text, option)]
    except UserError as error:
        if folder.is_file():
            raise
        raise UserError(
            f"{error}. Give parquet, json or jsonl files, a folder of them, or a dataset of the Hugging Face hub as "
            "owner/name, owner/name:config or owner/name:config@split"
        ) from None


# ------------------------------------------------------------------------------------------------------------- folders


def _open_folder(place: _Place, folder: Path, option: str, split: str) -> list[RowTable]:
    if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
        return [_open_saved(place, folder, option, split)]
    if place.config is not None:  # a repository as it lies on the hub, whose README says which files a config has
        return [_open_hub(place, option, split)]
    files = _data_files(folder) or _data_files(folder / "data")
    if not files:
        inside = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
        raise UserError(
            f"{option}={place.text!r}: the folder {folder.absolute()} has no parquet, json or jsonl file, and is "
            f"none of datasets.save_to_disk; it holds {inside}"
        )
    chosen = _files_of_split(files, place, option, split)
    return [read_data_file(str(file), option) for file in chosen]


def _data_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in SUFFIXES and path.name not in _DESCRIPTIONS and not path.name.startswith(".")
    )


def _files_of_split(files: list[Path], place: _Place, option: str, split: str) -> list[Path]:
    """The files whose names speak of the split; all of them where no name speaks of any."""
    by_split: dict[str, list[Path]] = {}
    unnamed = []
    for file in files:
        word = _SPLIT_WORD.search(file.stem.lower())
        if word is None:
            unnamed.append(file)
        else:
            by_split.setdefault(word[1], []).append(file)
    if not by_split and place.split is None:
        return unnamed
    if unnamed and by_split:
        raise UserError(
            f"{option}={place.text!r}: some files of the folder are named after a split "
            f"({', '.join(sorted(by_split))}), and {unnamed[0].name} is not. Name the files that are meant"
        )
    return by_split[_choose_split(list(by_split), place, option, split)]


def _choose_split(known: Sequence[str], place: _Place, option: str, split: str) -> str:
    """The split that is asked for, or that an option takes by itself. Raises UserError listing what there is."""
    wanted = SPLITS[split] if place.split is None else (place.split,)
    for name in wanted:
        if name in known:
            return name
    there = f"there are {', '.join(sorted(known))}" if known else "it has none"
    what = f"no split {wanted[0]!r}" if len(wanted) == 1 else f"no split called {' or '.join(wanted[:2])}"
    raise UserError(
        f"{option}={place.text!r}: {what}; {there}. Name one behind an @, as {place.text.split('@')[0]}@NAME"
    )


# ------------------------------------------------------------------------------------------------- datasets and the hub


class DatasetRows:
    """Rows of a `datasets.Dataset`, which stay in its files on disk until they are asked for."""

    def __init__(self, path: str, dataset: datasets.Dataset, data_source: str | None) -> None:
        self.path, self.data_source = path, data_source
        self.columns = list(dataset.column_names)
        self.media = tuple(name for name, feature in dataset.features.items() if _is_media(feature))
        self._dataset = dataset
        self._views: dict[tuple[str, ...], datasets.Dataset] = {}

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, indices: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        names = tuple(columns)
        if names not in self._views:
            self._views[names] = self._dataset.with_format("arrow", columns=list(names))
        table: pyarrow.Table = self._views[names][list(indices)]
        return table.to_pylist(maps_as_pydicts="lossy")


def _is_media(feature: Any) -> bool:
    """Whether a feature, or one inside it, is a picture, video or sound."""
    if isinstance(feature, dict):
        return any(map(_is_media, feature.values()))
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return type(feature).__name__ in _MEDIA_FEATURES or (inner is not None and _is_media(inner))


def _open_saved(place: _Place, folder: Path, option: str, split: str) -> RowTable:
    """A folder that `save_to_disk` wrote: a dataset, or several by split."""
    import datasets

    try:
        found = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise UserError(f"{option}={place.text!r}: not a readable folder of datasets.save_to_disk ({error})") from error
    if isinstance(found, datasets.DatasetDict):
        found = found[_choose_split(list(found), place, option, split)]
    elif place.split is not None:
        raise UserError(
            f"{option}={place.text!r}: the folder holds one dataset without splits; leave @{place.split} out"
        )
    return DatasetRows(place.text, found, None)


def _open_hub(place: _Place, option: str, split: str) -> RowTable:
    """A dataset of the hub, or a folder laid out like one; without network from the cache of `datasets`."""
    import datasets

    folder = Path(place.base).expanduser()
    try:
        builder = datasets.load_dataset_builder(str(folder) if folder.is_dir() else place.base, place.config)
        known = list(builder.info.splits or getattr(builder.config, "data_files", None) or [])
        name = _choose_split([str(name) for name in known], place, option, split)
        builder.download_and_prepare()
        found = builder.as_dataset(split=name)
    except (OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(_unreachable(place, option, error)) from error
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{option}={place.text!r}: {error}. A config is named behind a colon, as {place.base}:NAME"
        ) from error
    return DatasetRows(place.text, found, None if folder.is_dir() else place.base)


def _unreachable(place: _Place, option: str, error: Exception) -> str:
    import datasets

    cache = datasets.config.HF_DATASETS_CACHE
    return (
        f"{option}={place.text!r}: there is no such file or folder (looked for {Path(place.base).absolute()}), and no "
        f"dataset of that name on the Hugging Face hub or in the cache {cache} ({type(error).__name__}: {error}). "
        "Correct the name; or, without network here, load it once where there is one and copy the cache, or write it "
        f"as a file: datasets.load_dataset({place.base!r}, split=SPLIT).to_parquet(FILE)"
    )


# ----------------------------------------------------------------------------------------------------- the user's class


def _rows_of_class(
    places: Sequence[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, split: str
) -> RowTable:
    """The rows of data.custom_cls, made with verl's arguments, of those that it takes."""
    custom = config.custom_cls
    made = load_object(custom.path or "", custom.name or "", "data.custom_cls.path", "data.custom_cls.name")
    most = config.train_max_samples if split == "train" else config.val_max_samples
    arguments = {"data_files": list(places), "tokenizer": tokenizer, "config": config, "max_samples": most}
    arguments = {name: value for name, value in arguments.items() if accepts(made, name)}
    if takes(made, "processor"):
        arguments["processor"] = None
    rows = made(**arguments)
    name = f"{custom.name} of {custom.path}"
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise UserError(
            f"data.custom_cls.name={custom.name}: found {type(rows).__name__} without __len__ or __getitem__, expected "
            "a sequence of rows, each a dict as a line of a jsonl file"
        )
    if hasattr(rows, "on_batch_end"):
        raise UserError(
            f"data.custom_cls.name={custom.name}: its on_batch_end would not be called; what changes the order of the "
            "prompts while the model learns is a sampler with update(batch): data.sampler.class_path"
        )
    return ListedRows(name, [_plain_row(rows[index], index, name) for index in range(len(rows))])


def _plain_row(row: Any, index: int, name: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"data.custom_cls: row {index} of {name} is {row!r:.100}, expected a dict with named columns")
    tensors = [key for key, value in row.items() if type(value).__module__.partition(".")[0] == "torch"]
    if tensors:
        raise UserError(
            f"data.custom_cls: row {index} of {name} has a tensor in {tensors[0]!r}: the class gives processed items, "
            "as verl's RLHFDataset does. Here the trainer makes the tokens; give a class whose items are rows, such as "
            f"{json.dumps({'data_source': 'mine', 'prompt': [{'role': 'user', 'content': '1+1='}]})}"
        )
    return row

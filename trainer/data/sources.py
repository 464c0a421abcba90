"""Where rows come from: files, folders of files, folders of `datasets`, names of the Hugging Face hub, a class.

Takes what data.train_files or data.val_files say; gives `RowTable`s. A place that keeps several splits gives the one
that is named behind an @, or the one whose name fits the option. trainer/DATA.md has the spellings. Json is parsed here
and not by `datasets`, which makes a date of the text "2024-05-01" and, in columns of several types, a number of "1".
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow
import pyarrow.parquet
from transformers import PreTrainedTokenizerBase

from verl_lite.config import HUB_NAME, DataConfig
from verl_lite.errors import UserError
from verl_lite.registry import accepts, takes
from verl_lite.user_code import load_object

if TYPE_CHECKING:
    import datasets

SUFFIXES = (".parquet", ".json", ".jsonl")
SPLITS: dict[str, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("test", "validation", "val", "valid", "dev", "eval", "testing", "evaluation"),
}
"""Names of the split that an option takes where none is asked for, the first that there is."""

_SPLIT_WORD = re.compile(rf"(?<![a-z0-9])({'|'.join(name for names in SPLITS.values() for name in names)})(?![a-z0-9])")
_DESCRIPTIONS = ("dataset_infos.json", "dataset_info.json", "dataset_dict.json", "state.json")
_MEDIA_FEATURES = ("Image", "Video", "Audio")


class RowTable:
    """Rows from one place. Those of a file are in memory, those of `datasets` stay on disk until they are asked for.

    path: the place, for messages. data_source: a name for all rows that give none. columns: names in the order of the
    place. media: columns declared to hold pictures, video or sound.
    """

    def __init__(
        self,
        path: str,
        rows: list[dict[str, Any]] | pyarrow.Table | datasets.Dataset,
        data_source: str | None = None,
    ) -> None:
        self.path, self.data_source, self._rows = path, data_source, rows
        self.columns: list[str]
        if isinstance(rows, list):  # the types of a column may differ from row to row
            self.columns = sorted({name for row in rows for name in row})
        else:
            self.columns = list(rows.column_names)
        features = getattr(rows, "features", {})
        self.media = tuple(name for name, feature in features.items() if _is_media(feature))

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, indices: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
        """Some rows, in the order asked for, with these columns where they have them."""
        rows = self._rows
        if isinstance(rows, list):
            return [{name: row[name] for name in columns if name in row} for row in map(rows.__getitem__, indices)]
        if isinstance(rows, pyarrow.Table):
            table = rows.select(list(columns)).take(pyarrow.array(indices, type=pyarrow.int64()))
        else:
            table = rows.with_format("arrow", columns=list(columns))[list(indices)]
        return table.to_pylist(maps_as_pydicts="lossy")


def _is_media(feature: Any) -> bool:
    """Whether a feature, or one inside it, is a picture, video or sound."""
    if isinstance(feature, dict):
        return any(map(_is_media, feature.values()))
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", None)
    return type(feature).__name__ in _MEDIA_FEATURES or (inner is not None and _is_media(inner))


def open_sources(
    places: Sequence[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, *, split: str
) -> list[RowTable]:
    """The rows of each place, unchecked.

    Args:
        split: "train" or "val", the option that the places are from.
    Raises:
        UserError: for a place that is not there or cannot be read.
    """
    if config.custom_cls.path is not None:
        return [_rows_of_class(places, config, tokenizer, split)]
    return [table for place in places for table in open_place(place, f"data.{split}_files", split)]


def read_rows(path: str, option: str) -> list[dict[str, Any]]:
    """All rows of a file; see `read_data_file`."""
    table = read_data_file(path, option)
    return table.rows(range(len(table)), table.columns)


# --------------------------------------------------------------------------------------------------------------- files


def read_data_file(path: str, option: str) -> RowTable:
    """The rows of a parquet, json (a list of rows) or jsonl (a row per line) file.

    Args:
        option: the configuration key that the file came from, for messages.
    Raises:
        UserError: for a file that is not there, cannot be read, or is of another kind.
    """
    file, where = Path(path).expanduser(), f"{option}={path!r}"
    if not file.is_file():
        raise UserError(f"{where}: no such file (looked for {file.absolute()})")
    if file.suffix not in SUFFIXES:
        raise UserError(f"{where}: expected a file named .parquet, .json or .jsonl")
    return RowTable(path, _read_parquet(file, where) if file.suffix == ".parquet" else _read_json(file, where))


def _read_parquet(file: Path, where: str) -> pyarrow.Table:
    try:
        with pyarrow.parquet.ParquetFile(file) as reader:
            table = reader.read()
        table.validate(full=True)  # texts that are not UTF-8 are found here, not when a row is asked for
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{where}: not a readable parquet file ({error})") from error
    for name in table.column_names:
        if table.column_names.count(name) > 1:
            raise UserError(f"{where}: the file has several columns {name!r}; expected one of each name")
    return table


def _read_json(file: Path, where: str) -> list[dict[str, Any]]:
    try:
        content = file.read_bytes()
        text = content.decode("utf-8-sig")  # editors on Windows put a mark in front
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error})") from error
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{where}, line {line}: found the byte 0x{content[error.start]:02x}, which is not UTF-8 text "
            f"({error.reason}); expected json in UTF-8, not compressed"
        ) from error
    if text.lstrip().startswith("["):
        rows = parse_json(text, where, "a row per line, or one list of rows")
    else:  # split, not splitlines, which would also split at U+2028 inside a string
        lines = enumerate(text.split("\n"), start=1)
        rows = [parse_json(line, f"{where}, line {number}", "a row per line") for number, line in lines if line.strip()]
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UserError(f"{where}: row {index} is {row!r:.100}, expected an object with named columns")
    return rows


def parse_json(text: str, where: str, expected: str) -> Any:
    """What a json text says. Raises UserError with `where` and what was expected."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also of a number with too many digits
        raise UserError(f"{where}: not valid json ({error}); expected {expected}") from error


# -------------------------------------------------------------------------------------------------------------- places


@dataclass(frozen=True)
class _Place:
    """`base:config@split`, taken apart. where: the option and the text, for messages."""

    where: str
    base: str
    config: str | None
    split: str | None

    @property
    def folder(self) -> Path:
        return Path(self.base).expanduser()


def open_place(text: str, option: str, split: str) -> list[RowTable]:
    """The rows of one place, a table for each file; `option` and `split` as of `open_sources`."""
    front, _, asked = text.partition("@")
    base, _, config = front.partition(":")
    place = _Place(f"{option}={text!r}", base, config or None, asked or None)
    if Path(text).expanduser().exists():  # a path may hold any character
        place = _Place(place.where, text, None, None)
    if place.folder.is_dir():
        if (place.folder / "dataset_dict.json").is_file() or (place.folder / "state.json").is_file():
            return [RowTable(text, _load_saved(place, split))]
        if place.config is not None:  # a repository as it lies on the hub, whose README says which files a config has
            return [RowTable(text, _load_prepared(place, split))]
        return [read_data_file(str(file), option) for file in _files_of_split(place, split)]
    if HUB_NAME.fullmatch(text) and place.folder.suffix not in SUFFIXES:
        return [RowTable(text, _load_prepared(place, split), data_source=place.base)]
    if not place.folder.is_file():
        raise UserError(
            f"{place.where}: no such file (looked for {Path(text).absolute()}). Give parquet, json or jsonl files, a "
            "folder of them, or a dataset of the Hugging Face hub as owner/name, owner/name:config or "
            "owner/name:config@split"
        )
    return [read_data_file(text, option)]


def _files_of_split(place: _Place, split: str) -> list[Path]:
    """The files of a folder, or of its `data`, whose names speak of the split; all where no name speaks of any."""
    inside = [path for folder in (place.folder, place.folder / "data") if folder.is_dir() for path in folder.iterdir()]
    found = [path for path in inside if path.suffix in SUFFIXES and path.name not in _DESCRIPTIONS]
    found = [path for path in found if not path.name.startswith(".")]
    files = sorted([path for path in found if path.parent == place.folder] or found)
    if not files:
        names = ", ".join(sorted(path.name for path in inside)[:10]) or "nothing"
        raise UserError(
            f"{place.where}: the folder {place.folder.absolute()} has no parquet, json or jsonl file, and is none of "
            f"datasets.save_to_disk; it holds {names}"
        )
    by_split: dict[str, list[Path]] = {}
    for file in files:
        word = _SPLIT_WORD.search(file.stem.lower())
        by_split.setdefault(word[1] if word else "", []).append(file)
    unnamed = by_split.pop("", [])
    if unnamed and not by_split and place.split is None:
        return unnamed
    if unnamed and by_split:
        raise UserError(
            f"{place.where}: some files of the folder are named after a split ({', '.join(sorted(by_split))}), and "
            f"{unnamed[0].name} is not. Name the files that are meant"
        )
    return by_split[_choose_split(list(by_split), place, split)]


def _choose_split(known: Sequence[str], place: _Place, split: str) -> str:
    """The split that is asked for, or that an option takes by itself. Raises UserError listing what there is."""
    wanted = SPLITS[split] if place.split is None else (place.split,)
    for name in wanted:
        if name in known:
            return name
    there = f"there are {', '.join(sorted(known))}" if known else "it has none"
    what = f"no split {wanted[0]!r}" if len(wanted) == 1 else f"no split called {' or '.join(wanted[:2])}"
    config = "" if place.config is None else f":{place.config}"
    raise UserError(f"{place.where}: {what}; {there}. Name one behind an @, as {place.base}{config}@NAME")


def _load_saved(place: _Place, split: str) -> datasets.Dataset:
    """A folder that `save_to_disk` wrote: a dataset, or several by split."""
    import datasets

    try:
        found = datasets.load_from_disk(place.base)
    except (OSError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise UserError(f"{place.where}: not a readable folder of datasets.save_to_disk ({error})") from error
    if isinstance(found, datasets.DatasetDict):
        return found[_choose_split(list(found), place, split)]
    if place.split is not None:
        raise UserError(f"{place.where}: the folder holds one dataset without splits; leave @{place.split} out")
    return found


def _load_prepared(place: _Place, split: str) -> datasets.Dataset:
    """A dataset of the hub, or a folder laid out like one; without network from the cache of `datasets`."""
    import datasets

    try:
        builder = datasets.load_dataset_builder(
            str(place.folder) if place.folder.is_dir() else place.base, place.config
        )
        known = list(builder.info.splits or getattr(builder.config, "data_files", None) or [])
        name = _choose_split([str(name) for name in known], place, split)
        builder.download_and_prepare()
        return builder.as_dataset(split=name)
    except (OSError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"{place.where}: there is no such file or folder (looked for {place.folder.absolute()}), and no dataset of "
            f"that name on the Hugging Face hub or in the cache {datasets.config.HF_DATASETS_CACHE} "
            f"({type(error).__name__}: {error}). Correct the name; or, without network here, load it once where there "
            f"is one and copy the cache, or write it as a file: "
            f"datasets.load_dataset({place.base!r}, split=SPLIT).to_parquet(FILE)"
        ) from error
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{place.where}: {error}. A config is named behind a colon, as {place.base}:NAME") from error


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
    where = f"data.custom_cls.name={custom.name}"
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        raise UserError(
            f"{where}: found {type(rows).__name__} without __len__ or __getitem__, expected a sequence of rows, each a "
            "dict as a line of a jsonl file"
        )
    if hasattr(rows, "on_batch_end"):
        raise UserError(
            f"{where}: its on_batch_end would not be called; what changes the order of the prompts while the model "
            "learns is a sampler with update(batch): data.sampler.class_path"
        )
    name = f"{custom.name} of {custom.path}"
    found = [_plain_row(rows[index], f"data.custom_cls: row {index} of {name}") for index in range(len(rows))]
    return RowTable(name, found)


def _plain_row(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise UserError(f"{where} is {row!r:.100}, expected a dict with named columns")
    for key, value in row.items():
        if type(value).__module__.partition(".")[0] == "torch":
            raise UserError(
                f"{where} has a tensor in {key!r}: the class gives processed items, as verl's RLHFDataset does. Here "
                "the trainer makes the tokens; give a class whose items are rows, such as "
                '{"data_source": "mine", "prompt": [{"role": "user", "content": "1+1="}]}'
            )
    return row

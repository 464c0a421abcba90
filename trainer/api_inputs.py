"""The arguments of `trainer.train` as files of a run: rows, images and a reward function."""

from __future__ import annotations

import datetime
import decimal
import functools
import hashlib
import inspect
import json
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePath
from types import ModuleType
from typing import TYPE_CHECKING, TypeGuard

from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject

if TYPE_CHECKING:
    from trainer.data.sources import Row

Rows = str | Iterable[str] | Iterable[Mapping[str, object]]
"""Entries of data.train_files (a file, folder or hub name, or several), or rows: dicts in the forms of trainer/DATA.md,
such as a list, a pandas DataFrame or a dataset of `datasets`."""

Chat = list[dict[str, str]]
Prompts = str | Chat | Iterable[str | Chat]
"""One prompt, which is a text or a chat, or several of them."""

RewardFunction = Callable[..., object]
"""A function of a user with the arguments of verl or of TRL; `trainer.train` describes both."""

_NUMBERS_AND_TEXTS = (str, bytes, int, float, PurePath, uuid.UUID, decimal.Decimal)
_TIMES = (datetime.date, datetime.time, datetime.timedelta)
_PLAIN = (*_NUMBERS_AND_TEXTS, *_TIMES)
"""Types of values that a file of rows holds as json values, or as the text that users expect."""
_MOST_LEVELS = 100
"""Levels of nesting in a value of a row. A list that contains itself has more."""
_MOST_BITS = 10_000
"""Bits of an integer in a row. Python refuses to write a number of more than 4300 digits, which is 14,284 bits."""
_CUSTOM_FUNCTION = "reward.custom_reward_function"
_REWARD_FILE = """\"\"\"Loads the reward function that was given to `trainer.train`.\"\"\"

import pathlib

import cloudpickle

compute_score = cloudpickle.loads(pathlib.Path(__file__).with_suffix(".pkl").read_bytes())
"""


def data_files(data: Rows, folder: Path, name: str) -> list[str]:
    """Returns entries of data.train_files or data.val_files. Rows are written to a file in `folder`.

    Args:
        data: files or rows.
        folder: folder for the files.
        name: name of the data in messages and of its file.

    Raises:
        UserError: if `data` is neither, or has no rows.
    """
    if isinstance(data, str | Path):
        return [str(data)]
    if isinstance(data, Mapping):
        first_keys = [str(key) for key in list(data)[:5]]
        raise UserError(
            f"{name}: found a dictionary with the keys {', '.join(first_keys)}; expected rows, that is, "
            "a list of dictionaries of columns such as prompt, or a DataFrame or dataset"
        )
    # iterating over a DataFrame yields the names of its columns
    is_frame = hasattr(data, "to_dict") and hasattr(data, "iloc")
    try:
        entries: list[object] = list(data.to_dict("records") if is_frame else data)  # type: ignore[union-attr]
    except TypeError:
        raise UserError(
            f"{name}: found {data!r:.100}, expected rows (dictionaries of columns) or the paths of files"
        ) from None
    are_files = all(isinstance(entry, str | Path) for entry in entries)
    if entries and are_files:
        return [str(entry) for entry in entries]
    rows = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, Mapping):
            raise UserError(
                f"{name}: row {index} is {entry!r:.100}, expected a dict of columns such as "
                "{'prompt': 'What is 2 + 3?'}"
            )
        rows.append(_as_json_row(dict(entry), folder, f"{name}: row {index}"))
    return [write_rows(rows, folder, name)]


def write_rows(rows: Sequence[JsonObject], folder: Path, name: str) -> str:
    """Writes rows to a jsonl file in `folder` and returns its path.

    A file with other rows is never overwritten, because a run may refer to it. Raises UserError without rows.
    """
    if not rows:
        raise UserError(f"{name}: there are no rows; expected at least one")
    text = "".join(json.dumps(row) + "\n" for row in rows)
    file = folder / f"{name}.jsonl"
    has_other_rows = file.exists() and file.read_text(encoding="utf-8") != text
    if has_other_rows:
        file = folder / f"{name}-{digest_of(rows)}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return str(file)


def digest_of(content: object) -> str:
    """Returns a short hash of JSON values."""
    text = json.dumps(content)
    digest = hashlib.blake2b(text.encode(), digest_size=6)
    return digest.hexdigest()


def prompt_rows(prompts: Prompts) -> list[JsonObject]:
    """Returns a row for each prompt. Raises UserError for anything that is neither a text nor a chat."""
    entries: list[object]
    if isinstance(prompts, str) or _is_chat(prompts):
        entries = [prompts]
    elif isinstance(prompts, Iterable) and not isinstance(prompts, Mapping):
        entries = list(prompts)
    else:
        raise UserError(_not_a_prompt("prompts", prompts))
    rows: list[JsonObject] = []
    for index, prompt in enumerate(entries):
        messages: Sequence[Mapping[str, object]]
        if isinstance(prompt, str):
            messages = [{"role": "user", "content": prompt}]
        elif _is_chat(prompt):
            messages = [dict(message) for message in prompt]
        else:
            raise UserError(_not_a_prompt(f"prompts: entry {index}", prompt))
        # a row must have a data source, even if no reward reads it
        rows.append({"prompt": messages, "data_source": "generate"})
    return rows


def reward_settings(reward: RewardFunction | str | None, folder: Path) -> dict[str, object]:
    """Returns the options that select the reward. A function is stored in `folder`."""
    if reward is None:
        return {}
    if isinstance(reward, str):
        file, _, name = reward.partition(":")
        if not file.endswith(".py"):
            return {"reward.functions": {"reward": {"reward": reward}}}
        path = Path(file).expanduser().absolute()
        settings: dict[str, object] = {f"{_CUSTOM_FUNCTION}.path": str(path)}
        if name:
            settings[f"{_CUSTOM_FUNCTION}.name"] = name
        return settings
    if not callable(reward):
        raise UserError(
            f"reward: found {reward!r:.100}; expected a function, FILE.py:FUNCTION or the name of a built-in reward"
        )
    return _store_function(reward, folder)


def _store_function(reward: RewardFunction, folder: Path) -> dict[str, object]:
    """Stores a reward function in `folder`, with a file that loads it. Returns the options that select that file.

    Raises:
        UserError: for a class, and for a function that cannot be copied to other processes.
    """
    import cloudpickle

    if inspect.isclass(reward):
        raise UserError(f"reward: {reward.__name__} is a class; expected a function, or an object that can be called")
    with _by_value(_module_to_copy(reward)):
        try:
            code = cloudpickle.dumps(reward)
        except Exception as error:
            # pickle calls methods of the user's objects, which may raise anything
            raise UserError(
                f"reward: {reward!r:.100} cannot be copied to the reward processes ({error}). Create what it uses, "
                "such as clients, locks or open files, inside the function, or put it into a file: reward='FILE.py'"
            ) from error
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.pkl").write_bytes(code)
    (folder / "reward.py").write_text(_REWARD_FILE, encoding="utf-8")
    settings: dict[str, object] = {f"{_CUSTOM_FUNCTION}.path": str(folder / "reward.py")}
    # a name that only TRL's functions have
    if _has_parameter(reward, "completions"):
        settings[f"{_CUSTOM_FUNCTION}.style"] = "trl"
    return settings


def _module_to_copy(reward: RewardFunction) -> ModuleType | None:
    """Returns the module of a function if reward processes may be unable to import it, else None."""
    function: object = reward
    # the module of a partial function itself is functools
    while isinstance(function, functools.partial):
        function = function.func
    module_name = getattr(function, "__module__", "") or ""
    module = sys.modules.get(module_name)
    # cloudpickle copies functions of __main__ by itself
    if module is None or module.__name__ == "__main__":
        return None
    top_package, _, _ = module.__name__.partition(".")
    is_of_python = top_package in sys.stdlib_module_names
    is_installed = "site-packages" in str(getattr(module, "__file__", None))
    if is_of_python or is_installed:
        return None
    return module


def _has_parameter(function: RewardFunction, name: str) -> bool:
    """Returns True if the function has a parameter of this name."""
    try:
        return name in inspect.signature(function).parameters
    except ValueError:
        # some functions written in C do not tell their parameters
        return False


def _is_chat(prompt: object) -> TypeGuard[Sequence[Mapping[str, object]]]:
    """True for a list of messages with roles."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    for message in prompt:
        if not isinstance(message, Mapping) or "role" not in message:
            return False
    return True


def _not_a_prompt(where: str, prompt: object) -> str:
    return (
        f"{where}: found {prompt!r:.100}; expected a text, a chat ([{{'role': 'user', 'content': ...}}]), or a list of "
        "texts and chats"
    )


def _check_value(value: object, place: str, levels: int) -> None:
    """Raises UserError for a value that a file of rows could hold only in another form, such as a set or an object.

    A reward would silently compare with that form, for example `<object at 0x7f...>`.

    Args:
        value: a value of a row.
        place: its place for messages.
        levels: number of levels that lists and dictionaries may still be nested.
    """
    from trainer.validation.sample import is_missing_in_pandas

    expected = "expected text, numbers, lists, or dictionaries with keys of text; leave out columns that nothing reads"
    # a scalar or an array
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()

    if isinstance(value, dict | list | tuple) and levels == 0:
        raise UserError(f"{place}: nested more than {_MOST_LEVELS} levels deep")
    if isinstance(value, dict):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise UserError(f"{place}: found the key {key!r:.100} of a dictionary; {expected}")
            _check_value(entry, place, levels - 1)
    elif isinstance(value, list | tuple):
        for entry in value:
            _check_value(entry, place, levels - 1)
    elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise UserError(f"{place}: found a number of {value.bit_length()} bits; write it as text")
    elif value is not None and not isinstance(value, _PLAIN) and not is_missing_in_pandas(value):
        raise UserError(f"{place}: found {value!r:.100} of type {type(value).__name__}; {expected}")


def _as_json_row(row: Row, folder: Path, where: str) -> JsonObject:
    """Returns a row as JSON values, with a ground truth, and with its images as files.

    Args:
        row: the row.
        folder: folder of the images.
        where: the row's name, for messages.
    """
    from trainer.data.images import read_image
    from trainer.validation.sample import plain_value

    images = row.get("images")
    if not images and row.get("image") is not None:
        images = [row["image"]]
    names = []
    for number, image in enumerate(images or []):
        content = read_image(image, Path.cwd(), f"{where}, image {number}")
        digest = hashlib.blake2b(content, digest_size=8)
        # named after the content, so that other rows never overwrite an image that a run refers to
        name = f"{digest.hexdigest()}.image"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
        names.append(name)
    other_columns = {key: value for key, value in row.items() if key not in ("image", "images")}
    for column, value in other_columns.items():
        _check_value(value, f"{where}, column {column!r}", _MOST_LEVELS)
    values = plain_value(other_columns)
    if "reward_model" not in values:
        # rows of a run with rewards must have one, also if the reward does not read it
        ground_truth = values.setdefault("ground_truth", "")
        if ground_truth is None:
            raise UserError(
                f"{where} has a column ground_truth without a value; give each row one, or no row such a column"
            )
    if names:
        values["images"] = names
    return values


@contextmanager
def _by_value(module: ModuleType | None) -> Iterator[None]:
    """Makes cloudpickle copy the functions of a module, which reward processes may be unable to import."""
    if module is None:
        yield
        return
    import cloudpickle

    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)

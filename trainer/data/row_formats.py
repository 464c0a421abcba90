"""Row formats: checks the columns of each row and converts it to the `PromptRow` that the trainer uses.

Rows follow verl's schema (`EXAMPLE_ROW`), or `data.columns` maps their columns to those of the schema. Every error
message names the file, row and column, and shows the value found.
"""

import json
import math
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TypedDict

from trainer.data.chats import (
    EXAMPLE_PROMPT,
    MULTIMODAL,
    TEXT_MODEL,
    Chat,
    read_messages,
    read_tools,
    read_tools_file,
    refuse_messages_as_text,
    without_nulls,
    wrong_value,
)
from trainer.data.images import PLACEHOLDER, read_image
from trainer.data.sources import Row, RowTable
from verl_lite.config import DataConfig
from verl_lite.config.data import template_argument_problems
from verl_lite.config.sources import is_unicode
from verl_lite.errors import UserError
from verl_lite.json_types import ExtraInfo, JsonObject, KeywordArguments, ToolSchema

EXAMPLE_ROW: Row = {
    "data_source": "openai/gsm8k",
    "prompt": EXAMPLE_PROMPT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0},
}

# columns that data.columns can map; reward_model is read under its own name
_OURS = ("prompt", "ground_truth", "data_source", "extra_info", "tools", "n")
TEMPLATE_ARGUMENTS = "chat_template_kwargs"  # TRL's column of a row's arguments of the chat template
THINKING = "enable_thinking"  # such an argument, for which verl has a column of this name
_MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
_MOST_ANSWERS = 1_000_000
_ROWS_AT_ONCE = 1000  # rows of a table that are converted to Python objects at a time


class PromptRow(TypedDict):
    """One row of prompt data.

    Attributes:
        data_source: Name that selects the reward and groups the validation metrics.
        prompt: Chat messages.
        reward_model: verl's dict, with the key ground_truth if the row has a ground truth.
        extra_info: Further values for the reward, the environment or the agent program.
        tools: Tool schemas for the chat template, or None.
        n: Number of answers to sample, or None if the row has no `n`.
        images: Encoded image files, in the order of their placeholders `<image>` in the messages.
    """

    data_source: str
    prompt: Chat
    reward_model: JsonObject
    extra_info: ExtraInfo
    tools: list[ToolSchema] | None
    n: int | None
    images: list[bytes]


class RowSchema:
    """Converts rows to `PromptRow` as configured.

    Args:
        config: Section `data` of the options.
        split: "train" or "val", for messages.
        needs_ground_truth: True if a reward function compares answers with reward_model["ground_truth"], so that every
            row must have a ground truth.
        accepts_images: True if the model reads images.

    Raises:
        UserError: If the file data.tools_path is unreadable or contains no tool schemas.
    """

    def __init__(
        self,
        config: DataConfig,
        split: str,
        needs_ground_truth: bool = True,
        accepts_images: bool = False,
    ) -> None:
        self._config = config
        self._option = f"data.{split}_files"
        self._needs_ground_truth = needs_ground_truth
        self._accepts_images = accepts_images
        self._image_columns = [config.image_key]
        if config.image_key == "images":
            self._image_columns.append("image")  # TRL reads both
        self._maps_prompt = config.columns.get("prompt") is not None
        self._regex: re.Pattern[str] | None = None
        if config.ground_truth_regex is not None:
            self._regex = re.compile(config.ground_truth_regex)
        self._tools = read_tools_file(config.tools_path)

        column_options = {"prompt": config.prompt_key} | config.columns
        # names of the user's columns by the schema's name
        self._theirs: dict[str, list[str]] = {}
        for name in _OURS:
            self._theirs[name] = _listed(column_options.get(name, name))

    def rows(self, table: RowTable, indices: Sequence[int]) -> Iterator[PromptRow]:
        """Yields the checked rows at these indices. Raises UserError for the first unusable row."""
        # only the columns that are used, because others would be converted to Python objects for nothing
        wanted = ["reward_model", *self._image_columns, *_MEDIA_COLUMNS, *table.media, TEMPLATE_ARGUMENTS, THINKING]
        for names in self._theirs.values():
            for name in names:
                # a dotted name can be that of a column, or of an entry of a column
                first_part, _, _ = name.partition(".")
                wanted += [name, first_part]
        columns = [name for name in table.columns if name in wanted]

        for start in range(0, len(indices), _ROWS_AT_ONCE):
            chunk = indices[start : start + _ROWS_AT_ONCE]
            raw_rows = table.rows(chunk, columns)
            for index, raw in zip(chunk, raw_rows, strict=True):
                yield self._row(raw, table, f"{self._option}: row {index} of {table.path}")

    def check_columns(self, tables: Sequence[RowTable]) -> None:
        """Raises UserError if a table has no prompt column, or if no table has a column named in data.columns."""
        all_columns: set[str] = set()
        for table in tables:
            all_columns.update(table.columns)
            has_prompts = _first_found(self._theirs["prompt"], table.columns) is not None
            # a file without rows may have no columns
            if len(table) and not has_prompts:
                raise self._not_understood(f"{self._option}: {table.path}", "prompt", table.columns)

        # validation files may have fewer columns
        if self._option != "data.train_files":
            return
        for ours, theirs in self._config.columns.items():
            for name in self._theirs[ours]:
                if not _first_found([name], all_columns):
                    raise UserError(
                        f"data.columns.{ours}={theirs}: there is no column {name!r} in {self._option}; columns found: "
                        f"{', '.join(sorted(all_columns))}"
                    )

    def _not_understood(self, where: str, ours: str, columns: Collection[str]) -> UserError:
        """Returns the error about a required value that is missing.

        Args:
            where: Location of the row or table.
            ours: The schema's name of the column.
            columns: Names of the existing columns.
        """
        theirs = ", ".join(self._theirs[ours]) or ours
        return UserError(
            f"{where}: there is no {ours} (column {theirs!r}); columns found: {', '.join(columns)}. Map the columns, "
            "for example data.columns='{prompt: question, ground_truth: answer}', and set data.data_source=NAME if no "
            "column has the data source that selects the reward (trainer/DATA.md). A correct row:\n"
            f"{json.dumps(EXAMPLE_ROW)}"
        )

    def _row(self, raw: Row, table: RowTable, where: str) -> PromptRow:
        """Returns a row in the schema. Raises UserError if it is unusable."""
        # media that are not read would be missing in the prompt without an error
        for name in (*_MEDIA_COLUMNS, *table.media):
            if raw.get(name) and name not in self._image_columns:
                raise UserError(
                    f"{where}, column {name!r} is not empty ({MULTIMODAL}); if it has images, set data.image_key={name}"
                )

        self._require_common_arguments(raw, where)
        source = self._data_source(raw, table, where)
        images = self._images(raw)
        prompt, answer = self._prompt(raw, where, images)
        files = self._read_images(prompt, images, table, where)
        reward_model = self._reward_model(raw, answer, where)
        if self._needs_ground_truth and "ground_truth" not in reward_model:
            raise self._not_understood(where, "ground_truth", table.columns)

        # the row's own tools have priority over those of data.tools_path
        tools = self._tools
        own_tools, column = self._value("tools", raw, where)
        if own_tools:
            tools = read_tools(own_tools, f"{column} (data.columns.tools=null leaves it out)")
        return {
            "data_source": source,
            "prompt": prompt,
            "reward_model": reward_model,
            "extra_info": self._extra_info(raw, where),
            "tools": tools,
            "n": self._answers(raw, where),
            "images": files,
        }

    def _require_common_arguments(self, raw: Row, where: str) -> None:
        """Raises UserError if a row has arguments of the chat template that the run does not use for all rows."""
        mapped_columns = [name for names in self._theirs.values() for name in names]
        # a column that the user has given another meaning, such as one of extra_info
        unmapped = {name: value for name, value in raw.items() if name not in mapped_columns}
        arguments = self._config.apply_chat_template_kwargs
        for name, value in own_template_arguments(unmapped, where).items():
            if name not in arguments or arguments[name] != value:
                raise UserError(
                    f"{where}: the row has the argument {name}={value!r:.100} of the chat template (column "
                    f"{TEMPLATE_ARGUMENTS!r} or {THINKING!r}), and a run has the same arguments for all prompts, "
                    f"data.apply_chat_template_kwargs={dict(arguments)}: set it there, or leave the column out"
                )

    def _data_source(self, raw: Row, table: RowTable, where: str) -> str:
        """Returns the row's own data source, else that of the options, else the name of the dataset."""
        source, column = self._value("data_source", raw, where)
        if source is None:
            source = self._config.data_source or table.data_source
        if source is None:
            raise self._not_understood(where, "data_source", table.columns)
        if not isinstance(source, str) or not source or not is_unicode(source):
            raise wrong_value(column, source, "a name")
        return source

    def _value(self, ours: str, raw: Row, where: str) -> tuple[object, str]:
        """Returns the first non-null value among the row's columns mapped to `ours`, and its location for messages."""
        names = self._theirs[ours]
        for name in names:
            value = value_at(raw, name)
            if not is_missing(value):
                return value, f"{where}, column {name!r}"

        column = _first_found(names, raw)
        if column is None:
            column = names[0] if names else ours
        return None, f"{where}, column {column!r}"

    def _images(self, raw: Row) -> list[object]:
        """Returns the entries of the row's image column."""
        for name in self._image_columns:
            entries = raw.get(name)
            if isinstance(entries, list | tuple):
                return list(entries)
            if entries is not None:
                return [entries]
        return []

    def _read_images(self, prompt: Chat, images: list[object], table: RowTable, where: str) -> list[bytes]:
        """Returns the encoded image files of a prompt.

        Puts placeholders before the first user message of a prompt that has none, as TRL does.

        Args:
            prompt: The messages, which this method changes.
            images: Entries of the image column and of the messages' parts.
            table: The row's source, whose folder has the files.
            where: Location of the row for messages.

        Raises:
            UserError: If the numbers of images and placeholders differ, or if an image is unreadable.
        """
        if not self._accepts_images:
            if images:
                raise UserError(f"{where} has {len(images)} images, but {TEXT_MODEL}")
            return []

        texts = [message["content"] or "" for message in prompt]
        placeholders = sum(text.count(PLACEHOLDER) for text in texts)
        if images and not placeholders:
            user_messages = [message for message in prompt if message["role"] == "user"]
            candidates = user_messages or prompt
            first = candidates[0]
            first["content"] = PLACEHOLDER * len(images) + first["content"]
        elif placeholders != len(images):
            raise UserError(
                f"{where} has {len(images)} images in column {' or '.join(self._image_columns)} (data.image_key) and "
                f"{placeholders} placeholders {PLACEHOLDER} in its messages; expected one placeholder for each image"
            )

        folder = self._image_folder(table)
        files = []
        for number, entry in enumerate(images):
            files.append(read_image(entry, folder, f"{where}, image {number}"))
        return files

    def _image_folder(self, table: RowTable) -> Path | None:
        """Returns the folder to which paths of images refer.

        This is data.image_folder, else the folder of the source. A source of the hub has none.
        """
        if self._config.image_folder is not None:
            return Path(self._config.image_folder).expanduser()
        source = Path(table.path).expanduser()
        # a saved dataset must read only images in its own folder
        if source.is_dir():
            return source
        if source.is_file():
            return source.parent
        return None

    def _prompt(self, raw: Row, where: str, images: list[object]) -> tuple[Chat, str | None]:
        """Returns the prompt's messages, and the answer that ends a mapped chat, if there is one.

        Args:
            raw: The row as it was read.
            where: Location of the row for messages.
            images: Receives the images inside the messages.

        Raises:
            UserError: If the column is neither text nor chat messages.
        """
        value, column = self._value("prompt", raw, where)
        if isinstance(value, str):
            refuse_messages_as_text(value, column)
            template = self._config.prompt_template or "{prompt}"
            value = [{"role": "user", "content": template.replace("{prompt}", value)}]
        # without a list for the images, images in messages are refused
        images_of_messages = images if self._accepts_images else None
        chat = read_messages(value, column, images_of_messages)

        answer = None
        # a mapped column can hold whole conversations, whose last answer is the ground truth
        if self._maps_prompt and chat[-1]["role"] == "assistant":
            answer = chat[-1]["content"]
            chat = chat[:-1]
            if not chat:
                raise wrong_value(column, "only an assistant message", "a prompt before it")

        # a chat with a system message of its own keeps it
        system = self._config.system_prompt
        if system is not None and chat[0]["role"] != "system":
            chat = [{"role": "system", "content": system}, *chat]
        return chat, answer

    def _reward_model(self, raw: Row, answer: str | None, where: str) -> JsonObject:
        """Returns the row's reward_model dict with its ground truth, if the row has one.

        The ground truth is the first that exists of: the column mapped with data.columns.ground_truth; the entry of
        reward_model; the column ground_truth; the answer that ends the chat.

        Args:
            raw: The row as it was read.
            answer: The answer that ends a mapped chat.
            where: Location of the row for messages.

        Raises:
            UserError: If reward_model is not a dict, or data.ground_truth_regex matches nothing.
        """
        own = raw.get("reward_model")
        if own is not None and not isinstance(own, dict):
            raise wrong_value(f"{where}, column 'reward_model'", own, f"a dict like {EXAMPLE_ROW['reward_model']}")
        reward_model = dict(own or {})
        if is_missing(reward_model.get("ground_truth")):
            reward_model.pop("ground_truth", None)

        truth, column = self._value("ground_truth", raw, where)
        match truth:
            # TRL's conversational form of a completion: a chat with one message
            case [{"role": "assistant", "content": str(text)}]:
                truth = text
        is_mapped = "ground_truth" in self._config.columns
        if truth is not None and (is_mapped or "ground_truth" not in reward_model):
            reward_model["ground_truth"] = truth
        elif answer is not None:
            reward_model.setdefault("ground_truth", answer)

        if "ground_truth" in reward_model and self._regex is not None:
            location = f"{column} (ground truth)"
            reward_model["ground_truth"] = _last_group(self._regex, reward_model["ground_truth"], location)
        return reward_model

    def _extra_info(self, raw: Row, where: str) -> ExtraInfo:
        """Returns the row's extra_info, or a dict of the columns that data.columns.extra_info lists."""
        if isinstance(self._config.columns.get("extra_info"), list):
            return {name: value_at(raw, name) for name in self._theirs["extra_info"]}
        value, column = self._value("extra_info", raw, where)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise wrong_value(
                column, value, "a dict (data.columns.extra_info=[...] builds a dict from several columns)"
            )
        return value

    def _answers(self, raw: Row, where: str) -> int | None:
        """Returns the number of answers that the row requests, or None if it requests none."""
        value, column = self._value("n", raw, where)
        if value is None:
            return None
        # not isinstance, because a bool is an int, but no number of answers
        if type(value) is not int or not 1 <= value <= _MOST_ANSWERS:
            expected = f"a number of answers, at least 1 and at most {_MOST_ANSWERS}"
            raise wrong_value(column, value, f"{expected}; data.columns.n=null ignores the column")
        return value


def is_missing(value: object) -> bool:
    """Returns True for null, which parquet gives rows without a column, and for NaN, which pandas writes instead."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def own_template_arguments(row: Row, where: str) -> KeywordArguments:
    """Returns the arguments of the chat template that a row has itself, in TRL's column or in verl's.

    Raises UserError if TRL's column does not hold a dictionary of variables of a template.
    """
    arguments: dict[str, object] = {}
    column = row.get(TEMPLATE_ARGUMENTS)
    if not is_missing(column):
        if not isinstance(column, dict):
            raise wrong_value(
                f"{where}, column {TEMPLATE_ARGUMENTS!r}",
                column,
                "a dict of arguments of the chat template, such as {'enable_thinking': False}; leave the column out",
            )
        arguments |= without_nulls(column)
        for problem in template_argument_problems(f"{where}, column {TEMPLATE_ARGUMENTS!r}", arguments):
            raise UserError(problem)
    # text, for example, has another meaning
    if isinstance(row.get(THINKING), bool):
        arguments[THINKING] = row[THINKING]
    return arguments


def _last_group(regex: re.Pattern[str], text: object, where: str) -> str:
    """Returns the first group that takes part in the last match of data.ground_truth_regex.

    A pattern with alternatives has a group in each, of which only one takes part.
    """
    matches: list[re.Match[str]] = []
    if isinstance(text, str):
        matches = list(regex.finditer(text))
    if matches:
        for group in matches[-1].groups():
            if group is not None:
                return group
    raise wrong_value(where, text, f"text in which data.ground_truth_regex={regex.pattern} matches a group")


def check_text_only(row: Row, where: str) -> None:
    """Raises UserError if a row for supervised training has images, video or sound."""
    for name in _MEDIA_COLUMNS:
        if row.get(name):
            raise UserError(f"{where}, column {name!r} is not empty ({MULTIMODAL})")


def _listed(names: str | Sequence[str] | None) -> list[str]:
    """Returns the column names in a value of data.columns: one name, several, or null for none."""
    if names is None:
        return []
    if isinstance(names, str):
        return [names]
    return list(names)


def _first_found(names: Sequence[str], columns: Collection[str]) -> str | None:
    """Returns the first of the names that has a column, or None. The column of a dotted name a.b may also be a."""
    for name in names:
        if name in columns or name.partition(".")[0] in columns:
            return name
    return None


def value_at(raw: Row, name: str) -> object:
    """Returns the value of a column, or the value inside a dict column for a dotted name a.b; None if missing."""
    # a column whose own name has dots comes first
    if name in raw or "." not in name:
        return raw.get(name)
    column, _, name_inside = name.partition(".")
    value = raw.get(column)
    if not isinstance(value, dict):
        return None
    return value_at(value, name_inside)

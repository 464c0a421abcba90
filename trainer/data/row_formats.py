"""Row formats: checks the columns of each row and converts it to the `PromptRow` that the trainer uses.

Rows follow verl's schema (`EXAMPLE_ROW`), or `data.columns` maps their columns to those of the schema. Every error
message names the file, row and column, and shows the value found.
"""

import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

from trainer.data.images import PLACEHOLDER, read_image
from trainer.data.sources import RowTable, parse_json
from verl_lite.config import DataConfig
from verl_lite.config.loader import is_unicode
from verl_lite.errors import UserError

Chat = list[dict[str, Any]]
"""Messages with role and content (text, possibly empty); of an assistant also tool_calls."""

EXAMPLE_ROW: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 70 + 2? Put the answer after ####."}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0},
}

_OURS = ("prompt", "ground_truth", "data_source", "extra_info", "tools", "n")
_MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
_MULTIMODAL = "only images of prompts are supported, for main_ppo with a vision-language model"
_TEXT_MODEL = (
    "the model of model.path reads only text: set model.path to a vision-language model (Qwen2.5-VL, Qwen3-VL)"
)
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of message parts with text, each with the key of its text."""
_REASONING = ("reasoning_content", "reasoning", "thinking")
_ROWS_AT_ONCE = 1000  # rows of a table that are converted to Python objects at a time


class PromptRow(TypedDict):
    """One row of prompt data.

    prompt: chat messages. reward_model: verl's dict, with the key ground_truth if the row has a ground truth.
    tools: tool schemas for the chat template, or None. n: number of answers to sample, or None if the row has no `n`.
    images: encoded image files, in the order of their placeholders `<image>` in the messages.
    """

    data_source: str
    prompt: Chat
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]
    tools: list[dict[str, Any]] | None
    n: int | None
    images: list[bytes]


class RowSchema:
    """Converts rows to `PromptRow` as configured.

    Args:
        split: "train" or "val", for messages.
        needs_ground_truth: True if a reward function compares answers with reward_model["ground_truth"], so that every
            row must have a ground truth.
        accepts_images: True if the model reads images.
    Raises:
        UserError: If the file data.tools_path is unreadable or contains no tool schemas.
    """

    def __init__(
        self, config: DataConfig, split: str, needs_ground_truth: bool = True, accepts_images: bool = False
    ) -> None:
        self._config, self._option, self._needs_ground_truth = config, f"data.{split}_files", needs_ground_truth
        self._accepts_images = accepts_images
        self._image_columns = [config.image_key, *(["image"] if config.image_key == "images" else [])]  # TRL has both
        self._maps_prompt = config.columns.get("prompt") is not None
        self._regex = None if config.ground_truth_regex is None else re.compile(config.ground_truth_regex)
        self._tools = read_tools_file(config.tools_path)
        given = {"prompt": config.prompt_key} | config.columns
        self._theirs = {name: _listed(given.get(name, name)) for name in _OURS}

    def rows(self, table: RowTable, indices: Sequence[int]) -> Iterator[PromptRow]:
        """Yields the checked rows at these indices. Raises UserError for the first unusable row."""
        mapped = [name for names in self._theirs.values() for name in names]
        wanted = [*mapped, *(name.partition(".")[0] for name in mapped), "reward_model"]
        wanted += [*self._image_columns, *_MEDIA_COLUMNS, *table.media]
        names = [name for name in dict.fromkeys(wanted) if name in table.columns]
        for start in range(0, len(indices), _ROWS_AT_ONCE):
            part = indices[start : start + _ROWS_AT_ONCE]
            for index, raw in zip(part, table.rows(part, names), strict=True):
                yield self._row(raw, table, f"{self._option}: row {index} of {table.path}")

    def check_columns(self, tables: Sequence[RowTable]) -> None:
        """Raises UserError if a table has no prompt column, or if no table has a column named in data.columns."""
        for table in filter(len, tables):
            if _first_found(self._theirs["prompt"], table.columns) is None:
                raise self._not_understood(f"{self._option}: {table.path}", "prompt", table.columns)
        every = sorted({column for table in tables for column in table.columns})
        for ours, theirs in self._config.columns.items() if self._option == "data.train_files" else ():
            for name in self._theirs[ours]:
                if not _first_found([name], every):
                    raise UserError(
                        f"data.columns.{ours}={theirs}: there is no column {name!r} in {self._option}; columns found: "
                        f"{', '.join(every)}"
                    )

    def _not_understood(self, where: str, ours: str, columns: Collection[str]) -> UserError:
        theirs = ", ".join(self._theirs[ours]) or ours
        return UserError(
            f"{where}: there is no {ours} (column {theirs!r}); columns found: {', '.join(columns)}. Map the columns, "
            "for example data.columns='{prompt: question, ground_truth: answer}', and set data.data_source=NAME if no "
            "column has the data source that selects the reward (trainer/DATA.md). A correct row:\n"
            f"{json.dumps(EXAMPLE_ROW)}"
        )

    def _row(self, raw: dict[str, Any], table: RowTable, where: str) -> PromptRow:
        for name in (*_MEDIA_COLUMNS, *table.media):
            if raw.get(name) and name not in self._image_columns:
                remedy = f"if it has images, set data.image_key={name}"
                raise UserError(f"{where}, column {name!r} is not empty ({_MULTIMODAL}); {remedy}")
        source, place = self._value("data_source", raw, where)
        source = self._config.data_source or table.data_source if source is None else source
        if source is None:
            raise self._not_understood(where, "data_source", table.columns)
        if not isinstance(source, str) or not source or not is_unicode(source):
            raise _wrong(place, source, "a name")
        images = self._images(raw)
        prompt, answer = self._prompt(raw, where, images)
        files = self._read_images(prompt, images, table, where)
        truth = self._reward_model(raw, answer, where)
        if self._needs_ground_truth and "ground_truth" not in truth:
            raise self._not_understood(where, "ground_truth", table.columns)
        tools, place = self._value("tools", raw, where)
        return {
            "data_source": source,
            "prompt": prompt,
            "reward_model": truth,
            "extra_info": self._extra_info(raw, where),
            "tools": read_tools(tools, f"{place} (data.columns.tools=null leaves it out)") if tools else self._tools,
            "n": self._answers(raw, where),
            "images": files,
        }

    def _value(self, ours: str, raw: dict[str, Any], where: str) -> tuple[Any, str]:
        """Returns the first non-null value among the row's columns mapped to `ours`, and its location for messages."""
        value = next((value for name in self._theirs[ours] if (value := value_at(raw, name)) is not None), None)
        return value, f"{where}, column {_first_found(self._theirs[ours], raw) or (*self._theirs[ours], ours)[0]!r}"

    def _images(self, raw: dict[str, Any]) -> list[Any]:
        """Returns the entries of the row's image column."""
        found: Any = next((raw[name] for name in self._image_columns if raw.get(name) is not None), [])
        return list(found) if isinstance(found, list | tuple) else [found]

    def _read_images(self, prompt: Chat, images: list[Any], table: RowTable, where: str) -> list[bytes]:
        """Returns the files of the images. Puts placeholders before the first user message of a prompt that has none,
        as TRL does. Raises UserError if the numbers of images and placeholders differ."""
        if not images and not self._accepts_images:
            return []
        if not self._accepts_images:
            raise UserError(f"{where} has {len(images)} images, but {_TEXT_MODEL}")
        shown = sum((message["content"] or "").count(PLACEHOLDER) for message in prompt)
        if images and not shown:
            first = next((message for message in prompt if message["role"] == "user"), prompt[0])
            first["content"] = PLACEHOLDER * len(images) + first["content"]
        elif shown != len(images):
            raise UserError(
                f"{where} has {len(images)} images in column {' or '.join(self._image_columns)} (data.image_key) and "
                f"{shown} placeholders {PLACEHOLDER} in its messages; expected one placeholder for each image"
            )
        place, given = Path(table.path).expanduser(), self._config.image_folder
        folder = place if place.is_dir() else place.parent if place.is_file() else None
        folder = folder if given is None else Path(given).expanduser()
        return [read_image(entry, folder, f"{where}, image {number}") for number, entry in enumerate(images)]

    def _prompt(self, raw: dict[str, Any], where: str, images: list[Any]) -> tuple[Chat, str | None]:
        """Returns the prompt's messages and, for a mapped chat that ends with an assistant message, that answer. Adds
        images inside the messages to `images`."""
        value, place = self._value("prompt", raw, where)
        template, system = self._config.prompt_template, self._config.system_prompt
        if isinstance(value, str):
            if value.startswith('[{"role"'):
                raise _wrong(place, value, "chat messages or plain text, not messages written as json text")
            value = [{"role": "user", "content": (template or "{prompt}").replace("{prompt}", value)}]
        value = read_messages(value, place, images if self._accepts_images else None)
        answer = None
        if self._maps_prompt and value[-1]["role"] == "assistant":
            value, answer = value[:-1], value[-1]["content"]
            if not value:
                raise _wrong(place, "only an assistant message", "a prompt before it")
        if system is not None and value[0]["role"] != "system":
            value = [{"role": "system", "content": system}, *value]
        return value, answer

    def _reward_model(self, raw: dict[str, Any], answer: str | None, where: str) -> dict[str, Any]:
        """Returns the row's reward_model dict with its ground truth, if the row has one: from the column mapped with
        data.columns.ground_truth, else from reward_model, the column ground_truth, or the answer that ends the chat."""
        found = raw.get("reward_model")
        if found is not None and not isinstance(found, dict):
            raise _wrong(f"{where}, column 'reward_model'", found, f"a dict like {EXAMPLE_ROW['reward_model']}")
        found = dict(found or {})
        mapped, place = self._value("ground_truth", raw, where)
        match mapped:
            case [{"role": "assistant", "content": str(text)}]:  # an answer stored as a chat with one message
                mapped = text
        if mapped is not None and ("ground_truth" in self._config.columns or "ground_truth" not in found):
            found["ground_truth"] = mapped
        elif answer is not None:
            found.setdefault("ground_truth", answer)
        if "ground_truth" in found and self._regex is not None:
            text = found["ground_truth"]
            matches = list(self._regex.finditer(text)) if isinstance(text, str) else []
            groups = [group for group in (matches[-1].groups() if matches else ()) if group is not None]
            if not groups:
                setting = f"data.ground_truth_regex={self._regex.pattern}"
                raise _wrong(f"{place} (ground truth)", text, f"text in which {setting} matches a group")
            found["ground_truth"] = groups[0]
        return found

    def _extra_info(self, raw: dict[str, Any], where: str) -> dict[str, Any]:
        if isinstance(self._config.columns.get("extra_info"), list):
            return {name: value_at(raw, name) for name in self._theirs["extra_info"]}
        value, place = self._value("extra_info", raw, where)
        if value is not None and not isinstance(value, dict):
            raise _wrong(place, value, "a dict (data.columns.extra_info=[...] builds a dict from several columns)")
        return value or {}

    def _answers(self, raw: dict[str, Any], where: str) -> int | None:
        value, place = self._value("n", raw, where)
        if value is not None and (type(value) is not int or value < 1):
            raise _wrong(place, value, "a number of answers, at least 1; data.columns.n=null ignores the column")
        return value


def _text_of_parts(parts: list[Any], images: list[Any] | None, where: str) -> str:
    """Returns the text of a message's typed parts. An image part becomes a placeholder; its image, if it has one, is
    added to `images`. Raises UserError for an image part if `images` is None, because the model reads only text."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get(_TEXT_PARTS[kind]) if kind in _TEXT_PARTS else None
        if kind == "image" and images is None:
            raise UserError(f"{where}: a message has an image, but {_TEXT_MODEL}")
        if kind == "image" and images is not None:
            texts.append(PLACEHOLDER)
            if part.get("image") is not None:
                images.append(part["image"])
        elif isinstance(text, str):
            texts.append(text)
        else:
            raise UserError(f"{where}: found the message part {part!r:.200} ({_MULTIMODAL}); expected text or image")
    return "".join(texts)


def check_text_only(row: dict[str, Any], where: str) -> None:
    """Raises UserError if a row for supervised training has images, video or sound."""
    for name in _MEDIA_COLUMNS:
        if row.get(name):
            raise UserError(f"{where}, column {name!r} is not empty ({_MULTIMODAL})")


def read_messages(chat: Any, where: str, images: list[Any] | None = None) -> Chat:
    """Returns checked messages in the form that chat templates expect.

    - Entries that are null are left out, because the rows of a parquet file have the keys of all rows.
    - Typed text parts become text. A refusal is the content of a message that has no other.
    - The content may be missing or null in an assistant's message with tool calls or reasoning, as in OpenAI's format,
      and in the result of a tool. It becomes an empty text; `chat_template.CallForm` gives each template what it reads.
    - The role developer becomes system, as in the agents' endpoint.

    Args:
        chat: the value of a column.
        where: the column's place, for messages.
        images: receives the images of the messages; None = the model reads only text.

    Raises:
        UserError: if `chat` is not a list of chat messages.
    """
    if not isinstance(chat, list) or not chat:
        raise _wrong(where, chat, f"a list of chat messages like {EXAMPLE_ROW['prompt']}")
    return [_read_message(message, where, images) for message in chat]


def _read_message(message: Any, where: str, images: list[Any] | None) -> dict[str, Any]:
    if not isinstance(message, dict) or "role" not in message:
        raise _wrong(where, message, f"a message like {EXAMPLE_ROW['prompt'][0]}")
    result = without_nulls({key: value for key, value in message.items() if key not in ("role", "content", "refusal")})
    calls = result.pop("tool_calls", None)
    if calls:
        result["tool_calls"] = _read_tool_calls(calls, where)
    role = _checked_text(message["role"], f"{where}, role of a message")
    if role == "developer":
        role = "system"

    content = message.get("content")
    if isinstance(content, list):
        content = _text_of_parts(content, images, where)
    if not content and message.get("refusal") is not None:
        content = message["refusal"]
    has_other_output = any(result.get(name) for name in ("tool_calls", *_REASONING))
    if content is None and (role == "tool" or (role == "assistant" and has_other_output)):
        content = ""
    elif content is None and "content" not in message:
        raise _wrong(where, message, f"a message like {EXAMPLE_ROW['prompt'][0]}")
    content = _checked_text(content, f"{where}, content of a message")
    # the keys of the message in their order, because a template may write them
    return {"role": role, "content": content, **result}


def _checked_text(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise _wrong(where, text, "text")
    if not is_unicode(text):
        raise _wrong(where, text, "text without half a surrogate pair")
    return text


def _read_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Returns checked tool calls, given as a list or as JSON text. Each has arguments, a dict or its JSON text."""
    place = f"{where}, tool_calls"
    if isinstance(calls, str) and calls.lstrip().startswith("["):
        calls = parse_json(calls, place, "a list of tool calls")
    expected = '{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}'
    checked = []
    for call in _as_list(calls, place):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(place, call, f"a call like {expected}")
        # a table has null for an empty dictionary, and some clients write an empty text
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, dict | str):
            raise _wrong(f"{place}, arguments of {function['name']!r}", arguments, "a dict, or its JSON text")
        _checked_text(json.dumps([call, arguments], ensure_ascii=False, default=str), place)
        function = function | {"arguments": arguments}
        checked.append(call | {"function": function} if "function" in call else function)
    return checked


def _as_list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _wrong(where, value, "a list")
    return value


def without_nulls(value: Any) -> Any:
    """Returns a value of JSON without the entries of dictionaries that are null.

    Parquet stores rows of one structure: an entry that one row has exists in all rows, as null. To keep a null, store
    the dictionary as JSON text.
    """
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [without_nulls(entry) for entry in value]
    return value


def read_tools(tools: Any, where: str) -> list[dict[str, Any]]:
    """Returns checked tool schemas, given as a list or as JSON text. Raises UserError for anything else."""
    if isinstance(tools, str):
        tools = parse_json(tools, where, "a list of tool schemas")
    elif isinstance(tools, list):
        schemas = []
        for tool in tools:  # schemas rarely fit the columns of a table, so each may be JSON text, which is exact
            is_text = isinstance(tool, str)
            schemas.append(parse_json(tool, where, "a tool schema") if is_text else without_nulls(tool))
        tools = schemas
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        example = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}
        raise _wrong(where, tools, f"a list of tool schemas like [{json.dumps(example)}]")
    return tools


def read_tools_file(path: str | None) -> list[dict[str, Any]] | None:
    """Returns the tool schemas of the file data.tools_path, or None without one. Raises UserError if it has none."""
    if path is None:
        return None
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.tools_path={path!r}: cannot be read ({error}); expected a json file") from error
    return read_tools(text, f"data.tools_path={path!r}")


def _wrong(place: str, found: Any, expected: str) -> UserError:
    return UserError(f"{place}: found {found!r:.200}, expected {expected}")


def _listed(names: Any) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def _first_found(names: Sequence[str], columns: Collection[str]) -> str | None:
    """Returns the first name that is a column, or whose first part is (a for the dotted name a.b); None without one."""
    return next((name for name in names if name in columns or name.partition(".")[0] in columns), None)


def value_at(raw: dict[str, Any], name: str) -> Any:
    """Returns the value of a column, or the value inside a dict column for a dotted name a.b; None if missing."""
    if name in raw or "." not in name:
        return raw.get(name)
    first, _, rest = name.partition(".")
    inner = raw.get(first)
    return value_at(inner, rest) if isinstance(inner, dict) else None

"""What the rows of a place mean: their columns, checked and made into the row that the trainer works with.

Rows follow verl's schema (`EXAMPLE_ROW`), or `data.columns` says which of their columns is which of ours. Every message
names place, row, column and what to change.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict

from trainer.data.sources import RowTable, parse_json
from verl_lite.config import DataConfig
from verl_lite.config.sources import is_unicode
from verl_lite.errors import UserError

Chat = list[dict[str, str]]

EXAMPLE_ROW: dict[str, Any] = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 70 + 2? Put the answer after ####."}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0},
}

PROMPT_NAMES = ("prompt", "question", "problem", "query", "instruction", "input", "messages", "text")
"""Columns that other schemas have their prompt in."""
ANSWER_NAMES = ("ground_truth", "answer", "solution", "completion", "response", "output", "target", "label")
"""Columns that other schemas have their answer in."""

_MAPPED = ("ground_truth", "data_source", "extra_info", "tools", "n")
_MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
_SURROGATE = "which has half of a surrogate pair (\\ud800 to \\udfff): no tokenizer reads it"
_MULTIMODAL = "pictures, video and sound are not supported yet: use a dataset of text"
_ROWS_AT_ONCE = 1000  # of a table, as Python objects


class PromptRow(TypedDict):
    """One row. prompt: chat messages. tools: schemas that the chat template shows, or None. n: how many answers the row
    asks for, None where it leaves that open. reward_model: with the ground_truth, where there is one."""

    data_source: str
    prompt: Chat
    reward_model: dict[str, Any]
    extra_info: dict[str, Any]
    tools: list[dict[str, Any]] | None
    n: int | None


class RowSchema:
    """How rows are read under a configuration.

    Args:
        split: "train" or "val", for messages.
        needs_ground_truth: whether a reward function compares answers with reward_model["ground_truth"], which each
            row then has to have.
    Raises:
        UserError: for tools that cannot be read.
    """

    def __init__(self, config: DataConfig, split: str, needs_ground_truth: bool = True) -> None:
        self._config, self._option, self._needs_ground_truth = config, f"data.{split}_files", needs_ground_truth
        self._is_train, self._used = split == "train", set[str]()
        self._maps_prompt = config.columns.get("prompt") is not None
        self._regex = None if config.ground_truth_regex is None else re.compile(config.ground_truth_regex)
        self._tools = None if config.tools_path is None else read_tools(config.tools_path)
        self._theirs = {name: _listed(config.columns.get(name, name)) for name in _MAPPED}
        self._theirs["prompt"] = _listed(config.columns["prompt"]) if self._maps_prompt else [config.prompt_key]

    def rows(self, table: RowTable, indices: Sequence[int]) -> Iterator[PromptRow]:
        """Some rows, checked. Raises UserError for the first that cannot be used."""
        names = self._columns_read(table)
        for start in range(0, len(indices), _ROWS_AT_ONCE):
            part = indices[start : start + _ROWS_AT_ONCE]
            for index, raw in zip(part, table.rows(part, names), strict=True):
                yield self._row(raw, table, f"{self._option}: row {index} of {table.path}")

    def check_columns(self, tables: Sequence[RowTable]) -> None:
        """Raises UserError for a table without the columns that are needed, and for a name in data.columns that no
        table has."""
        for table in filter(len, tables):
            for name in ("prompt", "data_source", "ground_truth"):
                if not self._gives(name, table):
                    raise UserError(self._missing(name, table))
        every = sorted({column for table in tables for column in table.columns})
        for ours, theirs in self._config.columns.items() if self._is_train else ():
            for name in self._theirs[ours]:
                if not _first_found([name], every):
                    raise UserError(
                        f"data.columns.{ours}={theirs}: there is no column {name!r} in {self._option}; columns found: "
                        f"{', '.join(every)}"
                    )

    def check_effects(self) -> None:
        """Raises UserError for a setting that changed none of the training rows that were read."""
        unused = {
            "prompt_template": "no prompt is plain text",
            "system_prompt": "every prompt begins with a system message of its own",
            "data_source": "every row says its own data_source",
            "ground_truth_regex": "no row has a ground truth",
            "tools_path": "every row has tools of its own",
        }
        for name, why in unused.items():
            value = getattr(self._config, name)
            if self._is_train and value is not None and name not in self._used:
                raise UserError(f"data.{name}={value!r:.100} has no effect: {why}. Leave it out")

    # ------------------------------------------------------------------------------------------------- of a whole table

    def _gives(self, name: str, table: RowTable) -> bool:
        """Whether the table has what the rows need under one of our names."""
        if name == "data_source" and (self._config.data_source or table.data_source):
            return True
        if name == "ground_truth" and (not self._needs_ground_truth or "reward_model" in table.columns):
            return True
        if name == "ground_truth" and self._maps_prompt:  # a chat may end in the answer
            if isinstance(self._value("prompt", table.rows([0], self._columns_read(table))[0]), list):
                return True
        return _first_found(self._theirs[name], table.columns) is not None

    def _missing(self, name: str, table: RowTable) -> str:
        column = "reward_model" if name == "ground_truth" else self._theirs[name][0]
        hint = {
            "prompt": "Set data.prompt_key if the chat messages are in another column, or data.columns",
            "data_source": "Set data.data_source=NAME to give all rows one; it picks the reward",
            "ground_truth": "Rewards compare answers with it",
        }[name]
        if setting := self._setting(table):
            hint = f"For rows of this schema give {setting}"
        return (
            f"{self._option}: {table.path} has no column {column!r}; columns found: {', '.join(table.columns)}. "
            f"{hint}. A correct row:\n{json.dumps(EXAMPLE_ROW, indent=2)}"
        )

    def _setting(self, table: RowTable) -> str | None:
        """The settings for a schema that is known by its columns' names."""
        columns = dict(self._config.columns)
        if not self._gives("prompt", table) or (not self._maps_prompt and "reward_model" not in table.columns):
            columns["prompt"] = _first_found(PROMPT_NAMES, table.columns)
        if not self._gives("ground_truth", table) and columns.get("prompt") != "messages":
            columns["ground_truth"] = _first_found(ANSWER_NAMES, table.columns)
        is_known = all(columns.get(name, "") is not None for name in ("prompt", "ground_truth"))
        if not is_known or columns == self._config.columns:
            return None
        pairs = ", ".join(f"{name}: {_as_written(theirs)}" for name, theirs in columns.items())
        source = "" if self._gives("data_source", table) else " data.data_source=NAME (which picks the reward)"
        return f"data.columns='{{{pairs}}}'{source}"

    def _columns_read(self, table: RowTable) -> list[str]:
        mapped = [name for names in self._theirs.values() for name in names]
        wanted = [*mapped, *(name.partition(".")[0] for name in mapped), "reward_model", *_MEDIA_COLUMNS, *table.media]
        return [name for name in dict.fromkeys(wanted) if name in table.columns]

    # -------------------------------------------------------------------------------------------------- of a single row

    def _row(self, raw: dict[str, Any], table: RowTable, where: str) -> PromptRow:
        for name in (*_MEDIA_COLUMNS, *table.media):
            if raw.get(name):
                raise UserError(f"{where}, column {name!r} is not empty ({_MULTIMODAL})")
        source = self._value("data_source", raw)
        if source is None:
            source = self._config.data_source or table.data_source
            self._used.add("data_source")
        place = self._place("data_source", raw, where)
        if not isinstance(source, str) or not source:
            raise UserError(f"{place}: found {source!r:.200}, expected a name, as {EXAMPLE_ROW['data_source']!r}")
        if not is_unicode(source):
            raise UserError(f"{place}: found {source!r:.200}, {_SURROGATE}")
        prompt, answer = self._prompt(raw, where)
        return {
            "data_source": source,
            "prompt": prompt,
            "reward_model": self._reward_model(raw, answer, where),
            "extra_info": self._extra_info(raw, where),
            "tools": self._row_tools(raw, where),
            "n": self._answers(raw, where),
        }

    def _name(self, ours: str, raw: dict[str, Any]) -> str:
        """The column that holds one of ours in this row."""
        return _first_found(self._theirs[ours], raw) or (*self._theirs[ours], ours)[0]

    def _place(self, ours: str, raw: dict[str, Any], where: str) -> str:
        return f"{where}, column {self._name(ours, raw)!r}"

    def _value(self, ours: str, raw: dict[str, Any]) -> Any:
        """The first of their values for one of our columns that is not null; a dotted name goes into dicts."""
        return next((value for name in self._theirs[ours] if (value := _at(raw, name)) is not None), None)

    def _prompt(self, raw: dict[str, Any], where: str) -> tuple[Chat, str | None]:
        """The messages, and what the assistant says last in a chat of another schema."""
        value, place = self._value("prompt", raw), self._place("prompt", raw, where)
        template, system = self._config.prompt_template, self._config.system_prompt
        if isinstance(value, str) and (self._maps_prompt or template is not None):
            self._used.add("prompt_template")
            value = [{"role": "user", "content": (template or "{prompt}").replace("{prompt}", value)}]
        check_prompt(value, place)
        answer = None
        if self._maps_prompt and value[-1]["role"] == "assistant":
            value, answer = value[:-1], value[-1]["content"]
            if not value:
                raise UserError(f"{place}: found nothing but an answer of the assistant, expected a prompt before it")
        if system is not None and value[0]["role"] != "system":
            self._used.add("system_prompt")
            value = [{"role": "system", "content": system}, *value]
        return value, answer

    def _reward_model(self, raw: dict[str, Any], answer: str | None, where: str) -> dict[str, Any]:
        found, expected = raw.get("reward_model"), EXAMPLE_ROW["reward_model"]
        if found is not None and not isinstance(found, dict):
            raise UserError(f"{where}, column 'reward_model': found {found!r:.200}, expected a dict, as {expected}")
        found, column = found or {}, "reward_model"
        is_mapped, has_truth = "ground_truth" in self._config.columns, "ground_truth" in found
        truth = found.get("ground_truth")
        if is_mapped or not has_truth:
            mapped = self._value("ground_truth", raw)
            if mapped is not None:
                truth, column, has_truth = _plain_answer(mapped), self._name("ground_truth", raw), True
            elif answer is not None and not has_truth:
                truth, column, has_truth = answer, self._name("prompt", raw), True
        if self._needs_ground_truth and not has_truth:
            column = self._name("ground_truth", raw) if is_mapped else "reward_model"
            what = "the right answer" if is_mapped else "a dict with 'ground_truth'"
            raise UserError(
                f"{where}, column {column!r}: found {raw.get(column)!r:.200}, expected {what}, as {expected}"
            )
        if has_truth and self._regex is not None:
            self._used.add("ground_truth_regex")
            truth = self._matched(truth, self._regex, f"{where}, column {column!r}")
        return {**found, "ground_truth": truth} if has_truth else found

    def _matched(self, truth: Any, regex: re.Pattern[str], place: str) -> str:
        """The first group that took part in the last match of data.ground_truth_regex."""
        setting = f"data.ground_truth_regex={regex.pattern}"
        if not isinstance(truth, str):
            raise UserError(f"{place}: found {truth!r:.200}, expected text to find {setting} in")
        matches = list(regex.finditer(truth))
        groups = [group for group in (matches[-1].groups() if matches else ()) if group is not None]
        if not groups:
            raise UserError(f"{place}: {setting} is not found in {truth[-200:]!r}")
        return groups[0]

    def _extra_info(self, raw: dict[str, Any], where: str) -> dict[str, Any]:
        if isinstance(self._config.columns.get("extra_info"), list):
            return {name: _at(raw, name) for name in self._theirs["extra_info"]}
        value = self._value("extra_info", raw)
        if value is not None and not isinstance(value, dict):
            raise UserError(
                f"{self._place('extra_info', raw, where)}: found {value!r:.200}, expected a dict (or several columns "
                "that make one: data.columns.extra_info=[...])"
            )
        return value or {}

    def _row_tools(self, raw: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
        value, place = self._value("tools", raw), self._place("tools", raw, where)
        if not value:
            self._used.add("tools_path")
            return self._tools
        if isinstance(value, str):
            value = parse_json(value, place, "a list of tool schemas")
        check_tools(value, f"{place} (data.columns.tools=null leaves it out)")
        return value

    def _answers(self, raw: dict[str, Any], where: str) -> int | None:
        value = self._value("n", raw)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise UserError(
                f"{self._place('n', raw, where)}: found {value!r:.100}, expected a number of answers, at least 1; "
                "where it means something else, data.columns.n=null leaves it out"
            )
        return value


def check_prompt(prompt: Any, where: str) -> None:
    """Raises UserError unless `prompt` is a list of chat messages with text."""
    if isinstance(prompt, str):
        raise UserError(
            f"{where}: found text ({prompt[:60]!r}), expected a list of chat messages. Write it as "
            f'[{{"role": "user", "content": {json.dumps(prompt[:60])}}}]; or data.prompt_template=\'{{prompt}}\' makes '
            "a user's message of it"
        )
    if not isinstance(prompt, list) or not prompt:
        example = EXAMPLE_ROW["prompt"]
        raise UserError(f"{where}: found {prompt!r:.200}, expected a list of chat messages like {example}")
    for message in prompt:
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise UserError(f"{where}: found {message!r:.200}, expected a message like {EXAMPLE_ROW['prompt'][0]}")
        if isinstance(message["content"], list):
            raise UserError(f"{where}: a message's content is a list of parts ({_MULTIMODAL})")
        for name in ("role", "content"):
            if not isinstance(message[name], str) or not is_unicode(message[name]):
                expected = _SURROGATE if isinstance(message[name], str) else "expected text"
                raise UserError(f"{where}: a message's {name} is {message[name]!r:.200}, {expected}")


def check_tools(tools: Any, where: str) -> None:
    """Raises UserError unless `tools` is a list of schemas."""
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        example = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}
        raise UserError(f"{where}: found {tools!r:.200}, expected a list of tool schemas like [{json.dumps(example)}]")


def read_tools(path: str) -> list[dict[str, Any]]:
    """The tool schemas of data.tools_path. Raises UserError for a file that is not a json list of them."""
    where = f"data.tools_path={path!r}"
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: cannot be read ({error}); expected a json file") from error
    tools = parse_json(text, where, "a list of tool schemas")
    check_tools(tools, where)
    return tools


def _plain_answer(value: Any) -> Any:
    """An answer; of one that is written as a chat of one message, its text."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        content = value[0].get("content")
        return content if value[0].get("role") == "assistant" and isinstance(content, str) else value
    return value


def _as_written(names: Any) -> str:
    """A value of data.columns, as one writes it on a command line."""
    return "null" if names is None else names if isinstance(names, str) else f"[{', '.join(names)}]"


def _listed(names: Any) -> list[str]:
    return [] if names is None else [names] if isinstance(names, str) else list(names)


def _first_found(names: Sequence[str], columns: Collection[str]) -> str | None:
    """The first of these names, or of columns that they go into, a.b, that there is."""
    return next((name for name in names if name in columns or name.partition(".")[0] in columns), None)


def _at(raw: dict[str, Any], name: str) -> Any:
    """The value of a column, or of a place inside it, a.b; None where there is none."""
    if name in raw or "." not in name:
        return raw.get(name)
    first, _, rest = name.partition(".")
    inner = raw.get(first)
    return _at(inner, rest) if isinstance(inner, dict) else None

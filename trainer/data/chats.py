"""Chats and tools in rows: checks messages, tool calls and tool schemas, and gives them the form of chat templates.

Every error message names the file, row and column, and shows the value found.
"""

import json
import re
from pathlib import Path
from typing import Any

from trainer.data.images import PLACEHOLDER
from trainer.data.sources import parse_json
from verl_lite.config.sources import is_unicode
from verl_lite.errors import UserError
from verl_lite.json_types import ChatMessage, JsonObject, ToolSchema

Message = ChatMessage
Chat = list[Message]
"""Messages with role and content (text, possibly empty); of an assistant also tool_calls."""

ToolCall = JsonObject
"""A call of a tool. Models and templates define its keys beyond those that this module checks."""

EXAMPLE_PROMPT: Chat = [{"role": "user", "content": "What is 70 + 2? Put the answer after ####."}]

MULTIMODAL = "only images of prompts are supported, for main_ppo with a vision-language model"
TEXT_MODEL = "the model of model.path reads only text: set model.path to a vision-language model (Qwen2.5-VL, Qwen3-VL)"
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of message parts with text, each with the key of its text."""
_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|content)["']\s*:""")
"""The beginning of a list of messages as JSON, or as Python prints it."""
REASONING = ("reasoning_content", "reasoning", "thinking")
"""Entries of an answer with its reasoning, of which a template reads one."""


def wrong_value(where: str, value: object, expected: str) -> UserError:
    """Returns the error about a value that is not the expected one."""
    return UserError(f"{where}: found {value!r:.200}, expected {expected}")


def refuse_messages_as_text(text: str, where: str) -> None:
    """Raises UserError for a text that is a list of messages, as JSON or as Python prints it.

    A table that was once written as CSV has such texts. They would become the content of a single message.

    Args:
        text: the value of a column that may hold plain text or messages.
        where: the column's place, for the message.
    """
    names_both_keys = all(re.search(rf"""["']{key}["']\s*:""", text) for key in ("role", "content"))
    if _MESSAGES_AS_TEXT.match(text) and names_both_keys:
        raise wrong_value(
            where,
            text,
            "chat messages or plain text, not messages written as text: convert the column to lists of messages (for "
            "JSON with json.loads). If the text itself is meant, write it as the content of a message",
        )


def read_messages(chat: object, where: str, images: list[object] | None = None) -> Chat:
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
        raise wrong_value(where, chat, f"a list of chat messages like {EXAMPLE_PROMPT}")
    return [_read_message(message, where, images) for message in chat]


def _read_message(message: object, where: str, images: list[object] | None) -> Message:
    """Returns a checked message; see `read_messages`."""
    if not isinstance(message, dict) or "role" not in message:
        raise wrong_value(where, message, f"a message like {EXAMPLE_PROMPT[0]}")
    others = without_nulls(message)
    for key in ("role", "content", "refusal"):
        others.pop(key, None)
    calls = others.pop("tool_calls", None)
    if calls:
        others["tool_calls"] = _read_tool_calls(calls, where)
    # templates ignore it, so that the answer would be empty
    if others.get("function_call"):
        raise wrong_value(
            f"{where}, function_call of a message",
            others["function_call"],
            "OpenAI's present form, tool_calls: [{'type': 'function', 'function': {'name': ..., 'arguments': ...}}], "
            "and the result as a message of the role tool",
        )
    role = _checked_text(message["role"], f"{where}, role of a message")
    if role == "developer":
        role = "system"

    content = message.get("content")
    if isinstance(content, list):
        content = _text_of_parts(content, images, where)
    if not content and message.get("refusal") is not None:
        content = message["refusal"]
    if content is None:
        has_other_output = any(others.get(name) for name in ("tool_calls", *REASONING))
        may_be_empty = role == "tool" or (role == "assistant" and has_other_output)
        if may_be_empty:
            content = ""
        elif "content" not in message:
            raise wrong_value(where, message, f"a message like {EXAMPLE_PROMPT[0]}")
    content = _checked_text(content, f"{where}, content of a message")
    # the keys of the message in their order, because a template may write them
    return {"role": role, "content": content, **others}


def _text_of_parts(parts: list[object], images: list[object] | None, where: str) -> str:
    """Returns the text of a message's typed parts, in which an image part becomes a placeholder.

    Args:
        parts: The parts of the message.
        images: Receives the images of the parts. None: the model reads only text.
        where: Location of the message, for error messages.

    Raises:
        UserError: For a part that is neither text nor, if the model reads images, an image.
    """
    texts = []
    for part in parts:
        entries = part if isinstance(part, dict) else {}
        kind = entries.get("type")
        text = None
        if kind in _TEXT_PARTS:
            text = entries.get(_TEXT_PARTS[kind])
        if kind == "image":
            if images is None:
                raise UserError(f"{where}: a message has an image, but {TEXT_MODEL}")
            texts.append(PLACEHOLDER)
            # a part without an image refers to the image column
            if entries.get("image") is not None:
                images.append(entries["image"])
        elif isinstance(text, str):
            texts.append(text)
        else:
            raise UserError(f"{where}: found the message part {part!r:.200} ({MULTIMODAL}); expected text or image")
    return "".join(texts)


def _checked_text(text: object, where: str) -> str:
    """Returns a text that can be encoded. Raises UserError for any other value."""
    if not isinstance(text, str):
        raise wrong_value(where, text, "text")
    # json can contain half a surrogate pair, which UTF-8, and so a tokenizer or a file, cannot
    if not is_unicode(text):
        raise wrong_value(where, text, "text without half a surrogate pair")
    return text


def _read_tool_calls(calls: object, where: str) -> list[ToolCall]:
    """Returns checked tool calls, given as a list or as JSON text. Each has arguments, a dict or its JSON text."""
    location = f"{where}, tool_calls"
    if isinstance(calls, str) and calls.lstrip().startswith("["):
        calls = parse_json(calls, location, "a list of tool calls")
    if not isinstance(calls, list):
        raise wrong_value(location, calls, "a list")

    expected = '{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}'
    checked = []
    for call in calls:
        function = None
        if isinstance(call, dict):
            # OpenAI's form has the function below a key; others have its name and arguments themselves
            function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise wrong_value(location, call, f"a call like {expected}")
        # a table has null for an empty dictionary, and some clients write an empty text
        arguments = function.get("arguments") or {}
        if not isinstance(arguments, dict | str):
            raise wrong_value(f"{location}, arguments of {function['name']!r}", arguments, "a dict, or its JSON text")
        # all texts at once, at any depth
        all_texts = json.dumps([call, arguments], ensure_ascii=False, default=str)
        _checked_text(all_texts, location)

        checked_call = function | {"arguments": arguments}
        if "function" in call:
            checked_call = call | {"function": checked_call}
        checked.append(checked_call)
    return checked


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


def read_tools(tools: object, where: str) -> list[ToolSchema]:
    """Returns checked tool schemas, given as a list or as JSON text. Raises UserError for anything else."""
    if isinstance(tools, str):
        tools = parse_json(tools, where, "a list of tool schemas")
    elif isinstance(tools, list):
        schemas = []
        for tool in tools:
            # schemas rarely fit the columns of a table, so each may be JSON text, which is exact
            if isinstance(tool, str):
                schemas.append(parse_json(tool, where, "a tool schema"))
            else:
                schemas.append(without_nulls(tool))
        tools = schemas
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        example = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": {}}}
        raise wrong_value(where, tools, f"a list of tool schemas like [{json.dumps(example)}]")
    return tools


def read_tools_file(path: str | None) -> list[ToolSchema] | None:
    """Returns the tool schemas of the file data.tools_path, or None without one. Raises UserError if it has none."""
    if path is None:
        return None
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"data.tools_path={path!r}: cannot be read ({error}); expected a json file") from error
    return read_tools(text, f"data.tools_path={path!r}")

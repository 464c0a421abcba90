"""Reads and checks the fields of a request. A body comes from a program that training does not control, so every value
is of unknown type and size until a function of this file has read it; each of them raises Refusal.

A field that would change how answers are sampled, and that the engine does not support, is refused by name. Other
fields that the endpoint does not know are ignored.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from verl_lite.envs.tool_calls import strict_json
from verl_lite.errors import UserError
from verl_lite.registry import did_you_mean
from workers.agents.conversation import CalledFunction, MessageCall, Tool, ToolFunction
from workers.agents.endpoint.trace import Refusal
from workers.engines.base import SamplingParams

MAX_OBJECTS = 200_000
MAX_VALUES = 1_000_000
"""Numbers of opening brackets and of commas in a body. Reading so many takes 0.2 s, in which other clients wait."""
MAX_MESSAGES = 4096
"""Number of messages, blocks, or input items of a request. Each takes about 50 microseconds of the server's thread."""
MAX_TOOLS = 1024
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024
MAX_IDENTIFIER = 256
MAX_DEPTH = 64
"""Nesting of objects and lists in a tool."""

Body = Mapping[str, object]
"""A JSON object of a request: the body, or an object inside it."""

_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "text.format": ({"type": "text"},),
    "output_format": (),
    "output_config.format": (),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("auto", "none"),
    "modalities": (["text"],),
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "echo": (False,),
    "ignore_eos": (False,),
    "add_generation_prompt": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "documents": ([],),
    "web_search_options": (),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "length_penalty": (1,),
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "thinking_token_budget": (),
    "vllm_xargs": ({},),
    "regex": (),
    "ebnf": (),
    "json_schema": (),
    "stop_token_ids": ([],),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "mcp_servers": ([],),
}
"""Fields that change how an answer is sampled, with the values that leave it as it is (in addition to null)."""
_WITH_FORMAT = ("text", "output_config")
"""Objects with a field `format`, of which `_UNSUPPORTED` has entries such as text.format."""
TOOLS_OF_TYPE = "tools."
"""Beginning of entries of agentic.endpoint.ignored_fields that leave out tools of a type, as in tools.web_search."""


@dataclass(frozen=True)
class Settings:
    """Settings of the endpoint.

    Attributes:
        sampling: Sampling parameters that requests may repeat.
        removed_blocks: Beginnings of text blocks in system messages that are removed.
        ignored_fields: Fields that are ignored instead of refused.
    """

    sampling: SamplingParams
    removed_blocks: tuple[str, ...] = ()
    ignored_fields: frozenset[str] = frozenset()


def parsed_body(raw: bytes) -> Body:
    """Returns the JSON object in a body. Raises Refusal for another body."""
    # counted before it is parsed, because parsing keeps other clients waiting
    num_objects = raw.count(b"{") + raw.count(b"[")
    if num_objects > MAX_OBJECTS or raw.count(b",") > MAX_VALUES:
        raise Refusal(
            f"the body has more than {MAX_OBJECTS} objects and lists, or more than {MAX_VALUES} values",
            status=413,
            kind="size",
        )
    try:
        body = strict_json(raw.decode())
        # fails for characters that no tokenizer can encode
        json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refusal(f"the body is not valid JSON of encodable text: {error}") from error
    if not isinstance(body, dict):
        raise Refusal("the body is not a JSON object")
    return body


def check_ignored_fields(names: Iterable[str]) -> None:
    """Raises UserError for an entry of agentic.endpoint.ignored_fields that the endpoint never refuses."""
    refused = ("temperature", "top_p", "top_k", "min_p", *_UNSUPPORTED)
    for name in names:
        # providers add types of tools with each version
        is_type_of_tool = name.startswith(TOOLS_OF_TYPE) and name != TOOLS_OF_TYPE
        if name not in refused and not is_type_of_tool:
            raise UserError(
                f"agentic.endpoint.ignored_fields={name} has no effect: the endpoint never refuses this field"
                f"{did_you_mean(name, refused)}. Remove it, or name one of {', '.join(refused)}, or "
                f"{TOOLS_OF_TYPE}TYPE"
            )


def check_fields(body: Body, settings: Settings) -> None:
    """Raises Refusal for a field that would change how the answer is sampled."""
    fields = dict(body)
    for name in _WITH_FORMAT:
        outer = body.get(name)
        if isinstance(outer, dict):
            fields[f"{name}.format"] = outer.get("format")

    for name, value in fields.items():
        if name in settings.ignored_fields or value is None:
            continue
        expected = _expected_instead(name, value, settings.sampling)
        if expected is not None:
            raise Refusal(
                f"{name}={shortened(value)}: expected {expected}; remove the field, or add it to "
                "agentic.endpoint.ignored_fields if the agent does not depend on it",
                field=name,
            )


def _expected_instead(name: str, value: object, sampling: SamplingParams) -> str | None:
    """Returns a description of the values that a field may have; None if it may have this one."""
    if name in ("temperature", "top_p", "top_k", "min_p"):
        own_value = getattr(sampling, name)
        if value == own_value:
            return None
        return f"{own_value}, the run's own value (rollout.{name}), because training reads its log-probs"

    if name not in _UNSUPPORTED or value in _UNSUPPORTED[name]:
        return None
    accepted = [json.dumps(neutral) for neutral in _UNSUPPORTED[name]]
    return f"no value but {' or '.join(accepted) or 'null'}"


# ------------------------------------------------------------------------------------------------------ values by type


def as_object(value: object, where: str) -> Body:
    """Returns a JSON object of a request. Raises Refusal, which names the place `where`, for another value."""
    if not isinstance(value, dict):
        raise Refusal(f"{where} is {shortened(value)}: expected an object", field=where)
    return value


def read_list(body: Body, name: str, needed: bool = True) -> list[object]:
    """Returns a list of a request, whose length is limited."""
    value = body.get(name)
    if value is None and not needed:
        return []
    if not isinstance(value, list):
        raise Refusal(f"{name} is {shortened(value)}: expected a list", field=name)
    most = MAX_TOOLS if name in ("tools", "tool_calls") else MAX_MESSAGES
    check_length(value, name, most)
    return value


def check_length(values: Sequence[object], name: str, most: int) -> None:
    """Raises Refusal if a list of a request has too many entries."""
    if len(values) > most:
        raise Refusal(f"{name} has {len(values)} entries; at most {most} are accepted", field=name, kind="size")


def read_integer(body: Body, name: str, least: int = 1) -> int | None:
    """Returns a whole number of a request that fits 64 bits, or None if the request has none."""
    value = body.get(name)
    if value is None:
        return None
    # Python counts True as a number
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**63:
        raise Refusal(f"{name}={shortened(value)}: expected a whole number of at least {least}", field=name)
    return value


def read_stops(body: Body, name: str) -> tuple[str, ...]:
    """Returns the different texts that end the answer, in their order; the request has a text or a list of texts."""
    value = body.get(name)
    stops = value or []
    if isinstance(value, str):
        stops = [value]
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise Refusal(f"{name}={shortened(value)}: expected a text or a list of texts", field=name)
    check_length(stops, name, MAX_STOPS)
    longest = max(map(len, stops), default=0)
    if longest > MAX_STOP_CHARACTERS:
        raise Refusal(
            f"{name}: a text has {longest} characters; at most {MAX_STOP_CHARACTERS} are accepted",
            field=name,
            kind="size",
        )
    # every text contains the empty one, which would end each answer at once
    return tuple(dict.fromkeys(stop for stop in stops if stop))


def shortened(value: object) -> str:
    """Returns a value as a message shows it: at most 100 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


# ------------------------------------------------------------------------------------------------------------ messages


def read_text(content: object, where: str, settings: Settings, role: str = "system") -> str:
    """Returns the text of a message's content.

    Args:
        content: A text, a list of parts, or None.
        where: Place of the content in the request, for the message of Refusal.
        settings: Settings of the endpoint. Blocks of a system message that begin with one of its `removed_blocks` are
            left out.
        role: Role of the message.

    Raises:
        Refusal: The content is no text.
    """
    if content is None:
        return ""
    blocks = content
    if isinstance(content, str):
        blocks = [{"type": "text", "text": content}]
    if not isinstance(blocks, list):
        raise Refusal(f"{where}={shortened(content)}: expected text or a list of parts", field=where)
    check_length(blocks, where, MAX_MESSAGES)
    texts = []
    for entry in blocks:
        block = as_object(entry, where)
        kind = block.get("type")
        # OpenAI's parts of the type refusal have their text in a field of the same name
        text = block.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str) or kind not in ("text", "input_text", "output_text", "refusal"):
            raise Refusal(
                f"{where}: parts of the type {shortened(kind)} are not supported; the model reads text", field=where
            )
        # Claude Code changes such a block in every request, which would begin a new row each time
        is_removed = role == "system" and text.startswith(settings.removed_blocks)
        if not is_removed:
            texts.append(text)
    # without a separator, the text of an answer in parts equals the sampled one, which `Trace.add` looks up
    separator = "" if role == "assistant" else "\n"
    return separator.join(texts)


def tool_call(identifier: object, name: object, arguments: object, where: str) -> MessageCall:
    """Returns a tool call in OpenAI's format.

    Args:
        identifier, name, arguments: Fields of the call, which no one has checked yet.
        where: Place of the call in the request, for the message of Refusal.

    Raises:
        Refusal: The name is no text, or the identifier is too long.
    """
    if not isinstance(name, str):
        raise Refusal(f"{where}: a tool call needs a name, found {shortened(name)}", field=where)
    # OpenAI's APIs send arguments as JSON text, Anthropic's as an object
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {})
    identifier = read_identifier(identifier, where)
    function: CalledFunction = {"name": name, "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}


def read_identifier(value: object, where: str) -> str:
    """Returns the identifier of a tool call; empty if the request has none."""
    if value is None:
        return ""
    text = str(value)
    if len(text) > MAX_IDENTIFIER:
        raise Refusal(
            f"{where}: the identifier of a tool call has {len(text)} characters; at most {MAX_IDENTIFIER} are accepted",
            field=where,
            kind="size",
        )
    return text


# --------------------------------------------------------------------------------------------------------------- tools


def read_tools(body: Body, settings: Settings, kind: str = "function") -> list[Body]:
    """Returns the tools of a request that are of this kind. Raises Refusal for others, unless they are ignored."""
    tools = []
    for value in read_list(body, "tools", needed=False):
        tool = as_object(value, "tools")
        tool_type = tool.get("type")
        # clients send null for a type that they leave open
        if tool_type in (None, kind):
            tools.append(tool)
            continue
        ignored_name = f"{TOOLS_OF_TYPE}{tool_type}"
        if ignored_name not in settings.ignored_fields:
            raise Refusal(
                f"tools: found the type {shortened(tool_type)}, expected {kind}; switch this tool off in the agent, or "
                f"add {shortened(ignored_name)} to agentic.endpoint.ignored_fields to leave out tools of this type",
                field="tools",
            )
    return tools


def read_function(value: object) -> Tool:
    """Returns a tool in OpenAI's format. Raises Refusal for one that is not a function."""
    tool = as_object(value, "tools")
    function = as_object(tool.get("function"), "tools: functions are supported, and tools.function")
    # a deep value is valid JSON, but the chat template could not print it
    if _is_deeper(function, MAX_DEPTH):
        raise Refusal(f"tools: a tool is nested deeper than {MAX_DEPTH} levels", field="tools", kind="size")
    name = function.get("name")
    if tool.get("type") not in (None, "function") or not isinstance(name, str):
        raise Refusal(f"tools={shortened(tool)}: expected functions with a name", field="tools")
    # templates read both fields, which clients may leave out
    declared: ToolFunction = {
        "name": name,
        "description": function.get("description") or "",
        "parameters": function.get("parameters") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": declared}


def allows_calls(body: Body) -> bool:
    """Returns False if the request forbids that the answer calls tools."""
    return body.get("tool_choice") not in ("none", {"type": "none"})


def _is_deeper(value: object, most: int) -> bool:
    """Returns True if objects and lists are nested deeper than `most`.

    Goes through the levels one after the other, because a recursion would itself fail for a deep value.
    """
    level = [value]
    for _ in range(most + 1):
        next_level: list[object] = []
        for element in level:
            if isinstance(element, dict):
                next_level.extend(element.values())
            elif isinstance(element, list):
                next_level.extend(element)
        if not next_level:
            return False
        level = next_level
    return True


def is_retry(headers: Mapping[str, str]) -> bool:
    """Returns True if an SDK repeats a request, which the SDKs of OpenAI and Anthropic say in a header."""
    count = headers.get("x-stainless-retry-count", "0")
    # a hostile client may send a number of any length
    return count.isdecimal() and int(count[:9]) > 0

"""Renders chats with a tokenizer's chat template, in a child process whose time and memory the kernel limits.

A chat template is a program by the author of the model's folder. Jinja's sandbox blocks access to files and to the
network, but does not stop loops that take hours, `9**9**9`, or texts that fill the memory.
"""

import functools
import gc
import json
import os
import pickle
import resource
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import NamedTuple

import psutil
from transformers import PreTrainedTokenizerBase

from verl_lite.errors import UserError
from verl_lite.json_types import ChatMessage, JsonMapping, JsonObject, KeywordArguments
from verl_lite.machine.process_tree import ForkedProcess

SECONDS = 10.0
"""Limit of processor time of all calls of a child together, besides `SECONDS_PER_CHAT`."""
SECONDS_PER_CHAT = 0.05
"""Processor time that each chat adds to the limit. A chat usually takes 0.0002 s."""
MEMORY_BYTES = 2 << 30
MOST_CHARACTERS = 1 << 20
"""Limit of characters in all texts of a call, unless `MOST_GROWTH` allows more."""
MOST_GROWTH = 8
"""Characters that a call may always write for each byte of its input."""


class ChatTemplateError(UserError):
    """The chat template rejected a chat or failed on it. The message begins with the type of the original error."""


class _Child:
    """A fork of this process that renders with the current `tokenizer` and exits when the connection closes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.template = tokenizer.chat_template
        self.parent = os.getpid()
        self.connection, end_of_child = Pipe()
        self.process = ForkedProcess(functools.partial(_serve, tokenizer, end_of_child))
        # closed here, so that the connection ends with the child
        end_of_child.close()

    def fits(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """True if the child renders with this tokenizer and its current template, and is a child of this process."""
        # the process of a fork of this one is no child of it
        is_own_child = self.parent == os.getpid()
        return self.tokenizer is tokenizer and self.template == tokenizer.chat_template and is_own_child

    def end(self) -> int:
        """Kills the child if it is still running. Returns its exit code, or the negative number of a signal."""
        self.connection.close()
        self.process.kill()
        return self.process.wait()


# The child stays for later calls, because a fork takes longer than most chats.
_child: _Child | None = None
_rendering = threading.Lock()


def render_chats(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Sequence[Mapping[str, object]]], **arguments: object
) -> list[str]:
    """Renders chats to texts, with the result of `tokenizer.apply_chat_template(chats, tokenize=False, **arguments)`.

    Tool calls are written as the template reads them (`CallForm`): their arguments as values or as JSON text, and the
    content of a message without text as null or as an empty text.

    Raises:
        ChatTemplateError: the template rejects a chat or fails on it.
        UserError: the template takes too much time or memory, or writes too much.
    """
    global _child
    # fails for deeply nested arguments, before a child is in use
    message = pickle.dumps((list(chats), arguments))
    with _rendering:
        # taken away: if this call is interrupted, no later call reads its reply
        child = _child
        _child = None
        if child is not None and not child.fits(tokenizer):
            if child.parent == os.getpid():
                child.end()
            child = None
        if child is None:
            child = _Child(tokenizer)

        try:
            child.connection.send_bytes(message)
            reply: _Reply = child.connection.recv()
        except (EOFError, OSError):
            code = child.end()
            excess = f"ended the process that renders it (exit code {code})"
            if code == -signal.SIGPROF:
                excess = f"took more than {SECONDS + SECONDS_PER_CHAT * len(chats):g} s of processor time"
            reply = _Reply(excess=excess)
        else:
            _child = child

    if reply.excess:
        problem = f"The chat template of {tokenizer.name_or_path!r} (or data.chat_template) {reply.excess}"
        raise UserError(
            f"{problem} for {len(chats)} chats. "
            "Check the template before you use this folder, or set data.chat_template to another one"
        )
    if reply.error:
        raise ChatTemplateError(reply.error)
    return reply.texts


def _serve(tokenizer: PreTrainedTokenizerBase, connection: Connection) -> int:
    """Runs the child: drops the parent's files, signal handlers and garbage, sets the limits, and renders chats."""
    # objects of the parent stay as they are: collecting them would copy their pages and run their finalizers
    gc.freeze()
    # all files but standard streams and the connection: the parent's sockets must close when the parent ends
    os.closerange(3, connection.fileno())
    os.closerange(connection.fileno() + 1, 1 << 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent handles these and ends this process
        signal.signal(number, signal.SIG_IGN)
    # the kernel ends this process when the timer below runs out
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # the address space of the parent's copies counts, too
    most_bytes = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))

    seconds_left = SECONDS
    forms: dict[str, CallForm] = {}
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return 0
        chats, arguments = pickle.loads(message)
        signal.setitimer(signal.ITIMER_PROF, min(SECONDS, seconds_left) + SECONDS_PER_CHAT * len(chats))
        most_characters = max(MOST_CHARACTERS, MOST_GROWTH * len(message))
        reply = _rendered(tokenizer, chats, arguments, forms, most_characters)
        # time that the chats of this call did not use is left for later calls
        seconds_left, _ = signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(reply)


class _Reply(NamedTuple):
    """The child's reply to one call.

    Attributes:
        texts: the rendered chats, if nothing failed.
        error: the template's error; empty if it raised none.
        excess: the exceeded limit, as a message describes it; empty if there is none.
    """

    texts: list[str] = []
    error: str = ""
    excess: str = ""


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    chats: list[list[ChatMessage]],
    arguments: KeywordArguments,
    forms: dict[str, "CallForm"],
    most_characters: int,
) -> _Reply:
    """Renders chats.

    Args:
        tokenizer: the tokenizer with its template.
        chats: messages of each chat.
        arguments: arguments of the template.
        forms: the forms of tool calls found so far, by the arguments of the template; the call adds to them.
        most_characters: limit of characters in all texts.
    """
    texts: list[str] = []
    written = 0
    try:
        for chat in chats:
            messages = chat
            # only these have several forms, which need some renderings to find out
            if any(message.get("tool_calls") for message in chat):
                key = repr(arguments)
                if key not in forms:
                    forms[key] = find_call_form(tokenizer, arguments)
                messages = [forms[key].apply(message) for message in chat]
            text = str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))
            texts.append(text)
            written += len(text)
            if written > most_characters:
                return _Reply(excess=f"wrote {written:,} characters, more than the {most_characters:,} allowed,")
    except MemoryError:
        return _Reply(excess=f"needed more than {MEMORY_BYTES >> 30} GiB of memory")
    except Exception as error:  # the template is code of the model's folder and may raise any exception
        return _Reply(error=f"{type(error).__name__}: {error}")
    return _Reply(texts)


def tool_arguments(arguments: str | JsonObject) -> str | JsonObject:
    """Returns the arguments of a tool call as a dict, which chat templates expect, if they are one as JSON text;
    returns all others unchanged."""
    if not isinstance(arguments, str):
        return arguments
    # a model can write any text
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


# --------------------------------------------------------------------------------------------- tool calls of a message


@dataclass(frozen=True)
class CallForm:
    """How a template reads an assistant's message with tool calls.

    Attributes:
        content: the content of a message without text: None, or "" for templates that would print None or fail on it.
        arguments_are_text: True if the arguments of a call are JSON text, False if they are a dict. Templates with
            `arguments | tojson` need the dict, templates that concatenate the arguments need the text.
        writes_calls: True if the template does not show tool calls, so that they are written into the content, in the
            notation that agents use with such templates.
    """

    content: str | None
    arguments_are_text: bool
    writes_calls: bool = False

    def apply(self, message: JsonMapping) -> ChatMessage:
        """Returns a message in this form. Messages without tool calls stay unchanged."""
        written = dict(message)
        if not message.get("tool_calls"):
            return written
        if self.writes_calls:
            calls = [_written_call(call) for call in written.pop("tool_calls")]
            written["content"] = (message.get("content") or "") + "\n".join(calls)
            return written
        if not message.get("content"):
            written["content"] = self.content
        written["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return written

    def _call(self, call: JsonMapping) -> JsonObject:
        """Returns a tool call, or its `function`, with the arguments in this form."""
        written = dict(call)
        if isinstance(call.get("function"), Mapping):
            written["function"] = self._call(call["function"])
        elif "arguments" in call:
            written["arguments"] = self._arguments(call["arguments"])
        return written

    def _arguments(self, arguments: str | JsonObject) -> str | JsonObject:
        if not self.arguments_are_text:
            return tool_arguments(arguments)
        if isinstance(arguments, str):
            return arguments
        return json.dumps(arguments, ensure_ascii=False)


def _written_call(call: JsonMapping) -> str:
    """Returns a tool call as text, in the notation of Hermes and Qwen."""
    function = call.get("function", call)
    arguments = tool_arguments(function.get("arguments", {}))
    written = json.dumps({"name": function["name"], "arguments": arguments})
    return f"<tool_call>{written}</tool_call>"


_CALL_FORMS = (CallForm(None, False), CallForm("", False), CallForm(None, True), CallForm("", True))
# names that no template contains
_PROBE_NAME = "verlliteprobe"
_PROBE_KEY = "verllitekey"


def find_call_form(tokenizer: PreTrainedTokenizerBase, arguments: KeywordArguments) -> CallForm:
    """Returns the first form of `_CALL_FORMS` that the template renders with the call's name, and without the word None
    or a Python dict. If there is none, the template does not show calls, and they become content.

    Args:
        tokenizer: the tokenizer with its template.
        arguments: arguments of the template.
    """
    function = {"name": _PROBE_NAME, "arguments": {_PROBE_KEY: "value"}}
    # Mistral's templates accept only ids of nine letters and digits
    call = {"id": "verllite0", "type": "function", "function": function}
    system = {"role": "system", "content": "s"}
    question = {"role": "user", "content": "q"}
    for beginning in ([question], [system, question]):  # few templates need a system message, some refuse it
        # a template may contain the word None itself, such as "Reasoning: None"
        answer = {"role": "assistant", "content": "a"}
        number_without_calls = _probe(tokenizer, [*beginning, answer], arguments).count("None")
        for form in _CALL_FORMS:
            message = form.apply({"role": "assistant", "content": "", "tool_calls": [call]})
            text = _probe(tokenizer, [*beginning, message], arguments)
            # a dict that is concatenated as a text has single quotes, which are no JSON
            shows_dict = f"'{_PROBE_KEY}'" in text
            shows_none = text.count("None") > number_without_calls
            if _PROBE_NAME in text and not shows_dict and not shows_none:
                return form
    return CallForm("", False, writes_calls=True)


def _probe(tokenizer: PreTrainedTokenizerBase, chat: list[ChatMessage], arguments: KeywordArguments) -> str:
    """Returns the text of a chat, or "" if the template fails on it."""
    try:
        return str(tokenizer.apply_chat_template(chat, tokenize=False, **arguments))
    except MemoryError:
        raise
    except Exception:  # the template is code of the model's folder and may raise any exception
        return ""

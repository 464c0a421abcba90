"""Renders chats with a tokenizer's chat template, in a process whose time and memory the kernel limits.

A chat template is a program by the author of the model's folder. Jinja's sandbox blocks access to files and to the
network, but does not stop loops that take hours, `9**9**9`, or texts that fill the memory.
"""

import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple

import psutil
from transformers import PreTrainedTokenizerBase

from verl_lite.errors import UserError
from verl_lite.json_types import ChatMessage, JsonMapping, JsonObject, KeywordArguments
from verl_lite.machine.process_tree import ProcessTree

SECONDS = 10.0
"""Limit of processor time of all calls with the same template, besides `SECONDS_PER_CHAT`."""
SECONDS_PER_CHAT = 0.05
"""Processor time that each chat adds to the limit. A chat usually takes 0.0002 s."""
MEMORY_BYTES = 2 << 30
MOST_CHARACTERS = 1 << 20
"""Limit of characters in all texts of a call, unless `MOST_GROWTH` allows more."""
MOST_GROWTH = 8
"""Characters that a call may always write for each byte of its input."""


class ChatTemplateError(UserError):
    """The chat template rejected a chat or failed on it. The message begins with the type of the original error."""


@dataclass(frozen=True)
class _Template:
    """What rendering needs of a tokenizer. Unlike a tokenizer, it travels to the renderer in a few kilobytes.

    The methods are those of transformers; with `tokenize=False` they read nothing but the two attributes.
    """

    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, str | list[str]]

    apply_chat_template = PreTrainedTokenizerBase.apply_chat_template
    get_chat_template = PreTrainedTokenizerBase.get_chat_template


class _Request(NamedTuple):
    """A call of the renderer.

    Attributes:
        template: the template. A renderer charges the processor time of all calls with the same template together.
        chats: messages of each chat.
        arguments: arguments of the template.
        seconds, seconds_per_chat, memory_bytes: limits, see the constants of this module.
    """

    template: _Template
    chats: list[list[ChatMessage]]
    arguments: KeywordArguments
    seconds: float
    seconds_per_chat: float
    memory_bytes: int


class _Renderer:
    """A process that renders one request at a time. It ends when this process ends or closes the connection.

    The process is a new interpreter, not a fork. A fork of a process that trains can hang: in the fork, Python removes
    the data of all other threads, and with them what torch's DTensor keeps there. The destructor of a Gloo process
    group then waits for threads that a fork does not have.
    """

    def __init__(self) -> None:
        self.parent = os.getpid()
        ours, theirs = socket.socketpair()
        with theirs:
            program = f"from workers.policy.chat_template import serve; serve({theirs.fileno()})"
            self._tree = ProcessTree(
                [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}"],
                {**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._connection = Connection(ours.detach())

    def render(self, message: bytes) -> "_Reply":
        """Sends a pickled request and returns the reply. Raises EOFError or OSError if the process ends."""
        self._connection.send_bytes(message)
        reply: _Reply = self._connection.recv()
        return reply

    def has_ended(self) -> bool:
        """Returns True if the process was killed since the last request."""
        return self._tree.process.poll() is not None

    def end(self) -> int:
        """Ends the process if it is still running. Returns its exit code, or the negative number of a signal."""
        self._connection.close()
        self._tree.end()
        return int(self._tree.process.returncode)


# The renderer stays for later calls, because its start takes a second or two.
_renderer: _Renderer | None = None
_rendering = threading.Lock()


def render_chats(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Sequence[Mapping[str, object]]], **arguments: object
) -> list[str]:
    """Renders chats to texts, with the result of `tokenizer.apply_chat_template(chats, tokenize=False, **arguments)`.

    Tool calls are written as the template reads them (`CallForm`): their arguments as values or as JSON text, and the
    content of a message without text as null or as an empty text. A tokenizer whose class replaces
    `apply_chat_template` renders in this process, because its code is no template of the model's folder.

    Raises:
        ChatTemplateError: the template rejects a chat or fails on it.
        UserError: the template takes too much time or memory, or writes too much.
    """
    as_dicts = []
    for chat in chats:
        messages = [dict(message) for message in chat]
        as_dicts.append(messages)
    if type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template:
        template = _Template(tokenizer.chat_template, dict(tokenizer.special_tokens_map))
        request = _Request(template, as_dicts, arguments, SECONDS, SECONDS_PER_CHAT, MEMORY_BYTES)
        reply = _rendered_outside(request)
    else:
        reply = _rendered(tokenizer, as_dicts, arguments, {})

    if reply.excess:
        problem = f"The chat template of {tokenizer.name_or_path!r} (or data.chat_template) {reply.excess}"
        raise UserError(
            f"{problem} for {len(chats)} chats. "
            "Check the template before you use this folder, or set data.chat_template to another one"
        )
    if reply.error:
        raise ChatTemplateError(reply.error)
    return reply.texts


def _rendered_outside(request: _Request) -> "_Reply":
    """Renders with the renderer of this process, and starts one if there is none."""
    global _renderer
    # fails for deeply nested arguments, before a renderer is in use
    message = pickle.dumps(request)
    with _rendering:
        renderer = _renderer
        # if this call is interrupted, no later call reads its reply
        _renderer = None
        # a fork of this process leaves its parent's renderer alone, and the end of a run kills that of its process
        if renderer is None or renderer.parent != os.getpid() or renderer.has_ended():
            renderer = _Renderer()
        try:
            reply = renderer.render(message)
        except (EOFError, OSError):
            code = renderer.end()
            if code != -signal.SIGPROF:
                return _Reply(excess=f"ended the process that renders it (exit code {code})")
            limit_s = request.seconds + request.seconds_per_chat * len(request.chats)
            return _Reply(excess=f"took more than {limit_s:g} s of processor time")
        except BaseException:
            # such as Ctrl-C: the renderer would answer the next request with this one's reply
            renderer.end()
            raise
        _renderer = renderer
    return reply


def serve(connection_fd: int) -> None:
    """Runs the renderer: answers the requests of a connection until the other side closes it."""
    connection = Connection(connection_fd)
    memory_at_start = psutil.Process().memory_info().vms
    _, memory_hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    # transformers imports Jinja with the first template, which is not to be charged for it
    trial = _Template("{{ messages }}", {})
    trial.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    template: _Template | None = None
    seconds_left = 0.0
    forms: dict[str, CallForm] = {}
    while True:
        try:
            message = connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        request: _Request = pickle.loads(message)
        if request.template != template:
            template = request.template
            seconds_left = request.seconds
            forms = {}

        memory_limit = memory_at_start + request.memory_bytes
        # of the user's shell or job, and not to be exceeded
        if memory_hard_limit != resource.RLIM_INFINITY:
            memory_limit = min(memory_limit, memory_hard_limit)
        resource.setrlimit(resource.RLIMIT_AS, (memory_limit, memory_hard_limit))
        seconds_of_chats = request.seconds_per_chat * len(request.chats)
        seconds = min(request.seconds, seconds_left) + seconds_of_chats
        # its signal ends the process, whatever runs
        signal.setitimer(signal.ITIMER_PROF, seconds)
        most_characters = max(MOST_CHARACTERS, MOST_GROWTH * len(message))
        reply = _rendered(template, request.chats, request.arguments, forms, most_characters, request.memory_bytes)
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
    template: "_Template | PreTrainedTokenizerBase",
    chats: list[list[ChatMessage]],
    arguments: KeywordArguments,
    forms: dict[str, "CallForm"],
    most_characters: int = sys.maxsize,
    memory_bytes: int = sys.maxsize,
) -> _Reply:
    """Renders chats.

    Args:
        template: the template, or a tokenizer that renders with code of its own.
        chats: messages of each chat.
        arguments: arguments of the template.
        forms: the forms of tool calls found so far, by the arguments of the template; the call adds to them.
        most_characters: limit of characters in all texts.
        memory_bytes: limit of memory, which the caller has set.
    """
    texts: list[str] = []
    written = 0
    try:
        for chat in chats:
            messages = chat
            # only these have several forms, which need some renderings to find out
            has_calls = any(message.get("tool_calls") for message in chat)
            if has_calls:
                key = repr(arguments)
                if key not in forms:
                    forms[key] = find_call_form(template, arguments)
                messages = [forms[key].apply(message) for message in chat]
            text = str(template.apply_chat_template(messages, tokenize=False, **arguments))
            texts.append(text)
            written += len(text)
            if written > most_characters:
                return _Reply(excess=f"wrote {written:,} characters, more than the {most_characters:,} allowed,")
    except MemoryError:
        return _Reply(excess=f"needed more than {memory_bytes >> 30} GiB of memory")
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
            content = message.get("content") or ""
            written["content"] = content + "\n".join(calls)
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


# in the order in which they are tried
_CALL_FORMS = (
    CallForm(content=None, arguments_are_text=False),
    CallForm(content="", arguments_are_text=False),
    CallForm(content=None, arguments_are_text=True),
    CallForm(content="", arguments_are_text=True),
)
# names that no template contains
_PROBE_NAME = "verlliteprobe"
_PROBE_KEY = "verllitekey"


def find_call_form(template: _Template | PreTrainedTokenizerBase, arguments: KeywordArguments) -> CallForm:
    """Returns the first form of `_CALL_FORMS` that the template renders with the call's name, and without the word None
    or a Python dict. If there is none, the template does not show calls, and they become content.

    Args:
        template: the template, or a tokenizer that renders with code of its own.
        arguments: arguments of the template.
    """
    function = {"name": _PROBE_NAME, "arguments": {_PROBE_KEY: "value"}}
    # Mistral's templates accept only ids of nine letters and digits
    call = {"id": "verllite0", "type": "function", "function": function}
    system = {"role": "system", "content": "s"}
    question = {"role": "user", "content": "q"}
    answer = {"role": "assistant", "content": "a"}
    answer_with_call = {"role": "assistant", "content": "", "tool_calls": [call]}
    # few templates need a system message, some refuse it
    for beginning in ([question], [system, question]):
        # a template may contain the word None itself, such as "Reasoning: None"
        text_without_calls = _probe(template, [*beginning, answer], arguments)
        number_without_calls = text_without_calls.count("None")
        for form in _CALL_FORMS:
            message = form.apply(answer_with_call)
            text = _probe(template, [*beginning, message], arguments)
            # a dict that is concatenated as a text has single quotes, which are no JSON
            shows_dict = f"'{_PROBE_KEY}'" in text
            shows_none = text.count("None") > number_without_calls
            if _PROBE_NAME in text and not shows_dict and not shows_none:
                return form
    return CallForm("", False, writes_calls=True)


def _probe(template: _Template | PreTrainedTokenizerBase, chat: list[ChatMessage], arguments: KeywordArguments) -> str:
    """Returns the text of a chat, or "" if the template fails on it."""
    try:
        return str(template.apply_chat_template(chat, tokenize=False, **arguments))
    except MemoryError:
        raise
    except Exception:  # the template is code of the model's folder and may raise any exception
        return ""

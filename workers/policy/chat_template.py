"""Renders chats with a tokenizer's chat template, in a child process whose time and memory the kernel limits.

A chat template is a program by the author of the model's folder. Jinja's sandbox blocks access to files and to the
network, but does not stop loops that take hours, `9**9**9`, or texts that fill the memory.
"""

import gc
import json
import os
import pickle
import resource
import signal
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

import psutil
from transformers import PreTrainedTokenizerBase

from verl_lite.errors import UserError

SECONDS, SECONDS_PER_CHAT = 10.0, 0.05
"""Limits of processor time: seconds in total, plus seconds per chat. A chat usually takes 0.0002 s."""
MEMORY_BYTES = 2 << 30
MOST_CHARACTERS, MOST_GROWTH = 1 << 20, 8
"""Limit of characters in all texts of a call: the larger of a constant and a multiple of the input's bytes."""


class ChatTemplateError(UserError):
    """The chat template rejected a chat or failed on it. The message begins with the type of the original error."""


class _Child:
    """A fork of this process that renders with the current `tokenizer` and exits when the connection closes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.template, self.parent = tokenizer, tokenizer.chat_template, os.getpid()
        self.connection, theirs = Pipe()
        self.pid = os.fork()
        if not self.pid:
            try:
                _serve(tokenizer, theirs)
            finally:
                os._exit(1)
        theirs.close()

    def fits(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """True if the child renders with this tokenizer and its current template, and is a child of this process."""
        return self.tokenizer is tokenizer and self.template == tokenizer.chat_template and self.parent == os.getpid()

    def end(self) -> int:
        """Kills the child if it is still running. Returns its exit code, or the negative number of a signal."""
        self.connection.close()
        os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


_child: _Child | None = None
_rendering = threading.Lock()


def render_chats(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[Sequence[dict[str, Any]]], **arguments: Any
) -> list[str]:
    """Renders chats to texts, with the result of `tokenizer.apply_chat_template(chats, tokenize=False, **arguments)`.

    Raises:
        ChatTemplateError: the template rejects a chat or fails on it.
        UserError: the template takes too much time or memory, or writes too much.
    """
    global _child
    message = pickle.dumps((list(chats), arguments))  # fails for deeply nested arguments, before a child is in use
    with _rendering:
        child, _child = _child, None  # if this call is interrupted, no later call reads its reply
        if child is None or not child.fits(tokenizer):
            if child is not None and child.parent == os.getpid():
                child.end()
            child = _Child(tokenizer)
        try:
            child.connection.send_bytes(message)
            texts, refusal, excess = child.connection.recv()
        except (EOFError, OSError):
            code = child.end()
            excess = f"ended the process that renders it (exit code {code})"
            if code == -signal.SIGPROF:
                excess = f"took more than {SECONDS + SECONDS_PER_CHAT * len(chats):g} s of processor time"
        else:
            _child = child
    if excess:
        raise UserError(
            f"The chat template of {tokenizer.name_or_path!r} (or data.chat_template) {excess} for {len(chats)} chats. "
            "Check the template before you use this folder, or set data.chat_template to another one"
        )
    if refusal:
        raise ChatTemplateError(refusal)
    return texts


def _serve(tokenizer: PreTrainedTokenizerBase, connection: Connection) -> None:
    """Runs the child: drops the parent's files, signal handlers and garbage, sets the limits, and renders chats."""
    gc.freeze()
    os.closerange(3, connection.fileno())
    os.closerange(connection.fileno() + 1, 1 << 16)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent handles these and ends this process
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    most = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    left = SECONDS
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            return
        chats, arguments = pickle.loads(message)
        signal.setitimer(signal.ITIMER_PROF, min(SECONDS, left) + SECONDS_PER_CHAT * len(chats))
        reply = _rendered(tokenizer, chats, arguments, max(MOST_CHARACTERS, MOST_GROWTH * len(message)))
        left = signal.setitimer(signal.ITIMER_PROF, 0)[0]
        connection.send(reply)


def _rendered(
    tokenizer: PreTrainedTokenizerBase, chats: list[Any], arguments: dict[str, Any], most: int
) -> tuple[list[str], str, str]:
    """Renders chats. Returns the texts, the template's error, and the exceeded limit (each of them may be empty)."""
    texts: list[str] = []
    written = 0
    try:
        for chat in chats:
            texts.append(_rendered_chat(tokenizer, chat, arguments))
            written += len(texts[-1])
            if written > most:
                return [], "", f"wrote {written:,} characters, more than the {most:,} allowed,"
    except MemoryError:
        return [], "", f"needed more than {MEMORY_BYTES >> 30} GiB of memory"
    except Exception as error:  # the template is code of the model's folder and may raise any exception
        return [], f"{type(error).__name__}: {error}", ""
    return texts, "", ""


def _rendered_chat(tokenizer: PreTrainedTokenizerBase, chat: Any, arguments: dict[str, Any]) -> str:
    """Renders one chat.

    A message that only calls tools has the content None, as in OpenAI's format. Some templates test for None, others
    write the text "None" or fail; for the latter the content becomes an empty text.
    """

    def rendered(messages: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **arguments))

    if all(message.get("content", "") is not None for message in chat):
        return rendered(chat)
    with_empty = [message | {"content": message.get("content") or ""} for message in chat]
    try:
        text = rendered(chat)
    except Exception:  # the template's code may raise anything; if it also fails on texts, that error is the reason
        return rendered(with_empty)
    text_of_empty = rendered(with_empty)
    return text_of_empty if text.count("None") > text_of_empty.count("None") else text


def tool_arguments(arguments: Any) -> Any:
    """Returns the arguments of a tool call as a dict if they are one as JSON text, which chat templates expect, else
    unchanged."""
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments

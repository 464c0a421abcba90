"""The process that renders chat templates: it equals transformers, and neither hangs nor outlives its caller."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import PreTrainedTokenizerFast

from tests.tiny_model import tiny_tokenizer
from verl_lite.errors import UserError
from workers.policy import chat_template
from workers.policy.chat_template import ChatTemplateError, render_chats

ROOT = Path(__file__).resolve().parents[3]
CHAT = [{"role": "user", "content": "a"}]


@pytest.fixture(autouse=True)
def new_renderer(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test starts a renderer of its own."""
    monkeypatch.setattr(chat_template, "_renderer", None)
    yield
    if chat_template._renderer is not None:
        chat_template._renderer.end()


def with_template(template: str | dict[str, str]) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>"})
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"add_generation_prompt": True, "enable_thinking": False},
        {"tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]},
        {"bos_token": "<other>"},
        {"chat_template": "own: {{ messages | tojson }}"},
    ],
)
def test_the_text_is_that_of_transformers(arguments: dict[str, Any]) -> None:
    templates = {
        "default": "{{ bos_token }}{{ messages }}{{ add_generation_prompt }}{{ enable_thinking }}",
        "tool_use": "{{ tools | tojson }}{{ messages[0].content }}",
    }
    tokenizer = with_template(templates)
    expected = tokenizer.apply_chat_template([CHAT, CHAT * 2], tokenize=False, **arguments)
    assert render_chats(tokenizer, [CHAT, CHAT * 2], **arguments) == expected


def test_a_tokenizer_without_a_template_is_an_error_of_transformers() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ChatTemplateError, match="^ValueError: .*chat_template is not set"):
        render_chats(tokenizer, [CHAT])


def test_another_template_and_other_special_tokens_are_read_at_once() -> None:
    first, second = with_template("1{{ bos_token }}"), with_template("2{{ bos_token }}")
    second.add_special_tokens({"bos_token": "="})
    assert [render_chats(tokenizer, [CHAT]) for tokenizer in (first, second, first)] == [
        ["1<|endoftext|>"],
        ["2="],
        ["1<|endoftext|>"],
    ]


def test_a_tokenizer_that_renders_with_its_own_code_uses_it() -> None:
    class Coded(PreTrainedTokenizerFast):
        def apply_chat_template(self, conversation: Any, **_: Any) -> str:  # type: ignore[override]
            return f"{len(conversation)} messages"

    tokenizer = Coded(tokenizer_object=tiny_tokenizer().backend_tokenizer)
    assert render_chats(tokenizer, [CHAT, CHAT * 2]) == ["1 messages", "2 messages"]


def test_what_other_threads_hold_does_not_stop_it() -> None:
    """A fork of this process would destroy it, as torch's process groups are destroyed, and wait for ever."""

    class Held:
        def __init__(self) -> None:
            self.process = os.getpid()

        def __del__(self) -> None:
            if os.getpid() != self.process:
                time.sleep(3600)

    of_this_thread = threading.local()
    of_this_thread.held = Held()
    texts: list[str] = []
    thread = threading.Thread(target=lambda: texts.extend(render_chats(with_template("hello"), [CHAT])), daemon=True)
    thread.start()
    thread.join(60)
    assert texts == ["hello"]


def test_an_interrupted_call_leaves_no_reply_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_template("{{ messages[0].content }}")
    assert render_chats(tokenizer, [CHAT]) == ["a"]
    assert chat_template._renderer is not None
    process = chat_template._renderer._tree.process

    def interrupted(renderer: Any, message: bytes) -> None:
        renderer._connection.send_bytes(message)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(chat_template._Renderer, "render", interrupted)
        with pytest.raises(KeyboardInterrupt):
            render_chats(tokenizer, [CHAT])
    assert process.poll() == -signal.SIGKILL
    assert render_chats(tokenizer, [[{"role": "user", "content": "b"}]]) == ["b"]


def test_a_renderer_that_was_killed_between_two_calls_is_replaced() -> None:
    """The end of a run kills all processes below it, and a script may train twice."""
    tokenizer = with_template("{{ messages[0].content }}")
    assert render_chats(tokenizer, [CHAT]) == ["a"]
    assert chat_template._renderer is not None
    chat_template._renderer._tree.process.kill()
    chat_template._renderer._tree.process.wait()
    assert render_chats(tokenizer, [CHAT]) == ["a"]


def test_a_renderer_that_is_killed_during_a_call_is_an_error_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = with_template("{{ messages[0].content }}")

    def killed(renderer: Any, message: bytes) -> None:
        renderer._tree.process.kill()
        raise EOFError

    with monkeypatch.context() as patch:
        patch.setattr(chat_template._Renderer, "render", killed)
        with pytest.raises(UserError, match=r"ended the process that renders it \(exit code -9\) for 1 chats"):
            render_chats(tokenizer, [CHAT])
    assert render_chats(tokenizer, [CHAT]) == ["a"]


@pytest.mark.slow
def test_it_renders_below_a_limit_of_memory_of_the_users_shell() -> None:
    script = (
        "import resource\n"
        "from tests.tiny_model import tiny_tokenizer\n"
        "from workers.policy import chat_template\n"
        "limit = 64 << 30\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "chat_template.MEMORY_BYTES = 2 * limit\n"
        "tokenizer = tiny_tokenizer()\n"
        "tokenizer.chat_template = 'x'\n"
        "print(chat_template.render_chats(tokenizer, [[{'role': 'user', 'content': 'a'}]]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, text=True)
    assert done.stdout.strip() == "['x']", done.stderr


@pytest.mark.slow
def test_it_ends_with_its_caller_however_that_ends() -> None:
    script = (
        "from tests.tiny_model import tiny_tokenizer\n"
        "from workers.policy import chat_template\n"
        "tokenizer = tiny_tokenizer()\n"
        "tokenizer.chat_template = 'x'\n"
        "chat_template.render_chats(tokenizer, [[{'role': 'user', 'content': 'a'}]])\n"
        "print(chat_template._renderer._tree.process.pid, flush=True)\n"
        "input()\n"
    )
    caller = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    with caller:
        assert caller.stdout is not None
        renderer = psutil.Process(int(caller.stdout.readline()))
        assert renderer.is_running()
        caller.kill()
    gone, alive = psutil.wait_procs([renderer], timeout=20)
    assert not alive

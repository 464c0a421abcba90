"""The built-in agent with real MCP servers over stdio and HTTP, and a scripted policy.

After every test, no process and no folder of a server may be left.
"""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.trainer import tiny_run
from tests.workers.agents.endpoint import mcp_server
from tests.workers.agents.endpoint.live import Live
from verl_lite.config import AgenticConfig
from verl_lite.errors import UserError
from workers.agents import tool_agent
from workers.agents.program_host import load_function, program_of

pytest.importorskip("mcp")
from mcp.types import CallToolResult

SERVER = mcp_server.__file__
LIMITS = {"memory_mb": 300, "processes": 8, "file_mb": 10}
ROW = {"prompt": [{"role": "user", "content": "hi"}]}


def call(tool: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def processes(mark: str) -> list[str]:
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    return [" ".join(words) for words in found if mark in words]


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Identifies the processes and folders of the test, and checks that none is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield str(tmp_path)
    assert processes(str(tmp_path)) == []
    assert list(tmp_path.glob("verl_lite-mcp-*")) == []


@pytest.fixture
def stdio(mark: str) -> dict[str, Any]:
    return {"s": {"command": sys.executable, "args": [SERVER, mark]}}


def start_http(mark: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, mark, str(port)])
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return process, {"h": {"url": f"http://127.0.0.1:{port}/mcp", "headers": {"Authorization": "Bearer x"}}}
        except OSError:
            assert process.poll() is None
            time.sleep(0.05)


@pytest.fixture(scope="module")
def http() -> Iterator[dict[str, Any]]:
    process, servers = start_http("shared")
    yield servers
    process.kill()
    process.wait()


class Episodes:
    """Runs episodes in which the policy gives the answers of a script. prompts, rows: of the last run."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.prompts: list[str] = []
        self.rows: list[Any] = []

    def run(
        self, script: list[str], servers: Any, count: int = 1, cancel_at: tuple[float, ...] = (), **options: Any
    ) -> Any:
        """Returns the metrics of the last of `count` episodes. cancel_at: seconds between cancellations."""
        live = Live(lambda prompt: script[prompt.count("<|assistant|>") - 1])
        keys, url = [live.open() for _ in range(count)], f"{live.url}/v1"

        async def all_of_them() -> Any:
            tasks = [asyncio.create_task(tool_agent.run(url, key, ROW, servers, LIMITS, **options)) for key in keys]
            for seconds in cancel_at:
                await asyncio.sleep(seconds)
                for task in tasks:
                    task.cancel()
            return (await asyncio.gather(*tasks))[-1]

        try:
            return self._runner.run(all_of_them())
        finally:
            self.prompts, self.rows = live.prompts, [live.close_episode(key) for key in keys]
            live.stop()


@pytest.fixture
def episodes(runner: asyncio.Runner) -> Episodes:
    return Episodes(runner)


def result_in(prompt: str) -> str:
    """The result of a tool at the end of a prompt."""
    return prompt.rpartition("<|user|>tool: ")[2].removesuffix("<|assistant|>")


# ------------------------------------------------------------------------------------------------------------- results


def test_results_are_in_the_next_prompt(episodes: Episodes, stdio: dict[str, Any]) -> None:
    script = [call("add", a=1, b=2) + call("add", a=3, b=4), call("mixed"), "done"]
    assert episodes.run(script, stdio, system="Use tools.") == {"tool_calls": 3, "tool_errors": 0, "turns": 3}
    assert "add mixed place" in episodes.prompts[0] and "system: Use tools.<|user|>user: hi" in episodes.prompts[0]
    assert episodes.prompts[1].endswith("<|user|>tool: sum=3<|user|>tool: sum=7<|assistant|>")
    assert result_in(episodes.prompts[2]) == "a picture:\n[image of image/png, which is not shown]"
    (rows,) = episodes.rows
    assert [len(turns) for turns in rows] == [3]  # one row, in which no token was encoded again


def test_tools_of_the_same_name_get_the_name_of_their_server(
    episodes: Episodes, http: dict[str, Any], stdio: dict[str, Any]
) -> None:
    metrics = episodes.run([call("s__add", a=1, b=2), call("h__add", a=5, b=5), "done"], {**stdio, **http})
    assert metrics == {"tool_calls": 2, "tool_errors": 0, "turns": 3}
    assert "TOOLS s__add s__mixed" in episodes.prompts[0] and " h__add h__mixed" in episodes.prompts[0]
    assert [result_in(prompt) for prompt in episodes.prompts[1:]] == ["sum=3", "sum=10"]


def test_a_hostile_result_is_bounded_text(episodes: Episodes, http: dict[str, Any]) -> None:
    assert episodes.run([call("long", count=10_000_000), "done"], http, max_result_chars=100)["tool_errors"] == 0
    shown = (mcp_server.HOSTILE + "x" * 100)[:100]
    left_out = 10_000_000 + len(mcp_server.HOSTILE) - 100
    assert result_in(episodes.prompts[1]) == f"{shown}\n[{left_out} more characters are left out]"
    ((turns,),) = episodes.rows
    assert [turn.action for turn in turns] == ['long({"count": 10000000})', "done"]


def test_a_result_that_does_not_fit_ends_the_episode(episodes: Episodes, http: dict[str, Any]) -> None:
    metrics = episodes.run([call("long", count=5000), "done"], http, max_result_chars=5000)
    assert metrics == {"tool_calls": 1, "tool_errors": 0, "turns": 1}


def test_errors_of_tools_are_text(episodes: Episodes, http: dict[str, Any]) -> None:
    script = [call("fails"), call("nope"), call("add", a="x"), call("add", a="\ud800", b=1), "done"]
    assert episodes.run(script, http) == {"tool_calls": 4, "tool_errors": 4, "turns": 5}
    results = [result_in(prompt) for prompt in episodes.prompts[1:]]
    patterns = [
        "Error executing tool fails",
        "there is no tool 'nope'; the tools are add",
        "valid integer",
        "surrogates",
    ]
    for result, pattern in zip(results, patterns, strict=True):
        assert pattern in result


def test_an_error_without_a_text_is_named(runner: asyncio.Runner) -> None:
    async def failed(name: str, arguments: dict[str, Any]) -> CallToolResult:
        return CallToolResult(content=[], is_error=True)

    async def called() -> tuple[str, bool]:
        server = tool_agent.Server("s", {"command": "x"}, LIMITS, (), 5.0)
        server._client = SimpleNamespace(call_tool=failed)  # type: ignore[assignment]
        return await server.call("add", {})

    assert runner.run(called()) == ("Error: the tool failed without a message", False)


@pytest.mark.parametrize("arguments", ["{", "[1]", '{"a": NaN}', '{"a": "\\ud800"}', "[" * 100_000, "1" * 10_000])
def test_malformed_arguments_do_not_reach_the_server(runner: asyncio.Runner, arguments: str) -> None:
    text, worked = runner.run(tool_agent.call_tool({"add": (None, None)}, "add", arguments))  # type: ignore[dict-item]
    assert not worked and text.startswith("Error: the arguments are not ")


def test_a_tool_that_hangs_is_an_error(episodes: Episodes, http: dict[str, Any]) -> None:
    metrics = episodes.run([call("hangs"), *[call("add", a=1, b=2)] * 5], http, timeout_s=3, max_turns=3)
    assert metrics == {"tool_calls": 3, "tool_errors": 1, "turns": 3}
    results = ["Error: the tool did not answer within 3 seconds", "sum=3"]
    assert [result_in(prompt) for prompt in episodes.prompts[1:]] == results


# ------------------------------------------------------------------------------------------- the life of servers


@pytest.mark.parametrize(
    ("tool", "text"), [("dies", "last words"), ("greedy", r"memory of \d+ MiB exceeds memory_mb=300")]
)
def test_a_server_that_ends_masks_the_episode(episodes: Episodes, stdio: dict[str, Any], tool: str, text: str) -> None:
    with pytest.raises(UserError, match=rf"(?s)agentic.mcp_servers.s: the server ended during an episode.*{text}"):
        episodes.run([call("daemon"), call(tool), "done"], stdio)


def test_an_http_server_that_ends_masks_the_episode(episodes: Episodes, mark: str) -> None:
    process, servers = start_http(mark)
    with pytest.raises(UserError, match="agentic.mcp_servers.h: the server ended during an episode"):
        episodes.run([call("add", a=1, b=2), call("dies"), "done"], servers)
    process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("cancel_at", [(0.05,), (0.5, 0.1), (4.0,), (4.0, 0.5, 0.5)])
def test_a_cancelled_episode_ends_its_servers(
    episodes: Episodes, stdio: dict[str, Any], mark: str, runner: asyncio.Runner, cancel_at: tuple[float, ...]
) -> None:
    with pytest.raises(asyncio.CancelledError):
        episodes.run([call("daemon"), call("hangs")], stdio, cancel_at=cancel_at)
    if len(cancel_at) > 1:  # a second cancellation does not wait until the servers have ended
        deadline = time.monotonic() + 10
        while (processes(mark) or list(Path(mark).glob("verl_lite-mcp-*"))) and time.monotonic() < deadline:
            runner.run(asyncio.sleep(0.1))


@pytest.mark.slow
def test_children_that_a_tool_forks_end_with_the_episode(
    episodes: Episodes, stdio: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LIMITS, "processes", 100)
    # the fixture `mark` checks that no process is left
    assert episodes.run([call("forks"), "done"], stdio)["turns"] == 2


@pytest.mark.slow
def test_each_episode_has_a_server_of_its_own(episodes: Episodes, stdio: dict[str, Any]) -> None:
    assert episodes.run([call("daemon"), call("place"), "done"], stdio, count=6)["turns"] == 3
    assert len({pid for prompt in episodes.prompts for pid in re.findall(r"pid=(\d+)", prompt)}) == 6


def test_servers_see_no_secrets_and_their_own_folder(
    episodes: Episodes, stdio: dict[str, Any], mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "OPENAI_API_KEY", "ALLOWED"):
        monkeypatch.setenv(name, "x")
    stdio["s"]["env"] = {"OWN": 1, "HOME": "/elsewhere"}
    episodes.run([call("place"), "done"], stdio, environment=["ALLOWED"])
    found = re.fullmatch(r"pid=\d+ folder=(\S+) home=(\S+) variables=(.*)", result_in(episodes.prompts[1]))
    assert found is not None and found[1] == found[2] and found[1].startswith(f"{mark}/verl_lite-mcp-")
    assert "'ALLOWED'" in found[3] and "'OWN'" in found[3] and "KEY" not in found[3]


# ------------------------------------------------------------------------------------------- checks before training


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"command": "python", "args": [SERVER, "MARK", "exits"]}, "does not start: .*correct its command.*no licence"),
        ({"command": "nosuch"}, "a program in PATH .*nosuch: No such file or directory"),
        ({"command": "python", "args": "x.py"}, "expected a list of arguments"),
        ({"url": "http://127.0.0.1:9/mcp"}, "All connection attempts failed; correct its url, or start it"),
        ({"url": "127.0.0.1"}, "protocol.*correct its url"),
        ({"command": "python", "args": [SERVER, "MARK", "toolless"]}, "has no tools"),
        pytest.param(
            {"command": "python", "args": [SERVER, "MARK", "silent"]},
            "no answer within agentic.program_kwargs.timeout_s=2 seconds",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_server_that_cannot_be_used_is_found_before_training(mark: str, entry: dict[str, Any], text: str) -> None:
    if isinstance(words := entry.get("args"), list):
        entry = entry | {"command": sys.executable, "args": [mark if word == "MARK" else word for word in words]}
    with pytest.raises(UserError, match=f"(?s)agentic.mcp_servers.s.*{text}"):
        tool_agent.check_servers({"s": entry}, LIMITS, timeout_s=2 if "silent" in str(entry) else 30)


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserError, match=r'pip install "verl_lite\[mcp\]"'):
        tool_agent.check_servers({}, LIMITS)


def test_names_of_files_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("server.py").touch()
    servers = {"s": {"command": "python", "args": ["server.py", "-x", "y" * 300]}, "h": {"url": "http://x"}}
    located = tool_agent.located(servers)
    assert located["s"] == {"command": "python", "args": [str(tmp_path / "server.py"), "-x", "y" * 300]}
    assert located["h"] == {"url": "http://x"}


def test_mcp_servers_select_this_program() -> None:
    config = AgenticConfig(mcp_servers={"s": {"command": "x"}}, program_kwargs={"max_turns": 3, "system": "s"})
    assert load_function(*program_of(config)) is tool_agent.run


@pytest.mark.slow
def test_a_run_trains_with_the_tools_of_a_server(tmp_path: Path, stdio: dict[str, Any]) -> None:
    folder = tiny_run.write_files(tmp_path, ["a", "b", "c", "d"], max_positions=8192)
    options = ["algorithm.adv_estimator=grpo", "data.max_prompt_length=6000", "trainer.total_training_steps=1"]
    with pytest.raises(UserError, match="agentic.mcp_servers.s: the server does not start"):
        tiny_run.run(folder, "failed", *options, "agentic.mcp_servers={s: {command: nosuch}}")
    [step] = tiny_run.run(folder, "run", *options, f"agentic.mcp_servers={json.dumps(stdio)}")
    assert (step["env/own/turns"], step["env/own/tool_calls"], step["env/error_rate"]) == (1, 0, 0)

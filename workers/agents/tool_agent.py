"""The built-in agent: answers with the tools of MCP servers (agentic.mcp_servers), through the official package `mcp`.

Each episode has a connection of its own to each server. A server with a command runs with limits, in a folder of its
own and without secrets of the trainer (`workers.agents.endpoint.limited`). Episodes share the process of a server with
a url.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
from openai import AsyncOpenAI, BadRequestError

from verl_lite.errors import UserError, printable
from verl_lite.json_types import ChatMessage, DatasetRow, JsonMapping, JsonObject
from verl_lite.machine import process_tree
from verl_lite.machine.event_loop import run_async
from verl_lite.machine.folders import restore_base_folder, temporary_folder
from verl_lite.machine.proxies import local_mounts, proxy_note
from workers.agents.endpoint.limited import COMMAND, base_environment

# the package is an extra
if TYPE_CHECKING:
    from mcp.client.stdio import TransportStreams
    from mcp.types import CallToolResult, Tool

ServerEntry = JsonMapping
"""An entry of agentic.mcp_servers: {command, args, env} or {url, headers}."""

# episodes share its connections
CLIENT = AsyncOpenAI(base_url="http://localhost", api_key="set for each episode")
TIMEOUT_S = 30.0
"""Default time limit of each tool call, and of the start of each server."""
CLOSE_S = 5.0
"""Seconds that a server has to end after its last call."""
ERROR_CHARACTERS = 2_000
"""Number of characters at the end of a server's standard error that are part of a message."""


async def run(
    base_url: str,
    api_key: str,
    row: DatasetRow,
    servers: Mapping[str, ServerEntry],
    limits: Mapping[str, int],
    environment: Iterable[str] = (),
    max_turns: int = 8,
    max_result_chars: int = 4000,
    timeout_s: float = TIMEOUT_S,
    system: str = "",
) -> dict[str, float]:
    """Answers the prompt of `row` with tools, until an answer calls no tool or the context is full.

    Errors of tools become text for the policy. Raises UserError if a server does not start, or ends during the episode.

    Args:
        base_url, api_key: address of the endpoint, and key of the episode.
        row: the task.
        servers, limits, environment: agentic.mcp_servers; limits and environment of agentic.program_options.
        max_turns: maximum number of answers.
        max_result_chars: maximum number of characters of a result that the policy receives.
        timeout_s: time limit of each tool call, and of the start of each server.
        system: text of a system message before the prompt; empty = none.

    Returns:
        The numbers of tool calls, of failed ones, and of answers. The reward function scores the last answer.
    """
    client = CLIENT.with_options(base_url=base_url, api_key=api_key)
    messages: list[ChatMessage] = [*row["prompt"]]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    num_calls = num_errors = turns = 0
    async with contextlib.AsyncExitStack() as stack:
        running_servers = []
        for name, entry in servers.items():
            server = Server(name, entry, limits, environment, timeout_s)
            await stack.enter_async_context(server.running())
            running_servers.append(server)
        tools = named_tools(running_servers)
        functions = [_described_tool(name, named_tool.tool) for name, named_tool in tools.items()]

        while turns < max_turns:
            try:
                reply = await client.chat.completions.create(model="policy", messages=messages, tools=functions)
            except BadRequestError as error:
                # the results of the last calls do not fit; without an answer there is nothing to score
                if error.code == "context_length_exceeded" and turns:
                    break
                raise
            answer = reply.choices[0].message
            messages.append(answer)
            turns += 1
            if not answer.tool_calls:
                break
            for call in answer.tool_calls:
                function = call.function
                result, worked = await call_tool(tools, function.name, function.arguments)
                content = _shortened(result, max_result_chars)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
                num_calls += 1
                num_errors += not worked
    return {"tool_calls": num_calls, "tool_errors": num_errors, "turns": turns}


def _described_tool(name: str, tool: Tool) -> JsonObject:
    """Returns the description of a tool in OpenAI's format, under the name by which the policy calls it."""
    function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _shortened(result: str, max_characters: int) -> str:
    """Returns the first characters of a tool's result, with a note on the number of those that are left out."""
    surplus = len(result) - max_characters
    if surplus <= 0:
        return result
    return f"{result[:max_characters]}\n[{surplus} more characters are left out]"


async def call_tool(tools: Mapping[str, NamedTool], name: str, arguments: str) -> tuple[str, bool]:
    """Calls a tool. A wrong call does not end the episode: the policy receives an error text.

    Args:
        tools: The tools by name; see `named_tools`.
        name: Name that the policy has called.
        arguments: Its arguments as JSON.

    Returns:
        The result or an error as text, and True if the call worked.

    Raises:
        UserError: The server has ended.
    """
    if name not in tools:
        return f"Error: there is no tool {name[:100]!r}; the tools are {', '.join(tools)}", False
    try:
        values = json.loads(arguments)
        # fails for values that cannot be sent: NaN, and characters without an encoding
        json.dumps(values, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        return f"Error: the arguments are not valid JSON: {error}", False
    if not isinstance(values, dict):
        return "Error: the arguments are not a JSON object", False
    named_tool = tools[name]
    return await named_tool.server.call(named_tool.tool.name, values)


def check_servers(
    servers: Mapping[str, ServerEntry],
    limits: Mapping[str, int],
    environment: Iterable[str] = (),
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Starts each server once and lists its tools. Raises UserError if `mcp` is missing or a server is not usable."""
    try:
        import mcp  # noqa: F401
    except ImportError as error:
        raise UserError(f'agentic.mcp_servers: {error}; install the package: pip install "verl_lite[mcp]"') from error

    async def tools_of(name: str, entry: ServerEntry) -> list[Tool]:
        server = Server(name, entry, limits, environment, timeout_s)
        async with server.running():
            return server.tools

    for name, entry in servers.items():
        key = f"agentic.mcp_servers.{name}"
        if not isinstance(entry.get("args") or [], list):
            raise UserError(f"{key}.args={entry['args']!r}: expected a list of arguments")
        if not run_async(tools_of(name, entry)):
            raise UserError(f"{key}: the server has no tools; remove it, or correct its arguments")


def located(servers: Mapping[str, ServerEntry]) -> dict[str, JsonObject]:
    """Returns the servers with absolute paths instead of relative ones, because their commands run in other folders."""
    entries = {}
    for name, entry in servers.items():
        entries[name] = {key: _absolute(value) for key, value in entry.items()}
    return entries


def _absolute(value: object) -> object:
    """Returns a value of an entry, in which each text that is the path of a file becomes absolute."""
    if isinstance(value, list):
        return [_absolute(word) for word in value]
    if isinstance(value, str) and os.path.isfile(value):
        return os.path.abspath(value)
    return value


class Server:
    """The connection of one episode to an MCP server.

    A task of its own opens and closes the connection: the scopes of `mcp` have to be left by the task that entered
    them, and the cancellation of an episode must not interrupt the end of the server's process.

    Args:
        name, entry: Its name and entry in agentic.mcp_servers.
        limits: Limits of its command.
        names: Environment variables that its command inherits besides the usual ones.
        timeout_s: Time limit of its start and of each call.

    Attributes:
        tools: Its tools, once it is running.
    """

    def __init__(
        self, name: str, entry: ServerEntry, limits: Mapping[str, int], names: Iterable[str], timeout_s: float
    ) -> None:
        self.name = name
        self.tools: list[Tool] = []
        self._entry = entry
        self._limits = limits
        self._timeout_s = timeout_s
        self._environment = base_environment(names)
        # YAML reads a number as such, and an environment has only texts
        for variable, value in (entry.get("env") or {}).items():
            self._environment[variable] = str(value)
        # around the whole of `_run`: its deadline limits the start and the end of the server
        self._scope = anyio.CancelScope()
        # set when the tools are known
        self._is_open = asyncio.Event()
        # set when the connection has to end
        self._done = asyncio.Event()
        # why the connection failed
        self._failure: BaseException | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager in which the server is connected. Raises UserError if the server fails."""
        restore_base_folder()
        with tempfile.TemporaryFile() as self._log:
            self._task = asyncio.create_task(self._run())
            opened = asyncio.create_task(self._is_open.wait())
            try:
                # the task ends first if the server does not start
                await asyncio.wait((self._task, opened), return_when=asyncio.FIRST_COMPLETED)
                if not self._is_open.is_set():
                    raise self._error("does not start", self._start_remedy())
                yield
            finally:
                opened.cancel()
                await self._close()
            if self._failure is not None:
                raise self._error("failed")

    def _start_remedy(self) -> str:
        """Returns what to change if the server does not start, for the message."""
        if "url" in self._entry:
            return f"; correct its url, or start it{proxy_note(self._entry['url'])}"
        return "; correct its command (a program in PATH or an absolute file name), args or env"

    async def call(self, tool: str, arguments: JsonObject) -> tuple[str, bool]:
        """Returns the result of a tool or an error as text, and True if it worked. Raises UserError if the server has
        ended."""
        try:
            with anyio.fail_after(self._timeout_s):
                result = await self._client.call_tool(tool, arguments)
        except TimeoutError:
            return f"Error: the tool did not answer within {self._timeout_s:g} seconds", False
        except Exception as error:
            # an error of the protocol, or a result that contradicts the tool's schema
            if not await self._still_answers():
                # its process has written its last message only when it has ended
                await self._close()
                raise self._error("ended during an episode") from error
            return f"Error: {error}", False
        text = text_of(result)
        # the policy could not tell an empty error from an empty result
        if result.is_error and not text:
            text = "Error: the tool failed without a message"
        return text, not result.is_error

    async def _still_answers(self) -> bool:
        """Returns True if the server answers another request. Only then the policy receives an error of a call."""
        try:
            with anyio.fail_after(self._timeout_s):
                await self._list_tools()
        except Exception:
            return False
        return True

    async def _run(self) -> None:
        """Connects to the server, and closes the connection after `_close`."""
        from mcp import Client

        try:
            with self._scope:
                async with contextlib.AsyncExitStack() as stack:
                    # A Python server needs about a second of a core to start: not more at once than there are cores.
                    # The time limit begins when it is this server's turn.
                    async with _start_slots(asyncio.get_running_loop()):
                        self._scope.deadline = anyio.current_time() + self._timeout_s
                        self._client = await stack.enter_async_context(Client(self._streams()))
                        self.tools = await self._list_tools()
                        # from now on, `call` limits the time
                        self._scope.deadline = math.inf
                    self._is_open.set()
                    await self._done.wait()
                    self._scope.deadline = anyio.current_time() + CLOSE_S
        except Exception as error:
            self._failure = error
            # the task groups of `mcp` wrap the error of a server
            while isinstance(self._failure, ExceptionGroup):
                self._failure = self._failure.exceptions[0]
        # `_close` and the deadline of the end cancel the scope, too, which is no failure
        if self._scope.cancelled_caught and not self._done.is_set():
            limit = f"agentic.program_kwargs.timeout_s={self._timeout_s:g} seconds"
            self._failure = TimeoutError(f"no answer within {limit}")

    async def _close(self) -> None:
        """Ends the connection and the process of the server. A cancellation does not interrupt that."""
        self._done.set()
        if not self._is_open.is_set():
            self._scope.cancel()
        await asyncio.shield(self._task)

    def _streams(self) -> contextlib.AbstractAsyncContextManager[TransportStreams]:
        """Starts the command of the server, or connects to its url. Returns a transport of `mcp`."""
        if "url" in self._entry:
            return self._streams_of_url()
        return self._streams_of_command()

    @contextlib.asynccontextmanager
    async def _streams_of_url(self) -> AsyncIterator[TransportStreams]:
        import httpx2
        from mcp.client.streamable_http import streamable_http_client

        # `call` and `_run` limit the time of answers
        timeout = httpx2.Timeout(self._timeout_s, read=None)
        client = httpx2.AsyncClient(headers=self._entry.get("headers"), timeout=timeout, mounts=local_mounts())
        async with client as http:
            async with streamable_http_client(self._entry["url"], http_client=http) as streams:
                yield streams

    @contextlib.asynccontextmanager
    async def _streams_of_command(self) -> AsyncIterator[TransportStreams]:
        from mcp import StdioServerParameters, stdio_client

        with temporary_folder("verl_lite-mcp-") as folder:
            program, *arguments = COMMAND
            arguments += [json.dumps(self._limits), self._entry["command"]]
            arguments += self._entry.get("args") or []
            mark = process_tree.new_mark()
            environment = self._environment | {process_tree.MARK: mark}
            environment |= {"HOME": str(folder), "TMPDIR": str(folder)}
            server = StdioServerParameters(command=program, args=arguments, env=environment, cwd=folder)
            try:
                async with stdio_client(server, errlog=self._log) as streams:  # type: ignore[arg-type]
                    yield streams
            finally:
                # `mcp` kills the process with the limits if it takes long, and its children would stay
                process_tree.end_marked(mark, reaps=True)

    async def _list_tools(self) -> list[Tool]:
        """Returns all tools of the server, which lists them in pages."""
        tools: list[Tool] = []
        cursor: str | None = None
        while True:
            # not from the client's cache, because `_still_answers` needs a request
            page = await self._client.list_tools(cursor=cursor, cache_mode="refresh")
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools

    def _error(self, problem: str, remedy: str = "") -> UserError:
        """Returns the error of a server that cannot be used, with the end of its standard error."""
        reason = "its process or its connection has ended"
        if self._failure is not None:
            # some exceptions have no text
            reason = str(self._failure) or repr(self._failure)

        log = self._log.fileno()
        start = max(0, os.fstat(log).st_size - ERROR_CHARACTERS)
        # `pread` leaves the position unchanged, at which the process writes
        written = os.pread(log, ERROR_CHARACTERS, start)
        output = ""
        if written:
            output = f"; it wrote:\n{printable(written.decode(errors='replace'))}"
        return UserError(f"agentic.mcp_servers.{self.name}: the server {problem}: {reason}{remedy}{output}")


@dataclass(frozen=True)
class NamedTool:
    """A tool and its server. The policy may know the tool by another name than the server."""

    server: Server
    tool: Tool


def named_tools(servers: Sequence[Server]) -> dict[str, NamedTool]:
    """Returns the tools of all servers by name. If several servers have a tool of the same name, the names of these
    tools begin with the server's name."""
    # how many servers have a tool of this name
    counts: Counter[str] = Counter()
    for server in servers:
        counts.update(tool.name for tool in server.tools)

    tools = {}
    for server in servers:
        for tool in server.tools:
            name = tool.name if counts[tool.name] == 1 else f"{server.name}__{tool.name}"
            tools[name] = NamedTool(server, tool)
    return tools


def text_of(result: CallToolResult) -> str:
    """Returns the text of a tool's result, in which content of other types is named."""
    parts = []
    for block in result.content:
        # an embedded resource has its text or its data inside
        content = getattr(block, "resource", block)
        kind = getattr(content, "mime_type", None) or "unknown type"
        placeholder = f"[{block.type} of {kind}, which is not shown]"
        parts.append(getattr(content, "text", placeholder))
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content))
    return "\n".join(parts)


@functools.lru_cache(maxsize=1)
def _start_slots(loop: asyncio.AbstractEventLoop) -> asyncio.Semaphore:
    """Returns the semaphore that limits how many servers start at the same time. All episodes of the loop share it."""
    return asyncio.Semaphore(os.cpu_count() or 1)

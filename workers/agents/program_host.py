"""Runs programs: in a process of a supervised pool as functions, or as commands that such a process starts.

A program is an agent of the user. It receives the address of the endpoint, an API key and a task, talks to the model,
and returns nothing, a score, or a dict of a score and metrics. Commands run with limits, in a folder of their own and
with an environment that has no secrets of the trainer (`workers.agents.endpoint.limited`).
"""

import functools
import inspect
import json
import math
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from verl_lite.config import AgenticConfig, ProgramConfig
from verl_lite.errors import UserError
from verl_lite.json_types import DatasetRow, JsonObject, KeywordArguments
from verl_lite.machine.folders import temporary_folder
from verl_lite.machine.host import cpu_count
from verl_lite.machine.process_tree import ProcessTree, end_adopted, hide_memory
from verl_lite.registry import Registry
from workers.agents.endpoint.callers import key_digest
from workers.agents.endpoint.limited import COMMAND, CommandLimits, base_environment
from workers.agents.env_host import NonsenseError, check_metric_names, read_number
from workers.pool.child_main import AsyncCalls, Overdue
from workers.pool.process_pool import PoolSpec

Program = Callable[..., object]
"""A user's function. It receives base_url, api_key, row and agentic.program_kwargs; `read_result` checks its result."""
PROGRAMS: Registry[Program] = Registry("program")
TOOL_AGENT = "workers.agents.tool_agent:run"
"""The built-in agent, which runs with agentic.mcp_servers and leaves the score to the reward function."""
RESULT_BYTES_MAX = 1 << 20
"""Size of the largest file that a command may write as its result."""
ERROR_CHARACTERS = 4_000
"""Number of bytes at the end of a command's output that are part of a message."""
NAMES_SHOWN, NAME_CHARACTERS = 8, 100
"""Bounds of `ProgramResult.names`: number of names, and length of each."""
THREADS = 64
"""Default number of episodes at the same time in each process. Commands use the cores of the machine instead."""

_TIME_LIMIT = "agentic.program_options.timeout_s"
_CHECK_S = 0.5
"""Seconds between two looks at a running command."""
_NO_KEY = "pass-api_key-to-the-client"
"""API key in the environment of functions that share a process, where it cannot identify an episode."""


class ProgramError(UserError):
    """The program cannot be used: it does not load, or its processes do not start."""


@dataclass(frozen=True)
class ProgramCall:
    """A call that runs the program for one episode.

    Attributes:
        url: Address of the endpoint, without /v1.
        api_key: Key of the episode.
        row: The task.
    """

    url: str
    api_key: str
    row: DatasetRow


@dataclass(frozen=True)
class ProgramResult:
    """The result of a program.

    Attributes:
        score: Its score; None if it returned none.
        metrics: Other numbers that it returned.
        names: Some names of a dict that has no entry `score`; empty for other results.
    """

    score: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    names: tuple[str, ...] = ()


def is_command(program: str) -> bool:
    """Returns True for a command line, False for package.module:function."""
    module, _, name = program.partition(":")
    identifiers = [*module.split("."), name]
    return not all(identifier.isidentifier() for identifier in identifiers)


def client_environment(url: str, api_key: str) -> dict[str, str]:
    """Returns the variables that the clients of OpenAI and Anthropic read."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": api_key,
        # otherwise the Agents SDK sends its traces to OpenAI
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        # a proxy in the environment would get the requests to the endpoint
        "NO_PROXY": "127.0.0.1,localhost,::1",
        "no_proxy": "127.0.0.1,localhost,::1",
    }


class ProgramHost:
    """Handler of a pool's process that runs the program. A session is one episode.

    Args:
        program: package.module:function, or a command line.
        kwargs: further arguments of the function.
        config: section agentic.program_options.
        threads: number of episodes at the same time; with 1, the process's environment has the address and the key of
            the episode.

    Attributes:
        style, thread: see `workers.pool.child_main.Handler`.
    """

    def __init__(self, program: str, kwargs: KeywordArguments, config: ProgramConfig, threads: int) -> None:
        self._program = program
        self._config = config
        self._kwargs = dict(kwargs)
        self._has_own_environment = threads == 1
        self._command: list[str] | None = None
        self._function: Program | None = None
        words = shlex.split(program) if is_command(program) else []
        if words:
            if shutil.which(words[0]) is None:
                raise UserError(f"agentic.program={program}: there is no command {words[0]!r}")
            self._command = words
            self.style = "commands"
        else:
            self._function = load_function(program, self._kwargs)
            self.style = "async" if inspect.iscoroutinefunction(self._function) else "threads"
        # the memory holds the keys of the episodes, and commands of other episodes run as the same user
        hide_memory()
        self.thread: int | None = None
        if self.style == "async":
            self._coroutines = AsyncCalls()
            self.thread = self._coroutines.thread

    def run(self, session: int, payload: ProgramCall) -> ProgramResult:
        """Runs the program. Raises every exception of the program, NonsenseError for an invalid result, and Overdue."""
        if self._command is not None:
            returned = self._run_command(self._command, payload)
        else:
            returned = self._run_function(payload)
        result = read_result(returned)
        if self._program != TOOL_AGENT:
            return result
        # the built-in agent leaves the score to the reward function, so its other numbers are no misspelt score
        return replace(result, names=())

    def _run_function(self, payload: ProgramCall) -> object:
        """Calls the function in an environment that its clients read. Returns what it returned."""
        if not self._has_own_environment:
            # the episodes of a process share its environment, which can have the address, but no key
            os.environ |= client_environment(payload.url, _NO_KEY)
            return self._call_function(payload)
        os.environ |= client_environment(payload.url, payload.api_key)
        try:
            return self._call_function(payload)
        finally:
            # a process that lives longer than the episode keeps no key
            os.environ |= client_environment(payload.url, _NO_KEY)

    def _call_function(self, payload: ProgramCall) -> object:
        """Calls the function, and waits for its result if it is a coroutine."""
        assert self._function is not None
        base_url = f"{payload.url}/v1"
        returned = self._function(base_url=base_url, api_key=payload.api_key, row=payload.row, **self._kwargs)
        if self.style != "async":
            return returned
        assert inspect.iscoroutine(returned)
        return self._coroutines.run(returned, self._config.timeout_s, "program", _TIME_LIMIT)

    def end(self, session: int) -> None:
        """Does nothing: an episode is a single call."""

    def _run_command(self, command: list[str], payload: ProgramCall) -> object:
        """Runs the command with the task as JSON in its standard input. Returns the JSON that it wrote to the file
        $VERL_LITE_RESULT; None if it wrote none."""
        limits = limits_of(self._config)
        limits["key"] = key_digest(payload.api_key)
        with (
            temporary_folder("verl_lite-program-") as folder,
            tempfile.TemporaryFile() as task,
            tempfile.TemporaryFile() as output,
        ):
            result_path = folder / "result.json"
            environment = base_environment(self._config.environment)
            environment |= client_environment(payload.url, payload.api_key)
            environment |= {"VERL_LITE_RESULT": str(result_path), "HOME": str(folder), "TMPDIR": str(folder)}
            content = json.dumps({"row": payload.row, **self._kwargs})
            task.write(content.encode())
            task.seek(0)

            tree = ProcessTree(
                [*COMMAND, json.dumps(limits), *command],
                environment,
                stdin=task,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
            )
            try:
                status = self._wait(tree)
            finally:
                tree.end()
                # a command that killed the process with its limits left children behind
                end_adopted()

            if status:
                end_of_output = _end_of_file(output, ERROR_CHARACTERS)
                raise UserError(f"The program {shlex.join(command)} ended with status {status}:\n{end_of_output}")
            # before the folder is removed
            return read_result_file(result_path)

    def _wait(self, tree: ProcessTree) -> int:
        """Waits for the end of a command and returns its exit status.

        Raises:
            Overdue: The command took longer than its time limit.
            UserError: Nobody enforces the other limits any more.
        """
        until = time.monotonic() + self._config.timeout_s
        while (status := tree.wait(_CHECK_S)) is None:
            # a command can stop the process that enforces its limits, because both run as the same user
            if tree.is_stopped:
                raise UserError(
                    "The process that enforces agentic.program_options was stopped; the program was killed."
                )
            if time.monotonic() > until:
                limit = f"{_TIME_LIMIT}={self._config.timeout_s:g} seconds"
                raise Overdue(f"The program took longer than {limit}; it was killed.")
        return status


def _end_of_file(file: IO[bytes], size: int) -> str:
    """Returns the last `size` bytes of a file as text."""
    file_size = file.seek(0, os.SEEK_END)
    file.seek(max(0, file_size - size))
    return file.read().decode(errors="replace")


def read_result_file(path: Path) -> object:
    """Returns the JSON in a file that a command wrote; None without a file.

    Raises NonsenseError if it is no file, is too large or is not JSON. A link or a pipe is not opened: reading could
    show another file, or wait forever.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NonsenseError(f"the file $VERL_LITE_RESULT cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise NonsenseError("$VERL_LITE_RESULT is no regular file")
    with open(handle, "rb") as file:
        # one byte more than allowed shows that a file is too long, whatever its length
        written = file.read(RESULT_BYTES_MAX + 1)
    if len(written) > RESULT_BYTES_MAX:
        raise NonsenseError(f"the file $VERL_LITE_RESULT has more than {RESULT_BYTES_MAX} bytes")
    try:
        return json.loads(written)
    except (ValueError, RecursionError) as error:
        raise NonsenseError(f"the file $VERL_LITE_RESULT is not JSON: {error}") from error


def program_of(config: AgenticConfig) -> tuple[str, JsonObject]:
    """Returns the program of a run and its further arguments: agentic.program, or the built-in agent."""
    if config.program is not None:
        return config.program, config.program_kwargs
    kwargs = {
        "servers": config.mcp_servers,
        "limits": limits_of(config.program_options),
        "environment": config.program_options.environment,
        **config.program_kwargs,
    }
    return TOOL_AGENT, kwargs


def episodes_per_process(config: AgenticConfig) -> int:
    """Returns the number of episodes that run at the same time in each process: agentic.env_pool.threads."""
    pool = config.env_pool
    if pool.threads is not None:
        return pool.threads
    # each command is at least one further process that starts at once, so their default follows the number of cores
    if config.program is not None and is_command(config.program):
        return math.ceil(cpu_count() / pool.num_workers)
    return THREADS


def limits_of(program_options: ProgramConfig) -> CommandLimits:
    """Returns the limits that `workers.agents.endpoint.limited` enforces."""
    return {
        "memory_mb": program_options.memory_mb,
        "processes": program_options.processes,
        "file_mb": program_options.file_mb,
    }


def program_pool(
    config: AgenticConfig, log_dir: str | None = None, on_repeat: Callable[[int], None] | None = None
) -> PoolSpec[ProgramCall, ProgramResult]:
    """Returns the description of the pool that runs the program. For the arguments see `PoolSpec`."""
    program, kwargs = program_of(config)
    options = config.program_options
    threads = episodes_per_process(config)
    # functions keep the user's home; commands get a temporary one (`ProgramHost`)
    environment = base_environment([*options.environment, "HOME"])
    return PoolSpec(
        functools.partial(ProgramHost, program, kwargs, options, threads),
        name="program",
        what="program",
        options="agentic.program_options",
        error=ProgramError,
        num_workers=config.env_pool.num_workers,
        threads=threads,
        timeout_s=options.timeout_s,
        log_dir=log_dir,
        environment=environment,
        on_repeat=on_repeat,
    )


def load_function(program: str, kwargs: KeywordArguments) -> Program:
    """Imports the function package.module:function.

    Args:
        program: Name of the function.
        kwargs: Its further arguments.

    Raises:
        UserError: The function is missing, or cannot be called with base_url, api_key, row and `kwargs`.
    """
    try:
        function = PROGRAMS.get_fn(program)
        # a wrong argument is an error at the start of the run, not of every episode
        signature = inspect.signature(function)
        signature.bind(base_url="", api_key="", row={}, **kwargs)
    except (ValueError, TypeError) as error:
        further_arguments = "".join(f", {name}" for name in kwargs)
        raise UserError(
            f"agentic.program={program}: {error}; expected package.module:function that accepts base_url, api_key, row"
            f"{further_arguments} (agentic.program_kwargs), or a command line"
        ) from error
    return function


def read_result(returned: object) -> ProgramResult:
    """Checks what a program returned: None, a number, or a dict of a score and metrics, in which text is ignored.

    Raises NonsenseError if the score or a metric is no finite number, or if a name cannot be that of a metric.
    """
    entries = returned if isinstance(returned, dict) else {"score": returned}
    # other entries may be text, but a score is never guessed
    if isinstance(entries.get("score"), str):
        raise NonsenseError(
            f"'score' in the result of the program is {entries['score']!r:.200}, expected a finite number"
        )

    values = {}
    for name, value in entries.items():
        if value is not None and not isinstance(value, str):
            values[name] = value
    metric_names = [name for name in values if name != "score"]
    check_metric_names("the result of the program", metric_names)

    numbers = {}
    for name, value in values.items():
        numbers[name] = read_number(f"{name!r} in the result of the program", value)
    score = numbers.pop("score", None)
    return ProgramResult(score, numbers, _names_without_score(entries))


def _names_without_score(entries: Collection[object]) -> tuple[str, ...]:
    """Returns the first names of a result that has no entry `score`; otherwise none."""
    if "score" in entries:
        return ()
    names = list(entries)[:NAMES_SHOWN]
    return tuple(str(name)[:NAME_CHARACTERS] for name in names)

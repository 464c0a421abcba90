"""Adapters for environments of two hubs: `verifiers` (Prime Intellect) and `openenv` (Meta).

verifiers   modules with load_environment(); their rollout loop runs in this process, with the agent as its model
openenv     servers that receive actions, and return observations and rewards
"""

import asyncio
import importlib
import json
import logging
import re
import threading
import types
from collections.abc import Coroutine, Mapping, Sequence
from typing import NoReturn, Protocol, TypeAlias, TypedDict, TypeVar

from verl_lite.envs.base import Info, StepResult, register_env
from verl_lite.envs.tool_calls import ToolCall, calls_behind_thinking, parse_tool_calls, with_types
from verl_lite.errors import UserError
from verl_lite.json_types import JsonMapping, JsonObject, KeywordArguments
from verl_lite.registry import Registry

T = TypeVar("T")
Tools: TypeAlias = Mapping[str, JsonMapping]
"""Tools by name; each has name, description, and parameters (a JSON schema)."""


# ---------------------------------------------------------------------- what this module reads of the two packages


class _Message(Protocol):
    """A message of a conversation in verifiers."""

    role: str
    content: str | list[JsonObject] | None


class _Tool(Protocol):
    """A tool that verifiers offers to the model."""

    name: str

    def model_dump(self, *, exclude: set[str]) -> JsonObject: ...


class _FinalState(TypedDict):
    """The state of a rollout of verifiers after its end, with the scores of the rubric."""

    reward: float
    metrics: dict[str, float]
    stop_condition: str | None
    error: Exception | None


class _Rubric(Protocol):
    """The rewards of an environment of verifiers, which it writes into the state."""

    async def score_rollout(self, state: _FinalState) -> None: ...

    async def cleanup(self, state: _FinalState) -> None: ...


class _VerifiersEnvironment(Protocol):
    """An environment of verifiers."""

    rubric: _Rubric
    requires_group_rollouts: bool

    def build_dataset(self) -> Sequence[JsonMapping]: ...

    def build_eval_dataset(self) -> Sequence[JsonMapping]: ...

    async def rollout(self, row: JsonMapping, client: object, model: str, sampling: JsonObject) -> _FinalState: ...


class _ServerReply(Protocol):
    """The reply of an OpenEnv server to reset and step."""

    observation: object
    # a server may send null or a text, which `OpenEnv.step` and the caller of the environment check
    reward: float
    done: bool


@register_env("verifiers")
class VerifiersEnv:
    """An environment of `verifiers`. Its own rollout loop runs, with the agent in place of the model's client.

    The loop runs in a thread and calls `get_response` for each turn of the model. Two queues connect it with `reset`
    and `step`: `_requests` takes the loop's prompts and at last its end, `_responses` takes the agent's turns.

    The last step returns the reward and the metrics of the rubric. If verifiers ends the rollout with an error, or a
    reward function raises, the episode fails; verifiers alone would continue with the reward 0.

    Args:
        env_id, env_args: module of the environment, and arguments of its load_environment.
        split: data of the episodes, "train" or "eval". The row of an episode is its seed modulo the number of rows.
        success_reward: reward from which an episode is a success.
    """

    def __init__(
        self, env_id: str, env_args: KeywordArguments | None = None, split: str = "train", success_reward: float = 1.0
    ) -> None:
        if split not in ("train", "eval"):
            raise UserError(f"split={split!r}: expected train or eval")
        self._verifiers = _import_verifiers()
        self.success_reward = success_reward
        try:
            self.env: _VerifiersEnvironment = self._verifiers.load_environment(env_id, **dict(env_args or {}))
            if split == "train":
                self.rows = self.env.build_dataset()
            else:
                self.rows = self.env.build_eval_dataset()
        except Exception as error:
            # the environment's module may raise anything
            raise UserError(f"env_id={env_id!r}, env_args={env_args}: verifiers cannot load it: {error}") from error
        if not self.rows:
            raise UserError(f"env_id={env_id!r}: it has no rows for split={split!r}; expected at least one")
        if self.env.requires_group_rollouts:
            raise UserError(f"env_id={env_id!r}: its rubric scores groups of episodes, which is not supported")

        self.tools: Tools = {}
        self._prompt: list[_Message] = []
        # in its own thread, because the caller's thread may already run a loop
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, name="verifiers", daemon=True).start()
        self._episode: asyncio.Future[_FinalState] = self._loop.create_future()

    def reset(self, seed: int) -> tuple[str, Info]:
        row = self.rows[seed % len(self.rows)]
        self._run(self._begin(row))
        system_messages = [message for message in self._prompt if message.role == "system"]
        other_messages = [message for message in self._prompt if message.role != "system"]
        instruction = _describe(self.tools)
        system_text = _text_of(system_messages)
        if system_text:
            instruction = f"{system_text}\n{instruction}"
        return _text_of(other_messages), {"env_instruction": instruction}

    def step(self, action: str) -> StepResult:
        text = _encodable(action)
        try:
            calls = _tool_calls(text, self.tools)
        except (ValueError, RecursionError) as error:
            # the environment does not see this turn
            return f"Error: {error}", 0.0, False, False, _info(valid=False, is_tool=True)

        prompt_before = self._prompt
        response = self._response(text, calls)
        final_state = self._run(self._exchange(response))
        if final_state is not None:
            reward = final_state["reward"]
            is_success = reward >= self.success_reward
            info = _info(success=is_success, scores=final_state["metrics"])
            return f"Reward {reward}.", reward, True, False, info

        # an environment usually appends its messages to the agent's turn, but may also rewrite the conversation
        new_messages = self._prompt
        num_before = len(prompt_before)
        is_continued = self._prompt[:num_before] == prompt_before
        if is_continued:
            # without the agent's own turn
            new_messages = self._prompt[num_before + 1 :]
        is_tool = all(message.role == "tool" for message in new_messages)
        return _text_of(new_messages), 0.0, False, False, _info(is_tool=is_tool)

    def close(self) -> None:
        self._run(self._cancel())
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def get_response(
        self, prompt: list[_Message], *_: object, tools: Sequence[_Tool] | None = None, **__: object
    ) -> object:
        """Returns the agent's next turn. verifiers calls this method of its model client."""
        tools_by_name: dict[str, JsonObject] = {}
        for tool in tools or ():
            tools_by_name[tool.name] = tool.model_dump(exclude={"strict"})
        await self._requests.put((prompt, tools_by_name))
        return await self._responses.get()

    def _serve(self) -> None:
        """Runs the event loop of the rollouts in its thread, until `close` stops it."""
        self._loop.run_forever()
        self._loop.close()

    def _run(self, work: Coroutine[object, None, T]) -> T:
        """Runs a coroutine in the thread of the rollout and waits for its result."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()

    async def _begin(self, row: JsonMapping) -> None:
        """Starts the rollout of a row, and waits for its first prompt."""
        await self._cancel()
        # new queues, so that nothing of an abandoned episode reaches this one
        self._requests: asyncio.Queue[tuple[list[_Message], Tools] | asyncio.Future[_FinalState]] = asyncio.Queue()
        self._responses: asyncio.Queue[object] = asyncio.Queue()
        self._episode = asyncio.ensure_future(self._rollout(row))
        # when the loop ends, its future follows the prompts into the queue; otherwise `_exchange` would wait forever
        self._episode.add_done_callback(self._requests.put_nowait)
        final_state = await self._exchange()
        if final_state is not None:
            raise RuntimeError(f"verifiers ended the episode before its first turn: {final_state['stop_condition']}")

    async def _cancel(self) -> None:
        """Ends the episode that is running, if there is one."""
        self._episode.cancel()
        await asyncio.wait({self._episode})

    async def _exchange(self, response: object = None) -> _FinalState | None:
        """Passes a turn to the rollout, if there is one, and waits for the next prompt.

        Returns the state if the episode has ended, and raises the exception of an episode that failed.
        """
        if self._episode.done() and self._requests.empty():
            raise RuntimeError("the episode has ended; call reset")
        if response is not None:
            await self._responses.put(response)
        request = await self._requests.get()
        # the future of the episode, which has ended
        if isinstance(request, asyncio.Future):
            return request.result()
        self._prompt, self.tools = request
        return None

    async def _rollout(self, row: JsonMapping) -> _FinalState:
        """Runs an episode in verifiers, which calls `get_response` for each turn, and scores it."""
        state = await self.env.rollout(row, self, "agent", {})
        if state["error"] is not None:
            raise RuntimeError(f"verifiers ended the episode with {state['error']!r}") from state["error"]
        await self.env.rubric.score_rollout(state)
        await self.env.rubric.cleanup(state)
        return state

    def _response(self, text: str, calls: list[ToolCall]) -> object:
        """Returns a turn as a model's response. Its content ends before the first tool call."""
        verifiers_types = self._verifiers.types
        turn = len(self._prompt)
        content = text
        finish_reason = "stop"
        if calls:
            content = text[: calls_behind_thinking(text).start]
            finish_reason = "tool_calls"
        tool_calls = []
        for number, call in enumerate(calls):
            identifier = f"call_{turn}_{number}"
            arguments = json.dumps(call.arguments)
            tool_calls.append(verifiers_types.ToolCall(id=identifier, name=call.name, arguments=arguments))
        message = verifiers_types.ResponseMessage(
            content=content, tool_calls=tool_calls or None, finish_reason=finish_reason, is_truncated=False
        )
        return verifiers_types.Response(id=f"turn_{turn}", created=0, model="agent", message=message)


@register_env("openenv")
class OpenEnv:
    """A session with an OpenEnv server.

    If the server rejects an action, or ends an episode without a number as the reward, the episode fails.

    Args:
        base_url: URL of the server.
        action_fields, action_pattern: fields of an action, and a regular expression in which `.` matches line ends,
            with one group for each field. A text that does not match it is not sent.
        observation_field: field that is shown; None = all fields as JSON.
        client, action_class: pkg.module:Class of the client and of its actions; by default the client without types.
        reset_options: arguments of reset besides the seed.
        env_instruction: description of the task.
        timeout_s: time limit of a connection, reset or step.
        success_reward: sum of rewards from which a completed episode is a success.
    """

    def __init__(
        self,
        base_url: str,
        action_fields: str | Sequence[str] = "message",
        action_pattern: str = "(.*)",
        observation_field: str | None = None,
        client: str = "openenv.core:GenericEnvClient",
        action_class: str = "builtins:dict",
        reset_options: KeywordArguments | None = None,
        env_instruction: str = "",
        timeout_s: float = 30.0,
        success_reward: float = 1.0,
    ) -> None:
        _import("openenv.core", "openenv")
        self.base_url = base_url
        # a text is one field, not a sequence of characters
        if isinstance(action_fields, str):
            action_fields = [action_fields]
        self.fields = list(action_fields)
        self.observation_field = observation_field
        self.reset_options = dict(reset_options or {})
        self.instruction = env_instruction
        self.timeout_s = timeout_s
        self.success_reward = success_reward
        self.score = 0.0
        self.text = ""

        classes = Registry[type]("class")
        try:
            self.pattern = re.compile(action_pattern, re.DOTALL)
            self.action_class = classes.get_fn(action_class)
            client_class = classes.get_fn(client)
            asynchronous_client = client_class(
                base_url=base_url, connect_timeout_s=timeout_s, message_timeout_s=timeout_s
            )
            self.client = asynchronous_client.sync()
        except (re.error, ValueError, TypeError, AttributeError) as error:
            raise UserError(f"action_pattern={action_pattern!r}, client={client!r}: {error}") from error
        if self.pattern.groups != len(self.fields):
            raise UserError(f"action_pattern={action_pattern!r}: expected one group for each of {self.fields}")
        try:
            self._call("connect")
        except RuntimeError as error:
            raise UserError(f"{error}; start the server, or correct base_url") from error

    def reset(self, seed: int) -> tuple[str, Info]:
        options = {**self.reset_options, "seed": seed % 2**31}
        result = self._call("reset", **options)
        self.score = 0.0
        self.text = self._text(result.observation)
        # the connection to the server's session of this episode; see `step`
        self.connection = self.client._ws
        return self.text, {"env_instruction": self.instruction}

    def step(self, action: str) -> StepResult:
        match = self.pattern.search(_encodable(action))
        if match is None:
            hint = f"This is not an action. Actions match {self.pattern.pattern}\n"
            return hint + self.text, 0.0, False, False, _info(valid=False)

        values = dict(zip(self.fields, match.groups(), strict=True))
        result = self._call("step", self.action_class(**values))
        # the client reconnects by itself; a new connection starts another session, which was not reset
        if self.client._ws is not self.connection:
            raise RuntimeError(f"base_url={self.base_url!r}: the connection was lost during the episode")

        # only the last step needs a number; without one there, the caller fails the episode
        reward = result.reward
        if reward is None and not result.done:
            reward = 0.0
        if isinstance(reward, int | float):
            self.score += reward
        self.text = self._text(result.observation)
        is_success = bool(result.done) and self.score >= self.success_reward
        return self.text, reward, result.done, False, _info(success=is_success)

    def close(self) -> None:
        self.client.close()

    def _call(self, method: str, *arguments: object, **options: object) -> _ServerReply:
        """Calls a method of the client. Raises RuntimeError if the server fails or exceeds timeout_s."""
        try:
            client_method = getattr(self.client, method)
            result: _ServerReply = client_method(*arguments, **options)
            return result
        except Exception as error:
            message = f"base_url={self.base_url!r}: {method} failed or exceeded timeout_s={self.timeout_s:g}: {error!r}"
            raise RuntimeError(message) from error

    def _text(self, observation: object) -> str:
        """Returns the text of an observation: a model of pydantic, or a dict."""
        fields: object = observation
        if hasattr(observation, "model_dump"):
            fields = observation.model_dump()
        name = self.observation_field
        is_missing = name is not None and isinstance(fields, Mapping) and name not in fields
        if not isinstance(fields, Mapping) or not fields or is_missing:
            expected = f"the field {name}" if name else "an observation with fields"
            raise RuntimeError(f"base_url={self.base_url!r}: the server returned {fields!r:.200}, expected {expected}")
        content: object = fields
        if name is not None:
            content = fields[name]
        if isinstance(content, str):
            return content
        return json.dumps(content, ensure_ascii=False, default=str)


class _RaisingHandler(logging.Handler):
    """Raises what rubrics log as an error: they log the exception of a reward function and continue with 0."""

    def emit(self, record: logging.LogRecord) -> NoReturn:
        raise RuntimeError(record.getMessage())


def _import_verifiers() -> types.ModuleType:
    """Imports verifiers, and adapts it to a rollout in a thread whose model is an agent."""
    verifiers = _import("verifiers.legacy", "verifiers")
    # its rollouts take only an instance of this class for a client
    clients = importlib.import_module("verifiers.legacy.clients")
    clients.Client.register(VerifiersEnv)
    # each environment would replace the process's signal handlers, which only the main thread can do
    environment_module = importlib.import_module("verifiers.legacy.envs.environment")
    vars(environment_module)["signal"] = types.SimpleNamespace(signal=lambda *_: None, SIGINT=None, SIGTERM=None)
    # a failed reward function must fail the episode
    logger = logging.getLogger("verifiers.legacy.rubrics.rubric")
    logger.handlers = [_RaisingHandler()]
    logger.setLevel(logging.ERROR)
    return verifiers


def _import(module: str, extra: str) -> types.ModuleType:
    """Imports a module of an optional package. Raises UserError, with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        install = f"pip install 'verl_lite[{extra}]' in an environment of its own, because {extra} needs mcp<2"
        raise UserError(f"env_type {extra} needs the package {extra}: {error}; {install}") from error


def _text_of(messages: Sequence[_Message]) -> str:
    """Joins the texts of messages. Messages of an assistant, which occur in prompts with examples, are marked."""
    texts = []
    for message in messages:
        content = message.content
        parts: list[JsonObject] = [{"type": "text", "text": content}]
        if isinstance(content, list):
            parts = content
        other_types = {part.get("type") for part in parts} - {"text"}
        if other_types:
            raise UserError(f"the environment sent parts of the types {other_types}; only text is supported")
        text = "".join(part.get("text") or "" for part in parts)
        if message.role == "assistant":
            text = f"assistant: {text}"
        texts.append(text)
    return "\n\n".join(texts)


def _describe(tools: Tools) -> str:
    """Returns the part of the instruction that lists the tools."""
    if not tools:
        return ""
    call = 'A call: <tool_call>{"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}</tool_call>\n'
    schemas = [json.dumps(tool) for tool in tools.values()]
    return "\n".join(["You may call these tools:", *schemas, call])


def _tool_calls(text: str, tools: Tools) -> list[ToolCall]:
    """Returns the tool calls in a text; none if there are no tools.

    Raises:
        ValueError, RecursionError: for a call that cannot be parsed. The message is worded for the agent.
    """
    if not tools:
        return []
    calls = []
    for call in parse_tool_calls(text):
        if call.problem:
            raise ValueError(call.problem)
        schema = tools.get(call.name, {}).get("parameters")
        calls.append(with_types(call, schema))

    # as json text, in which halves of surrogate pairs are replaced at any depth of the arguments
    pairs = [[call.name, call.arguments] for call in calls]
    pairs_as_text = _encodable(json.dumps(pairs, ensure_ascii=False))
    return [ToolCall(name, arguments) for name, arguments in json.loads(pairs_as_text)]


def _encodable(text: str) -> str:
    """Replaces halves of surrogate pairs, which an agent can write in JSON and UTF-8 cannot encode."""
    return text.encode(errors="replace").decode()


def _info(
    *, valid: bool = True, success: bool = False, is_tool: bool = False, scores: Mapping[str, float] | None = None
) -> Info:
    """Returns the info of a step.

    Args:
        valid: whether the agent's text was an action.
        success: whether the task is done.
        is_tool: whether the observation is the result of a tool.
        scores: metrics of the environment, which can replace `success`.
    """
    metrics: dict[str, float] = {"success": success}
    metrics.update(scores or {})
    metrics["action_is_valid"] = valid
    modes = dict.fromkeys(metrics, "last")
    modes["action_is_valid"] = "mean"
    return {"metrics": metrics, "metrics_agg_mode": modes, "use_tool": is_tool}

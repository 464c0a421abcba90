"""The token bookkeeping of one episode: a tree of requests and their answers, and the training rows of the tree.

A request contains a whole conversation. `Trace.add` finds the longest beginning of it that ends with an answer of this
episode, and continues the token ids of that answer: sampled text is never encoded again, and a tool call is never
rendered again. A conversation that continues no answer begins a new tree. Two answers are the same if their text and
their tool calls are; thinking, which many clients do not send back, is not compared.

Each path from the first request of a conversation to a last answer is one row. Where several requests continue the same
answer, the first one continues its row, and the others begin rows in which the shared tokens have mask 0. Each sampled
token has mask 1 in exactly one row.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from verl_lite.errors import UserError
from workers.agents.conversation import ChatJoins, Message, MessageCall, Tool
from workers.agents.endpoint.answer_parts import (
    SplitAnswer,
    arguments_of,
    message_text,
    split_thinking,
    split_tool_calls,
)
from workers.agents.episodes import DescribedMessage, DescribedRequest, TokenLimits
from workers.agents.turns import Turn
from workers.engines.base import Completion
from workers.rollout.rows import of_response

TEXT_SHOWN = 2_000
"""Number of characters of each text in the column `requests`."""
PROMPT_END = 16
"""Number of tokens at the end of a prompt that are enough to recognize a <think> there."""
_UNRENDERABLE = (UserError, TypeError)
"""Errors of the chat template, and of the tokenizer for surrogates in the arguments of tool calls."""

CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"


class Refusal(Exception):
    """A request that the endpoint does not answer.

    Args:
        status: HTTP status, chosen by how clients react: they repeat a request after 5xx, and report 4xx.
        field: name of the field that caused the refusal.
        code: OpenAI's error code.
        kind: name under which the refusal is counted (`program/refused/KIND`); None = not counted.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        field: str | None = None,
        code: str | None = None,
        kind: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.field = field
        self.code = code
        self.kind = kind


class ContextOverflow(Refusal):
    """A prompt that leaves no room for an answer.

    Clients recognize this refusal by words of OpenAI's or Anthropic's message, so each API has its own.

    Args:
        tokens: length of the prompt.
        maximum: length of the longest prompt that leaves room for one token.
        explanation: the limits of the run.
    """

    def __init__(self, tokens: int, maximum: int, explanation: str) -> None:
        limit = f"This model's maximum context length is {maximum} tokens"
        too_long = f"prompt is too long: {tokens} tokens > {maximum} maximum"
        # LangChain reads the code in the message, because openai's exception leaves it out of its text
        rest = f"({CONTEXT_LENGTH_EXCEEDED}). Please reduce the length of the messages; {explanation}"
        self.anthropic_message = f"{too_long}. {limit} {rest}"
        message = f"{limit}. However, your messages resulted in {tokens} tokens: {too_long} {rest}"
        super().__init__(message, field="messages", code=CONTEXT_LENGTH_EXCEEDED)


@dataclass(frozen=True)
class Conversation:
    """The content of a request, independent of its API.

    Attributes:
        messages: the whole conversation.
        tools: the functions that the answer may call.
        calls_tools: False if the answer must not contain tool calls.
        max_tokens: limit of the answer's tokens; None = no own limit.
        stop: texts that end the answer.
        seed: number from which, with the seed of the episode, the answer is drawn; None = the request's number.
        names_tokens: True if the answer needs the text of each token.
    """

    messages: list[Message]
    tools: list[Tool] = field(default_factory=list)
    calls_tools: bool = True
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    names_tokens: bool = False


@dataclass(frozen=True)
class SampledAnswer:
    """A sampled answer.

    Attributes:
        text: its text without thinking and tool calls.
        thinking: text of its thinking; may be empty.
        finish_reason: stop, length or tool_calls, as OpenAI names them.
        prompt_ids: the whole context that the policy sampled from.
        token_ids, log_probs: sampled tokens, up to the end of a stop text.
        stop: the stop text that ended the answer.
        tokens: text of each token, if the request wants it.
    """

    text: str
    thinking: str
    tool_calls: list[MessageCall]
    finish_reason: str
    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    stop: str | None = None
    tokens: list[str] = field(default_factory=list)

    @property
    def message(self) -> Message:
        """The answer as a message of the conversation."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


@dataclass(eq=False)
class TraceNode:
    """A request and its answer.

    Attributes:
        number: place of the request in its episode.
        parent: the request whose answer this one continues; None for a new conversation.
        added: messages that follow the answer of `parent`.
        prompt_ids: token ids of these messages; without a parent, the whole prompt.
        key: digest of tools and messages; see `_keys`.
        room: maximum number of tokens of the answer.
        is_delivered: True if the answer was sent to a client that was still connected.
        row: number of the training row; None before `Trace.rows`, and for an answer that is not trained on.
    """

    number: int
    parent: "TraceNode | None"
    conversation: Conversation
    added: list[Message]
    prompt_ids: tuple[int, ...]
    key: bytes
    room: int = 0
    completion: Completion | None = None
    answer: SampledAnswer | None = None
    is_delivered: bool = False
    row: int | None = None

    def path(self) -> "list[TraceNode]":
        """Returns the nodes from the first request of the conversation to this one."""
        nodes = [self]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        return nodes[::-1]

    def context(self) -> list[int]:
        """Returns the token ids of the prompt, which include the answers before."""
        ids: list[int] = []
        for node in self.path():
            ids += node.prompt_ids
            if node is not self and node.answer is not None:
                ids += node.answer.token_ids
        return ids


class Trace:
    """The requests of one episode.

    Args:
        joins: builds token ids from messages.
        tokenizer: decodes answers.
        limits: numbers of tokens that fit a row and the engine's context.
        stop_token_ids: tokens that end an answer.
    """

    def __init__(
        self,
        joins: ChatJoins,
        tokenizer: PreTrainedTokenizerBase,
        limits: TokenLimits,
        stop_token_ids: Sequence[int],
    ) -> None:
        self._joins = joins
        self._tokenizer = tokenizer
        self._limits = limits
        self._stop_token_ids = frozenset(stop_token_ids)
        # nodes by the digest of their conversation with their answer, which later requests look up
        self._answered: dict[bytes, TraceNode] = {}
        self.nodes: list[TraceNode] = []
        self.counts: Counter[str] = Counter()
        self.first_prompts: list[int] = []
        """Number of tokens of each first prompt, refused ones included."""

    # ------------------------------------------------------------------------------------------------------- requests

    def add(self, conversation: Conversation, max_tokens: int) -> TraceNode:
        """Adds a request.

        Args:
            conversation: Its content.
            max_tokens: The run's limit on the tokens of one answer; the request may have a lower one.

        Raises:
            Refusal: Its messages cannot be rendered, or leave no room for an answer.
        """
        messages = conversation.messages
        if not messages or messages[-1]["role"] == "assistant":
            raise Refusal("the last message has to be one of the user or a tool", field="messages")

        keys = list(_keys(messages, conversation.tools))
        num_continued = self._num_continued(messages, keys)
        parent: TraceNode | None = None
        ids: tuple[int, ...] | None = None
        if num_continued:
            parent = self._answered[keys[num_continued]]
            ids = self._continued_ids(parent, messages, num_continued)
        # it continues no answer, or only the whole conversation can be rendered
        if ids is None:
            parent = None
            num_continued = 0
            ids = self._first_prompt(conversation)

        number = len(self.nodes)
        added = messages[num_continued:]
        node = TraceNode(number, parent, conversation, added, ids, keys[-1])
        # before the node is added: a request without room is refused and leaves no node
        node.room = min(self._room(node), max_tokens, conversation.max_tokens or max_tokens)
        self.nodes.append(node)
        return node

    def _continued_ids(
        self, parent: TraceNode, messages: Sequence[Message], num_continued: int
    ) -> tuple[int, ...] | None:
        """Returns the token ids of the messages after an answer; None if the chat template cannot continue the answer
        with them, for example with a second message of the assistant.

        Args:
            parent: The answer.
            messages: The whole conversation.
            num_continued: Number of messages up to the answer.
        """
        assert parent.answer is not None
        # as the client spells them: a template may print the id or the name of a call next to its result
        calls = messages[num_continued - 1].get("tool_calls") or ()
        try:
            return self._joins.join(parent.answer.token_ids, *messages[num_continued:], calls=calls)
        except _UNRENDERABLE:
            return None

    def _first_prompt(self, conversation: Conversation) -> tuple[int, ...]:
        """Returns the token ids of a conversation that continues no answer, and counts them. Raises Refusal."""
        try:
            ids = self._joins.prompt(conversation.messages, conversation.tools)
        except _UNRENDERABLE as error:
            raise Refusal(f"the chat template of the model rejects these messages: {error}") from error
        self.first_prompts.append(len(ids))
        return ids

    def _num_continued(self, messages: Sequence[Message], keys: Sequence[bytes]) -> int:
        """Returns the number of messages up to the last answer of this episode; 0 if the conversation continues none.

        Args:
            messages: The whole conversation.
            keys: Digests of its beginnings; `keys[n]` is that of the first n messages.
        """
        # from the end, so that the longest sampled beginning is continued
        for number in range(len(messages), 0, -1):
            is_answer = messages[number - 1]["role"] == "assistant"
            if is_answer and keys[number] in self._answered:
                return number
        return 0

    def count_tokens(self, conversation: Conversation) -> int:
        """Returns the number of tokens of the prompt, without adding the request. Raises Refusal as `add`."""
        num_first_prompts = len(self.first_prompts)
        try:
            node = self.add(conversation, max_tokens=1)
        finally:
            # `add` also counts the first prompt of a request that it refuses
            del self.first_prompts[num_first_prompts:]
        self.nodes.pop()
        return len(node.context())

    def _room(self, node: TraceNode) -> int:
        """Returns the number of tokens that still fit the columns of a row and the engine's context."""
        limits = self._limits
        num_tokens = len(node.context())
        # tokens of a first prompt above its limit move into the response (`trajectories.trajectory_rows`)
        first = min(len(node.path()[0].prompt_ids), limits.max_prompt_length)
        max_tokens = min(first + limits.max_response_length, limits.max_model_len)
        if num_tokens < max_tokens:
            return max_tokens - num_tokens
        # the longest prompt that leaves room for one token
        longest_prompt = max_tokens - 1
        raise ContextOverflow(
            num_tokens,
            longest_prompt,
            f"data.max_prompt_length={limits.max_prompt_length} tokens of the first prompt and "
            f"data.max_response_length={limits.max_response_length} of everything after it fit",
        )

    # -------------------------------------------------------------------------------------------------------- answers

    def commit(self, node: TraceNode, completion: Completion) -> SampledAnswer:
        """Adds the sampled answer of a request."""
        request = node.conversation
        ids = completion.token_ids
        self.counts["sampled"] += len(ids)
        is_ended = bool(ids) and ids[-1] in self._stop_token_ids
        text = self._decoded(ids[:-1] if is_ended else ids)

        # the engine knows only stop tokens: it samples past a stop text, and what follows the text is discarded
        stop = _first_stop(text, request.stop)
        num_answered = len(ids)
        if stop is not None:
            start = text.index(stop)
            num_answered = self._tokens_until(ids, start + len(stop))
            text = text[:start]
        self.counts["discarded/after_stop"] += len(ids) - num_answered

        # some templates open the thinking; without that, thinking that a limit cuts off would look like an answer
        prompt_end = self._decoded(node.prompt_ids[-PROMPT_END:]).rstrip()
        thinking, text = split_thinking(text, is_open=prompt_end.endswith("<think>"))
        split = SplitAnswer(text)
        if request.tools and request.calls_tools and self._joins.notation is not None:
            split = split_tool_calls(text, node.number, self._joins.notation, request.tools)
        tokens: list[str] = []
        if request.names_tokens:
            tokens = [self._decoded([token]) for token in ids[:num_answered]]

        node.completion = completion
        node.answer = SampledAnswer(
            text=split.text,
            thinking=thinking,
            tool_calls=split.calls,
            finish_reason=_finish_reason(completion.finish_reason, stop, bool(split.calls), split.rest),
            prompt_ids=node.context(),
            token_ids=ids[:num_answered],
            log_probs=completion.log_probs[:num_answered],
            stop=stop,
            tokens=tokens,
        )
        self._remember(node, node.answer.message)
        if stop is not None:
            # an agent may append the text that ended the answer
            message: Message = {**node.answer.message, "content": node.answer.text + stop}
            self._remember(node, message)
        return node.answer

    def _remember(self, node: TraceNode, message: Message) -> None:
        """Lets later requests with this message continue the node.

        If two answers are the same, requests continue the first one that a client received.
        """
        key = _key(node.key, message)
        if key not in self._answered or not self._answered[key].is_delivered:
            self._answered[key] = node

    def _decoded(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def _tokens_until(self, ids: Sequence[int], characters: int) -> int:
        """Returns the smallest number of tokens whose text has this number of characters."""
        # a binary search, because each look decodes the beginning: a token alone may be a part of a character
        low = 0
        high = len(ids)
        while low < high:
            middle = (low + high) // 2
            if len(self._decoded(ids[:middle])) >= characters:
                high = middle
            else:
                low = middle + 1
        return low

    # ----------------------------------------------------------------------------------------------------------- rows

    def rows(self, reward: float) -> list[list[Turn]]:
        """Returns the turns of each training row. Answers that no client received are discarded.

        Args:
            reward: Score of the episode, which the last turn of every row gets.
        """
        # nodes whose row continues with a request after their answer
        continued: set[TraceNode] = set()
        # the last node of each row so far
        last_nodes: list[TraceNode] = []
        for node in self.nodes:
            if node.answer is None:
                continue
            if not node.is_delivered:
                self.counts["discarded/undelivered"] += len(node.answer.token_ids)
            # the first request that continues an answer continues its row, and every other one begins a row
            elif node.parent is None or node.parent in continued or node.parent.row is None:
                node.row = len(last_nodes)
                last_nodes.append(node)
            else:
                continued.add(node.parent)
                node.row = node.parent.row
                last_nodes[node.row] = node

        rows = []
        for last_node in last_nodes:
            turns = self._turns(last_node)
            turns[-1].reward = reward
            self.counts["trained"] += sum(len(turn.response_ids) for turn in turns)
            rows.append(turns)
        return rows

    def _turns(self, end: TraceNode) -> list[Turn]:
        """Returns the turns of the row that ends with this node. The prompt of the first turn contains the turns before
        it that belong to another row."""
        turns: list[Turn] = []
        # what follows the last turn of this row and is not sampled in it: the prompt of its next turn
        ids: list[int] = []
        messages: list[Message] = []
        for node in end.path():
            assert node.answer is not None and node.completion is not None
            ids += node.prompt_ids
            messages += node.added
            # an answer that another row trains on is part of the prompt here
            if node.row != end.row:
                ids += node.answer.token_ids
                messages.append(node.answer.message)
                continue

            # the last turn has the values of the whole context, and of the others only those of their responses remain
            extra = node.completion.extra
            if node is not end:
                extra = of_response(extra)
            num_answered = len(node.answer.token_ids)
            turn = Turn(
                messages=messages,
                prompt_ids=tuple(ids),
                response_ids=node.answer.token_ids,
                log_probs=node.answer.log_probs,
                finish_reason=node.completion.finish_reason,
                versions=node.completion.versions[:num_answered],
                action=message_text(node.answer.message),
                observation="",
                state_hash="",
                extra=extra,
            )
            turns.append(turn)
            ids = []
            messages = []
        return turns

    def described(self) -> list[DescribedRequest]:
        """Returns the column `requests` (verl_lite/schema.py). Called after `rows`, which sets the row of each node."""
        return [_described(node) for node in self.nodes]


def _described(node: TraceNode) -> DescribedRequest:
    """Returns the description of a request; without an answer, it was aborted before its answer was complete."""
    messages: list[DescribedMessage] = []
    for message in node.added:
        content = message_text(message)
        messages.append({"role": message["role"], "content": content[:TEXT_SHOWN]})
    described: DescribedRequest = {
        "parent": None if node.parent is None else node.parent.number,
        "row": None,
        "prompt_tokens": len(node.context()),
        "tokens": 0,
        "versions": [-1, -1],
        "finish_reason": "abort",
        "tool_calls": [],
        "messages": messages,
        "text": "",
        "discarded": "aborted",
    }
    if node.answer is None or node.completion is None:
        return described

    text = node.answer.thinking + node.answer.text
    # an update of the weights during a request gives its tokens several versions
    versions = node.completion.versions
    described["row"] = node.row
    described["tokens"] = len(node.answer.token_ids)
    described["versions"] = [min(versions, default=-1), max(versions, default=-1)]
    described["finish_reason"] = node.answer.finish_reason
    described["tool_calls"] = [call["function"]["name"] for call in node.answer.tool_calls]
    described["text"] = text[:TEXT_SHOWN]
    described["discarded"] = "undelivered" if node.row is None else None
    return described


def _first_stop(text: str, stops: Sequence[str]) -> str | None:
    """Returns the stop text that comes first in an answer; None if it has none of them."""
    positions = [(text.index(stop), stop) for stop in stops if stop in text]
    if not positions:
        return None
    _, first_stop = min(positions)
    return first_stop


def _finish_reason(sampled: str, stop: str | None, has_calls: bool, rest: str) -> str:
    """Returns the finish reason of an answer in OpenAI's words.

    Args:
        sampled: finish reason of the engine.
        stop: stop text that ended the answer.
        rest: text behind the tool calls. If a limit cut off this text, the answer is incomplete.
    """
    if has_calls and (sampled != "length" or stop is not None or not rest.strip()):
        return "tool_calls"
    return "stop" if stop is not None else sampled


def _keys(messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[bytes]:
    """Yields the digest of the tools, and of the tools with each beginning of the messages."""
    text = json.dumps(tools, sort_keys=True)
    key = _digest(text.encode(errors="surrogatepass"))
    yield key
    for message in messages:
        key = _key(key, message)
        yield key


def _key(before: bytes, message: Message) -> bytes:
    """Returns the digest of a conversation that continues another one with this message."""
    role = message["role"]
    content = message["content"]
    # without the ids of the calls, which clients may replace
    calls = []
    for call in message.get("tool_calls") or ():
        calls.append([call["function"]["name"], arguments_of(call)])
    if role == "assistant":
        # a client may leave out the thinking, or send it back as part of the text
        _, answer = split_thinking(content)
        content = answer.strip()
    text = json.dumps([role, content, calls], sort_keys=True)
    return _digest(before + text.encode(errors="surrogatepass"))


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()

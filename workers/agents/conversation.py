"""Multi-turn prompts: messages, and the token ids that join the turns of a conversation.

`ChatJoins` turns messages into token ids with the chat template and never re-encodes sampled tokens. The first prompt
is the template's text of the first messages. Between a sampled turn and the next one, the template's text for that
place is inserted: the end of the turn (if the policy did not sample it), the environment's message and the generation
prompt. The token ids therefore equal the encoded template text of the whole conversation, provided that the sampled ids
are the tokenizer's own encoding of their text. Some templates rewrite earlier turns. The sampled tokens stay unchanged
in that case, because the policy saw them and is trained on them:

- Thinking that a template strips from earlier turns stays in the context.
- An empty think block at the start of the generation prompt (Qwen3 with enable_thinking=False) stays in each turn.
- Spaces around an answer, which some templates trim, stay.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NotRequired, TypedDict

from transformers import PreTrainedTokenizerBase

from verl_lite.envs.tool_calls import NOTATIONS, Notation, ToolCall, tagged_calls
from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject, KeywordArguments
from workers.agents.tokens import characters_per_token, closing_index, closing_token, special_token_ids
from workers.policy.chat_template import ChatTemplateError, render_chats, tool_arguments
from workers.policy.tokenizer import NO_TEMPLATE


class CalledFunction(TypedDict):
    """The function of a tool call.

    Attributes:
        name: Name of the function.
        arguments: The arguments as JSON text; `ChatJoins` gives templates their value.
    """

    name: str
    arguments: str | JsonObject


class MessageCall(TypedDict):
    """A tool call of an assistant's message, in OpenAI's format. The id may be empty."""

    id: NotRequired[str]
    type: str
    function: CalledFunction


class Message(TypedDict):
    """A message of a conversation.

    Attributes:
        role: system, user, assistant or tool.
        content: Its text.
        tool_calls: Calls of an assistant's message.
        tool_call_id: The call that the result of a tool belongs to.
        name: Name of the function that was called.
    """

    role: str
    content: str
    tool_calls: NotRequired[list[MessageCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


class ToolFunction(TypedDict):
    """The function of a tool. Only the chat template reads its description and parameters, which are not checked."""

    name: str
    description: object
    parameters: object


class Tool(TypedDict):
    """A tool that the policy may call, in OpenAI's format."""

    type: str
    function: ToolFunction


# How a template writes a chat is found out by rendering probes: short chats whose texts are searched in the result.
_ANSWER, _OTHER_ANSWER = "verlliteanswer", "verlliteother"
_SHORT_CHAT: list[Message] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _ANSWER}]
_PROBE = "verlliteprobe"
_PROBE_ID = "vlprobe00"
"""Identifier of a call in the form that Mistral's templates demand: nine letters or digits."""
_PROBE_KEY, _PROBE_ARGUMENT = "verllitekey", "verlliteargument"
_PROBE_TOOL = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}}}
_ODD_CONTENT = f" \t\n\"<a>&'{{}}\\/ <tool_response> {_PROBE} \n "
"""A content that a template changes if it trims, escapes or wraps contents."""
_ENCODINGS_KEPT = 1024
"""Number of texts whose token ids are kept."""
TOOLS = (
    "You may call one or more of these functions:\n{}\n"
    'A call: <tool_call>{{"name": NAME, "arguments": {{...}}}}</tool_call>'
)
"""Description of tools for templates without tools, in the notation that `verl_lite.envs.tool_calls` parses."""
_WITHOUT_SYSTEM = "put its text into agent_template and leave agentic.custom_envs.TAG.agent_system_template empty"


class ChatJoins:
    """Builds the token ids of prompts, and of the text between turns, from the chat template of one tokenizer.

    Args:
        template_kwargs: `data.apply_chat_template_kwargs`.
        system: True if conversations begin with a system message.
        most_tokens: the length above which the callers drop a text. Of a text that is certainly longer, only the
            beginning is tokenized. None = all texts are tokenized completely.

    Attributes:
        end_of_turn: the token that ends an assistant's turn in the template. It must be one of the stop tokens of a
            request, otherwise the policy continues past the end of its turn.
        ends_of_turn: the tokens that end a turn before a user's message, before a tool's result, and after a tool call.
            Most templates have one; GLM's have two, and Llama-3.1's may have two.
        tool_role: "tool", or "user" if the template accepts no message of the role tool after an assistant's.
        notation: reads tool calls in the notation of the template, or in the one that describes tools for templates
            without tools. None if the template writes calls in a notation that is not supported.

    Raises:
        UserError: the turns of the template cannot be joined: there is no template, no token ends a turn, a message
            changes the text before it, or the template rejects a system message.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: KeywordArguments | None = None,
        *,
        system: bool = False,
        most_tokens: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        if tokenizer.chat_template is None:
            raise UserError(NO_TEMPLATE.format("the turns of an episode"))
        # the members of a group begin with the same prompt
        self._encoded = functools.lru_cache(_ENCODINGS_KEPT)(self._encode)
        longest_token = characters_per_token(tokenizer)
        self._most_characters: int | None = None
        if longest_token is not None and most_tokens is not None:
            # one character more than `most_tokens` tokens can encode
            self._most_characters = longest_token * most_tokens + 1

        # each of the following steps uses what the steps before it have found out about the template
        self._check_joins(system)
        self.tool_role = "tool" if self._prints_tool_message() else "user"
        self._takes_tools = self._prints_tools()
        self.notation: Notation | None = tagged_calls
        # the template's text between the arguments of a call and the end of the call
        self._after_arguments = ""
        self._takes_called_results = False
        if self._takes_tools:
            self.notation, self._after_arguments = self._notation_of_template()
            self._takes_called_results = self._prints_called_result()

        # by role, the function that writes the text after an answer, up to and including a message of this role
        self._continuations: dict[str, Callable[[str], str]] = {}
        for role in {"user", self.tool_role}:
            self._continuations[role] = self._continuation_renderer(role)
        self._results_name_calls = self._takes_called_results and self._prints_identity()
        self._special_ids = special_token_ids(tokenizer)
        self.end_of_turn = self._closing_of_turn()
        self.ends_of_turn = self._all_ends_of_turn()

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Returns the token ids of the first prompt, generation prompt included.

        A text that certainly has more than `most_tokens` tokens is cut to a beginning that also has more than that.

        Args:
            messages: the conversation so far.
            tools: the functions that the policy may call. If the template ignores tools, a system message describes
                them.
        """
        options: dict[str, object] = {}
        # a template may print an empty list of tools, so that the option is left out without tools
        if tools and self._takes_tools:
            options["tools"] = list(tools)
        elif tools:
            messages = _with_described_tools(messages, tools)
        accepted = self._accepted(messages)
        text = self._render(accepted, **options)
        return self._encoded(text[: self._most_characters])

    def join(
        self, response_ids: Sequence[int], *messages: Message, calls: Sequence[MessageCall] = ()
    ) -> tuple[int, ...]:
        """Returns the token ids between a sampled turn and the next: end of turn, messages and generation prompt.

        The end of the turn is left out if `response_ids` already ends with it.

        Args:
            response_ids: the sampled turn. Its last token may be an end-of-turn token, another stop token, or any
                token if a limit cut the turn off.
            messages: the next messages, usually one of the role user or tool.
            calls: the tool calls of the sampled turn, in OpenAI's format. Some templates print the id or the name of a
                call next to its result.
        """
        results = [message for message in messages if message["role"] == "tool" and message.get("tool_call_id")]
        if not calls:
            # without the calls, the results tell their ids and the names of their functions
            calls = [_call_of_result(message) for message in results]
        accepted = self._accepted(messages, calls)
        text = self._text_after_turn(accepted, calls, has_results=bool(results))
        return self._without_end(response_ids, text)

    def _text_after_turn(self, accepted: Sequence[Message], calls: Sequence[MessageCall], *, has_results: bool) -> str:
        """Returns the template's text after a turn: end of turn, messages and generation prompt.

        Args:
            accepted: the messages, as `_accepted` returns them.
            calls: the tool calls of the turn.
            has_results: whether one of the messages is the result of a call with an identifier.
        """
        # the text depends on the calls before it
        if has_results and self._results_name_calls:
            return self._after_calls(calls, accepted)

        # `_continuations` know a result without id and name. In an unsupported notation, nothing has shown whether the
        # template prints these, so that the whole message is rendered.
        may_print_identity = has_results and self.notation is None
        if len(accepted) == 1 and not may_print_identity:
            [message] = accepted
            continuation = self._continuations.get(message["role"])
            if continuation is not None:
                return continuation(message["content"])
        return self._after_answer([*_SHORT_CHAT, *accepted])

    def _without_end(self, response_ids: Sequence[int], text: str) -> tuple[int, ...]:
        """Returns the token ids of the text after a turn, without the end of the turn if the policy sampled it.

        Templates with several end tokens choose one by the next message (GLM: `<|user|>` or `<|observation|>`), so the
        sampled token is compared with the end in this text.
        """
        ids = self._encoded(text[: self._most_characters])
        index = closing_index(ids, self._tokenizer, self._special_ids)
        if index is not None and response_ids and response_ids[-1] == ids[index]:
            return ids[index + 1 :]
        return ids

    def _accepted(self, messages: Sequence[Message], calls: Sequence[MessageCall] = ()) -> list[Message]:
        """Returns the messages without parts that the template would reject or omit.

        Messages of tools and tool calls become text if the template has no role for them. The arguments of tool calls
        become values, and the result of a call gets the name of its function.

        Args:
            messages: The messages.
            calls: The tool calls before the first message.
        """
        # names of the functions by the id of their call
        names = {str(call.get("id")): call["function"]["name"] for call in calls}
        accepted: list[Message] = []
        for message in messages:
            own_calls = message.get("tool_calls") or ()
            for call in own_calls:
                names[str(call.get("id"))] = call["function"]["name"]
            if message["role"] == "tool":
                accepted.append(self._accepted_result(message, names))
            elif own_calls:
                accepted.append(self._accepted_turn(message, own_calls))
            else:
                accepted.append(message)
        return accepted

    def _accepted_turn(self, message: Message, calls: Sequence[MessageCall]) -> Message:
        """Returns the message of an assistant, with its calls in the form that the template takes."""
        if self._takes_tools:
            return {**message, "tool_calls": [_with_values(call) for call in calls]}
        text = message["content"] or ""
        lines = "\n".join(_written_call(call) for call in calls)
        return _message(message["role"], text + lines)

    def _accepted_result(self, message: Message, names: Mapping[str, str]) -> Message:
        """Returns the result of a tool as the template takes it.

        Args:
            message: The result.
            names: Names of the functions by the id of their call.
        """
        call_id = str(message.get("tool_call_id") or "")
        takes_identity = self._takes_called_results or self.tool_role == "tool"
        if not call_id or not takes_identity:
            return _message(self.tool_role, message["content"])
        # some templates print the name of the function, which clients need not repeat
        if call_id in names and not message.get("name"):
            return {**message, "name": names[call_id]}
        return message

    def _render(self, messages: Sequence[Message], **variables: object) -> str:
        """Returns the template's text of a conversation, generation prompt included.

        Args:
            messages: The conversation.
            variables: Further variables of the template.
        """
        options = {**self._template_kwargs, **variables}
        [text] = render_chats(self._tokenizer, [messages], add_generation_prompt=True, **options)
        return text

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    # ---------------------------------------------------------------------------------- properties of the chat template

    def _continuation_renderer(self, role: str) -> Callable[[str], str]:
        """Returns a function that maps a message's content to the template's text after the answer before the message.

        Most templates put the content between two constant texts. The function then concatenates them, which is a
        hundred times faster than rendering; for other templates it renders each message.
        """

        def rendered(content: str) -> str:
            return self._after_answer([*_SHORT_CHAT, _message(role, content)])

        before, _, after = rendered(_PROBE).partition(_PROBE)
        # a template may trim, escape or wrap contents, which the probe alone does not show
        odd_text = rendered(_ODD_CONTENT)
        if odd_text == before + _ODD_CONTENT + after:
            return lambda content: before + content + after
        if odd_text == before + _ODD_CONTENT.strip() + after:
            return lambda content: before + content.strip() + after
        return rendered

    def _after_answer(self, messages: list[Message]) -> str:
        """Renders `messages` and returns the text after the first answer."""
        _, answer, rest = self._render(messages).partition(_ANSWER)
        if not answer:
            raise self._template_error("leaves out the content of the assistant's message")
        return rest

    def _prints_tool_message(self) -> bool:
        """Returns True if the template shows a message of the role tool after an answer."""
        chat = [*_SHORT_CHAT, _message("tool", _PROBE)]
        try:
            return _PROBE in self._after_answer(chat)
        except UserError:
            # the template rejects the role or omits the answer before the message
            return False

    def _prints_tools(self) -> bool:
        """Returns True if the template shows the tools of a conversation."""
        try:
            return _PROBE in self._render(_SHORT_CHAT[:1], tools=[_PROBE_TOOL])
        except UserError:
            return False

    def _closing_of_turn(self) -> int:
        """Returns the token that ends an assistant's turn before a user's message."""
        text = self._continuations["user"](_PROBE)
        token = closing_token(text, self._tokenizer, self._special_ids)
        if token is None:
            raise self._template_error(
                "has no token that ends an assistant's turn: after the answer it writes "
                f"{text[:80]!r}, but a special token of the tokenizer has to come first"
            )
        return token

    def _all_ends_of_turn(self) -> tuple[int, ...]:
        """Returns the tokens that end a turn before any kind of message."""
        texts = [continuation(_PROBE) for continuation in self._continuations.values()]
        # some templates end a turn with a call by another token
        if self._takes_called_results:
            probe_call = _probe_call(_PROBE, _PROBE_ID)
            texts.append(self._after_calls([probe_call], [_probe_result(_PROBE)]))
        ends = {self.end_of_turn}
        for text in texts:
            token = closing_token(text, self._tokenizer, self._special_ids)
            if token is not None:
                ends.add(token)
        return tuple(sorted(ends))

    def _notation_of_template(self) -> tuple[Notation | None, str]:
        """Returns the notation in which the template writes tool calls, and the text between the arguments and the end
        of a call. The notation is None if no notation reads a call as the template writes it."""
        probe_call = _probe_call(_PROBE, _PROBE_ID)
        chat: list[Message] = [_SHORT_CHAT[0], _probe_turn([probe_call]), _probe_result("")]
        try:
            rendered = self._render(chat)
            start = self._render(_SHORT_CHAT[:1])
        except UserError:
            return None, ""
        # templates may write a space or an empty thought between the generation prompt and the call
        answer = rendered.removeprefix(start)
        if _PROBE_ARGUMENT not in answer:
            return None, ""

        # the shortest text that a notation reads as the call: what follows belongs to the end of the turn
        argument_end = answer.rfind(_PROBE_ARGUMENT) + len(_PROBE_ARGUMENT)
        expected_calls = [ToolCall(_PROBE, {_PROBE_KEY: _PROBE_ARGUMENT})]
        for end in range(argument_end, len(answer) + 1):
            text = answer[:end].lstrip()
            for notation in NOTATIONS.values():
                if notation(text).calls == expected_calls:
                    return notation, answer[argument_end:end]
        return None, ""

    def _prints_called_result(self) -> bool:
        """Returns True if the template accepts the result of a call, with id and name, and shows its content."""
        if self.notation is None:
            return False
        # twice, because the name of the function is the probe, too
        content = _PROBE + _PROBE
        probe_call = _probe_call(_PROBE, _PROBE_ID)
        try:
            return content in self._after_calls([probe_call], [_probe_result(content)])
        except UserError:
            return False

    def _prints_identity(self) -> bool:
        """Returns True if the text of a single result depends on the id or the name of its call, or on there being a
        call at all. The text of `_continuations`, which know no calls, is then wrong."""
        if "tool" not in self._continuations:
            return True
        text_without_call = self._continuations["tool"](_PROBE)
        for name, identifier in ((_PROBE, _PROBE_ID), ("other", "vlother00")):
            result = _probe_result(_PROBE, identifier, name)
            text = self._after_calls([_probe_call(name, identifier)], [result])
            if text != text_without_call:
                return True
        return False

    def _after_calls(self, calls: Sequence[MessageCall], messages: Sequence[Message]) -> str:
        """Returns the template's text after a turn with these calls.

        The arguments of the calls are replaced: what the policy sampled must not decide where the turn ends.
        """
        probes = []
        for call in calls:
            name = call["function"]["name"]
            probes.append(_probe_call(name, str(call.get("id")), {}))
        # the turn ends behind its last call, so only this one has the argument that is searched in the text
        last_call = probes[-1]
        last_call["function"]["arguments"] = {_PROBE_KEY: _PROBE_ARGUMENT}
        text = self._render([_SHORT_CHAT[0], _probe_turn(probes), *messages])
        _, argument, rest = text.partition(_PROBE_ARGUMENT)

        # some templates write the id of a call behind its arguments
        end_of_call = self._after_arguments.replace(_PROBE_ID, last_call["id"])
        if not argument or not rest.startswith(end_of_call):
            raise self._template_error("leaves out the tool calls of an assistant's message, or their arguments")
        return rest.removeprefix(end_of_call)

    def _check_joins(self, system: bool) -> None:
        """Raises UserError if the text of a message depends on later messages or on the number of earlier ones.

        Renders a conversation of three questions and two answers as a whole, and compares the parts around the answers
        with the texts that `prompt` and `join` write.
        """
        beginning = [_message("user", "q1")]
        if system:
            beginning.insert(0, _message("system", "s"))
        second = _message("user", "q2")
        third = _message("user", "q3")

        prompt = self._rendered_or_refused(beginning, system)
        # only for its error: `_after_answer` renders it again, without a remedy
        self._rendered_or_refused([*_SHORT_CHAT, second], False)
        chat = [*beginning, _message("assistant", _ANSWER), second, _message("assistant", _OTHER_ANSWER), third]
        text = self._rendered_or_refused(chat, system)
        before_answer, answer, rest = text.partition(_ANSWER)
        between_answers, other_answer, after_answers = rest.partition(_OTHER_ANSWER)
        if not answer or not other_answer:
            raise self._template_error("leaves out the content of an assistant's message")

        second_join = self._after_answer([*_SHORT_CHAT, second])
        third_join = self._after_answer([*_SHORT_CHAT, third])
        for part, written in ((before_answer, prompt), (between_answers, second_join)):
            # before an answer, one of the two may have more at its end: a think block or a space
            differs_by_suffix = part.startswith(written) or written.startswith(part)
            if not differs_by_suffix:
                raise self._unstable_text_error(part, written)
        if after_answers != third_join:
            raise self._unstable_text_error(after_answers, third_join)

    def _rendered_or_refused(self, messages: list[Message], system: bool) -> str:
        """Renders a conversation. Raises UserError with a remedy if the template fails.

        system: whether the conversation begins with a system message.
        """
        try:
            return self._render(messages)
        except ChatTemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            remedy = "set data.apply_chat_template_kwargs to the variables that the template needs"
            if system:
                remedy = f"if the template rejects the system message, {_WITHOUT_SYSTEM}"
            raise self._template_error(f"fails on messages of the roles {roles}: {error}; {remedy}") from error

    def _unstable_text_error(self, long_text: str, short_text: str) -> UserError:
        return self._template_error(
            "writes a message differently once others follow, so joining the turns would change the context that the "
            f"policy sampled from: {long_text!r} in a long conversation, {short_text!r} in a short one; "
            f"if the template moves the system message, {_WITHOUT_SYSTEM}"
        )

    def _template_error(self, problem: str) -> UserError:
        return UserError(
            f"The chat template of model.path (or data.chat_template) {problem}. Set data.chat_template to another "
            "template: a file or the Jinja text"
        )


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _with_described_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Returns the messages with a description of the tools at the end of their system message, or in a new one."""
    functions = [json.dumps(tool["function"]) for tool in tools]
    description = TOOLS.format("\n".join(functions))
    first, *others = messages
    if first["role"] != "system":
        return [_message("system", description), *messages]
    return [_message("system", f"{first['content']}\n\n{description}"), *others]


def _written_call(call: MessageCall) -> str:
    """Returns a tool call as text, for templates without tools."""
    function = call["function"]
    written = {"name": function["name"], "arguments": tool_arguments(function["arguments"])}
    return f"<tool_call>{json.dumps(written)}</tool_call>"


def _probe_call(name: str, identifier: str, arguments: JsonObject | None = None) -> MessageCall:
    """Returns a tool call whose arguments mark its place in a rendered text."""
    if arguments is None:
        arguments = {_PROBE_KEY: _PROBE_ARGUMENT}
    function: CalledFunction = {"name": name, "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}


def _probe_turn(calls: list[MessageCall]) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _probe_result(content: str, identifier: str = _PROBE_ID, name: str = _PROBE) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": identifier, "name": name}


def _call_of_result(message: Message) -> MessageCall:
    """Returns the tool call that a result belongs to, as far as the result names it."""
    return _probe_call(str(message.get("name") or _PROBE), str(message["tool_call_id"]))


def _with_values(call: MessageCall) -> MessageCall:
    """Returns a tool call with its arguments as a value, and with its id if it has one."""
    called = call["function"]
    function: CalledFunction = {**called, "arguments": tool_arguments(called["arguments"])}
    # "None" is the text of an absent id
    if call.get("id") in (None, "", "None"):
        return {"type": "function", "function": function}
    return {"id": call["id"], "type": "function", "function": function}


def end_of_turn(tokenizer: PreTrainedTokenizerBase, template_arguments: KeywordArguments) -> int | None:
    """Returns the token that ends an assistant's turn in the chat template, or None if the template writes none."""
    # some templates write the end of a turn only before the next message
    for messages in (_SHORT_CHAT, [*_SHORT_CHAT, _message("user", _PROBE)]):
        token = _end_after_answer(tokenizer, messages, template_arguments)
        if token is not None:
            return token
    return None


def writes_end_of_turn(tokenizer: PreTrainedTokenizerBase, template_arguments: KeywordArguments) -> bool:
    """Returns whether the chat template writes an end after an answer that ends the chat."""
    return _end_after_answer(tokenizer, _SHORT_CHAT, template_arguments) is not None


def _end_after_answer(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], template_arguments: KeywordArguments
) -> int | None:
    """Returns the token that the chat template writes as the end of the first answer, or None without one."""
    if tokenizer.chat_template is None:
        return None
    try:
        [text] = render_chats(tokenizer, [messages], **template_arguments)
    except ChatTemplateError:
        # the template needs a system message, or accepts other chats only
        return None
    _, _, text_after = text.partition(_ANSWER)
    return closing_token(text_after, tokenizer)

"""Multi-turn prompts: the messages that each turn adds to a conversation, and the token ids that join the turns.

`turn_messages` fills the environment's template; `ChatJoins` turns messages into token ids with the chat template and
never re-encodes sampled tokens. The first prompt is the template's text of the first messages. Between a sampled turn
and the next one, the template's text for that place is inserted: the end of the turn (if the policy did not sample it),
the environment's message and the generation prompt. The token ids therefore equal the encoded template text of the
whole conversation, provided that the sampled ids are the tokenizer's own encoding of their text. Some templates rewrite
earlier turns. The sampled tokens stay unchanged in that case, because the policy saw them and is trained on them:

- Thinking that a template strips from earlier turns stays in the context.
- An empty think block at the start of the generation prompt (Qwen3 with enable_thinking=False) stays in each turn.
- Spaces around an answer, which some templates trim, stay.
"""

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from verl_lite.envs.base import EnvTemplate
from verl_lite.errors import UserError
from workers.policy.chat_template import ChatTemplateError, render_chats, tool_arguments
from workers.policy.tokenizer import NO_TEMPLATE

Message = dict[str, Any]
"""role: system, user, assistant or tool; content: text; tool_calls of an assistant's message, in OpenAI's format."""

_ANSWER, _OTHER_ANSWER = "verlliteanswer", "verlliteother"
_PROBE = "verlliteprobe"
_ODD_CONTENT = f" \t\n\"<a>&'{{}}\\/ <tool_response> {_PROBE} \n "
_ENCODINGS_KEPT = 1024
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
        tool_role: "tool", or "user" if the template accepts no message of the role tool after an assistant's.

    Raises:
        UserError: the turns of the template cannot be joined: there is no template, no token ends a turn, a message
            changes the text before it, or the template rejects a system message.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        *,
        system: bool = False,
        most_tokens: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        if tokenizer.chat_template is None:
            raise UserError(NO_TEMPLATE.format("the turns of an episode"))
        self._encoded = functools.lru_cache(_ENCODINGS_KEPT)(self._encode)
        longest = characters_per_token(tokenizer)
        self._most_characters = None if longest is None or most_tokens is None else longest * most_tokens + 1
        self._check_joins(system)
        try:
            takes_results = _PROBE in self._after_answer([*_SHORT_CHAT, {"role": "tool", "content": _PROBE}])
        except UserError:  # the template rejects the role or omits the answer before the message
            takes_results = False
        self.tool_role = "tool" if takes_results else "user"
        probe = {"type": "function", "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}}}
        try:
            self._takes_tools = _PROBE in self._render(_SHORT_CHAT[:1], tools=[probe])
        except UserError:
            self._takes_tools = False
        self._continuations: dict[str, Callable[[str], str]] = {
            role: self._continuation_renderer(role) for role in {"user", self.tool_role}
        }
        self._closing_length, self.end_of_turn = self._closing_of_turn()

    def prompt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> tuple[int, ...]:
        """Returns the token ids of the first prompt, generation prompt included.

        A text that certainly has more than `most_tokens` tokens is cut to a beginning that also has more than that.
        tools: functions in OpenAI's format. If the template ignores tools, a system message describes them.
        """
        if not tools:
            return self._encoded(self._render(self._accepted(messages))[: self._most_characters])
        if self._takes_tools:
            text = self._render(self._accepted(messages), tools=list(tools))
        else:
            functions = "\n".join(json.dumps(tool["function"]) for tool in tools)
            is_first = messages[0]["role"] == "system"
            system = (f"{messages[0]['content']}\n\n" if is_first else "") + TOOLS.format(functions)
            text = self._render(self._accepted([{"role": "system", "content": system}, *messages[is_first:]]))
        return self._encoded(text[: self._most_characters])

    def join(self, response_ids: Sequence[int], *messages: Message) -> tuple[int, ...]:
        """Returns the token ids between a sampled turn and the next: end of turn, messages and generation prompt.

        The end of the turn is left out if `response_ids` already ends with it.

        Args:
            response_ids: the sampled turn. Its last token may be the end-of-turn token, another stop token, or any
                token if a limit cut the turn off.
            messages: the next messages, usually one of the role user or tool.
        """
        messages = tuple(self._accepted(messages))
        if len(messages) == 1 and (role := messages[0]["role"]) in self._continuations:
            text = self._continuations[role](messages[0]["content"])
        else:
            text = self._after_answer([*_SHORT_CHAT, *messages])
        ids = self._encoded(text[: self._most_characters])
        ended = bool(response_ids) and response_ids[-1] == self.end_of_turn
        return ids[self._closing_length :] if ended else ids

    def _accepted(self, messages: Sequence[Message]) -> list[Message]:
        """Returns the messages without parts that the template would reject or omit: messages of tools and tool calls
        become text if it has no role for them, and the arguments of tool calls become values."""
        result = []
        for message in messages:
            calls = [call["function"] for call in message.get("tool_calls") or ()]
            if message["role"] == "tool" and self.tool_role != "tool":
                message = {"role": self.tool_role, "content": message["content"]}
            elif calls and not self._takes_tools:
                texts = []
                for call in calls:
                    written_call = {"name": call["name"], "arguments": tool_arguments(call["arguments"])}
                    texts.append(f"<tool_call>{json.dumps(written_call)}</tool_call>")
                written = "\n".join(texts)
                message = {"role": message["role"], "content": f"{message['content'] or ''}{written}"}
            elif calls:
                values = [{**call, "arguments": tool_arguments(call["arguments"])} for call in calls]
                message = message | {"tool_calls": [{"type": "function", "function": call} for call in values]}
            result.append(message)
        return result

    def _render(self, messages: Sequence[Message], **more: Any) -> str:
        return render_chats(self._tokenizer, [messages], add_generation_prompt=True, **self._template_kwargs, **more)[0]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    # ---------------------------------------------------------------------------------- properties of the chat template

    def _continuation_renderer(self, role: str) -> Callable[[str], str]:
        """Returns a function that maps a message's content to the template's text after the answer before the message.

        Most templates put the content between two constant texts. The function then concatenates them, which is a
        hundred times faster than rendering; for other templates it renders each message.
        """

        def rendered(content: str) -> str:
            return self._after_answer([*_SHORT_CHAT, {"role": role, "content": content}])

        before, _, after = rendered(_PROBE).partition(_PROBE)
        for change in (str, str.strip):
            if rendered(_ODD_CONTENT) == before + change(_ODD_CONTENT) + after:
                return lambda content, change=change: before + change(content) + after  # type: ignore[misc]
        return rendered

    def _after_answer(self, messages: list[Message]) -> str:
        """Renders `messages` and returns the text after the first answer."""
        _, found, rest = self._render(messages).partition(_ANSWER)
        if not found:
            raise self._template_error("leaves out the content of the assistant's message")
        return rest

    def _closing_of_turn(self) -> tuple[int, int]:
        """Returns the number of tokens that end a turn in the template, and the last of them: the end-of-turn token."""
        ids = self._encode(self._continuations["user"](_PROBE))
        index = closing_index(ids, self._tokenizer)
        if index is None:
            raise self._template_error(
                "has no token that ends an assistant's turn: after the answer it writes "
                f"{self._continuations['user'](_PROBE)[:80]!r}, but a special token of the tokenizer has to come first"
            )
        return index + 1, ids[index]

    def _check_joins(self, system: bool) -> None:
        """Raises UserError if the text of a message depends on later messages or on the number of earlier ones.

        One difference is allowed: the generation prompt and the head of an answered turn may differ by a suffix, such
        as a think block or a space.
        """
        first, second, third = ({"role": "user", "content": f"q{number}"} for number in (1, 2, 3))
        first_answer, other_answer = ({"role": "assistant", "content": text} for text in (_ANSWER, _OTHER_ANSWER))
        beginning: list[Message] = [{"role": "system", "content": "s"}] * system + [first]
        prompt = self._rendered_or_refused(beginning, system)
        self._rendered_or_refused([*_SHORT_CHAT, second], False)
        whole = self._rendered_or_refused([*beginning, first_answer, second, other_answer, third], system)
        head, found, rest = whole.partition(_ANSWER)
        middle, found_too, tail = rest.partition(_OTHER_ANSWER)
        if not found or not found_too:
            raise self._template_error("leaves out the content of an assistant's message")
        joins = [self._after_answer([*_SHORT_CHAT, message]) for message in (second, third)]
        for part, expected in ((head, prompt), (middle, joins[0])):
            if not part.startswith(expected) and not expected.startswith(part):
                raise self._unstable_text_error(part, expected)
        if tail != joins[1]:
            raise self._unstable_text_error(tail, joins[1])

    def _rendered_or_refused(self, messages: list[Message], system: bool) -> str:
        try:
            return self._render(messages)
        except ChatTemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            remedy = "set data.apply_chat_template_kwargs to the variables that the template needs"
            if system:
                remedy = f"if the template rejects the system message, {_WITHOUT_SYSTEM}"
            raise self._template_error(f"fails on messages of the roles {roles}: {error}; {remedy}") from error

    def _unstable_text_error(self, found: str, expected: str) -> UserError:
        return self._template_error(
            "writes a message differently once others follow, so joining the turns would change the context that the "
            f"policy sampled from: {found!r} in a long conversation, {expected!r} in a short one; "
            f"if the template moves the system message, {_WITHOUT_SYSTEM}"
        )

    def _template_error(self, problem: str) -> UserError:
        return UserError(
            f"The chat template of model.path (or data.chat_template) {problem}. Set data.chat_template to another "
            "template: a file or the Jinja text"
        )


def characters_per_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the maximum number of characters that one token can encode, or None if the tokenizer has no known bound.

    A byte-level BPE with a token for every byte has a bound: a token encodes as many bytes as its name has characters,
    and a character has at least one byte. NFC normalisation merges at most four characters into one. There is no bound
    if a token absorbs the spaces around it, or if some character has no token.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    names = tokenizer.get_vocab()
    factor = {"NoneType": 1, "NFC": 4}.get(type(getattr(backend, "normalizer", None)).__name__)
    is_byte_level = "ByteLevel" in repr(getattr(backend, "pre_tokenizer", None))
    takes_spaces = any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values())
    if factor is None or not is_byte_level or takes_spaces or not names.keys() >= set(ByteLevel.alphabet()):
        return None
    return factor * max(map(len, names))


def closing_index(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the index of the token that ends an assistant's turn.

    It is the first special token, and only blanks may come before it.

    Args:
        ids: the tokens that the chat template writes after the answer.

    Returns:
        The index, or None if the turn has no such token.
    """
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    index = next((place for place, token in enumerate(ids) if token in special), None)
    if index is None or str(tokenizer.decode(list(ids[:index]))).strip():
        return None
    return index


def end_of_turn(tokenizer: PreTrainedTokenizerBase, template_arguments: Mapping[str, Any]) -> int | None:
    """Returns the token that ends an assistant's turn in the chat template, or None if the template writes none."""
    if tokenizer.chat_template is None:
        return None
    question, answer = _SHORT_CHAT
    following = {"role": "user", "content": _PROBE}
    for messages in ([question, answer], [question, answer, following]):
        try:
            [text] = render_chats(tokenizer, [messages], **template_arguments)
        except ChatTemplateError:  # the template needs a system message, or accepts other chats only
            continue
        after = text.partition(_ANSWER)[2]
        ids = tokenizer.encode(after, add_special_tokens=False) if after else []
        index = closing_index(ids, tokenizer)
        if index is not None:
            return int(ids[index])
    return None


@dataclass
class Turn:
    """One turn of an episode: the agent's action, the observation before it, and the reward of the step.

    messages, prompt_ids: the part of the prompt that this turn adds to the earlier turns; the whole prompt in step mode
        (`EnvTemplate.by_step`).
    response_ids, log_probs, versions, finish_reason: see `Completion`.
    action: text of the response without its stop token.
    observation, state_hash: the observation before the action, and the name of its state.
    reward: reward of the step, including a format penalty.
    is_valid: False if the environment reported an invalid action.
    info: the `info` dict that the environment's step returned.
    extra: see `Completion`. Values for the whole context are kept by the last turn of a trajectory only.
    """

    messages: list[Message]
    prompt_ids: tuple[int, ...]
    response_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    versions: list[int]
    action: str
    observation: str
    state_hash: str
    reward: float = 0.0
    is_valid: bool = True
    info: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)


def turn_messages(
    template: EnvTemplate,
    observation: str,
    past: Sequence[Turn],
    *,
    instruction: str,
    info: Mapping[str, Any],
    max_response_length: int,
) -> list[Message]:
    """Returns the messages that the next turn adds to the conversation, from the environment's template.

    In step mode (`template.by_step`), each turn is a separate conversation, and its user message summarises the last
    `history_length` turns with valid and invalid actions (ROLL: only invalid actions).

    Args:
        past: all turns so far.
        instruction: the environment's task, included in the first turn of a trajectory, and in each turn in step mode.
        info: the `info` dict of the reset or step that returned `observation`.
        max_response_length: maximum number of tokens of the turn's response.
    """
    is_first = template.by_step or not past
    fields: dict[str, Any] = {
        "observation": observation,
        "env_instruction": instruction if is_first else "",
        "turn_idx": len(past) + 1,
        "suffix": info.get("suffix") or "",
        "actions_left": template.max_steps - len(past),
        "max_response_length": max_response_length,
    }
    if template.by_step:
        history = past[len(past) - min(template.history_length, len(past)) :]
        first = len(past) - len(history) + 1
        fields |= {
            "history": "\n".join(
                f"(step {number}, observation: {turn.observation}, action: {turn.action}"
                f"{' (not a valid action)' * (not turn.is_valid)}, reward: {turn.reward:g})"
                for number, turn in enumerate(history, start=first)
            ),
            "history_length": len(history),
            "step_count": len(past),
            "current_step": len(past) + 1,
            "current_observation": observation,
        }
    content = template.agent_template.format(**fields)
    if is_first and instruction and "env_instruction" not in template.fields:
        content = instruction + ("" if instruction[-1].isspace() else "\n") + content
    is_tool = info.get("use_tool") and not is_first
    system = template.agent_system_template if is_first else None
    message: Message = {"role": "tool" if is_tool else "user", "content": content}
    return [{"role": "system", "content": system}, message] if system else [message]


_SHORT_CHAT: list[Message] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _ANSWER}]

"""What a turn adds to a conversation: as messages, in the words of the environment's template; and as token ids, joined
as the chat template joins them, without ever re-encoding what was sampled.

A first prompt is the chat template's text of the first messages. What stands between a sampled turn and the next one
(the end of the turn, where the policy did not write it itself; the environment's message; the generation prompt) is
what the template writes there for any conversation. So the whole equals the template's text of the whole conversation,
encoded, wherever the sampled ids are the ones that the tokenizer would have chosen for their text. Where templates
rewrite earlier turns, what was sampled stays instead, because that is what the policy saw and is trained on:

- Thinking that a template strips from earlier turns stays in the context.
- An empty think block that the generation prompt opens with (Qwen3 with enable_thinking=False) stays at each turn.
- Spaces around an answer, which some templates trim, stay.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

from verl_lite.envs.base import EnvTemplate
from verl_lite.errors import UserError
from workers.policy.chat_template import ChatTemplateError, render_chats
from workers.policy.tokenizer import NO_TEMPLATE

Message = dict[str, str]
"""role: system, user, assistant or tool; content: text."""

_ANSWER, _OTHER_ANSWER = "verlliteanswer", "verlliteother"
_PROBE = "verlliteprobe"
_ODD_CONTENT = f" \t\n\"<a>&'{{}}\\/ <tool_response> {_PROBE} \n "
_ENCODINGS_KEPT = 1024
_WITHOUT_SYSTEM = "put its text into agent_template and leave agentic.custom_envs.TAG.agent_system_template empty"


class ChatJoins:
    """The chat template of one tokenizer, as prompts and joins.

    end_of_turn: the token that ends an assistant's turn in the template; it has to be among the stop tokens of a
        request, else the policy writes on past its turn. tool_role: "tool", or "user" where the template takes no
        message of that role after an assistant's.
    template_kwargs: data.apply_chat_template_kwargs. system: whether conversations begin with a system message.
    most_tokens: the callers drop longer texts, so that of a text which is certainly longer only the beginning has to be
        tokenized; None = every text is tokenized whole.
    Raises UserError for a template whose turns cannot be joined: none at all, no end of a turn, messages that change
    what was written before them, a system message that it does not take.
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
            takes_tools = _PROBE in self._after_answer([*_SHORT, {"role": "tool", "content": _PROBE}])
        except UserError:  # it refuses the role, or leaves out the answer before it
            takes_tools = False
        self.tool_role = "tool" if takes_tools else "user"
        self._rests: dict[str, Callable[[str], str]] = {
            role: self._rest_after_answer(role) for role in {"user", self.tool_role}
        }
        self._closing, self.end_of_turn = self._closing_of_turn()

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids that the first turn of these messages is sampled from, the generation prompt at the end; of a text
        that certainly has more than `most_tokens`, more than that from its beginning."""
        return self._encoded(self._render(messages)[: self._most_characters])

    def join(self, response_ids: Sequence[int], message: Message) -> tuple[int, ...]:
        """What stands between a sampled turn and the next: its end where it is not sampled, the message, the generation
        prompt.

        response_ids: the turn as sampled. It may end in the end-of-turn token or another stop token or, cut off by a
        limit, in neither. message: of the role user or tool.
        """
        role = self.tool_role if message["role"] == "tool" else message["role"]
        ids = self._encoded(self._rests[role](message["content"])[: self._most_characters])
        ended = bool(response_ids) and response_ids[-1] == self.end_of_turn
        return ids[self._closing :] if ended else ids

    def _render(self, messages: Sequence[Message]) -> str:
        return render_chats(self._tokenizer, [messages], add_generation_prompt=True, **self._template_kwargs)[0]

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    # ------------------------------------------------------------------------------------------- what the template does

    def _rest_after_answer(self, role: str) -> Callable[[str], str]:
        """The function from a message's content to the text from the end of the answer before it on.

        Rendering costs a hundred times what it takes to put a content between two constant texts, which is what most
        templates do; the others are rendered each time.
        """

        def rendered(content: str) -> str:
            return self._after_answer([*_SHORT, {"role": role, "content": content}])

        before, _, after = rendered(_PROBE).partition(_PROBE)
        for change in (str, str.strip):
            if rendered(_ODD_CONTENT) == before + change(_ODD_CONTENT) + after:
                return lambda content, change=change: before + change(content) + after  # type: ignore[misc]
        return rendered

    def _after_answer(self, messages: list[Message]) -> str:
        """The text that follows the first answer."""
        _, found, rest = self._render(messages).partition(_ANSWER)
        if not found:
            raise self._refusal("leaves out what the assistant said")
        return rest

    def _closing_of_turn(self) -> tuple[int, int]:
        """How many tokens end a turn in the template, and the last of them, the end-of-turn token."""
        ids = self._encode(self._rests["user"](_PROBE))
        special = set(self._tokenizer.all_special_ids) | set(self._tokenizer.added_tokens_decoder)
        place = next((index for index, token in enumerate(ids) if token in special), None)
        written = "" if place is None else str(self._tokenizer.decode(list(ids[:place])))
        if place is None or written.strip():
            raise self._refusal(
                "has no token that ends an assistant's turn: after the answer it writes "
                f"{self._rests['user'](_PROBE)[:80]!r}, expected a special token of the tokenizer first"
            )
        return place + 1, ids[place]

    def _check_joins(self, system: bool) -> None:
        """Raises UserError unless each part of a conversation is the same text whatever comes after it, and however
        much before it.

        Only the head of an assistant's turn may be longer in one of two places: a think block, or a space.
        """
        first, second, third = ({"role": "user", "content": f"q{number}"} for number in (1, 2, 3))
        first_answer, other_answer = ({"role": "assistant", "content": text} for text in (_ANSWER, _OTHER_ANSWER))
        beginning: list[Message] = [{"role": "system", "content": "s"}] * system + [first]
        prompt = self._rendered_or_refused(beginning, system)
        self._rendered_or_refused([*_SHORT, second], False)
        whole = self._rendered_or_refused([*beginning, first_answer, second, other_answer, third], system)
        head, found, rest = whole.partition(_ANSWER)
        middle, found_too, tail = rest.partition(_OTHER_ANSWER)
        if not found or not found_too:
            raise self._refusal("leaves out what the assistant said")
        joins = [self._after_answer([*_SHORT, message]) for message in (second, third)]
        for part, expected in ((head, prompt), (middle, joins[0])):
            if not part.startswith(expected) and not expected.startswith(part):
                raise self._unstable(part, expected)
        if tail != joins[1]:
            raise self._unstable(tail, joins[1])

    def _rendered_or_refused(self, messages: list[Message], system: bool) -> str:
        try:
            return self._render(messages)
        except ChatTemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            remedy = "set data.apply_chat_template_kwargs to what it needs"
            if system:
                remedy = f"if it is the system message that it does not take, {_WITHOUT_SYSTEM}"
            raise self._refusal(f"fails on messages of the roles {roles}: {error}; {remedy}") from error

    def _unstable(self, found: str, expected: str) -> UserError:
        return self._refusal(
            "writes a message differently once others follow, so that turns cannot be joined without changing what was "
            f"sampled from: {found!r} in a long conversation, {expected!r} in a short one; where it moves the system "
            f"message, {_WITHOUT_SYSTEM}"
        )

    def _refusal(self, what: str) -> UserError:
        return UserError(
            f"The chat template of model.path (or data.chat_template) {what}. Give another template with "
            "data.chat_template: a file, or the Jinja text itself"
        )


def characters_per_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The most characters of a text that one token stands for; None where that is not known.

    It is known of a byte-level BPE that has every byte: a token stands for as many bytes as its name has characters,
    and a character has a byte at least. NFC makes one character of four at most. A token that takes the spaces around
    it, or a character without a token, would have no such bound.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    names = tokenizer.get_vocab()
    factor = {"NoneType": 1, "NFC": 4}.get(type(getattr(backend, "normalizer", None)).__name__)
    is_byte_level = "ByteLevel" in repr(getattr(backend, "pre_tokenizer", None))
    takes_spaces = any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values())
    if factor is None or not is_byte_level or takes_spaces or not names.keys() >= set(ByteLevel.alphabet()):
        return None
    return factor * max(map(len, names))


@dataclass
class Turn:
    """One action of the agent.

    messages, prompt_ids: what the turn's prompt adds to the turns before it; by steps, the whole prompt.
    response_ids, log_probs, finish_reason, policy_version: see `Completion`. action: the response as text, without its
    stop token. observation, state_hash: what the agent acted upon. reward: of the step, a format penalty included.
    is_valid: as far as the environment said. info: that the step gave.
    routed_experts: of the whole context, see `Completion`; in a trajectory those of the last turn alone are kept.
    """

    messages: list[Message]
    prompt_ids: tuple[int, ...]
    response_ids: list[int]
    log_probs: list[float]
    finish_reason: str
    policy_version: int
    action: str
    observation: str
    state_hash: str
    reward: float = 0.0
    is_valid: bool = True
    info: dict[str, Any] = field(default_factory=dict)
    routed_experts: torch.Tensor | None = None


def turn_messages(
    template: EnvTemplate,
    observation: str,
    past: Sequence[Turn],
    *,
    instruction: str,
    info: Mapping[str, Any],
    max_response_length: int,
) -> list[Message]:
    """The messages that the turn after `past` (all turns so far) adds, in the template's words. By steps, a turn is a
    conversation of its own: its one message tells the last turns, valid actions and invalid ones (ROLL: invalid only).

    instruction: of the environment, told in a trajectory's first turn and in each step. info: of the reset or step that
    gave the observation. max_response_length: tokens that the turn may take.
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
        told = past[len(past) - min(template.history_length, len(past)) :]
        first = len(past) - len(told) + 1
        fields |= {
            "history": "\n".join(
                f"(step {number}, observation: {turn.observation}, action: {turn.action}"
                f"{' (not a valid action)' * (not turn.is_valid)}, reward: {turn.reward:g})"
                for number, turn in enumerate(told, start=first)
            ),
            "history_length": len(told),
            "step_count": len(past),
            "current_step": len(past) + 1,
            "current_observation": observation,
        }
    content = template.agent_template.format(**fields)
    if is_first and instruction and "env_instruction" not in template.fields:  # it stands before the rest
        content = instruction + ("" if instruction[-1].isspace() else "\n") + content
    is_tool = info.get("use_tool") and not is_first
    system = template.agent_system_template if is_first else None
    own: Message = {"role": "tool" if is_tool else "user", "content": content}
    return [{"role": "system", "content": system}, own] if system else [own]


_SHORT: list[Message] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _ANSWER}]

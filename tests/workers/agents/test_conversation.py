"""Turns joined as each family's chat template joins them: against the template's own text of the whole conversation,
encoded, and against texts written by hand. What templates rewrite in hindsight stays as it was sampled.
"""

from __future__ import annotations

import copy
import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import normalizers
from transformers import PreTrainedTokenizerBase

from tests.tiny_model import tiny_tokenizer
from tests.workers.rollout import chat_templates as families
from verl_lite.errors import UserError
from workers.agents.conversation import ChatJoins, Message
from workers.agents.tokens import characters_per_token

SYSTEM: Message = {"role": "system", "content": "you are an agent."}


class Talk:
    """A conversation in both ways: `ids` joined turn by turn, `messages` for the template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, messages: list[Message], **kwargs: Any) -> None:
        self.tokenizer, self.kwargs = tokenizer, kwargs
        self.joins = ChatJoins(tokenizer, kwargs, system=messages[0]["role"] == "system")
        self.messages = list(messages)
        self.ids = list(self.joins.prompt(messages))
        self.response: list[int] = []

    def turn(self, answer: str, then: Message, *, is_cut: bool = False) -> Talk:
        """The answer in the tokenizer's own encoding, with the end-of-turn token unless a limit cut it off before."""
        then = {"role": self.joins.tool_role if then["role"] == "tool" else "user", "content": then["content"]}
        head = self.template(self.messages)
        answered = self.template([*self.messages, {"role": "assistant", "content": answer}, then], False)
        start = len(self.encode(head))
        whole = self.encode(answered)
        end = start + whole[start:].index(self.joins.end_of_turn)
        self.response = whole[start : end if is_cut else end + 1]
        if is_cut and not self.tokenizer.decode(self.response[-1:]).strip():
            self.response = self.response[:-1]  # the space that llama-2 writes before its end of turn
        self.ids += [*self.response, *self.joins.join(self.response, then)]
        self.messages += [{"role": "assistant", "content": answer}, then]
        return self

    def template(self, messages: list[Message], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **self.kwargs
            )
        )

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text(self) -> str:
        return self.tokenizer.decode(self.ids)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def tool(content: str) -> Message:
    return {"role": "tool", "content": content}


@pytest.mark.parametrize(
    ("family", "has_system", "tool_role"),
    [
        (families.chatml, True, "tool"),
        (families.qwen3, True, None),  # it rewrites thoughts after a tool's message
        (families.llama3, True, "tool"),
        (tiny_tokenizer, True, "tool"),
        (families.gemma, False, "user"),
        (families.mistral, False, "user"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_joined_turns_are_the_template_of_the_whole_conversation(
    family: Callable[[], PreTrainedTokenizerBase], has_system: bool, tool_role: str | None
) -> None:
    """With contents that templates trim or escape, answers that a limit cut off, and messages of tools."""
    for system in [[], [SYSTEM]] if has_system else [[]]:
        talk = Talk(family(), [*system, user("what is one plus two?")])
        talk.turn("it is three", user("go up")).turn("up", user("a wall\n\nis up."), is_cut=True)
        talk.turn("down", user(' \n{{ x }} {% if %} <a> & "b"\\ ')).turn("left", user("verlliteprobe \u00fc")).turn(
            "up", user("")
        )
        assert talk.ids == talk.encode(talk.template(talk.messages))
    talk = Talk(family(), [user("go")])
    if tool_role is not None:
        assert talk.joins.tool_role == tool_role
        talk.turn("left", tool('{"wall": "x"}')).turn("up", tool("three"), is_cut=True).turn("one", user("two"))
        assert talk.ids == talk.encode(talk.template(talk.messages))


def test_chatml_by_hand() -> None:
    talk = Talk(families.chatml(), [user("go")])
    talk.turn("up", tool("wall")).turn("left", user("on"), is_cut=True)
    assert talk.text() == (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
        "up<|im_end|>\n<|im_start|>user\n<tool_response>\nwall\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "left<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_end_of_a_turn_stands_once_whatever_ended_it() -> None:
    tokenizer = families.chatml()
    joins = ChatJoins(tokenizer)
    rest = tokenizer.encode("\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)
    end, end_of_text = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    up = tokenizer.encode("up", add_special_tokens=False)
    for response, added in (([*up, end], []), (up, [end]), ([*up, end_of_text], [end]), ([end], []), ([], [end])):
        assert list(joins.join(response, user("b"))) == [*added, *rest]


def test_sampled_ids_stay_where_the_tokenizer_would_have_chosen_others() -> None:
    tokenizer = families.chatml()
    by_letter = [tokenizer.convert_tokens_to_ids(letter) for letter in "three"]
    assert by_letter != tokenizer.encode("three", add_special_tokens=False)
    joins = ChatJoins(tokenizer)
    assert joins.join([*by_letter, joins.end_of_turn], user("b")) == joins.join([joins.end_of_turn], user("b"))


# ------------------------------------------------------------------------------------------------ calls of tools

TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]
WITH_TOOLS = [
    (families.mistral_tools, 1),
    (families.mistral_tools, 2),
    (families.glm, 1),
    (families.glm, 2),
    (families.named_results, 1),
    (families.named_results, 2),
    (families.llama31_tools, 1),  # the template accepts one call per turn
]


def called(*identifiers: str) -> list[dict[str, Any]]:
    return [
        {"id": each, "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
        for each in identifiers
    ]


def result(identifier: str, content: str = "seen") -> Message:
    return {"role": "tool", "tool_call_id": identifier, "content": content}


@pytest.mark.parametrize(("family", "number"), WITH_TOOLS)
@pytest.mark.parametrize("content", ["seen", "verlliteargument", " \n\"<e>' "])
def test_results_are_joined_as_the_template_writes_them(family: Any, number: int, content: str) -> None:
    """The joined ids are the template's text of the conversation behind the call, for one result and for two."""
    tokenizer = family()
    joins = ChatJoins(tokenizer)
    calls = called("call00001", "call00002")[:number]
    results = [result(call["id"], content) for call in calls]
    values = [{**call, "function": call["function"] | {"arguments": {"at": "x"}}} for call in calls]
    turn = {"role": "assistant", "content": "", "tool_calls": values}
    named = [{**each, "name": "look"} for each in results]
    whole = str(tokenizer.apply_chat_template([user("q"), turn, *named], tokenize=False, add_generation_prompt=True))

    ids = joins.join([], *results, calls=calls)
    text = str(tokenizer.decode(list(ids)))
    assert whole.endswith(text)
    # what is left is the turn up to its last call
    assert whole.removesuffix(text).endswith(("</tool_call>", "]", "}"))
    assert joins.join([ids[0]], *results, calls=calls) == ids[1:]
    assert ids[0] in joins.ends_of_turn
    fork = str(tokenizer.decode(list(joins.prompt([user("q"), {**turn, "tool_calls": calls}, *results]))))
    assert fork == whole


def test_glm_turns_are_joined_with_the_end_that_the_policy_sampled() -> None:
    tokenizer = families.glm()
    joins = ChatJoins(tokenizer)
    to_user, to_tool, end_of_text = tokenizer.convert_tokens_to_ids(["<|user|>", "<|observation|>", "<|endoftext|>"])
    assert set(joins.ends_of_turn) == {to_user, to_tool}
    [call] = called("call00001")
    answer = "\n<tool_response>\nseen\n</tool_response><|assistant|>\n"

    def joined(last: int, *messages: Message) -> str:
        return str(tokenizer.decode(list(joins.join([last], *messages, calls=[call]))))

    assert joined(to_tool, result("call00001")) == answer
    assert joined(end_of_text, result("call00001")) == "<|observation|>" + answer
    assert joined(to_user, user("b")) == "\nb<|assistant|>\n"
    assert joined(to_tool, user("b")) == "<|user|>\nb<|assistant|>\n"
    # a result without a call, as environments write it
    assert str(tokenizer.decode(list(joins.join([to_tool], tool("seen"))))) == answer


def test_the_name_of_a_function_is_found_by_the_id_of_its_call() -> None:
    joins = ChatJoins(families.named_results())
    text = families.named_results().decode(list(joins.join([], result("a"), result("b"), calls=called("a", "b"))))
    assert text == "<e><b>result of look (a): seen<e><b>result of look (b): seen<e><b>assistant: "


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (families.mistral_tools, '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}]'),
        (families.glm, "<tool_call>f</tool_call>"),
        (families.named_results, '<tool_call>{"name": "f"}</tool_call>'),
        (families.llama31_tools, '{"name": "f", "parameters": {}}'),
        (
            families.chatml,
            '<tool_call>{"name": "f"}</tool_call>',
        ),  # its system message describes tools in this notation
    ],
)
def test_calls_are_read_in_the_notation_of_the_template(family: Any, text: str) -> None:
    notation = ChatJoins(family()).notation
    assert notation is not None
    assert [call.name for call in notation(text).calls] == ["f"]


def test_a_notation_that_is_not_parsed_is_known_at_the_start() -> None:
    assert ChatJoins(families.harmony()).notation is None


# ------------------------------------------------------------------------------------------ what templates rewrite


def test_an_empty_think_block_of_the_generation_prompt_stays_at_each_turn() -> None:
    """The template drops the block from history; the policy was sampled after it, and is trained after it."""
    talk = Talk(families.qwen3(), [user("go")], enable_thinking=False)
    for answer in ("up", "down"):
        response = [*talk.encode(answer), talk.joins.end_of_turn]
        talk.ids += [*response, *talk.joins.join(response, user("on"))]
    empty = "<think>\n\n</think>\n\n"
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n" + empty + "{}"
    assert talk.text() == turn.format("go", "up<|im_end|>\n") + turn.format("on", "down<|im_end|>\n") + turn.format(
        "on", ""
    )
    history = [user("go"), {"role": "assistant", "content": "up"}, user("on")]
    assert talk.template(history) == turn.replace(empty, "").format("go", "up<|im_end|>\n") + turn.format("on", "")


def test_thinking_that_the_template_strips_from_history_stays() -> None:
    talk = Talk(families.qwen3(), [user("go")])
    answer = "<think>\na wall\n</think>\n\nup"
    response = [*talk.encode(answer), talk.joins.end_of_turn]
    ids = [*talk.ids, *response, *talk.joins.join(response, user("on"))]
    whole = talk.template([user("go"), {"role": "assistant", "content": answer}, user("on")])
    assert "a wall" not in whole
    head = "<|im_start|>user\ngo<|im_end|>\n<|im_start|>assistant\n"
    tail = "<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"
    assert talk.tokenizer.decode(ids) == head + answer + tail
    assert whole == head + "up" + tail


def test_only_the_beginning_of_a_text_that_is_certainly_too_long_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, read = copy.deepcopy(families.chatml()), list[int]()
    assert characters_per_token(tokenizer) == len("<|endoftext|>"), "its longest token"
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    assert characters_per_token(tokenizer) == 4 * len("<|endoftext|>")
    assert len(unicodedata.normalize("NFD", "\u1f82")) == 4, "characters that NFC makes one"
    for other in (tiny_tokenizer(), families.metaspace(families.MISTRAL)):
        assert characters_per_token(other) is None, "it drops characters, or takes several for one unknown token"
    joins, encode = ChatJoins(tokenizer, most_tokens=100), type(tokenizer).encode
    monkeypatch.setattr(type(tokenizer), "encode", lambda *x, **more: (read.append(len(x[1])), encode(*x, **more))[1])
    long = user("a " * 100_000)
    assert len(joins.prompt([long])) > 100 < len(joins.join([3], long))
    assert read == [4 * 13 * 100 + 1] * 2


# ------------------------------------------------------------------------------------------------------------ refusals

SILENT = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<e>{% endif %}{% endfor %}"
NEEDING = "{{ raise_exception('no date') if date is not defined }}" + families.CHATML
UNTAKEN = "; .*agent_system_template empty"


@pytest.mark.parametrize(
    ("tokenizer", "system", "told"),
    [
        (lambda: families.byte_level(None, "<e>"), False, "has no chat template.*data.chat_template"),
        (families.gemma, True, "System role not supported" + UNTAKEN),
        (families.mistral, True, "only user and assistant" + UNTAKEN),
        (lambda: families.metaspace(families.MISTRAL_MOVING_SYSTEM), True, "differently once.*system_template empty"),
        (lambda: families.byte_level(families.PLAIN, "<e>"), False, "no token that ends an assistant's turn.*'.nuser"),
        (lambda: families.byte_level(SILENT, "<e>"), False, "leaves out the content of an assistant"),
        (lambda: families.byte_level(NEEDING, "<|im_end|>", "<|im_start|>"), False, "no date; set data.apply_chat"),
    ],
)
def test_a_template_whose_turns_cannot_be_joined_is_refused(tokenizer: Any, system: bool, told: str) -> None:
    with pytest.raises(UserError, match=told):
        ChatJoins(tokenizer(), system=system)


def test_what_was_refused_is_taken_with_what_it_needs() -> None:
    ChatJoins(families.byte_level(NEEDING, "<|im_end|>", "<|im_start|>"), {"date": "today"})
    ChatJoins(families.metaspace(families.MISTRAL_MOVING_SYSTEM))

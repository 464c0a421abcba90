"""The bookkeeping of tokens: every sampled token is in one row, and no sampled token is encoded again."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import psutil
import pytest
import torch

from recipes.embedded import byte_tokenizer
from tests.workers.agents.endpoint.live import (
    END,
    JOINS,
    LIMITS,
    TEMPLATE,
    TOKENIZER,
    completion_of,
    ids_of,
    new_trace,
)
from verl_lite.schema import SAMPLING_CANDIDATES
from workers.agents.conversation import ChatJoins, Message
from workers.agents.endpoint.answer_parts import split_thinking
from workers.agents.endpoint.trace import ContextOverflow, Conversation, Refusal, SampledAnswer, Trace, TraceNode
from workers.agents.episodes import TokenLimits, Trajectory
from workers.agents.trajectories import trajectory_rows
from workers.engines.base import Completion
from workers.policy.chat_template import render_chats
from workers.rollout.specs import ProgramSpec

THINKING = byte_tokenizer()
THINKING.chat_template = TEMPLATE.replace(
    "generation_prompt %}<|assistant|>", "generation_prompt %}<|assistant|><think>\n"
)
"""A template that opens the thinking of each answer."""
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def ask(trace: Trace, *messages: Message, answer: str | list[int], delivered: bool = True, **more: Any) -> TraceNode:
    """Adds a request whose answer is this text, or these token ids."""
    node = trace.add(Conversation(list(messages), **more), 256)
    done = completion_of("r", answer, node.room) if isinstance(answer, str) else None
    if done is None:
        done = Completion("r", list(answer), [-0.5] * len(answer), "stop", [3] * len(answer))
    trace.commit(node, done)
    node.is_delivered = delivered
    return node


def said(node: TraceNode) -> SampledAnswer:
    assert node.answer is not None
    return node.answer


def written(trace: Trace) -> list[tuple[str, str]]:
    """The rows as texts: the whole row, and its tokens with mask 1."""
    shown = []
    for turns in trace.rows(1.0):
        ids = [*chain.from_iterable((*turn.prompt_ids, *turn.response_ids) for turn in turns)]
        own = [*chain.from_iterable(turn.response_ids for turn in turns)]
        shown.append((str(TOKENIZER.decode(ids)), str(TOKENIZER.decode(own))))
    counts = dict(trace.counts)
    assert counts.pop("sampled") == sum(counts.values())
    return shown


def test_a_request_that_extends_a_row_continues_it_with_the_sampled_ids() -> None:
    trace = new_trace()
    # the text has one token per byte; the policy sampled the special token as letters, which encoding would merge
    letters = [*chain.from_iterable(TOKENIZER.encode(c, add_special_tokens=False) for c in "<|user|>x")]
    first = ask(trace, user("a"), answer=[*letters, END])
    assert TOKENIZER.encode(said(first).text, add_special_tokens=False) != letters
    second = ask(trace, user("a"), said(first).message, user("b"), answer="yes")
    assert second.parent is first
    assert second.context()[len(first.context()) :][: len(letters) + 1] == [*letters, END]
    [(row, own)] = written(trace)
    assert row.endswith("<|user|>user: b<|assistant|>yes<|im_end|>") and own.endswith("yes<|im_end|>")


def test_a_turn_cut_off_by_its_length_is_closed_by_an_untrained_token() -> None:
    trace = new_trace()
    first = ask(trace, user("a"), answer="long", max_tokens=2)
    assert (said(first).text, said(first).finish_reason) == ("lo", "length")
    ask(trace, user("a"), assistant("lo"), user("b"), answer="c")
    [(row, own)] = written(trace)
    assert "lo<|im_end|><|user|>user: b" in row and own == "loc<|im_end|>"


@pytest.mark.parametrize(
    "second",
    [
        [user("a"), user("b")],  # the same question again
        [user("other"), assistant("yes"), user("b")],  # an edited message before the answer
        [user("a"), assistant("no"), user("b")],  # an edited answer
        [{"role": "system", "content": "s"}, user("a"), assistant("yes"), user("b")],
    ],
)
def test_a_rewritten_history_forks_a_row_without_sampled_tokens_of_others(second: list[Message]) -> None:
    trace = new_trace()
    ask(trace, user("a"), answer="yes")
    ask(trace, *second, answer="two")
    rows = written(trace)
    assert [own for _, own in rows] == ["yes<|im_end|>", "two<|im_end|>"]
    assert rows[1][0] == TOKENIZER.decode(list(JOINS.prompt(second))) + "two<|im_end|>"


def test_a_fork_begins_at_the_longest_branch_that_it_extends_with_mask_0_before_it() -> None:
    trace = new_trace()
    first = ask(trace, user("a"), answer="one")
    begun = [user("a"), said(first).message, user("b")]
    best_of = [ask(trace, *begun, answer=text) for text in ("x", "y", "z")]
    ask(trace, *begun, said(best_of[1]).message, user("c"), answer="end")  # continues the second of the three
    rows = written(trace)
    whole = "<|user|>user: a<|assistant|>one<|im_end|><|user|>user: b<|assistant|>"
    assert [own.replace("<|im_end|>", ".") for _, own in rows] == ["one.x.", "y.end.", "z."]
    assert [row.startswith(whole) for row, _ in rows] == [True, True, True]
    assert [len(turns) for turns in trace.rows(1.0)] == [2, 2, 1]


def test_a_sub_agent_and_a_compaction_are_rows_of_their_own_beside_the_main_row() -> None:
    trace = new_trace()
    first = ask(trace, user("main"), answer="plan")
    ask(trace, {"role": "system", "content": "sub"}, user("task"), answer="found")
    ask(trace, user("main"), said(first).message, user("found"), answer="go on")
    ask(trace, user("summary: plan, found"), answer="done")
    assert [own.replace("<|im_end|>", ".") for _, own in written(trace)] == ["plan.go on.", "found.", "done."]


def test_an_edited_tool_result_forks_after_the_call_whose_ids_are_kept() -> None:
    trace = new_trace()
    call = '<tool_call>{"name":"look",  "arguments": {"at":"x"}}</tool_call>'  # its spacing is not the template's
    first = ask(trace, user("a"), answer=call, tools=TOOLS)
    [found] = said(first).tool_calls
    assert json.loads(found["function"]["arguments"]) == {"at": "x"} and said(first).finish_reason == "tool_calls"
    again = json.loads(json.dumps(found))
    again["function"]["arguments"] = '{ "at" : "x" }'  # a client may write the arguments in another way
    asked = [user("a"), assistant("", tool_calls=[again])]
    result = [{"role": "tool", "tool_call_id": found["id"], "content": text} for text in ("r1", "r2")]
    ask(trace, *asked, result[0], answer="one", tools=TOOLS)
    ask(trace, *asked, result[1], answer="two", tools=TOOLS)
    ask(trace, user("a"), assistant("", tool_calls=[found]), *result, answer="both", tools=TOOLS)
    rows = written(trace)
    assert all(f"<|assistant|>{call}<|im_end|><|user|>tool: r" in row for row, _ in rows)
    assert [own.replace(call, "CALL").replace("<|im_end|>", ".") for _, own in rows] == ["CALL.one.", "two.", "both."]


def test_a_call_with_a_syntax_error_is_text_and_other_tools_are_another_conversation() -> None:
    trace = new_trace()
    for wrong in ('<tool_call>{"name": "look", </tool_call>', '<tool_call>{"name": "\\ud800"}</tool_call>'):
        node = ask(trace, user("a"), answer=wrong, tools=TOOLS)
        assert not said(node).tool_calls and said(node).text == wrong
    node = ask(trace, user("a"), answer='<tool_call>{"name": "look"}</tool_call>', tools=TOOLS, calls_tools=False)
    assert not said(node).tool_calls
    first = ask(trace, user("b"), answer="ok")
    assert ask(trace, user("b"), said(first).message, user("c"), answer="d", tools=TOOLS).parent is None


def test_thinking_stays_in_the_context_whether_or_not_the_client_sends_it_back() -> None:
    trace = new_trace()
    first = ask(trace, user("a"), answer="<think>long</think>\n\nshort")
    assert (said(first).thinking, said(first).text) == ("long", "short")
    for sent in (" short\n", "<think>\nlong\n</think>\n\nshort"):
        assert ask(trace, user("a"), assistant(sent), user("b"), answer="c").parent is first
    assert "<think>long</think>" in written(trace)[0][0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("a</think>b", ("a", "b")),
        ("<think>a</think>\n\nb", ("a", "b")),
        ("<think>a", ("a", "")),
        ("a < b", ("", "a < b")),
        ("</think></think>x", ("", "</think>x")),
    ],
)
def test_thinking_is_split_from_the_answer(text: str, found: tuple[str, str]) -> None:
    assert split_thinking(text) == found


def test_thinking_that_the_prompt_opens_and_a_limit_cuts_off_is_no_answer() -> None:
    call = '<tool_call>{"name": "look"}</tool_call>'
    trace = new_trace()
    trace._joins = ChatJoins(THINKING, most_tokens=LIMITS.max_model_len)
    node = ask(trace, user("a"), answer=f"first {call} then", tools=TOOLS, max_tokens=len(call) + 8)
    answer = said(node)
    assert (answer.thinking, answer.text, answer.tool_calls) == (f"first {call} t", "", [])
    assert answer.finish_reason == "length"
    closed = ask(trace, user("b"), answer=f"hm</think>\n\n{call}", tools=TOOLS)
    assert (said(closed).thinking, said(closed).text, len(said(closed).tool_calls)) == ("hm", "", 1)
    # a client that does not send the thinking back continues the row
    again = ask(trace, user("a"), assistant(""), user("go on"), answer="x</think>y", tools=TOOLS)
    assert again.parent is node


def test_a_stop_text_ends_the_answer_and_discards_the_tokens_after_it() -> None:
    trace = new_trace()
    node = ask(trace, user("a"), answer="one STOP two", stop=("STOP", "two"))
    assert (said(node).text, said(node).stop, said(node).finish_reason) == ("one ", "STOP", "stop")
    assert TOKENIZER.decode(said(node).token_ids) == "one STOP" and trace.counts["discarded/after_stop"] == 5
    second = ask(trace, user("a"), assistant("one"), user("b"), answer="c")
    assert second.parent is node
    [(row, own)] = written(trace)
    assert "one STOP<|im_end|><|user|>user: b" in row and own == "one STOPc<|im_end|>"


def test_an_answer_that_no_client_received_is_discarded_and_does_not_continue_the_row() -> None:
    trace = new_trace()
    first = ask(trace, user("a"), answer="one")
    ask(trace, user("a"), said(first).message, user("b"), answer="lost", delivered=False)
    ask(trace, user("a"), said(first).message, user("b"), answer="kept")
    assert [own for _, own in written(trace)] == ["one<|im_end|>kept<|im_end|>"]
    assert trace.counts["discarded/undelivered"] == len("lost") + 1
    assert [each["discarded"] for each in trace.described()] == [None, "undelivered", None]


CUT_CALLS = {
    "hermes": '<tool_call>{"name": "look", "arguments": {"path": "a.py"}}</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=look>\n<parameter=path>\na.py\n</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>look\n<arg_key>path</arg_key>\n<arg_value>a.py</arg_value>\n</tool_call>",
}


@pytest.mark.parametrize("name", CUT_CALLS)
def test_a_call_cut_off_by_its_length_is_text_with_the_finish_reason_length(name: str) -> None:
    call = CUT_CALLS[name]
    trace = new_trace()
    whole = ask(trace, user("a"), answer=call, tools=TOOLS)
    assert [json.loads(each["function"]["arguments"]) for each in said(whole).tool_calls] == [{"path": "a.py"}]
    for length in (len(call) - 1, len(call) - len("r>\n</tool_call>"), len("<tool_call>")):
        node = ask(trace, user("a"), answer=call, tools=TOOLS, max_tokens=length)
        answer = said(node)
        assert (answer.text, answer.tool_calls, answer.finish_reason) == (call[:length], [], "length")
    limits = TokenLimits(max_prompt_length=60, max_response_length=len(call) - 1, max_model_len=400)
    node = ask(new_trace(limits), user("a"), answer=call, tools=TOOLS)  # cut off by the room of the row
    assert (said(node).tool_calls, said(node).finish_reason) == ([], "length")


def test_a_complete_call_counts_although_a_limit_ends_the_answer_behind_it() -> None:
    call = CUT_CALLS["hermes"]
    trace = new_trace()
    node = ask(trace, user("a"), answer=call, tools=TOOLS, max_tokens=len(call))
    assert (len(said(node).tool_calls), said(node).finish_reason) == (1, "tool_calls")
    node = ask(trace, user("a"), answer=f"{call} and then", tools=TOOLS, max_tokens=len(call) + 5)
    assert (len(said(node).tool_calls), said(node).finish_reason) == (1, "length")
    node = ask(trace, user("a"), answer=call + call, tools=TOOLS, max_tokens=2 * len(call) - 1)
    assert (said(node).tool_calls, said(node).finish_reason) == ([], "length")


def test_arguments_get_the_types_of_the_tool_and_identifiers_have_nine_characters() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "look", "description": "", "parameters": schema}}]
    text = "<tool_call><function=look><parameter=n>3</parameter><parameter=m>3</parameter></function></tool_call>"
    trace = new_trace()
    calls = [call for _ in range(2) for call in said(ask(trace, user("a"), answer=text + text, tools=tools)).tool_calls]
    assert json.loads(calls[0]["function"]["arguments"]) == {"n": 3, "m": "3"}
    identifiers = [call["id"] for call in calls]
    assert len(set(identifiers)) == 4
    assert all(len(each) == 9 and each.isalnum() for each in identifiers)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1e999"])
def test_numbers_that_json_does_not_have_make_no_call(value: str) -> None:
    text = f'<tool_call>{{"name": "look", "arguments": {{"x": {value}}}}}</tool_call>'
    node = ask(new_trace(), user("a"), answer=text, tools=TOOLS)
    assert (said(node).text, said(node).tool_calls) == (text, [])


def test_an_agent_that_appends_the_stop_text_continues_its_row() -> None:
    trace = new_trace()
    messages = [user("a")]
    for turn in range(3):
        node = ask(trace, *messages, answer=f"act {turn} STOP surplus", stop=("STOP",))
        messages += [assistant(f"{said(node).text}{said(node).stop}"), user("on")]
    assert [node.parent for node in trace.nodes] == [None, *trace.nodes[:2]]
    assert len(written(trace)) == 1


def test_a_continuation_of_an_undelivered_answer_begins_a_row() -> None:
    trace = new_trace()
    lost = ask(trace, user("a"), answer="one", delivered=False)
    second = ask(trace, user("a"), said(lost).message, user("b"), answer="two")
    assert second.parent is lost
    rows = written(trace)
    assert [own for _, own in rows] == ["two<|im_end|>"]
    assert rows[0][0].endswith("one<|im_end|><|user|>user: b<|assistant|>two<|im_end|>")


def test_the_first_of_two_equal_answers_that_a_client_received_is_continued() -> None:
    trace = new_trace()
    lost = ask(trace, user("a"), answer="same", delivered=False)
    received = ask(trace, user("a"), answer="same")
    again = ask(trace, user("a"), answer="same")
    following = ask(trace, user("a"), assistant("same"), user("b"), answer="c")
    assert following.parent is received
    assert [node.row for node in (lost, received, again, following)] == [None] * 4
    assert [own for _, own in written(trace)] == ["same<|im_end|>c<|im_end|>", "same<|im_end|>"]


def test_a_first_prompt_below_its_limit_leaves_the_rest_unused() -> None:
    """The room is the response length: what the first prompt leaves of its own limit is no room for answers."""
    limits = TokenLimits(max_prompt_length=40, max_response_length=30, max_model_len=1000)
    short, long = user("x"), user("x" * 50)
    for message in (short, long):
        trace = new_trace(limits)
        node = trace.add(Conversation([message]), 256)
        length = len(node.context())
        assert node.room == min(30, 40 + 30 - length)
    assert trace.first_prompts == [length]
    assert trace.count_tokens(Conversation([long])) == length and trace.first_prompts == [length]
    with pytest.raises(Refusal):
        trace.add(Conversation([user("x" * 70)]), 256)
    assert trace.first_prompts == [length, length + 20]


def test_deeply_nested_tools_leave_the_process_that_renders_in_use() -> None:
    JOINS.prompt([user("a")], TOOLS)
    before = {child.pid for child in psutil.Process().children()}
    nested: dict[str, Any] = {}
    for _ in range(5000):
        nested = {"properties": nested}
    for _ in range(3):
        with pytest.raises(RecursionError):
            render_chats(TOKENIZER, [[user("a")]], tools=[nested])
    JOINS.prompt([user("another")], TOOLS)
    assert {child.pid for child in psutil.Process().children()} == before


def test_a_prompt_without_room_is_refused_with_the_limits_that_it_exceeds() -> None:
    limits = TokenLimits(max_prompt_length=20, max_response_length=30, max_model_len=50)
    trace = new_trace(limits)
    first = ask(trace, user("x" * 30), answer="y")  # the first prompt may be longer than max_prompt_length
    assert len(first.context()) == 38 and first.room == 12
    with pytest.raises(ContextOverflow, match="data.max_response_length=30") as refused:
        trace.add(Conversation([user("x" * 30), said(first).message, user("z" * 20)]), 256)
    tokens = len(first.context()) + len("y<|user|>user: " + "z" * 20) - len("<|user|>") + 1 + 2
    assert f"prompt is too long: {tokens} tokens > 49 maximum" in refused.value.message
    assert "This model's maximum context length is 49 tokens" in refused.value.anthropic_message
    assert (refused.value.status, refused.value.code) == (400, "context_length_exceeded")
    with pytest.raises(Refusal, match="the last message"):
        trace.add(Conversation([user("a"), assistant("b")]), 256)
    assert len(trace.nodes) == 1


def test_the_rows_of_an_episode_fit_the_columns_and_carry_its_score_once_per_row() -> None:
    limits = TokenLimits(max_prompt_length=20, max_response_length=200, max_model_len=220)
    trace = new_trace(limits)
    first = ask(trace, user("x" * 30), answer="y")
    for text in ("one", "two"):
        ask(trace, user("x" * 30), said(first).message, user("z"), answer=text)
    for node in trace.nodes:
        assert node.completion is not None
        node.completion.extra = {SAMPLING_CANDIDATES: torch.tensor(node.completion.token_ids).int()[:, None]}
    spec = ProgramSpec("e", "g", "t", start_step=1, row={"reward_model": {"ground_truth": "4"}})
    episode = Trajectory(spec, False, stop="terminated", is_kept=True, rows=trace.rows(0.5), outcome=0.5)
    episode.turns, episode.requests = [*chain.from_iterable(episode.rows or [])], trace.described()
    columns: Any = {"prompt_length": 20, "response_length": 200, "extra_outputs": {SAMPLING_CANDIDATES: (1,)}}
    batch = trajectory_rows([episode], pad_token_id=0, **columns)
    tensors = batch.batch
    assert "env_ids" not in batch and list(batch.non_tensor_batch["requests"]) == [trace.described()] * 2
    assert len(batch) == 2 and tensors["token_level_scores"].sum(1).tolist() == [0.5, 0.5]
    assert tensors["episode_scores"].tolist() == [0.5, 0.5] and tensors["step"].tolist() == [0, 1]
    for row, turns in enumerate(trace.rows(0.5)):
        ids = [*chain.from_iterable((*turn.prompt_ids, *turn.response_ids) for turn in turns)]
        assert tensors["input_ids"][row][tensors["attention_mask"][row].bool()].tolist() == ids
        own = tensors["responses"][row][tensors["response_mask"][row].bool()].tolist()
        assert own == [*chain.from_iterable(turn.response_ids for turn in turns)]
        mask = tensors["response_mask"][row].bool()
        assert tensors[SAMPLING_CANDIDATES][row][mask, 0].tolist() == own
        assert (tensors[SAMPLING_CANDIDATES][row][~mask] == -1).all()
        assert tensors["rollout_log_probs"][row][mask].all() and not tensors["rollout_log_probs"][row][~mask].any()
        assert (tensors["rollout_versions"][row][mask] == 1).all() and (
            tensors["rollout_versions"][row][~mask] == -1
        ).all()
    assert [each["row"] for each in batch.non_tensor_batch["requests"][0]] == [0, 0, 1]
    assert batch.non_tensor_batch["reward_model"][0] == {"ground_truth": "4"}


def test_the_context_of_every_turn_is_the_prompt_that_the_engine_received() -> None:
    trace = new_trace()
    messages: list[Message] = [user("a")]
    for turn in range(5):
        node = ask(trace, *messages, answer=f"answer {turn}")
        assert list(said(node).prompt_ids) == node.context()
        messages += [said(node).message, user(f"more {turn}")]
    [turns] = trace.rows(1.0)
    ids: list[int] = []
    for number, turn in enumerate(turns):
        ids += turn.prompt_ids
        assert ids == said(trace.nodes[number]).prompt_ids
        ids += turn.response_ids
    assert LIMITS.max_model_len > len(ids) > len(ids_of("answer"))

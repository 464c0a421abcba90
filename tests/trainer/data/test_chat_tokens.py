"""Chats of supervised training: the tokens of the whole text, the right end of each answer, tools, null entries.

The expected tokens are those of `tokenizer.apply_chat_template` for the whole chat; what is learnt is written out.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.tiny_model import tiny_tokenizer
from tests.trainer.prompt_rows import write
from tests.trainer.supervised.test_sft import assistant, learnt_text, user
from tests.workers.rollout.chat_templates import CHATML, GEMMA, LLAMA3, MISTRAL, QWEN3, byte_level, metaspace
from trainer.data.chat_tokens import encode_and_cut
from trainer.data.chats import read_messages, read_tools
from trainer.data.preferences import encode_answer, load_pairs
from trainer.data.sft_dataset import Example, encode_chat, encode_plain_text, load_examples
from trainer.data.tokens import Prompt, encode_prompts
from verl_lite.config import DataConfig, PreferenceDataConfig, SFTDataConfig
from verl_lite.errors import UserError
from workers.policy.tokenizer import set_chat_template

# an answer has no end of its own: the token that begins the next message ends it
GLM = (
    "[gMASK]<sop>{% for m in messages %}"
    "{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GLM_SPECIAL = ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|system|>")
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
LLAMA3_SPECIAL = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
CHAT = [user("one"), assistant("two"), user("three"), assistant("four")]

FAMILIES: dict[str, tuple[PreTrainedTokenizerBase, list[str]]] = {
    "chatml": (byte_level(CHATML, "<|im_end|>", "<|im_start|>"), ["two<|im_end|>", "four<|im_end|>"]),
    "llama3": (
        byte_level(LLAMA3, "<|end_of_text|>", *LLAMA3_SPECIAL),
        ["two<|eot_id|>", "four<|eot_id|>"],
    ),
    "gemma": (
        byte_level(GEMMA, "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        ["two<end_of_turn>", "four<end_of_turn>"],
    ),
    "mistral": (metaspace(MISTRAL), ["two</s>", "four</s>"]),
    "phi3": (
        byte_level(PHI3, "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ["two<|end|>", "four<|end|>"],
    ),
}


def tokens_of(example: Example) -> list[int]:
    return [*example.prompt, *example.response]


def whole_tokens(tokenizer: PreTrainedTokenizerBase, chat: list[dict[str, Any]], **arguments: Any) -> list[int]:
    text = tokenizer.apply_chat_template(chat, tokenize=False, **arguments)
    return tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_has_the_tokens_of_the_template_and_answers_end_as_it_ends_them(family: str) -> None:
    tokenizer, learnt = FAMILIES[family]
    example = encode_chat(CHAT, tokenizer, "row 0")
    assert tokens_of(example) == whole_tokens(tokenizer, CHAT)
    assert [text.strip() for text in learnt_text(example, tokenizer)] == learnt
    assert tokenizer.eos_token not in learnt_text(example, tokenizer)[0] or family in ("chatml", "mistral")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_the_tokens_that_generation_receives(family: str) -> None:
    tokenizer, learnt = FAMILIES[family]
    example = encode_chat(CHAT, tokenizer, "row 0", first=3)
    assert example.prompt == whole_tokens(tokenizer, CHAT[:3], add_generation_prompt=True)
    assert [text.strip() for text in learnt_text(example, tokenizer)] == learnt[1:]


def test_the_next_message_ends_an_answer_where_the_template_has_no_end() -> None:
    tokenizer = byte_level(GLM, "<|endoftext|>", *GLM_SPECIAL)
    example = encode_chat(CHAT, tokenizer, "row 0")
    assert learnt_text(example, tokenizer) == ["two<|user|>", "four<|user|>"]
    # the end of the last answer is the only added token
    assert tokens_of(example)[:-1] == whole_tokens(tokenizer, CHAT)

    calls = [{"type": "function", "function": {"name": "add", "arguments": "{}"}}]
    chat = [user("one"), {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "3"}]
    example = encode_chat([*chat, assistant("four")], tokenizer, "row 0")
    assert learnt_text(example, tokenizer) == ["add<|observation|>", "four<|user|>"]


def test_a_later_turn_gets_no_additional_blank() -> None:
    """MISTRAL writes no blank between </s> and [INST]; a fragment tokenized alone would begin with one."""
    tokenizer = metaspace(MISTRAL)
    example = encode_chat(CHAT, tokenizer, "row 0")
    # a metaspace tokenizer itself puts a mark before the text behind a special token, in the whole text, too
    assert tokens_of(example) == whole_tokens(tokenizer, CHAT)
    assert "▁▁" not in "".join(tokenizer.convert_ids_to_tokens(tokens_of(example)))


def test_no_token_covers_the_end_of_a_prompt_and_the_beginning_of_an_answer() -> None:
    backend = Tokenizer(models.BPE(vocab={"<end>": 0, "q": 1, "a": 2, "b": 3, "ab": 4}, merges=[("a", "b")]))
    backend.add_special_tokens(["<end>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ 'a' if m.role == 'user' else '<end>' }}{% endfor %}"
    )
    assert tokenizer.encode("qab") == [1, 4], "the premise: the whole text has a token that covers both"
    example = encode_chat([user("q"), assistant("b"), user("q"), assistant("b")], tokenizer, "row 0")
    assert tokens_of(example) == [1, 2, 3, 0, 1, 2, 3, 0]
    assert (example.prompt, example.mask) == ([1, 2], [1, 1, 0, 0, 1, 1])


@pytest.mark.parametrize("cuts", [[], [3], [1, 3, 7], [0, 11]])
def test_cuts_are_at_the_borders_of_tokens(cuts: list[int]) -> None:
    tokenizer = byte_level(CHATML, "<|im_end|>", "<|im_start|>")
    text = "go up go up"
    tokens, counts = encode_and_cut(text, cuts, tokenizer)
    assert tokenizer.decode(tokens) == text
    assert [tokenizer.decode(tokens[:count]) for count in counts] == [text[:cut] for cut in cuts]


def test_earlier_thinking_that_the_template_drops_is_refused_with_its_row() -> None:
    tokenizer = byte_level(QWEN3, "<|im_end|>", "<|im_start|>")
    chat = [user("one"), assistant("<think>\na\n</think>\n\ntwo"), user("three"), assistant("four")]
    with pytest.raises(UserError, match="row 5: the chat template renders earlier turns differently"):
        encode_chat(chat, tokenizer, "row 5")
    example = encode_chat(chat, tokenizer, "row 5", first=3)
    assert tokens_of(example) == whole_tokens(tokenizer, chat)


@pytest.mark.parametrize("first", [0, 1])
def test_an_answer_that_does_not_follow_the_generation_prompt_is_explained(first: int) -> None:
    # as in the templates of DeepSeek-R1-Distill: the prompt opens a think block, and finished answers have none
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<u>{{ m.content }}"
        "{% else %}<a>{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<a><think>\n{% endif %}"
    )
    tokenizer = tiny_tokenizer(96)
    tokenizer.chat_template = template
    message = (
        r"row 3: the chat template ends the prompt of message 1 with '<u>one<a><think>\\n', and writes that answer"
    )
    with pytest.raises(UserError, match=message):
        encode_chat([user("one"), assistant("<think>\na\n</think>\n\ntwo")], tokenizer, "row 3", first)


def test_a_text_with_the_first_token_of_its_tokenizer_gets_no_second_one() -> None:
    tokenizer = tiny_tokenizer(96)
    tokenizer.bos_token = "<|im_start|>"
    template = processors.TemplateProcessing(single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)])
    tokenizer.backend_tokenizer.post_processor = template
    with_first_token = encode_plain_text("<|im_start|>12", tokenizer, "row 0")
    assert with_first_token == encode_plain_text("12", tokenizer, "row 0")
    assert (with_first_token.prompt, len(with_first_token.response)) == ([1], 3)


def test_a_plain_text_without_a_token_is_refused() -> None:
    """A vocabulary without an unknown token drops the characters that it lacks."""
    backend = Tokenizer(models.BPE(vocab={"<end>": 0, "x": 1}, merges=[]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    assert len(encode_plain_text("x", tokenizer, "row 0").response) == 1
    with pytest.raises(UserError, match="row 3.*has no token for any part of 'yy'.*remove such rows"):
        encode_plain_text("yy", tokenizer, "row 3")


def test_a_message_with_loss_mask_0_is_not_learnt(tmp_path: Path) -> None:
    chat = [CHAT[0], CHAT[1] | {"loss_mask": 0}, CHAT[2], CHAT[3] | {"loss_mask": 1}]
    assert learnt([{"messages": chat}], tmp_path) == ["four<|im_end|>"]
    weighted = [CHAT[0], CHAT[1] | {"weight": 0}, *CHAT[2:]]
    assert learnt([{"messages": weighted}], tmp_path) == ["four<|im_end|>"]
    everything = learnt([{"messages": chat}], tmp_path, assistant_only_loss=False)
    whole = tiny_tokenizer(96).apply_chat_template(CHAT, tokenize=False)
    # the first token, which nothing predicts, and the message with 0, with the head of its turn, are left out
    before, _, after = whole.removeprefix("<|im_start|>").partition("<|im_start|>assistant\ntwo<|im_end|>\n")
    assert everything == [before, after]
    with pytest.raises(UserError, match=r"row 0.*loss_mask/weight 0\.5; expected 0 or 1"):
        learnt([{"messages": [CHAT[0], CHAT[1] | {"loss_mask": 0.5}]}], tmp_path)
    with pytest.raises(UserError, match="no token is in the loss"):
        learnt([{"messages": [CHAT[0], CHAT[1] | {"loss_mask": 0}]}], tmp_path)


def learnt(rows: list[dict[str, Any]], folder: Path, **options: Any) -> list[str]:
    [example] = load(rows, folder, **options)
    return learnt_text(example, tiny_tokenizer(96))


def load(rows: list[dict[str, Any]], folder: Path, name: str = "rows.jsonl", **options: Any) -> list[Example]:
    tokenizer = tiny_tokenizer(96)
    if template := options.pop("template", None):
        tokenizer.chat_template = template
    return load_examples([write(folder / name, rows)], tokenizer, SFTDataConfig(**options), option="data.train_files")


# ------------------------------------------------------------------------------------------------ tools, null entries

# as in Llama 3.1: it tests whether an entry exists, and fails on a null
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if 'tool_calls' in m %}"
    "{% if m.tool_calls | length != 1 %}{{ raise_exception('one call only') }}{% endif %}"
    "{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def schema(name: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    parameters_schema = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters_schema}}


def call(name: str, arguments: Any, **message: Any) -> dict[str, Any]:
    calls = [{"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "tool_calls": calls, **message}


CALLS = [
    {"messages": [user("one"), call("add", {"a": 1, "b": 2}), {"role": "tool", "content": "3"}, assistant("three")],
     "tools": [schema("add", "a", "b")]},
    {"messages": [user("two"), call("find", {"text": "x"}), {"role": "tool", "content": "y"}, assistant("four")],
     "tools": [schema("find", "text")]},
]  # fmt: skip


def test_rows_of_parquet_and_of_jsonl_have_the_same_tokens(tmp_path: Path) -> None:
    tables = [load(CALLS, tmp_path, name, template=TOOL_TEMPLATE) for name in ("rows.parquet", "rows.jsonl")]
    assert tables[0] == tables[1]
    tokenizer = tiny_tokenizer(96)
    tokenizer.chat_template = TOOL_TEMPLATE
    for row, example in zip(CALLS, tables[0], strict=True):
        text = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
        assert tokenizer.decode(tokens_of(example)) == text
        assert "null" not in text and "None" not in text
    assert learnt_text(tables[0][0], tokenizer)[0] == 'add {"a": 1, "b": 2}<|im_end|>'


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_arguments_as_json_text_keep_a_null(tmp_path: Path, name: str) -> None:
    row = {"messages": [user("one"), call("add", '{"a": null}'), {"role": "tool", "content": "3"}, assistant("three")]}
    [example] = load([row], tmp_path, name, template=TOOL_TEMPLATE)
    assert learnt_text(example, tiny_tokenizer(96))[0] == 'add {"a": null}<|im_end|>'


SHOWN_CALLS = "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}"


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
@pytest.mark.parametrize(
    "template",
    [
        TOOL_TEMPLATE,
        # writes the content without a test, so that a null would become the text "None"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}" + SHOWN_CALLS + "<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        # adds the content to a text, which fails for a null
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}" + SHOWN_CALLS + "<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        # tests for a null, as DeepSeek's
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is not none %}{{ m.content }}{% endif %}"
        + SHOWN_CALLS
        + "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ],
)
def test_a_message_that_only_calls_tools_needs_no_content(
    tmp_path: Path, content: dict[str, Any], template: str
) -> None:
    result = {"role": "tool", "content": "3"}
    row = {"messages": [user("one"), call("add", {"a": 1}, **content), result, assistant("4")]}
    [example] = load([row], tmp_path, template=template)
    text = tiny_tokenizer(96).decode(tokens_of(example))
    assert "None" not in text
    assert text.endswith("<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n")


# as gpt-oss's: a system message is read only in the first place, and the reasoning of the last answer as `thinking`
PLACES = (
    "{% for m in messages %}<|im_start|>"
    "{% if m.role == 'system' and loop.first %}rules: {{ m.content | upper }}<|im_end|>"
    "{% elif m.role == 'user' %}user {{ m.content }}<|im_end|>"
    "{% elif m.role == 'assistant' %}assistant "
    "{% if m.thinking and loop.last %}({{ m.thinking }}) {% endif %}{{ m.content }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
SYSTEM = {"role": "system", "content": "be brief"}


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([user("one"), SYSTEM, assistant("two")], "does not show message 1 of the role 'system' ('be brief')"),
        ([user("one"), {"role": "critic", "content": "no"}, assistant("two")], "message 1 of the role 'critic' ('no')"),
        ([user("one"), assistant("two") | {"reasoning": "since"}], "does not show the reasoning of message 1"),
        ([user("one"), assistant("") | {"reasoning_content": "since"}], "the reasoning_content of message 1"),
    ],
)
def test_what_the_template_does_not_show_is_refused(chat: list[dict[str, Any]], message: str) -> None:
    tokenizer = byte_level(PLACES, "<|im_end|>", "<|im_start|>")
    with pytest.raises(UserError, match=rf"row 7: .*{re.escape(message)}"):
        encode_chat(chat, tokenizer, "row 7")
    with pytest.raises(UserError, match=re.escape(message)):
        encode_answer(chat, tokenizer, "end_of_turn", "row 7")
    if chat[1]["role"] != "assistant":
        with pytest.raises(UserError, match=re.escape(message)):
            encode_prompts([Prompt(CHAT[:1]), Prompt(chat[:2])], tokenizer, DataConfig())


def test_what_the_template_writes_in_another_form_is_shown() -> None:
    tokenizer = byte_level(PLACES, "<|im_end|>", "<|im_start|>")
    chat = [SYSTEM, user("one"), assistant("two") | {"thinking": "since"}]
    assert learnt_text(encode_chat(chat, tokenizer, "row 0"), tokenizer) == ["(since) two<|im_end|>"]
    # the reasoning of an answer that is context need not be shown
    context = [*chat, user("three"), assistant("four")]
    assert learnt_text(encode_chat(context, tokenizer, "row 0", first=4), tokenizer) == ["four<|im_end|>"]
    [tokens] = encode_prompts([Prompt(chat[:2])], tokenizer, DataConfig())
    assert tokenizer.decode(tokens).startswith("<|im_start|>rules: BE BRIEF<|im_end|>")


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_a_row_can_have_arguments_of_the_template_itself(tmp_path: Path, name: str) -> None:
    template = (
        "{% if style %}{{ style }}{% endif %}{% if enable_thinking == false %}quick{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    chat = {"messages": CHAT[:2]}
    rows = [chat | {"chat_template_kwargs": {"style": "own"}, "enable_thinking": False}, chat]
    examples = load(rows, tmp_path, name, template=template, apply_chat_template_kwargs={"style": "all"})
    heads = [tiny_tokenizer(96).decode(tokens_of(example)).partition("<|im_start|>")[0] for example in examples]
    assert heads == ["ownquick", "all"]
    pair = {"prompt": "1", "chosen": "2", "rejected": "3", "chat_template_kwargs": {"style": "own"}}
    tokenizer = byte_level(template, "<|im_end|>", "<|im_start|>")
    file = write(tmp_path / "pairs.jsonl", [pair])
    options = PreferenceDataConfig(score_at="end_of_text")
    [encoded] = load_pairs([file], tokenizer, options, "end_of_text", option="data.train_files")
    assert tokenizer.decode(encoded.chosen.prompt).startswith("own")

    with pytest.raises(UserError, match="column 'chat_template_kwargs': found 'x', expected a dict of arguments"):
        load([chat | {"chat_template_kwargs": "x"}], tmp_path)
    with pytest.raises(UserError, match="tokenize=True is not accepted, because the trainer sets it"):
        load([chat | {"chat_template_kwargs": {"tokenize": True}}], tmp_path)


CALL_SPECIAL = ("<|call|>", "<|end_of_call|>", "<|im_start|>")
HEAD = "{% for m in messages %}<|im_start|>{{ m.role + '\\n' }}"
TAIL = "<|im_end|>{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{{ 'assistant\\n' }}{% endif %}"
FUNCTION = {"name": "add", "arguments": {"a": 1}}
ONE_CALL = [
    user("one"),
    {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": FUNCTION}]},
]


@pytest.mark.parametrize(
    ("body", "written"),
    [
        # shows calls of messages whose content is null only, and concatenates the arguments (DeepSeek)
        (
            "{% if m.content is none %}{% for c in m.tool_calls %}<|call|>"
            "{{ c['function']['name'] + ' ' + c['function']['arguments'] }}{% endfor %}"
            "{% else %}{{ m.content }}{% endif %}",
            '<|call|>add {"a": 1}<|im_end|>',
        ),
        # writes the arguments as they are, which for a dict would be Python
        (
            "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<|call|>"
            "{{ c.function.name }} {{ c.function.arguments }}{% endfor %}",
            '<|call|>add {"a": 1}<|im_end|>',
        ),
        # encodes the arguments, which for a text would be encoded twice (Qwen2.5, Llama 3.1)
        (
            "{{ m.content or '' }}{% for c in m.tool_calls or [] %}<|call|>"
            "{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}",
            '<|call|>add {"a": 1}<|im_end|>',
        ),
        # does not show calls: they are written as in the turns of agents
        ("{{ m.content }}", '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'),
    ],
)
@pytest.mark.parametrize("is_text", [True, False])
def test_each_template_gets_tool_calls_as_it_reads_them(body: str, written: str, is_text: bool) -> None:
    tokenizer = byte_level(HEAD + body + TAIL, "<|im_end|>", *CALL_SPECIAL)
    arguments = json.dumps(FUNCTION["arguments"]) if is_text else FUNCTION["arguments"]
    message = ONE_CALL[1] | {"tool_calls": [{"type": "function", "function": FUNCTION | {"arguments": arguments}}]}
    chat = read_messages([ONE_CALL[0], message], "row 0")
    assert learnt_text(encode_chat(chat, tokenizer, "row 0"), tokenizer) == [written]


def test_another_end_than_that_of_a_plain_answer_is_learnt_and_no_header_after_it() -> None:
    """Llama 3.1 ends the call of a built-in tool with <|eom_id|>, and other answers with <|eot_id|>."""
    body = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}<|end_of_call|>{% else %}{{ m.content }}<|im_end|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    tokenizer = byte_level(body, "<|im_end|>", *CALL_SPECIAL)
    chat = [*ONE_CALL, {"role": "tool", "content": "3"}, assistant("four")]
    example = encode_chat(chat, tokenizer, "row 0")
    assert learnt_text(example, tokenizer) == ["add<|end_of_call|>", "four<|im_end|>"]
    assert tokens_of(example) == whole_tokens(tokenizer, chat)
    last = encode_chat(ONE_CALL, tokenizer, "row 0")
    assert learnt_text(last, tokenizer) == ["add<|end_of_call|>"]
    answer = encode_answer(ONE_CALL, tokenizer, "end_of_turn", "row 0")
    assert tokenizer.decode(answer.response) == "add<|end_of_call|>"


@pytest.mark.parametrize("thought", ["", "<think>\na\n</think>\n\n"])
def test_an_empty_think_block_that_only_the_last_turn_has_does_not_prevent_several_turns(thought: str) -> None:
    tokenizer = byte_level(QWEN3, "<|im_end|>", "<|im_start|>")
    chat = [user("one"), assistant("two"), user("three"), assistant(f"{thought}four")]
    example = encode_chat(chat, tokenizer, "row 0")
    assert tokens_of(example) == whole_tokens(tokenizer, chat)
    shown = thought or "<think>\n\n</think>\n\n"
    assert learnt_text(example, tokenizer) == ["two<|im_end|>", f"{shown}four<|im_end|>"]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "developer", "content": "a"}, {"role": "system", "content": "a"}),
        ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": "no"}),
        ({"role": "assistant", "content": "a", "refusal": None}, {"role": "assistant", "content": "a"}),
        (
            {
                "role": "assistant",
                "content": [{"type": "refusal", "refusal": "n"}, {"type": "output_text", "text": "o"}],
            },
            {"role": "assistant", "content": "no"},
        ),
        (
            {"role": "assistant", "content": None, "reasoning_content": "a"},
            {"role": "assistant", "content": "", "reasoning_content": "a"},
        ),
        (
            {"role": "tool", "content": None, "tool_call_id": "1", "name": None},
            {"role": "tool", "content": "", "tool_call_id": "1"},
        ),
        (
            {"role": "assistant", "tool_calls": '[{"function": {"name": "add", "arguments": {"a": null}}}]'},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"function": {"name": "add", "arguments": {"a": None}}}],
            },
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": None}}]},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]},
        ),
    ],
)
def test_messages_of_clients_have_one_form(message: dict[str, Any], expected: dict[str, Any]) -> None:
    assert read_messages([message], "row 0") == [expected]


def test_an_answer_of_a_pair_that_is_left_out_of_the_loss_is_refused(tmp_path: Path) -> None:
    row = {"prompt": [user("1") | {"loss_mask": 0}], "chosen": [assistant("2")], "rejected": [assistant("3")]}
    file = write(tmp_path / "pairs.jsonl", [row])
    [pair] = load_pairs([file], tiny_tokenizer(96), PreferenceDataConfig(), option="data.train_files")
    assert learnt_text(pair.chosen, tiny_tokenizer(96)) == ["2<|im_end|>"]
    write(tmp_path / "pairs.jsonl", [row | {"rejected": [assistant("3") | {"weight": 0}]}])
    with pytest.raises(UserError, match="column 'rejected': the answer has loss_mask or weight 0"):
        load_pairs([file], tiny_tokenizer(96), PreferenceDataConfig(), option="data.train_files")


def test_schemas_as_json_text_keep_a_null() -> None:
    schema_with_null = {"type": "function", "function": {"name": "add", "parameters": {"default": None}}}
    for tools in (json.dumps([schema_with_null]), [json.dumps(schema_with_null)]):
        assert read_tools(tools, "row 0") == [schema_with_null]
    without = {"type": "function", "function": {"name": "add", "parameters": {}}}
    assert read_tools([schema_with_null], "row 0") == [without]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "assistant"}, "expected a message like"),
        ({"role": "assistant", "content": None}, "content of a message: found None, expected text"),
        ({"role": "user", "content": None, "tool_calls": [{"function": {"name": "a"}}]}, "found None, expected text"),
        ({"role": "assistant", "content": None, "tool_calls": "a"}, "tool_calls: found 'a', expected a list"),
        ({"role": "assistant", "content": None, "tool_calls": [3]}, "tool_calls: found 3, expected a call like"),
        (
            {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": "{}"}},
            "function_call of a message: found {'name': 'add', 'arguments': '{}'}, expected OpenAI's present form",
        ),
        ({"role": "assistant", "content": "\ud800"}, "without half a surrogate pair"),
        ({"role": "assistant", "content": [{"type": "image"}]}, "a message has an image"),
    ],
)
def test_wrong_messages_are_named(tmp_path: Path, message: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=f"row 0 of .*{expected}"):
        load([{"messages": [user("one"), message]}], tmp_path)


def test_typed_text_parts_are_text(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "t"}, {"type": "text", "text": "wo"}]
    rows = [{"messages": [user("one"), {"role": "assistant", "content": parts}]}]
    assert learnt(rows, tmp_path) == ["two<|im_end|>"]


def test_tools_are_shown_from_the_row_or_the_file_and_refused_by_templates_without_them(tmp_path: Path) -> None:
    plain = {"messages": [user("one"), assistant("two")]}
    (tmp_path / "tools.json").write_text(json.dumps([schema("sum")]))
    path = str(tmp_path / "tools.json")
    [example] = load([plain], tmp_path, template=TOOL_TEMPLATE, tools_path=path)
    assert '"name": "sum"' in tiny_tokenizer(96).decode(example.prompt)
    [example] = load([plain | {"tools": [schema("add")]}], tmp_path, template=TOOL_TEMPLATE, tools_path=path)
    assert '"name": "add"' in tiny_tokenizer(96).decode(example.prompt)
    with pytest.raises(UserError, match="does not show tools"):
        load([plain | {"tools": [schema("add")]}], tmp_path)
    assert load([plain | {"tools": [schema("add")]}], tmp_path, tools_key=None) == load([plain], tmp_path)


def test_tools_and_arguments_of_the_template_reach_pairs(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(96)
    tokenizer.chat_template = "{{ style }}" + TOOL_TEMPLATE
    rows = [{"prompt": "one", "chosen": "two", "rejected": "four", "tools": [schema("add")]}]
    config = PreferenceDataConfig(apply_chat_template_kwargs={"style": "brief"})
    [pair] = load_pairs([write(tmp_path / "p.jsonl", rows)], tokenizer, config, option="data.train_files")
    for example in pair.texts:
        text = tokenizer.decode(example.prompt)
        assert text.startswith('brief{"type": "function"') and '"name": "add"' in text


def test_a_tokenizer_with_several_templates_uses_the_default_one(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(96)
    default = tokenizer.chat_template
    tokenizer.chat_template = {"default": default, "tool_use": TOOL_TEMPLATE}
    example = encode_chat(CHAT, tokenizer, "row 0")
    tokenizer.chat_template = default
    assert example == encode_chat(CHAT, tokenizer, "row 0")


def test_one_of_several_templates_is_chosen_by_its_name() -> None:
    tokenizer = tiny_tokenizer(96)
    tokenizer.chat_template = {"default": "{{ messages[0].content }}", "short": "{{ messages[-1].content }}"}
    set_chat_template(tokenizer, "short")
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "four"


def test_an_error_of_the_template_names_the_row(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content if m.content != 'x' else raise_exception('no x') }}{% endfor %}"
    rows = [{"messages": [user("one"), assistant("two")]}, {"messages": [user("x"), assistant("two")]}]
    with pytest.raises(UserError, match=r"row 1 of .*refuses this chat .*no x.*data\.chat_template"):
        load(rows, tmp_path, template=template)


@pytest.mark.parametrize("family", ["chatml", "llama3"])
def test_a_greeting_that_begins_a_chat_is_learnt(family: str) -> None:
    """transformers renders no empty chat, so no prompt precedes the greeting; it begins with its content."""
    tokenizer, _ = FAMILIES[family]
    end = "<|im_end|>" if family == "chatml" else "<|eot_id|>"
    greeted = [assistant("hello"), *CHAT[:2]]
    example = encode_chat(greeted, tokenizer, "row 0")
    assert tokens_of(example) == whole_tokens(tokenizer, greeted)
    assert learnt_text(example, tokenizer) == [f"hello{end}", f"two{end}"]


def test_a_greeting_that_the_template_rewrites_is_refused() -> None:
    tokenizer = tiny_tokenizer(96)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}"
    with pytest.raises(UserError, match="row 0: the chat begins with an answer.*begin the row with a question"):
        encode_chat([assistant("hello"), user("one"), assistant("TWO")], tokenizer, "row 0")


def test_left_out_questions_and_results_need_no_border() -> None:
    """CHATML writes consecutive results of tools into one turn, so its text of the chat until the first result is no
    beginning of the whole text."""
    tokenizer, _ = FAMILIES["chatml"]
    left_out = {"loss_mask": 0}
    results = [{"role": "tool", "content": text} | left_out for text in ("up", "down")]
    chat = [user("one") | left_out, assistant("two"), *results, assistant("four")]
    example = encode_chat(chat, tokenizer, "row 0")
    assert learnt_text(example, tokenizer) == ["two<|im_end|>", "four<|im_end|>"]


CHATML_PLAIN = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
NO_CALLS = "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content or '' }}<|im_end|>{% endif %}{% endfor %}"
WITHOUT_CALL = [user("one"), assistant("two"), {"role": "tool", "content": "3"}, assistant("three")]


@pytest.mark.parametrize("content", [None, "I add."])
def test_calls_become_text_for_templates_that_leave_them_out(tmp_path: Path, content: str | None) -> None:
    """As in the turns of agents (`workers.agents.conversation`)."""
    chat = [user("one"), call("add", {"a": 1}, content=content)]
    [example] = load([{"messages": chat}], tmp_path, template=NO_CALLS)
    written = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'
    [learnt_answer] = learnt_text(example, tiny_tokenizer(96))
    assert "".join(learnt_answer.split()) == "".join(f"{content or ''}{written}".split())


def test_a_template_that_leaves_out_results_is_refused(tmp_path: Path) -> None:
    chat, part = WITHOUT_CALL, "messages of the role tool"
    with pytest.raises(UserError, match=f"row 0 .*does not show the {part}.*data.chat_template"):
        load([{"messages": chat}], tmp_path, template=NO_CALLS)

    tokenizer = tiny_tokenizer(96)
    tokenizer.chat_template = NO_CALLS
    with pytest.raises(UserError, match=f"does not show the {part}"):
        encode_prompts([Prompt([user("zero")]), Prompt(chat)], tokenizer, DataConfig())

    answers = {"chosen": [*chat, assistant("x")], "rejected": [user("one"), assistant("y")]}
    file = write(tmp_path / "pairs.jsonl", [answers])
    with pytest.raises(UserError, match=f"row 0 .*does not show the {part}"):
        load_pairs([file], tokenizer, PreferenceDataConfig(), option="data.train_files")


def test_a_template_that_requires_tools_shows_them(tmp_path: Path) -> None:
    template = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}" + CHATML_PLAIN
    row = {"messages": [user("one"), assistant("two")], "tools": [schema("add", "a")]}
    [example] = load([row], tmp_path, template=template)
    assert tiny_tokenizer(96).decode(tokens_of(example)) == "add one<|im_end|>two<|im_end|>"
    tokenizer = tiny_tokenizer(96)
    tokenizer.chat_template = template
    [tokens] = encode_prompts([Prompt(row["messages"][:1], json.dumps(row["tools"]))], tokenizer, DataConfig())
    assert tokenizer.decode(tokens) == "add one<|im_end|>"


def test_answers_without_any_end_token_are_refused() -> None:
    tokenizer = tiny_tokenizer(96)
    tokenizer.eos_token = None
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    with pytest.raises(UserError, match="no end-of-text token.*set eos_token in its tokenizer_config.json"):
        encode_chat([user("one"), assistant("two")], tokenizer, "row 0")
    with pytest.raises(UserError, match="row 0.*end-of-text token.*set eos_token"):
        encode_plain_text("one", tokenizer, "row 0")


def test_a_later_border_that_a_token_crosses_does_not_move_an_earlier_one() -> None:
    """The text until the second border, tokenized alone, has a token that crosses the first border."""
    vocabulary = {"<end>": 0, "!": 1, "x": 2, "y": 3, "!x": 4, "xy": 5}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("x", "y"), ("!", "x")]))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert (tokenizer.encode("!xy"), tokenizer.encode("!x")) == ([1, 5], [4]), "the premise"
    assert encode_and_cut("!xy", [1, 2], tokenizer) == ([1, 2, 3], [1, 2])


def test_a_combining_mark_at_the_beginning_of_an_answer_belongs_to_the_answer() -> None:
    letters = ["<end>", "q", "e", "Ã", "©", "Ì", "ģ"]  # U+0301 has the bytes cc 81
    backend = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.encode("qe\u0301") == [1, 3, 4], "the premise: the mark is joined to the letter"
    assert encode_and_cut("qe\u0301", [1, 2], tokenizer) == ([1, 2, 5, 6], [1, 2])

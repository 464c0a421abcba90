"""Which tokens are in the loss: TRL's options on each format of rows, plain text, and rows that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import tiny_tokenizer
from tests.trainer.prompt_rows import write
from tests.trainer.supervised.test_sft import assistant, learnt_text, user
from trainer.data.preferences import load_pairs
from trainer.data.sft_dataset import Example, load_examples
from verl_lite.config import ConfigError, SFTConfig, SFTDataConfig, load_schema
from verl_lite.config.checks import section_problems
from verl_lite.errors import UserError

TURNS = [user("1"), assistant("2"), user("3"), assistant("4")]
CHAT = {"messages": TURNS}
ASKED = {"prompt": TURNS[:3], "completion": [assistant("4"), user("5"), assistant("6")]}
FROM_USER = {"prompt": TURNS[:2], "completion": TURNS[2:]}
START, ASSISTANT = "<|im_start|>user\n", "<|im_start|>assistant\n"
WHOLE = f"{START}1<|im_end|>\n{ASSISTANT}2<|im_end|>\n{START}3<|im_end|>\n{ASSISTANT}4<|im_end|>\n"


def load(path: Path, row: dict[str, Any], **options: Any) -> list[Example]:
    file = write(path / "rows.parquet", [row])
    return load_examples([file], tiny_tokenizer(), SFTDataConfig(**options), option="data.train_files")


@pytest.mark.parametrize(
    ("row", "assistant_only", "completion_only", "learnt"),
    [
        (CHAT, True, None, ["2<|im_end|>", "4<|im_end|>"]),
        (CHAT, True, False, ["2<|im_end|>", "4<|im_end|>"]),
        (CHAT, True, True, ["4<|im_end|>"]),
        (CHAT, False, None, [WHOLE.removeprefix("<|im_start|>")]),  # nothing predicts the first token
        (CHAT, False, True, ["4<|im_end|>\n"]),
        ({"messages": [*TURNS, user("5")]}, False, True, [f"4<|im_end|>\n{START}5<|im_end|>\n"]),
        ({"messages": [*TURNS, user("5")]}, True, True, ["4<|im_end|>"]),
        (ASKED, True, None, ["4<|im_end|>", "6<|im_end|>"]),
        (ASKED, True, False, ["2<|im_end|>", "4<|im_end|>", "6<|im_end|>"]),
        (ASKED, False, True, [f"4<|im_end|>\n{START}5<|im_end|>\n{ASSISTANT}6<|im_end|>\n"]),
        (FROM_USER, False, None, [f"{START}3<|im_end|>\n{ASSISTANT}4<|im_end|>\n"]),
        (FROM_USER, False, False, [WHOLE.removeprefix("<|im_start|>")]),
        ({"messages": [user("1")]}, False, None, ["user\n1<|im_end|>\n"]),
    ],
)
def test_the_options_choose_the_tokens(
    row: dict[str, Any], assistant_only: bool, completion_only: bool | None, learnt: list[str], tmp_path: Path
) -> None:
    options = {"assistant_only_loss": assistant_only, "completion_only_loss": completion_only}
    [example] = load(tmp_path, row, **options)
    assert learnt_text(example, tiny_tokenizer()) == learnt
    [usual] = load(tmp_path, row, assistant_only_loss=False)
    length = len(example)
    assert (example.prompt + example.response)[:length] == (usual.prompt + usual.response)[:length], "the same tokens"


def test_all_tokens_of_plain_text_are_learnt_and_its_end(tmp_path: Path) -> None:
    [example] = load(tmp_path, {"text": "1+1=2"})
    assert tiny_tokenizer().decode(example.prompt) == "1"
    assert learnt_text(example, tiny_tokenizer()) == ["+1=2<|im_end|>"]
    [ended] = load(tmp_path, {"text": "1+1=2<|im_end|>"})
    assert ended == example


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"text": "12"}, {"completion_only_loss": True}, "plain text has no completion.*prompt and completion"),
        ({"text": " "}, {}, "column 'text': found ' ', expected text; remove such rows"),
        ({"messages": [user("1")]}, {}, "no assistant message, so no token is in the loss.*assistant_only_loss=false"),
        ({"messages": [user("1")]}, {"assistant_only_loss": False, "completion_only_loss": True}, "no assistant mess"),
        ({"prompt": "1", "completion": [user("2")]}, {}, "column 'completion': there is no assistant message"),
    ],
)
def test_a_row_without_a_token_in_the_loss_is_refused(
    row: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"data.train_files: row 0 of {tmp_path}/rows.parquet.*{message}"):
        load(tmp_path, row, **options)


def test_a_template_that_leaves_one_token_has_nothing_to_learn(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    path = write(tmp_path / "rows.jsonl", [{"messages": [user("1")]}])
    with pytest.raises(UserError, match="row 0 of .*: no token is in the loss; remove such rows, or set data.assist"):
        load_examples([path], tokenizer, SFTDataConfig(assistant_only_loss=False), option="data.train_files")


def test_the_last_turn_can_be_learnt_under_a_template_that_rewrites_earlier_turns(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ (messages | length + 1) // 2 }}" + (tokenizer.chat_template or "")
    path = write(tmp_path / "rows.jsonl", [CHAT])
    with pytest.raises(UserError, match="or set data.completion_only_loss=true to train on the last one"):
        load_examples([path], tokenizer, SFTDataConfig(), option="data.train_files")
    [example] = load_examples([path], tokenizer, SFTDataConfig(completion_only_loss=True), option="data.train_files")
    assert learnt_text(example, tokenizer) == ["4<|im_end|>"]


def test_the_options_of_masks_have_no_effect_on_pairs() -> None:
    config = load_schema(["loss=dpo", "data.assistant_only_loss=false"], SFTConfig).config
    assert list(section_problems(config)) == [
        "data.assistant_only_loss=false with loss=dpo: it has no effect, because dpo trains on whole answers: leave it "
        "out"
    ]
    with pytest.raises(ConfigError, match="completion_only_loss=maybe"):
        load_schema(["data.completion_only_loss=maybe"], SFTConfig)


def test_a_sentence_tells_what_the_rows_have(tmp_path: Path) -> None:
    """Template-free rows of 2 + 1, 4 + 2, 6 + 3 and 9 + 2 tokens (with the end); at most 8 tokens."""
    tokenizer, said = tiny_tokenizer(), list[str]()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    rows = [{"prompt": "1" * asked, "response": "2" * told} for asked, told in ((2, 0), (4, 1), (6, 2), (9, 1))]
    path = write(tmp_path / "rows.jsonl", rows)
    config = SFTDataConfig(max_length=8, truncation="right")
    kept = load_examples([path], tokenizer, config, option="data.train_files", report=said.append)
    assert [(len(row.prompt), len(row.response)) for row in kept] == [(2, 1), (4, 2), (6, 2)]
    assert said == [
        "data.train_files: 3 rows of 3 to 8 tokens, 17 in total, 29.4% of them in the loss; dropped: 1 (no token in "
        "the loss is left within data.max_length=8); cut off at 8 tokens: 1 (data.truncation=right)"
    ]
    pairs = [{"prompt": "11", "chosen": "2", "rejected": "33"}, {"prompt": "1" * 9, "chosen": "2", "rejected": "3"}]
    path, config = write(tmp_path / "pairs.jsonl", pairs), SFTDataConfig(max_length=8, truncation="drop")
    load_pairs([path], tokenizer, config, option="data.val_files", report=said.append)
    assert said[1] == (
        "data.val_files: 1 pairs of 9 to 9 tokens, 9 in total, 55.6% of them in the loss; dropped: 1 "
        "(data.truncation=drop: longer than data.max_length=8)"
    )


@pytest.mark.parametrize("column", ["chosen", "rejected"])
def test_whole_chats_share_a_prompt_of_several_turns(column: str, tmp_path: Path) -> None:
    tokenizer, prompt = tiny_tokenizer(), TURNS[:3]
    row = {"chosen": [*prompt, assistant("4")], "rejected": [*prompt, assistant("5")]}
    [pair] = load_pairs([write(tmp_path / "a.jsonl", [row])], tokenizer, SFTDataConfig(), option="data.train_files")
    assert pair.chosen.prompt == pair.rejected.prompt
    assert tokenizer.decode(pair.chosen.prompt) == WHOLE.rpartition("4")[0]
    assert learnt_text(getattr(pair, column), tokenizer) == ["4<|im_end|>" if column == "chosen" else "5<|im_end|>"]

"""The prompts of a run: what is served, what is refused and with which words."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.trainer.prompt_rows import char_tokenizer, load, make_row, write
from trainer.data.prompts import PromptDataset
from verl_lite.errors import UserError


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., PromptDataset]:
    """Of these rows, or contents of prompts, of at most 6 tokens."""

    def build(rows: list[Any], split: str = "train", name: str = "d.parquet", **options: Any) -> PromptDataset:
        made = [make_row(row, i) if isinstance(row, str) else row for i, row in enumerate(rows)]
        return load(write(tmp_path / name, made), split, **{"max_prompt_length": 6, **options})

    return build


@pytest.mark.parametrize("name", ["d.parquet", "d.json", "d.jsonl"])
def test_columns_of_a_batch(make: Callable, name: str) -> None:
    batch = make(["312", "54321"], name=name).__getitems__([1, 0])
    # ids by hand: "0" is 1, "=" is 14, pad is 0
    assert batch.batch["prompts"].tolist() == [[6, 5, 4, 3, 2, 14], [0, 0, 4, 2, 3, 14]]
    assert batch.batch["prompt_mask"].tolist() == [[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]
    columns = batch.non_tensor_batch
    assert columns["uid"].tolist() == ["train-1", "train-0"] and columns["index"].tolist() == [1, 0]
    assert columns["raw_prompt"][0] == [{"role": "user", "content": "54321"}]
    assert columns["reward_model"][1]["ground_truth"] == "123"
    assert columns["extra_info"][0] == {"index": 1} and columns["data_source"][0] == "verl_lite/sort"


def test_several_files_count_on_and_rows_need_not_agree(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", [make_row("1"), make_row("2")])
    second = write(tmp_path / "b.jsonl", [make_row("3", reward_model={"ground_truth": 3}), make_row("4", ability="x")])
    data = load([first, second], "val", max_prompt_length=4)
    batch = next(data.batches())
    assert batch.non_tensor_batch["uid"].tolist() == [f"val-{i}" for i in range(4)]
    assert [row["ground_truth"] for row in batch.non_tensor_batch["reward_model"]] == ["1", "2", 3, "4"]
    assert [prompt[0]["content"] for prompt in batch.non_tensor_batch["raw_prompt"]] == list("1234")
    assert data.data_sources() == ["verl_lite/sort"] and data.row(2)["reward_model"]["ground_truth"] == 3


def test_val_max_samples_takes_random_rows_that_are_the_same_in_every_run(make: Callable) -> None:
    texts = [str(number) for number in range(100)]
    data = make(texts, split="val", val_max_samples=10, seed=1)
    index = data.__getitems__(range(10)).non_tensor_batch["index"].tolist()
    assert len(data) == 10 and index == sorted(index) and len(set(index)) == 10
    assert max(index) > 50, "not the first ones, which often are of one source"
    assert make(texts, split="val", val_max_samples=10, seed=2).fingerprint() == data.fingerprint()
    assert "10 of them are taken, at random" in data.report
    assert len(make(texts, split="val", val_max_samples=200)) == 100


def test_overlong_prompts_are_an_error_by_default_that_names_row_length_limit_and_remedy(make: Callable) -> None:
    with pytest.raises(UserError) as caught:
        make(["1", "12345678", "123456"])
    message = str(caught.value)
    for part in ("2 of 3", "row 1 of", "9 tokens", "data.max_prompt_length=6", "filter_overlong_prompts", "truncation"):
        assert part in message


def test_overlong_prompts_are_dropped_and_counted_when_asked(make: Callable) -> None:
    data = make(["1", "12345678", "12345"], filter_overlong_prompts=True)
    assert len(data) == 2 and "1 longer than 6 were dropped, 2 kept" in data.report
    assert [prompt.non_tensor_batch["uid"][0] for prompt in data.batches(1)] == ["train-0", "train-2"]
    with pytest.raises(UserError, match="at least one prompt must remain"):
        make(["12345678"], filter_overlong_prompts=True)


@pytest.mark.parametrize(("side", "kept"), [("left", "45678="), ("right", "123456"), ("middle", "12378=")])
def test_overlong_prompts_are_cut_when_asked(make: Callable, side: str, kept: str) -> None:
    data = make(["12345678"], truncation=side)
    assert char_tokenizer().decode(data[0].batch["prompts"][0]) == kept and "1 longer than 6 were cut" in data.report


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        ({"data_source": "x"}, ["no prompt (column 'prompt')", "found: data_source", "data.columns", '"ground_truth"']),
        (
            make_row("1", prompt='[{"role": "user", "content": "1"}]'),
            ["row 0", "'prompt'", "not messages written as text"],
        ),
        (make_row("1", prompt=[{"role": "user"}]), ["expected a message like"]),
        (make_row("1", prompt=[]), ["expected a list of chat messages"]),
        (make_row("1", prompt=[{"role": "user", "content": [{"type": "image"}]}]), ["has an image", "only text"]),
        (make_row("1", images=["x.png"]), ["row 0", "has 1 images", "only text"]),
        (make_row("1", reward_model={"style": "rule"}), ["row 0", "no ground_truth"]),
        (make_row("1", reward_model={"ground_truth": None}), ["row 0", "no ground_truth"]),
        (make_row("1", reward_model={"ground_truth": float("nan")}), ["row 0", "no ground_truth"]),
        (make_row("1", reward_model=None, ground_truth=float("nan")), ["row 0", "no ground_truth"]),
        (make_row("1", n=2**62), ["row 0", "'n'", "at most 1000000"]),
        (make_row("1", data_source=None), ["row 0", "no data_source"]),
        (make_row("1", extra_info="text"), ["'extra_info'", "expected a dict"]),
        (make_row("1", reward_model="2"), ["'reward_model'", "expected a dict"]),
        (make_row("1", prompt=[{"role": 5, "content": "1"}]), ["role of a message: found 5", "expected text"]),
    ],
)
@pytest.mark.parametrize("name", ["d.parquet", "d.jsonl"])
def test_wrong_rows_are_explained(make: Callable, row: dict[str, Any], parts: list[str], name: str) -> None:
    with pytest.raises(UserError) as caught:
        make([row], name=name)
    assert all(part in str(caught.value) for part in [name, "data.train_files", *parts]), str(caught.value)


def test_wrong_files_are_explained(tmp_path: Path) -> None:
    for name, content, message in (
        ("none.parquet", None, "data.val_files=.*no such file"),
        ("text.parquet", b"hello", "not a readable parquet"),
        ("broken.jsonl", b'{"a": 1}\n{"a":\n', "line 2: not valid json"),
        ("rows.csv", b"a,b", "expected a file named"),
        ("empty.jsonl", b"", "the dataset has no rows"),
        ("gzip.jsonl", b"\x1f\x8b\x08\x00", "expected uncompressed json in UTF-8"),
        ("brackets.jsonl", b"[" * 100_000, "not valid json .*recursion"),
        ("digits.jsonl", b'{"a": ' + b"9" * 10_000 + b"}", "line 1: not valid json .*digits"),
    ):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match=message):
            load(str(tmp_path / name), "val")


def test_columns_of_maps_are_read_as_dicts(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist([make_row("1")])
    maps = pyarrow.array([[("ground_truth", "7")]], pyarrow.map_(pyarrow.string(), pyarrow.string()))
    place = table.schema.get_field_index("reward_model")
    pyarrow.parquet.write_table(table.set_column(place, "reward_model", maps), tmp_path / "d.parquet")
    data = load(str(tmp_path / "d.parquet"))
    assert data[0].non_tensor_batch["reward_model"][0] == {"ground_truth": "7"}


BARE = "{% for m in messages %}{{ m.content }}{% endfor %}"
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + BARE


@pytest.mark.parametrize(
    ("template", "row", "message"),
    [
        (BARE, make_row(""), "data.train_files: row 1 of .* turns into no tokens"),
        (STRICT, make_row("2", prompt=[{"role": "system", "content": "be"}]), "be.*no system role.*data.chat_template"),
    ],
)
def test_what_the_template_makes_nothing_of_or_refuses_is_explained(
    make: Callable, template: str, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        make(["12", row], template=template)


PLAIN = [[2, 3], [4]]
"""The tokens of 12 and 3, by hand: "0" is 1, "=" is 14."""


def test_a_template_that_shows_no_messages_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", [make_row("1"), make_row("2")])
    with pytest.raises(UserError, match="all 2 prompts become the same 1 tokens, although their messages differ"):
        load(path, template="1")
    same = write(tmp_path / "same.jsonl", [make_row("1"), make_row("1")])
    assert len(load(same, template="1")) == 2


def test_without_a_chat_template_a_prompt_is_its_text(make: Callable) -> None:
    rows = [make_row("1", prompt="12"), "3"]
    data = make(rows, name="d.jsonl", template=None)
    assert [data[row].batch["prompts"][0][-len(ids) :].tolist() for row, ids in enumerate(PLAIN)] == PLAIN
    assert data[0].non_tensor_batch["raw_prompt"][0] == [{"role": "user", "content": "12"}]
    with pytest.raises(UserError, match="no chat template, which prompts of several messages.*data.chat_template"):
        make(rows, name="d.jsonl", template=None, system_prompt="1")

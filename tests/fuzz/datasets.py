"""Malformed datasets: rows with a wrong value somewhere, files that are not what their names say, files cut short.

Rows are spoilt first, then written as jsonl, json or parquet, then the bytes are spoilt. Each draw gives a `Case` whose
`prepare` writes the files.
"""

from __future__ import annotations

import copy
import datetime
import decimal
import gzip
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from tests.fuzz.cases import Case
from tests.tiny_run import good_row

ODD_VALUES: list[Any] = [
    None, "", " ", 0, -1, 1.5, float("nan"), float("inf"), True, [], {}, [None], [[]], {"a": None}, b"\xff\xfe",
    "\ud800", "\x00", "x" * 100_000, "ü∑🙂\u2028", 10**400, datetime.datetime(2024, 1, 1),
    decimal.Decimal("1.10"), [1, "a", None], ["a", "b"], {"role": "user", "content": "1"}, "nan",
    [{"role": "user", "content": "1"}], '[{"role": "user", "content": "1"}]', [{}], [{"role": "user"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "1"}], [{"role": "assistant", "content": "a"}],
    [{"role": "user", "content": ""}], [{"role": "martian", "content": "1"}], [["user", "1"]],
    [{"role": "user", "content": [{"type": "text", "text": "1"}]}], [{"role": "user", "content": "1"}] * 200,
    [{"role": "user", "content": "<|im_end|><|endoftext|>"}], [{"role": ["user"], "content": "1"}],
]  # fmt: skip
PLACES: list[tuple[str | int, ...]] = [
    ("prompt",), ("prompt",), ("prompt",), ("prompt", 0), ("prompt", 0, "role"), ("prompt", 0, "content"),
    ("prompt", 0, "name"), ("prompt", 0, "tool_calls"), ("data_source",), ("reward_model",), ("extra_info",),
    ("reward_model", "ground_truth"), ("reward_model", "style"), ("extra_info", "index"), ("extra_info", "more"),
    ("images",), ("uid",), ("index",), ("responses",), ("input_ids",),
]  # fmt: skip
OPTIONS = [
    "data.truncation=left", "data.truncation=middle", "data.filter_overlong_prompts=true", "data.max_prompt_length=8",
    "data.train_max_samples=3", "data.prompt_key=question", "data.prompt_key=extra_info", "reward.num_workers=1",
    "trainer.rollout_data_dir=samples", "trainer.val_before_train=true", "data.val_batch_size=2",
    "model.tokenizer_path={root}/tokenizer_strict", "model.tokenizer_path={root}/tokenizer_bare",
    "model.tokenizer_path={root}/tokenizer_silent", "reward.custom_reward_function.path=null", "trainer.save_freq=1",
    "data.apply_chat_template_kwargs.x=1", "reward.function_weight=0", "data.system_prompt=be", "data.data_source=sums",
    "data.prompt_template={prompt}=", "data.ground_truth_regex=(.)", "data.columns={prompt: prompt}",
    "data.columns={prompt: extra_info.a, ground_truth: [data_source, prompt]}", "data.columns={n: extra_info}",
    "data.columns={extra_info: [prompt, n], tools: prompt}", "data.sources={sums: {weight: 1}}",
    "data.sources={sums: {n: 2}}", "data.sources={sums: {weight: 1}, x: {weight: 2}}", "data.train_files=[.]",
    "data.train_files=[data0.jsonl@train]", "data.train_files=[.:a@b]",
]  # fmt: skip
NAMES = [
    "nowhere.jsonl", "", ".", "*.parquet", "data0", "~/x.jsonl", "http://x/y.parquet", "data0.csv", "DATA.JSONL",
    "with space.jsonl", "ä.jsonl", ".jsonl", "data0.json.gz",
]  # fmt: skip


def draw_dataset(seed: int, index: int, root: Path) -> Case:
    """The case of that number. root: the folder of good files."""
    rng = random.Random(f"{seed} dataset {index}")
    kind = rng.choice(["jsonl", "jsonl", "json", "parquet", "parquet"])
    rows: list[Any] = [good_row(row) for row in range(rng.choice([0, 1, 3, 30, 30, 30]))]
    spoilers = rng.choice([0, 1, 1, 1, 2])
    for _ in range(spoilers):
        spoil(rng, rows)
    content: bytes | None = as_bytes(rng, rows, kind)
    if spoilers == 0 or rng.random() < 0.15:
        content = rng.choice(BYTE_SPOILERS)(rng, content or b"")
    name = f"data0.{kind}" if rng.random() < 0.9 else rng.choice(NAMES)
    split = rng.choice(["train", "train", "train", "val"])
    parts = [f"data.{split}_files=[{name}]", "data.train_batch_size=16", "actor.ppo_mini_batch_size=16"]
    parts += ["trainer.val_before_train=true"] if split == "val" else []
    parts += [text.replace("{root}", str(root)) for text in rng.sample(OPTIONS, rng.choice([0, 0, 0, 1, 2]))]

    def prepare(folder: Path) -> None:
        place = folder / f"data0.{kind}" if "/" in name or name in ("", ".") else folder / name
        if content is not None:
            place.write_bytes(content)
        elif not place.is_symlink() and not place.exists():
            make_no_file(random.Random(f"{seed} {index}"), place)

    return Case(f"dataset-{index}", parts, prepare=prepare)


def make_no_file(rng: random.Random, place: Path) -> None:
    """A folder, a link to nowhere, to itself or to a device, a pipe, or nothing, under the name of a data file."""
    targets = [place.mkdir, lambda: os.mkfifo(place), lambda: None]
    targets += [lambda target=target: place.symlink_to(target) for target in ("nowhere", place.name, "/dev/null")]
    rng.choice(targets)()


# --- rows ---------------------------------------------------------------------------------------------------------


def spoil(rng: random.Random, rows: list[Any]) -> None:
    """Something odd in one place of one row, or of all; a column less; rows that are no mappings."""
    place, value = rng.choice(PLACES), rng.choice(ODD_VALUES)
    kind, length = rng.choice(["value", "value", "value", "column", "length", "row"]), rng.choice([30, 1000, 200_000])
    for row in some(rng, rows):
        if kind == "value":
            put(row, place, copy.deepcopy(value))
        elif kind == "column" and isinstance(row, dict):
            row.pop(place[0], None)
        elif kind == "length":
            put(row, ("prompt", 0, "content"), "1+" * length)
        elif kind == "row":
            rows[rows.index(row)] = rng.choice([None, 5, "text", [], [{"prompt": 1}], True])


def some(rng: random.Random, rows: list[Any]) -> list[Any]:
    """All rows, the first, the last, or one somewhere."""
    return [rows[:], rows[:1], rows[-1:], [rng.choice(rows)] if rows else []][rng.randrange(4)]


def put(row: Any, place: tuple[str | int, ...], value: Any) -> None:
    """Sets a value deep inside a row, where there is such a place."""
    try:
        for step in place[:-1]:
            row = row[step]
        row[place[-1]] = value
    except (LookupError, TypeError):
        return


# --- files --------------------------------------------------------------------------------------------------------


def as_bytes(rng: random.Random, rows: list[Any], kind: str) -> bytes:
    """The rows in that format; what parquet cannot hold is written as json under its name."""
    if kind == "parquet":
        try:
            empty = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
            table = pyarrow.Table.from_pylist(rows) if rows else empty
            table = rng.choice(TABLE_CHANGES)(table) if rng.random() < 0.5 else table
            sink = pyarrow.BufferOutputStream()
            pyarrow.parquet.write_table(table, sink, row_group_size=rng.choice([None, 7]))
            return sink.getvalue().to_pybytes()
        except (pyarrow.ArrowException, LookupError, TypeError, ValueError, OverflowError, AttributeError):
            pass
    lines = [json.dumps(row, default=str, ensure_ascii=rng.random() < 0.5) for row in rows]
    text = "[" + ",".join(lines) + "]" if kind == "json" else "".join(line + "\n" for line in lines)
    return text.encode("utf-8", "surrogatepass")


Change = Callable[[pyarrow.Table], pyarrow.Table]


def cast(name: str, kind: pyarrow.DataType) -> Change:
    return lambda table: table.set_column(table.schema.get_field_index(name), name, table.column(name).cast(kind))


def filled(name: str, value: Any, kind: pyarrow.DataType | None = None) -> Change:
    """A column of one value only."""
    return lambda table: table.set_column(
        table.schema.get_field_index(name), name, pyarrow.array([value] * table.num_rows, kind)
    )


_MAP = pyarrow.map_(pyarrow.string(), pyarrow.string())
TABLE_CHANGES: list[Change] = [
    lambda table: table.append_column("prompt", table.column("prompt")),  # two columns of one name
    lambda table: table.select([]),
    lambda table: table.slice(0, 0),
    lambda table: table.replace_schema_metadata({b"pandas": b"{broken", b"huggingface": b"{", b"ARROW:schema": b"x"}),
    cast("data_source", pyarrow.dictionary(pyarrow.int8(), pyarrow.string())),
    cast("data_source", pyarrow.binary()),
    filled("reward_model", [("ground_truth", "1")], _MAP),
    *(filled(name, None) for name in ("reward_model", "extra_info", "prompt")),
    *(filled("prompt", value) for value in ("1+1", b"\xff", [{"role": "user", "content": b"\xff\xfe"}])),
    *(filled("reward_model", {"ground_truth": value}) for value in (b"\xff", decimal.Decimal("1.5"), [[1.0], None])),
    filled("data_source", 3),
]


# --- bytes --------------------------------------------------------------------------------------------------------


def flipped(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed anywhere."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 3, 30]) if changed else 0):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


BYTE_SPOILERS: list[Callable[[random.Random, bytes], bytes | None]] = [
    flipped, flipped, flipped, lambda rng, data: b"", lambda rng, data: None,
    lambda rng, data: data[: rng.randrange(len(data) + 1)], lambda rng, data: data[rng.randrange(len(data) + 1) :],
    lambda rng, data: b"\xef\xbb\xbf" + data, lambda rng, data: gzip.compress(data),
    lambda rng, data: data.decode("utf-8", "replace").encode("utf-16"),
    lambda rng, data: data.replace(b"\n", b"\r\n"), lambda rng, data: data.replace(b"user", b"us\xff\xfeer"),
    lambda rng, data: b"\0" * 1000, lambda rng, data: b"PAR1" + data + b"PAR1",
    lambda rng, data: rng.choice([b"null", b'"text"', b"[]", b"{}", b"[1, 2]", b"[[]]", b"NaN", b"[null]"]),
    lambda rng, data: b"[" * 100_000, lambda rng, data: b'{"prompt": ' + b"9" * 10_000 + b"}",
    lambda rng, data: data.replace(b'"2"', b"NaN").replace(b'"4"', b"-Infinity"),
    lambda rng, data: data.replace(b"1+1", b"\\ud800"),
]  # fmt: skip

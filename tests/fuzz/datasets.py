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

from tests.fuzz.cases import Case, Part, good_row

Row = dict[str, Any]
Files = dict[str, bytes | None]
"""Content by name; None for something in its place that is no file."""

ODD_VALUES: list[Any] = [
    None, "", " ", 0, -1, 1.5, float("nan"), float("inf"), True, [], {}, [None], [[]], {"a": None}, b"\xff\xfe",
    "\ud800", "\x00", "x" * 100_000, "ü∑🙂\u2028", 2**70, 10**400, datetime.datetime(2024, 1, 1),
    decimal.Decimal("1.10"), [1, "a", None], ["a", "b"], {"role": "user", "content": "1"},
    [{"role": "user", "content": "1"}], '[{"role": "user", "content": "1"}]', "nan", "None",
]  # fmt: skip
PLACES: list[tuple[str | int, ...]] = [
    ("prompt",), ("prompt",), ("prompt", 0), ("prompt", 0, "role"), ("prompt", 0, "role"), ("prompt", 0, "content"),
    ("prompt", 0, "content"), ("prompt", 0, "name"), ("prompt", 0, "tool_calls"), ("data_source",), ("data_source",),
    ("reward_model",), ("reward_model",), ("reward_model", "ground_truth"), ("reward_model", "ground_truth"),
    ("reward_model", "style"), ("extra_info",), ("extra_info", "index"), ("extra_info", "more"), ("images",),
    ("videos",), ("uid",), ("index",), ("responses",), ("input_ids",), ("ability",),
]  # fmt: skip
MESSAGES: list[Any] = [
    [], [{}], [{"role": "user"}], [{"content": "1"}],
    [{"role": "system", "content": "s"}, {"role": "user", "content": "1"}], [{"role": "assistant", "content": "a"}],
    [{"role": "user", "content": ""}], [{"role": "martian", "content": "1"}], [None],
    [{"role": "user", "content": [{"type": "text", "text": "1"}]}], [{"role": "user", "content": "1"}] * 200,
    {"role": "user", "content": "1"}, [["user", "1"]], [{"from": "human", "value": "1"}],
    [{"role": "user", "content": "<|im_end|><|endoftext|>"}], "plain text", [1, 2],
    [{"role": "user", "content": {"a": 1}}], [{"role": "user", "content": "1"}, None],
    [{"role": ["user"], "content": "1"}],
]  # fmt: skip
OPTIONS = [
    "data.truncation=left", "data.truncation=middle", "data.filter_overlong_prompts=true", "data.max_prompt_length=8",
    "data.train_max_samples=3", "data.prompt_key=question", "data.prompt_key=data_source",
    "data.prompt_key=extra_info", "trainer.rollout_data_dir=samples", "reward.num_workers=1", "reward.num_workers=1",
    "trainer.val_before_train=true", "model.tokenizer_path={root}/tokenizer_strict",
    "model.tokenizer_path={root}/tokenizer_bare", "model.tokenizer_path={root}/tokenizer_silent",
    "reward.custom_reward_function.path=null", "trainer.save_freq=1", "data.shuffle=false", "data.val_batch_size=2",
    "data.apply_chat_template_kwargs.x=1", "reward.function_weight=0", "data.system_prompt=be", "data.data_source=sums",
    "data.prompt_template={prompt}=", "data.ground_truth_regex=(.)", "data.columns={prompt: prompt}",
    "data.columns={prompt: extra_info.a, ground_truth: [data_source, prompt]}", "data.columns={n: extra_info}",
    "data.columns={extra_info: [prompt, n], tools: prompt}", "data.columns={ground_truth: reward_model}",
    "data.sources={sums: {weight: 1}}", "data.sources={sums: {n: 2}}", "data.train_files=[.]",
    "data.sources={sums: {weight: 1}, x: {weight: 2}}", "data.train_files=[data0.jsonl@train]",
    "data.train_files=[.:a@b]",
]  # fmt: skip


def draw_dataset(seed: int, index: int, root: Path) -> Case:
    """The case of that number. root: the folder of good files."""
    rng = random.Random(f"{seed} dataset {index}")
    files, names = draw_files(rng)
    split = rng.choice(["train", "train", "train", "val"])
    parts = [f"data.{split}_files=[{','.join(names)}]", "data.train_batch_size=16", "actor.ppo_mini_batch_size=16"]
    parts += [f"data.val_files={names[0]}"] if rng.random() < 0.1 else []
    parts += ["trainer.val_before_train=true"] if split == "val" else []
    parts += [text.replace("{root}", str(root)) for text in rng.sample(OPTIONS, rng.choice([0, 0, 0, 1, 2]))]

    def prepare(folder: Path) -> None:
        for name, content in files.items():
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if content is not None:
                place.write_bytes(content)
            elif not place.is_symlink() and not place.exists():
                make_no_file(random.Random(f"{seed} {index} {name}"), place)

    return Case("dataset", index, tuple(map(Part, parts)), prepare)


def make_no_file(rng: random.Random, place: Path) -> None:
    """A folder, a link to nowhere, to itself or to a device, a pipe, or nothing, under the name of a data file."""
    rng.choice(
        [
            place.mkdir,
            lambda: place.symlink_to("nowhere"),
            lambda: place.symlink_to(place.name),
            lambda: place.symlink_to("/dev/null"),
            lambda: os.mkfifo(place),
            lambda: None,
        ]
    )()


def draw_files(rng: random.Random) -> tuple[Files, list[str]]:
    """Files by name, and the names to give (not always all that were written, nor as they were written)."""
    files: Files = {}
    for number in range(rng.choice([1, 1, 1, 2])):
        kind = rng.choice(["jsonl", "jsonl", "json", "parquet", "parquet"])
        name = f"data{number}.{kind}"
        spoilers = rng.choice([0, 1, 1, 1, 2]) if number == 0 else rng.choice([0, 0, 1])
        rows: list[Any] = [good_row(row) for row in range(rng.choice([0, 1, 3, 30, 30, 30]))]
        for _ in range(spoilers):
            rng.choice(ROW_SPOILERS)(rng, rows)
        content: bytes | None = as_bytes(rng, rows, kind)
        if spoilers == 0 or rng.random() < 0.15:
            content = rng.choice(BYTE_SPOILERS)(rng, content)
        files[name] = content
    names = list(files)
    if rng.random() < 0.06:
        names[0] = rng.choice(
            ["nowhere.jsonl", "", ".", "*.parquet", "data0", "~/x.jsonl", "http://x/y.parquet", names[0] + "/"]
        )
    if rng.random() < 0.06:
        name = rng.choice(
            [
                "data0.csv",
                "DATA.JSONL",
                "with space.jsonl",
                "ä.jsonl",
                ".jsonl",
                "data0.parquet",
                "data0.jsonl",
                "data0.json.gz",
            ]
        )
        files[name] = files.pop(names[0]) if names[0] in files else b""
        names[0] = name
    return files, names


# --- rows ---------------------------------------------------------------------------------------------------------


def odd_value(rng: random.Random, rows: list[Any]) -> None:
    """Something odd in one place of one row, or of all."""
    place, value = rng.choice(PLACES), rng.choice(ODD_VALUES)
    for row in some(rng, rows):
        put(row, place, copy.deepcopy(value))


def odd_messages(rng: random.Random, rows: list[Any]) -> None:
    """Chats that are none, or unusual ones."""
    value = rng.choice(MESSAGES)
    for row in some(rng, rows):
        put(row, ("prompt",), copy.deepcopy(value))


def without_column(rng: random.Random, rows: list[Any]) -> None:
    """A column missing in one row, or in all."""
    name = rng.choice(["prompt", "data_source", "reward_model", "extra_info"])
    for row in some(rng, rows):
        if isinstance(row, dict):
            row.pop(name, None)


def long_prompts(rng: random.Random, rows: list[Any]) -> None:
    """More text than fits."""
    length = rng.choice([30, 1000, 200_000])
    for row in some(rng, rows):
        put(row, ("prompt", 0, "content"), "1+" * length)


def no_rows_at_all(rng: random.Random, rows: list[Any]) -> None:
    """Rows that are no mappings."""
    for place in range(len(rows)):
        if rng.random() < 0.5:
            rows[place] = rng.choice([None, 5, "text", [], [{"prompt": 1}], True])


ROW_SPOILERS: list[Callable[[random.Random, list[Any]], None]] = [
    odd_value, odd_value, odd_value, odd_value, odd_messages, odd_messages, without_column, long_prompts,
    no_rows_at_all,
]  # fmt: skip


def some(rng: random.Random, rows: list[Any]) -> list[Any]:
    """All rows, the first, the last, or one somewhere."""
    return [rows, rows[:1], rows[-1:], [rng.choice(rows)] if rows else []][rng.randrange(4)]


def put(row: Any, place: tuple[str | int, ...], value: Any) -> None:
    """Sets a value deep inside a row, where there is such a place."""
    for step in place[:-1]:
        if isinstance(row, dict) and step in row:
            row = row[step]
        elif isinstance(row, list) and isinstance(step, int) and step < len(row):
            row = row[step]
        else:
            return
    if isinstance(row, dict) or (isinstance(row, list) and isinstance(place[-1], int) and row):
        row[place[-1]] = value


# --- files --------------------------------------------------------------------------------------------------------


def as_bytes(rng: random.Random, rows: list[Any], kind: str) -> bytes:
    """The rows in that format; what parquet cannot hold is written as json under its name."""
    if kind == "parquet":
        try:
            return parquet_bytes(rng, rows)
        except (pyarrow.ArrowException, LookupError, TypeError, ValueError, OverflowError, AttributeError):
            pass
    lines = [json.dumps(row, default=str, ensure_ascii=rng.random() < 0.5) for row in rows]
    text = "[" + ",".join(lines) + "]" if kind == "json" else "".join(line + "\n" for line in lines)
    return text.encode("utf-8", "surrogatepass")


def parquet_bytes(rng: random.Random, rows: list[Any]) -> bytes:
    """The rows as a table, sometimes with columns of unusual types."""
    table = pyarrow.Table.from_pylist(rows) if rows else pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    change = rng.choice(TABLE_CHANGES) if rng.random() < 0.5 else None
    if change is not None:
        table = change(table)
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(
        table, sink, compression=rng.choice(["snappy", "none", "zstd"]), row_group_size=rng.choice([None, 7])
    )
    return sink.getvalue().to_pybytes()


def cast(name: str, kind: pyarrow.DataType) -> Callable[[pyarrow.Table], pyarrow.Table]:
    def change(table: pyarrow.Table) -> pyarrow.Table:
        place = table.schema.get_field_index(name)
        return table.set_column(place, name, table.column(name).cast(kind))

    return change


def replaced(name: str, make: Callable[[int], pyarrow.Array]) -> Callable[[pyarrow.Table], pyarrow.Table]:
    def change(table: pyarrow.Table) -> pyarrow.Table:
        return table.set_column(table.schema.get_field_index(name), name, make(table.num_rows))

    return change


def doubled(table: pyarrow.Table) -> pyarrow.Table:
    """Two columns of one name."""
    return table.append_column("prompt", table.column("prompt"))


def doubled_other(table: pyarrow.Table) -> pyarrow.Table:
    return table.append_column("extra_info", table.column("data_source"))


_MAP = pyarrow.map_(pyarrow.string(), pyarrow.string())
TABLE_CHANGES: list[Callable[[pyarrow.Table], pyarrow.Table]] = [
    doubled,
    doubled_other,
    lambda table: table.select([]),
    lambda table: table.slice(0, 0),
    lambda table: table.replace_schema_metadata({b"pandas": b"{broken"}),
    lambda table: table.replace_schema_metadata({b"huggingface": b"{broken", b"ARROW:schema": b"x"}),
    cast("data_source", pyarrow.large_string()),
    cast("data_source", pyarrow.dictionary(pyarrow.int8(), pyarrow.string())),
    cast("data_source", pyarrow.binary()),
    replaced("reward_model", lambda n: pyarrow.array([[("ground_truth", "1")]] * n, _MAP)),
    replaced("extra_info", lambda n: pyarrow.array([[("index", "1")]] * n, _MAP)),
    replaced("reward_model", lambda n: pyarrow.nulls(n)),
    replaced("extra_info", lambda n: pyarrow.nulls(n)),
    replaced("prompt", lambda n: pyarrow.nulls(n)),
    replaced("prompt", lambda n: pyarrow.array(["1+1"] * n)),
    replaced("prompt", lambda n: pyarrow.array([["1+1"]] * n)),
    replaced("prompt", lambda n: pyarrow.array([b"\xff"] * n)),
    replaced("prompt", lambda n: pyarrow.array([[{"role": "user", "content": b"\xff\xfe"}]] * n)),
    replaced("prompt", lambda n: pyarrow.array([[{"role": None, "content": "1"}]] * n)),
    replaced("reward_model", lambda n: pyarrow.array([{"ground_truth": b"\xff"}] * n)),
    replaced("reward_model", lambda n: pyarrow.array([{"ground_truth": datetime.datetime(2024, 1, 1)}] * n)),
    replaced("reward_model", lambda n: pyarrow.array([{"ground_truth": decimal.Decimal("1.5")}] * n)),
    replaced("reward_model", lambda n: pyarrow.array([{"ground_truth": [[1.0, None], None]}] * n)),
    replaced("reward_model", lambda n: pyarrow.array([{"ground_truth": float("nan")}] * n)),
    replaced("data_source", lambda n: pyarrow.array([None, "sums"] * (n // 2) + [None] * (n % 2))),
    replaced("data_source", lambda n: pyarrow.array(range(n))),
    replaced("data_source", lambda n: pyarrow.StructArray.from_arrays([pyarrow.array(range(n))], ["a"])),
]


# --- bytes --------------------------------------------------------------------------------------------------------

BYTE_SPOILERS: list[Callable[[random.Random, bytes], bytes | None]] = [
    lambda rng, data: b"", lambda rng, data: None, lambda rng, data: data[: rng.randrange(len(data) + 1)],
    lambda rng, data: data[: rng.randrange(len(data) + 1)], lambda rng, data: data[rng.randrange(len(data) + 1) :],
    lambda rng, data: flipped(rng, data), lambda rng, data: flipped(rng, data), lambda rng, data: flipped(rng, data),
    lambda rng, data: b"\xef\xbb\xbf" + data, lambda rng, data: data + rng.randbytes(40),
    lambda rng, data: rng.randbytes(400), lambda rng, data: gzip.compress(data),
    lambda rng, data: data.decode("utf-8", "replace").encode("utf-16"),
    lambda rng, data: data.replace(b"\n", b"\r\n"), lambda rng, data: data.replace(b"user", b"us\xff\xfeer"),
    lambda rng, data: data.replace(b'"', b"'"), lambda rng, data: data + data, lambda rng, data: b"\n\n  \n" + data,
    lambda rng, data: b"\0" * 1000, lambda rng, data: b"PAR1" + data + b"PAR1", lambda rng, data: b"PAR1PAR1",
    lambda rng, data: b"{" + data, lambda rng, data: b'{"data": ' + (data or b"0") + b"}",
    lambda rng, data: rng.choice([b"null", b"5", b'"text"', b"[]", b"{}", b"[1, 2]", b"[[]]", b"NaN", b"[null]"]),
    lambda rng, data: b"[" * 100_000, lambda rng, data: b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    lambda rng, data: b'{"prompt": ' + b"9" * 10_000 + b"}",
    lambda rng, data: data.replace(b'"2"', b"NaN").replace(b'"4"', b"-Infinity"),
    lambda rng, data: data.replace(b"1+1", b"\\ud800"), lambda rng, data: data.replace(b"prompt", b"Prompt"),
]  # fmt: skip


def flipped(rng: random.Random, data: bytes) -> bytes:
    """A few bytes changed anywhere."""
    changed = bytearray(data)
    for _ in range(rng.choice([1, 3, 30]) if changed else 0):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)

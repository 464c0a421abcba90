"""Tokens of many prompts are kept on disk: read back as they were, made anew when anything they depend on changes or
when the file is damaged, and never more than the limit."""

from __future__ import annotations

import logging
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.prompt_rows import TOOL_TEMPLATE, char_tokenizer, make_row, write
from trainer.data import token_cache
from trainer.data import tokens as data_tokens
from trainer.data.prompts import PromptDataset
from trainer.data.token_cache import TokenCache, digest_of
from trainer.data.tokens import Prompt, encode_prompts, truncate
from verl_lite.config import DataConfig


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where tokens are kept, from two prompts on."""
    monkeypatch.setenv("VERL_LITE_CACHE", str(tmp_path))
    monkeypatch.setattr(data_tokens, "CACHED_FROM", 2)
    return tmp_path / "tokens"


@pytest.fixture
def encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts were tokenised in each call that did so."""
    counts: list[int] = []
    encode = data_tokens._encode

    def counted(prompts: Any, *rest: Any) -> list[np.ndarray]:
        counts.append(len(prompts))
        return encode(prompts, *rest)

    monkeypatch.setattr(data_tokens, "_encode", counted)
    return counts


def prompts(*texts: str, tools: str | None = None) -> list[Prompt]:
    return [Prompt([{"role": "user", "content": text}], tools) for text in texts]


def tokens(given: list[Prompt], template: str = TOOL_TEMPLATE, **config: Any) -> list[list[int]]:
    found = encode_prompts(given, char_tokenizer(template), DataConfig(**config))
    return [row.tolist() for row in found]


def test_a_second_run_reads_what_the_first_wrote(folder: Path, encodings: list[int]) -> None:
    first = tokens(prompts("12", "3"))
    assert first == [[2, 3, 14], [4, 14]]  # by hand: "0" is 1, "=" is 14
    assert tokens(prompts("12", "3")) == first and encodings == [2]
    assert [path.suffix for path in folder.iterdir()] == [".bin"]


def test_few_prompts_are_not_kept(folder: Path) -> None:
    tokens(prompts("1"))
    assert not folder.exists()


@pytest.mark.parametrize(
    "changed",
    [
        {"given": prompts("12", "4")},
        {"given": prompts("3", "12")},
        {"given": prompts("12", "3", tools='[{"name": "a"}]')},
        {"apply_chat_template_kwargs": {"mark": True}},
        {"template": TOOL_TEMPLATE.replace("}}=", "}}==") + " "},
    ],
)
def test_whatever_the_tokens_depend_on_names_another_file(
    folder: Path, encodings: list[int], changed: dict[str, Any]
) -> None:
    tokens(prompts("12", "3"))
    given = {"given": prompts("12", "3"), **changed}
    assert tokens(**given) == [row.tolist() for row in data_tokens._encode(
        given["given"],
        char_tokenizer(given.get("template", TOOL_TEMPLATE)),
        given.get("apply_chat_template_kwargs", {}),
        1,
    )]  # fmt: skip
    assert encodings == [2, 2, 2] and len(list(folder.iterdir())) == 2


def test_a_template_that_writes_the_date_is_kept_for_a_day(
    folder: Path, encodings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = TOOL_TEMPLATE + "{% if false %}{{ strftime_now('%Y') }}{% endif %}"
    for day in ("2026-01-01", "2026-01-01", "2026-01-02"):
        monkeypatch.setattr(data_tokens.time, "strftime", lambda form, day=day: day)
        tokens(prompts("1", "2"), template)
    assert encodings == [2, 2]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:20],
        lambda content: b"",
        lambda content: content[:-1] + bytes([content[-1] ^ 1]),
        lambda content: b"other" + content,
    ],
)
def test_a_damaged_file_is_noticed_and_made_anew(
    folder: Path, encodings: list[int], damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    whole = tokens(prompts("12", "3"))
    (file,) = folder.iterdir()
    content = file.read_bytes()
    file.write_bytes(damage(content))
    with caplog.at_level(logging.WARNING):
        assert tokens(prompts("12", "3")) == whole
    assert "is damaged" in caplog.text and encodings == [2, 2]
    assert file.read_bytes() == content


def test_a_folder_that_cannot_be_written_costs_no_more_than_the_time(
    folder: Path, encodings: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        assert tokens(prompts("12", "3")) == [[2, 3, 14], [4, 14]]
    assert "cannot be kept" in caplog.text


def test_files_used_least_lately_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TokenCache(tmp_path)
    for age, name in enumerate(("a", "b", "c")):
        cache.write(name, [np.arange(100, dtype=np.int32)])
        os.utime(tmp_path / f"{name}.bin", (1000 + age, 1000 + age))
    assert cache.read("a", rows=1) is not None  # used now
    size = (tmp_path / "a.bin").stat().st_size
    monkeypatch.setattr(token_cache, "LIMIT_BYTES", 3 * size)
    cache.write("d", [np.arange(100, dtype=np.int32)])
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "c", "d"]


def write_often(folder: str, value: int) -> None:
    for _ in range(50):
        TokenCache(Path(folder)).write("same", [np.full(1000, value, dtype=np.int32)])


def test_a_reader_beside_several_writers_never_sees_half_a_file(tmp_path: Path) -> None:
    cache = TokenCache(tmp_path)
    cache.write("same", [np.full(1000, 1, dtype=np.int32)])
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_often, args=(str(tmp_path), value)) for value in (1, 2)]
    for writer in writers:
        writer.start()
    seen = [cache.read("same", rows=1) for _ in range(200)]
    for writer in writers:
        writer.join()
    assert all(found is not None and len(set(found[0].tolist())) == 1 for found in seen)
    assert [path.name for path in tmp_path.iterdir()] == ["same.bin"]


def test_names_tell_apart_what_only_joins_equally() -> None:
    assert digest_of(["ab"], ["c"]) != digest_of(["a"], ["bc"]) != digest_of(["a", "bc"])


def test_lengths_are_those_of_what_is_sampled_from(folder: Path, tmp_path: Path) -> None:
    """Kept or made, the dataset filters the same rows and serves the same tokens."""
    path = write(tmp_path / "d.jsonl", [make_row("1"), make_row("12345678"), make_row("123")])
    config = DataConfig(max_prompt_length=6, filter_overlong_prompts=True)
    made, kept = (PromptDataset(path, char_tokenizer(), config, split="train") for _ in range(2))
    assert made.fingerprint() == kept.fingerprint() and made.report == kept.report
    assert kept.__getitems__([0, 1]).batch["prompts"].tolist() == [[0, 0, 0, 0, 2, 14], [0, 0, 2, 3, 4, 14]]


def test_truncate_middle_with_an_odd_limit_keeps_more_of_the_end() -> None:
    assert truncate(np.arange(10), 5, "middle").tolist() == [0, 1, 7, 8, 9]
    assert truncate(np.arange(10), 1, "middle").tolist() == [9]

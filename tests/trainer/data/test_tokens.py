"""Tokens of many prompts are kept on disk: read back as they were, and made anew when anything they depend on changes
or when the file is damaged."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.prompt_rows import TOOL_TEMPLATE, char_tokenizer
from trainer.data import tokens as data_tokens
from trainer.data.tokens import Prompt, encode_prompts
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

    def counted(prompts: Any, *rest: Any) -> list[list[int]]:
        counts.append(len(prompts))
        return encode(prompts, *rest)

    monkeypatch.setattr(data_tokens, "_encode", counted)
    return counts


def prompts(*texts: str, tools: str | None = None) -> list[Prompt]:
    return [Prompt([{"role": "user", "content": text}], tools) for text in texts]


def tokens(given: list[Prompt], template: str = TOOL_TEMPLATE, **config: Any) -> list[list[int]]:
    return [row.tolist() for row in encode_prompts(given, char_tokenizer(template), DataConfig(**config))]


KEPT = [[2, 3, 14], [4, 14]]
"""The tokens of "12" and "3", by hand: "0" is 1, "=" is 14."""


def test_a_second_run_reads_what_the_first_wrote(folder: Path, encodings: list[int]) -> None:
    assert tokens(prompts("12", "3")) == KEPT
    assert tokens(prompts("12", "3")) == KEPT and encodings == [2]
    assert [path.suffix for path in folder.iterdir()] == [".arrow"]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"given": prompts("12", "4")}, [[2, 3, 14], [5, 14]]),
        ({"given": prompts("3", "12")}, [[4, 14], [2, 3, 14]]),
        ({"given": prompts("12", "3", tools='[{"name": "a"}]')}, [[11, 15, 2, 3, 14], [11, 15, 4, 14]]),
        ({"apply_chat_template_kwargs": {"mark": True}}, [[2, 3, 15, 14], [4, 15, 14]]),
        ({"template": TOOL_TEMPLATE.replace("}}=", "}}==") + "="}, [[2, 3, 14, 14], [4, 14, 14]]),
    ],
    ids=["prompt", "order", "tools", "arguments", "template"],
)
def test_whatever_the_tokens_depend_on_names_another_file(
    folder: Path, encodings: list[int], changed: dict[str, Any], expected: list[list[int]]
) -> None:
    assert tokens(prompts("12", "3")) == KEPT
    assert tokens(**{"given": prompts("12", "3"), **changed}) == expected
    assert encodings == [2, 2] and len(list(folder.iterdir())) == 2


def test_a_template_that_writes_the_date_is_kept_for_a_day(
    folder: Path, encodings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = TOOL_TEMPLATE + "{% if false %}{{ strftime_now('%Y') }}{% endif %}"
    for day in ("2026-01-01", "2026-01-01", "2026-01-02"):
        monkeypatch.setattr(data_tokens.time, "strftime", lambda form, day=day: day)
        tokens(prompts("1", "2"), template)
    assert encodings == [2, 2]


@pytest.mark.parametrize("size", [0, 20, -1])
def test_a_damaged_file_is_made_anew(
    folder: Path, encodings: list[int], size: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert tokens(prompts("12", "3")) == KEPT
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:size])
    with caplog.at_level(logging.WARNING):
        assert [tokens(prompts("12", "3")) for _ in range(3)] == [KEPT] * 3
    assert caplog.text.count("tokenizing without the cache") == 1 and encodings == [2, 2, 2]


@pytest.mark.slow
def test_tokenising_in_processes_gives_the_same(folder: Path) -> None:
    given = prompts(*map(str, range(2500)))
    one, two = (encode_prompts(given[:n], char_tokenizer(), DataConfig(filter_overlong_prompts_workers=w))
                for n, w in ((2500, 1), (2499, 2)))  # fmt: skip
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=False)) and len(two) == 2499

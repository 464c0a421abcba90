"""Tokens of prompts: by hand, and the same from several processes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.prompt_rows import TOOL_TEMPLATE, char_tokenizer
from trainer.data.tokens import PARALLEL_FROM, Prompt, encode_prompts
from verl_lite.config import DataConfig


def prompts(*texts: str, tools: str | None = None) -> list[Prompt]:
    return [Prompt([{"role": "user", "content": text}], tools) for text in texts]


@pytest.mark.parametrize(
    ("given", "config", "expected"),
    [
        (prompts("12", "3"), {}, [[2, 3, 14], [4, 14]]),  # "0" is 1, "=" is 14
        (prompts("12", "3", tools='[{"name": "a"}]'), {}, [[11, 15, 2, 3, 14], [11, 15, 4, 14]]),
        (prompts("3"), {"apply_chat_template_kwargs": {"mark": True}}, [[4, 15, 14]]),
    ],
)
def test_tokens_by_hand(given: list[Prompt], config: dict[str, Any], expected: list[list[int]]) -> None:
    found = encode_prompts(given, char_tokenizer(TOOL_TEMPLATE), DataConfig(**config))
    assert [row.tolist() for row in found] == expected


@pytest.mark.slow
def test_tokenising_in_processes_gives_the_same() -> None:
    given = [*prompts(*map(str, range(PARALLEL_FROM))), *prompts("1", tools='[{"name": "a"}]')]
    one, two = (
        encode_prompts(given, char_tokenizer(TOOL_TEMPLATE), DataConfig(filter_overlong_prompts_workers=workers))
        for workers in (1, 2)
    )
    assert [row.tolist() for row in one] == [row.tolist() for row in two]

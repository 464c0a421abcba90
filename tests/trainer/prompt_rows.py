"""Rows, files and a tokenizer for the tests of the data: small enough to compute by hand."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trainer.data.prompts import PromptDataset
from verl_lite.config import DataConfig

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if mark %}!{% endif %}="
    "{% if not add_generation_prompt %}wrong{% endif %}"
)
TOOL_TEMPLATE = "{% for tool in tools or [] %}{{ tool.name }}!{% endfor %}" + TEMPLATE


@cache
def char_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per character of 0123456789abc=!, pad is 0, "0" is 1; the template is `<content>=`."""
    vocabulary = {token: number for number, token in enumerate(["<pad>", *"0123456789abc=!"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=False))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", chat_template=template)


def make_row(content: str, index: int = 0, **changes: Any) -> dict[str, Any]:
    """A row of verl's schema."""
    row = {
        "data_source": "verl_lite/sort",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"style": "rule", "ground_truth": "".join(sorted(content))},
        "extra_info": {"index": index},
    }
    return {**row, **changes}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    """Rows as the file's name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(
    places: str | list[str],
    split: str = "train",
    *,
    template: str | None = TEMPLATE,
    needs_ground_truth: bool = True,
    answers: int | None = None,
    **config: Any,
) -> PromptDataset:
    """The prompts of some places."""
    options = DataConfig(**{"max_prompt_length": 32, **config})
    return PromptDataset(
        places,
        char_tokenizer(template),
        options,
        split=split,
        needs_ground_truth=needs_ground_truth,
        answers=answers,
    )


def contents(data: PromptDataset) -> list[str]:
    """What is said in each prompt, messages one after another."""
    return ["".join(message["content"] for message in data.row(place)["prompt"]) for place in range(len(data))]


def truths(data: PromptDataset) -> list[Any]:
    """The ground truth of each row."""
    return [data.row(place)["reward_model"].get("ground_truth") for place in range(len(data))]

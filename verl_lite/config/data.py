"""The options of the data: which files, what their columns are called, how prompts are made of them, in which order.

Part of `verl_lite.config`, which documents how fields are written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl_lite.config.fields import ALL_OR_SOME, at_least, opt, section
from verl_lite.errors import UserError

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?(@[\w.-]+)?")
"""owner/name, owner/name:config, owner/name:config@split"""


@dataclass
class CustomClassConfig:
    path: str | None = opt(None, "Python file, or pkg://module, with a dataset class of your own; null = ours")
    name: str | None = opt(None, "its name")


@dataclass
class SamplerConfig:
    class_path: str | None = opt(
        None, "Python file, or pkg://module, with a sampler or curriculum; null = data.shuffle"
    )
    class_name: str | None = opt(None, "its name")


@dataclass
class DataConfig:
    train_files: list[str] = opt(
        [], "training prompts: parquet, json or jsonl, folders, hub names (owner/name:config@split); one or a list"
    )
    val_files: list[str] = opt([], "the same for validation; may be empty, then nothing is validated")
    prompt_key: str = opt("prompt", "column that holds the chat messages")
    columns: dict[str, Any] = opt(
        {}, "for other schemas, our column: theirs, as {prompt: question, ground_truth: answer}; see trainer/DATA.md"
    )
    data_source: str | None = opt(None, "data_source of rows that have no such column")
    system_prompt: str | None = opt(None, "system message put before prompts that begin with none")
    prompt_template: str | None = opt(None, "text around a prompt that is plain text, which stands for {prompt} in it")
    ground_truth_regex: str | None = opt(
        None, "the ground truth is the first group of its last match in the row's, as #### (.+)"
    )
    tools_path: str | None = opt(
        None, "json file with a list of tool schemas, which the chat template shows where a row has no tools of its own"
    )
    sources: dict[str, Any] = opt(
        {}, "by data_source: {weight: its share of each batch, n: answers to each prompt instead of rollout.n}"
    )
    sampler: SamplerConfig = section(SamplerConfig, "the order of the training prompts")
    custom_cls: CustomClassConfig = section(CustomClassConfig, "a dataset class of your own")
    train_batch_size: int = opt(1024, "prompts per training step (each is sampled rollout.n times)", at_least(1))
    val_batch_size: int | None = opt(
        None, "prompts that a validation asks at one time; changes no number; null = all", at_least(1)
    )
    max_prompt_length: int = opt(512, "tokens; see `truncation` for longer prompts", at_least(1))
    max_response_length: int = opt(512, "tokens generated at most per sample", at_least(1))
    truncation: str = opt(
        "error", "what to do with a longer prompt: error | left | right | middle", ("error", "left", "right", "middle")
    )
    filter_overlong_prompts: bool = opt(False, "drop longer prompts at start, and say how many")
    filter_overlong_prompts_workers: int = opt(1, "processes that measure prompt lengths", at_least(1))
    train_max_samples: int = opt(-1, "use at most this many training rows; -1 = all", ALL_OR_SOME)
    val_max_samples: int = opt(
        -1, "validate on so many rows at most, drawn at random but the same ones in every run; -1 = all", ALL_OR_SOME
    )
    shuffle: bool = opt(True, "shuffle the training rows each epoch")
    seed: int | None = opt(None, "seed of the shuffle; null = trainer.seed", at_least(0))
    apply_chat_template_kwargs: dict[str, Any] = opt({}, "extra arguments of the tokenizer's chat template")


@dataclass(frozen=True)
class SourceOptions:
    """What `data.sources` says of one data_source. weight: its share of each batch; n: answers to each prompt."""

    weight: float | None = None
    n: int | None = None


def source_options(sources: Mapping[str, Any]) -> dict[str, SourceOptions]:
    """`data.sources`, checked. Raises UserError for the first problem."""
    for problem in source_problems(sources):
        raise UserError(problem)
    return {name: SourceOptions(**entry) for name, entry in sources.items()}


def source_problems(sources: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with `data.sources` whatever the data is."""
    known = ("weight", "n")
    for name, entry in sources.items():
        where = f"data.sources.{name}"
        if not isinstance(entry, Mapping) or not entry or not set(entry) <= set(known):
            yield f"{where}={entry}: expected entries of {' and '.join(known)}, as {{weight: 0.5, n: 8}}"
            continue
        weight, n = entry.get("weight"), entry.get("n")
        if weight is not None and (not _is_number(weight) or not 0 <= weight < math.inf):
            yield f"{where}.weight={weight!r}: expected a number of at least 0, its share beside the other weights"
        if n is not None and (not isinstance(n, int) or isinstance(n, bool) or n < 1):
            yield f"{where}.n={n!r}: expected a whole number of at least 1, the answers to each of its prompts"
    weighted = {name: entry["weight"] for name, entry in sources.items() if _is_weighted(entry)}
    for name in sources if weighted else ():
        if name not in weighted:
            yield f"data.sources.{name} has no weight, and {next(iter(weighted))} has one: give every source a weight"
    if weighted and not any(weighted.values()):
        yield "data.sources: every weight is 0, so no prompt would be drawn: give a source a weight above 0"


def _is_weighted(entry: Any) -> bool:
    return isinstance(entry, Mapping) and entry.get("weight") is not None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

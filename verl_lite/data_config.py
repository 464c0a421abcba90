"""The options of the data: which files, what their columns are called, how prompts are made of them, in which order.

Part of `verl_lite.config`, which documents how fields are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_lite.config_fields import opt, section


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
    train_files: list[str] = opt([], "parquet, json or jsonl files of training prompts; one path or a list")
    val_files: list[str] = opt([], "the same for validation; may be empty, then nothing is validated")
    prompt_key: str = opt("prompt", "column that holds the chat messages")
    columns: dict[str, Any] = opt(
        {}, "for other schemas, our column: theirs, as {prompt: question, ground_truth: answer}"
    )
    data_source: str | None = opt(None, "data_source of rows that have no such column")
    system_prompt: str | None = opt(None, "system message put before prompts that have none")
    prompt_template: str | None = opt(None, "text around a prompt that is plain text, which stands for {prompt} in it")
    ground_truth_regex: str | None = opt(None, "the answer is the first group of its last match in the ground truth")
    tools_path: str | None = opt(None, "json file with a list of tool schemas for the chat template")
    sources: dict[str, Any] = opt(
        {}, "by data_source: {weight: its share of each batch, n: answers to each prompt instead of rollout.n}"
    )
    sampler: SamplerConfig = section(SamplerConfig, "the order of the training prompts")
    custom_cls: CustomClassConfig = section(CustomClassConfig, "a dataset class of your own")
    train_batch_size: int = opt(1024, "prompts per training step (each is sampled rollout.n times)")
    val_batch_size: int | None = opt(None, "prompts per validation call; null = the whole set at once")
    max_prompt_length: int = opt(512, "tokens; see `truncation` for longer prompts")
    max_response_length: int = opt(512, "tokens generated at most per sample")
    truncation: str = opt("error", "what to do with a longer prompt: error | left | right | middle")
    filter_overlong_prompts: bool = opt(False, "drop longer prompts at start, and say how many")
    filter_overlong_prompts_workers: int = opt(1, "processes that measure prompt lengths")
    train_max_samples: int = opt(-1, "use at most this many training rows; -1 = all")
    val_max_samples: int = opt(-1, "use at most this many validation rows; -1 = all")
    shuffle: bool = opt(True, "shuffle the training rows each epoch")
    seed: int | None = opt(None, "seed of the shuffle; null = trainer.seed")
    apply_chat_template_kwargs: dict[str, Any] = opt({}, "extra arguments of the tokenizer's chat template")

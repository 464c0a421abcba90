"""Whether the options of the data fit each other and name what exists: a part of `checks.config`.

Takes a `PPOConfig`; yields problems, each naming key, value, what was expected and what to change. What the rows
themselves say is checked when they are read (`trainer/data/prompts.py`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from verl_lite.config.checks.values import Problems, python_file
from verl_lite.config.data import HUB_NAME, DataConfig, source_problems
from verl_lite.config.ppo import PPOConfig
from verl_lite.registry import did_you_mean

SUFFIXES = (".parquet", ".json", ".jsonl")
OUR_COLUMNS = ("prompt", "ground_truth", "data_source", "extra_info", "tools", "n")
"""What `data.columns` may map."""


def data(config: PPOConfig) -> Problems:
    """Files, columns, prompts, sources and the order of the prompts."""
    if not config.is_agentic:
        yield from _places(config)
        yield from _columns(config.data)
        yield from _prompts(config.data)
        yield from _order(config.data)


def _places(config: PPOConfig) -> Problems:
    if config.data.custom_cls.path is not None:  # what the files are is the class's affair
        return
    for split in ("train", "val"):
        name = f"data.{split}_files"
        for place in config.data.train_files if split == "train" else config.data.val_files:
            yield from _place(name, place)
    if not config.data.train_files and not config.trainer.val_only:
        yield "data.train_files is empty: give a parquet file of prompts, data.train_files=train.parquet"


def _place(name: str, place: str) -> Problems:
    file = Path(place).expanduser()
    if file.is_dir() or Path(place.partition("@")[0].partition(":")[0]).expanduser().is_dir():
        return
    if file.is_file():
        if file.suffix not in SUFFIXES:
            yield f"{name}={place}: a .parquet, .json or .jsonl file is expected"
    elif file.suffix in SUFFIXES or not HUB_NAME.fullmatch(place):
        yield (
            f"{name}={place}: there is no file {file.absolute()}; a dataset of the Hugging Face hub is given as "
            "owner/name, owner/name:config or owner/name:config@split"
        )


def _columns(data: DataConfig) -> Problems:
    for ours, theirs in data.columns.items():
        where = f"data.columns.{ours}={theirs}"
        if ours == "ability":
            yield f"{where}: nothing reads it; a reward sees it as one of data.columns.extra_info=[ability]"
        elif ours not in OUR_COLUMNS:
            columns = f"our columns are {', '.join(OUR_COLUMNS)}, and the name behind the colon is theirs"
            yield f"{where}: {columns}.{did_you_mean(str(ours), OUR_COLUMNS)}"
        elif theirs is None:
            if ours in ("prompt", "ground_truth"):
                yield f"{where}: it cannot be left out; name a column of the data"
        elif not _is_name(theirs) and not (isinstance(theirs, list) and theirs and all(map(_is_name, theirs))):
            yield f"{where}: expected the name of a column of the data, or a list of names"
    if data.columns.get("prompt") is not None and data.prompt_key != DataConfig().prompt_key:
        yield (
            f"data.prompt_key={data.prompt_key} has no effect with data.columns.prompt={data.columns['prompt']}, which "
            "names the prompt's column: leave one of them out"
        )


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _prompts(data: DataConfig) -> Problems:
    template = data.prompt_template
    if template is not None and "{prompt}" not in template:
        yield (
            f"data.prompt_template={template!r}: the prompt stands for {{prompt}}, which is not in it; write for "
            "example '{prompt} Put the answer after ####.'"
        )
    if data.ground_truth_regex is not None:
        yield from _regex(data.ground_truth_regex)
    if data.tools_path is not None:
        if not Path(data.tools_path).expanduser().is_file():
            yield f"data.tools_path={data.tools_path}: there is no file {Path(data.tools_path).expanduser().absolute()}"
        if "tools" in data.apply_chat_template_kwargs:
            yield (
                f"data.tools_path={data.tools_path} and data.apply_chat_template_kwargs.tools both give tools to the "
                "chat template: leave the second out"
            )


def _regex(pattern: str) -> Problems:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        yield f"data.ground_truth_regex={pattern!r}: not a regular expression ({error}); expected one as '#### (.+)'"
        return
    if not compiled.groups:
        yield (
            f"data.ground_truth_regex={pattern!r}: no part of it is in parentheses, and the answer is what is there; "
            "write for example '#### (.+)'"
        )


def _order(data: DataConfig) -> Problems:
    yield from source_problems(data.sources)
    for key, path, name in (
        ("data.sampler.class_", data.sampler.class_path, data.sampler.class_name),
        ("data.custom_cls.", data.custom_cls.path, data.custom_cls.name),
    ):
        path_key, name_key = f"{key}path", f"{key}name"
        if path is None and name is not None:
            yield f"{name_key}={name} has no effect without {path_key}: name the Python file of the class"
        if path is not None and name is None:
            yield f"{path_key}={path} needs {name_key}, which is null: name the class in it"
        yield from python_file(path_key, path)
    if data.sampler.class_path is None:
        return
    if not data.shuffle:
        yield (
            "data.shuffle=false has no effect with data.sampler.class_path, which decides the order: leave one of them "
            "out"
        )
    if any(isinstance(entry, dict) and entry.get("weight") is not None for entry in data.sources.values()):
        yield (
            "data.sources.*.weight and data.sampler.class_path both decide which prompts come: leave one of them out"
        )

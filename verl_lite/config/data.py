"""The options of the data: files, columns, conversion of rows to prompts, and the order of the prompts."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_lite.config.fields import (
    ALL_OR_SOME,
    SEED,
    FreeDict,
    Options,
    Problems,
    at_least,
    opt,
    section,
    unknown_value,
)

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*(:[\w.-]+)?(@[\w.-]+)?")
"""A data set of the Hugging Face hub: owner/name, owner/name:config or owner/name:config@split."""
SUFFIXES = (".parquet", ".json", ".jsonl")
_TRUNCATIONS = ("error", "left", "right", "middle")
OUR_COLUMNS = ("prompt", "ground_truth", "data_source", "extra_info", "tools", "n")
"""The keys that `data.columns` accepts."""
_SET_BY_TRAINER = {
    "chat_template": "data.chat_template names the template",
    "tools": "data.tools_path names the file of the tools",
    **dict.fromkeys(
        (
            "add_generation_prompt",
            "chats",
            "continue_final_message",
            "conversation",
            "messages",
            "tokenize",
            "tokenizer",
        ),
        "the trainer sets it",
    ),
    **dict.fromkeys(("return_assistant_tokens_mask", "return_dict", "return_tensors"), "templates give text here"),
}
"""Arguments of `apply_chat_template` that are no variables of a template, and why they cannot be given."""
CHAT_TEMPLATE = "file, Jinja text, or a named one of the tokenizer; none = the messages' texts; null = its own"


@dataclass
class CustomClassConfig(Options):
    path: str | None = opt(None, "Python file, or pkg://module, of a custom dataset class; null = built-in")
    name: str | None = opt(None, "name of the dataset class")


@dataclass
class SamplerConfig(Options):
    class_path: str | None = opt(None, "Python file, or pkg://module, of a sampler class; null = data.shuffle")
    class_name: str | None = opt(None, "name of the sampler class")


@dataclass
class DataConfig(Options):
    """The prompts."""

    train_files: list[str] = opt([], "parquet, json or jsonl files, folders, hub names (owner/name:config@split)")
    val_files: list[str] = opt([], "validation files, in the same forms; empty = no validation")
    prompt_key: str = opt("prompt", "column of the chat messages")
    image_key: str = opt("images", "column of a prompt's images, for a vision-language model")
    image_folder: str | None = opt(None, "folder that must contain the image files; null = folder of the data file")
    max_pixels: int | None = opt(None, "larger images are scaled down to this area; null = the model's", at_least(1))
    columns: FreeDict = opt({}, "KEY: COLUMN, such as {prompt: question, ground_truth: answer}; trainer/DATA.md")
    data_source: str | None = opt(None, "data_source of rows without this column")
    system_prompt: str | None = opt(None, "system message for prompts that have none")
    prompt_template: str | None = opt(None, "template of plain-text prompts; {prompt} is replaced by the text")
    ground_truth_regex: str | None = opt(None, "group 1 of the last match is the ground truth, e.g. #### (.+)")
    tools_path: str | None = opt(None, "json list of tool schemas for the chat template, for rows without tools")
    sources: FreeDict = opt({}, "DATA_SOURCE: {weight: share of each batch, n: replaces rollout.n}")
    sampler: SamplerConfig = section(SamplerConfig, "order of the training prompts")
    custom_cls: CustomClassConfig = section(CustomClassConfig, "custom dataset class")
    train_batch_size: int = opt(1024, "prompts per training step (each is sampled rollout.n times)", at_least(1))
    val_batch_size: int | None = opt(None, "prompts validated at a time; no effect on the results", at_least(1))
    max_prompt_length: int = opt(512, "maximum number of prompt tokens; see `truncation`", at_least(1))
    max_response_length: int = opt(512, "maximum number of generated tokens per sample", at_least(1))
    truncation: str = opt("error", "of longer prompts: error, or cut at left | right | middle", _TRUNCATIONS)
    filter_overlong_prompts: bool = opt(False, "drop longer prompts at the start, and log their number")
    filter_overlong_prompts_workers: int = opt(1, "processes that count prompt tokens", at_least(1))
    train_max_samples: int = opt(-1, "maximum number of training rows; -1 = all", ALL_OR_SOME)
    val_max_samples: int = opt(-1, "maximum number of validation rows, the same in every run; -1 = all", ALL_OR_SOME)
    shuffle: bool = opt(True, "shuffle the training rows in each epoch")
    seed: int | None = opt(None, "seed of the shuffle; null = trainer.seed", SEED)
    chat_template: str | None = opt(None, CHAT_TEMPLATE)
    apply_chat_template_kwargs: FreeDict = opt({}, "extra arguments of the tokenizer's chat template")

    def check(self) -> Problems:
        yield from template_argument_problems("data.apply_chat_template_kwargs", self.apply_chat_template_kwargs)

    def check_prompts(self, *, trains: bool) -> Problems:
        """Yields the problems of files, columns and order for a run on prompts. Rows are checked when they are read."""
        # a custom dataset class interprets the files itself
        if self.custom_cls.path is None:
            for name in ("train_files", "val_files"):
                for file in getattr(self, name):
                    yield from _data_file(f"data.{name}", file)
            if trains and not self.train_files:
                yield "data.train_files is empty: set it to a file of prompts, such as data.train_files=train.parquet"
        for key, columns in self.columns.items():
            yield from _column_problems(key, columns)
        if self.prompt_template is not None and "{prompt}" not in self.prompt_template:
            yield f"data.prompt_template={self.prompt_template!r}: expected a text that contains {{prompt}}"
        if self.ground_truth_regex is not None and not _has_group(self.ground_truth_regex):
            yield (
                f"data.ground_truth_regex={self.ground_truth_regex!r}: a regular expression with a group is expected, "
                "such as '#### (.+)'"
            )
        yield from _source_problems(self.sources)


def template_argument_problems(where: str, arguments: Mapping[str, object]) -> Problems:
    """Yields the problems of arguments that are given to a chat template. where: the option or place that has them."""
    for name, reason in _SET_BY_TRAINER.items():
        if name in arguments:
            setting = f"{name}={arguments[name]}"
            yield f"{where}: {setting:.80} is not accepted, because {reason}; expected are variables of the template"


def python_file(name: str, path: str | None) -> Problems:
    """Yields a problem if a Python file does not exist. Modules (pkg://package.module) are not checked."""
    if path is None or path.startswith("pkg://"):
        return
    file = Path(path).expanduser()
    if not file.is_file():
        yield f"{name}={path}: there is no file {file.absolute()} (a module is pkg://package.module)"


def _data_file(name: str, path: str) -> Problems:
    """Yields a problem if `path` is neither a folder, a data file nor the form of a hub name."""
    file = Path(path).expanduser()
    # a folder with a data set can have a configuration and a split as well
    without_split = path.partition("@")[0].partition(":")[0]
    if file.is_dir() or Path(without_split).expanduser().is_dir():
        return
    expected = "a .parquet, .json or .jsonl file is expected, or owner/name:config@split of the Hugging Face hub"
    has_suffix = file.suffix in SUFFIXES
    if file.is_file():
        if not has_suffix:
            yield f"{name}={path}: {expected}"
    elif has_suffix or not HUB_NAME.fullmatch(path):
        yield f"{name}={path}: there is no file {file.absolute()}; {expected}"


def _column_problems(key: str, columns: object) -> Problems:
    """Yields what is wrong with an entry of `data.columns`."""
    if key not in OUR_COLUMNS:
        yield unknown_value("data.columns", key, OUR_COLUMNS) + f"; or extra_info: [{key}] for a reward"
        return
    if columns is None and key not in ("prompt", "ground_truth"):
        return
    names = columns if isinstance(columns, list) else [columns]
    are_names = all(isinstance(name, str) and name for name in names)
    if not names or not are_names:
        yield f"data.columns.{key}={columns}: the name of a column of the data, or a list of names, is expected"


def _has_group(pattern: str) -> bool:
    """Returns True if the pattern is a regular expression with at least one group."""
    try:
        return re.compile(pattern).groups > 0
    except re.error:
        return False


def _source_problems(sources: FreeDict) -> Problems:
    """Yields the problems of `data.sources` that do not depend on the data."""
    weights: dict[str, object] = {}
    for name, entry in sources.items():
        if isinstance(entry, Mapping):
            weights[name] = entry.get("weight")
        if not _is_source(entry):
            yield (
                f"data.sources.{name}={entry}: expected weight (a number of at least 0), n (a whole number of at least "
                "1), or both, such as {weight: 0.5, n: 8}"
            )

    # without any weights, the order of the prompts does not depend on their sources
    unweighted = [name for name, weight in weights.items() if weight is None]
    if len(unweighted) == len(weights):
        return
    for name in unweighted:
        yield f"data.sources.{name} has no weight, but another source does: set a weight for each source"
    if not any(weights.values()):
        yield "data.sources: every weight is 0, so no prompt would be drawn: set a weight above 0"


def _is_source(entry: object) -> bool:
    """Returns True for an entry of `data.sources` with valid options."""
    if not isinstance(entry, Mapping) or not entry:
        return False
    return all(_is_source_option(name, value) for name, value in entry.items())


def _is_source_option(name: object, value: object) -> bool:
    """Returns True for an entry of `data.sources` with a valid value. True and False are no numbers here."""
    if name not in ("n", "weight"):
        return False
    if value is None:
        return True
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if name == "n":
        return isinstance(value, int) and value >= 1
    return 0 <= value < math.inf

"""Samples: prompts and answers in a readable form, for files, trackers and the end of a run's output."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, overload

import numpy as np

from verl_lite.json_types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from trainer.data.sources import Row
    from verl_lite.protocol import DataProto
    from workers.policy.vision import ImageInputs

PREDICTION = "pred"
"""The entry of a reward's result that maj@n uses as the vote."""
OPTIONAL = ("requests", "images")
"""Fields that most samples lack, so that json records contain them only if they are not empty."""
_IMAGE_NAME = re.compile(r"[0-9a-f]{16}-[0-9]+\.jpg")


def is_prediction(name: str) -> bool:
    """Returns True if an entry of a reward's result is a prediction, which is not a metric even if it is a number."""
    # the entries of a part of the reward are named PART.NAME
    return name.split(".")[-1] == PREDICTION


@dataclass(frozen=True)
class Sample:
    """One prompt, its answer, and the answer's score.

    prompt, ground_truth and extra_info are the inputs of the reward, so that `trainer.score` can compute another one.
    The fields are columns of the sample files and arguments of callbacks and trackers.

    Attributes:
        step: Training step of the weights that the run had.
        uid: Identifier of the prompt.
        data_source: Data source of the prompt.
        input, gts: Last message of the prompt, and ground truth, as text for display.
        output: The answer.
        score: None if the reward failed.
        response_length: Number of tokens of the answer.
        finish_reason: stop or length.
        policy_version: Version of the weights that sampled the answer.
        extra: Further entries of the reward's result.
        sample: Number of the answer among those to one prompt.
        timed_out: True if the reward exceeded its time limit.
        prompt: The chat messages.
        ground_truth, extra_info: As in the dataset, converted to json values.
        requests: Requests of an episode's program in the form of workers/agents/endpoint/trace.py; empty for all other
            samples.
        images: File names of the prompt's images in the folder that `SampleFiles.write_images` fills.
    """

    step: int
    uid: str
    data_source: str
    input: str
    output: str
    gts: str
    score: float | None
    response_length: int
    finish_reason: str
    policy_version: int
    extra: dict[str, float | str]
    sample: int = 0
    timed_out: bool = False
    prompt: list[dict[str, str]] = field(default_factory=list)
    ground_truth: object = None
    extra_info: JsonObject | None = None
    requests: list[JsonObject] = field(default_factory=list)
    images: list[str] = field(default_factory=list)


def record_of(sample: Sample) -> JsonObject:
    """Returns a sample as a json record, without its optional fields that are empty."""
    record = asdict(sample)
    for name in OPTIONAL:
        if not record[name]:
            del record[name]
    return record


def samples_of(batch: DataProto, tokenizer: PreTrainedTokenizerBase, step: int) -> list[Sample]:
    """Converts the rows of a batch to samples, without padding rows. Rows of an unscored batch have no score.

    Args:
        batch: Answers with the columns of a rollout.
        tokenizer: The policy's tokenizer.
        step: The current training step.
    """
    tensors = batch.batch
    # from attention_mask, because the response_mask of a sample whose reward failed may already be empty
    prompt_width = tensors["prompts"].shape[1]
    answer_mask = tensors["attention_mask"][:, prompt_width:]
    lengths = answer_mask.sum(1).tolist()
    scores = None
    if "token_level_scores" in tensors.keys():
        scores = tensors["token_level_scores"].sum(1).tolist()

    is_padding = [False] * len(batch)
    if "is_padding" in tensors.keys():
        is_padding = tensors["is_padding"].tolist()

    samples = []
    for row in range(len(batch)):
        # rows that only fill a batch up have no answer
        if is_padding[row]:
            continue
        columns: Row = {}
        for name, values in batch.non_tensor_batch.items():
            columns[name] = values[row]
        score = None
        if scores is not None and not columns["reward_failed"]:
            score = scores[row]
        answer_ids = tensors["responses"][row, : lengths[row]]
        answer = str(tokenizer.decode(answer_ids, skip_special_tokens=True))
        version = int(tensors["policy_version"][row])
        sample = _sample(columns, answer, lengths[row], score, version, step)
        samples.append(sample)
    return samples


def _sample(columns: Row, answer: str, length: int, score: float | None, version: int, step: int) -> Sample:
    """Returns the sample of one row.

    Args:
        columns: The row's columns outside the tensors.
        answer, length: The answer and its number of tokens.
        score: Score of the answer; None if it has none.
        version: Version of the weights that sampled the answer.
        step: The current training step.
    """
    prompt = columns["raw_prompt"]
    ground_truth = columns["reward_model"].get("ground_truth")
    extra_info = plain_value(columns.get("extra_info", {})) or None
    return Sample(
        step=step,
        uid=columns["uid"],
        data_source=columns["data_source"],
        input=prompt[-1]["content"],
        output=answer,
        gts="" if ground_truth is None else str(ground_truth),
        score=score,
        response_length=length,
        finish_reason=columns["finish_reason"],
        policy_version=version,
        extra=_entries(columns),
        sample=int(columns.get("sample", 0)),
        timed_out=bool(columns.get("reward_timed_out", False)),
        prompt=[plain_value(message) for message in prompt],
        ground_truth=plain_value(ground_truth),
        extra_info=extra_info,
        images=image_names(columns.get("multi_modal_inputs")),
    )


def _entries(columns: Mapping[str, object]) -> dict[str, float | str]:
    """Returns the further entries of a row's reward, which are its columns `reward/<name>`."""
    entries: dict[str, float | str] = {}
    for column, value in columns.items():
        if not column.startswith("reward/") or value is None:
            continue
        name = column.removeprefix("reward/")
        if name == PREDICTION:
            # a prediction is a vote, which is compared as text
            entries[name] = str(value)
        elif isinstance(value, int | float | np.number | np.bool_):
            entries[name] = float(value)
        else:
            entries[name] = str(value)
    return entries


def image_names(images: ImageInputs | None) -> list[str]:
    """Returns the file names of a prompt's images. All prompts with the same images have the same names."""
    if images is None:
        return []
    # the digest is that of all images of the prompt, so each gets a number
    return [f"{images.digest:016x}-{number}.jpg" for number in range(len(images.files))]


def valid_image_names(value: object) -> list[str]:
    """Returns the file names among the entries of a saved `images`, which is untrusted.

    Names of another form, such as paths, are left out.
    """
    if not isinstance(value, list):
        return []
    names = []
    for entry in value:
        if isinstance(entry, str) and _IMAGE_NAME.fullmatch(entry):
            names.append(entry)
    return names


@overload
def plain_value(value: dict[str, object]) -> JsonObject: ...
@overload
def plain_value(value: object) -> object: ...
def plain_value(value: object) -> object:
    """Converts a value of a dataset to a json value.

    Arrays become lists, numbers that are not finite and pandas' missing values None, and types that json lacks (dates,
    bytes) text.
    """
    if isinstance(value, dict):
        return {str(name): plain_value(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(entry) for entry in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain_value(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, str | int | float):
        return value
    return None if is_missing_in_pandas(value) else str(value)


def is_missing_in_pandas(value: object) -> bool:
    """Returns True for pandas' NA and NaT, without importing pandas."""
    return type(value).__name__ in ("NAType", "NaTType")

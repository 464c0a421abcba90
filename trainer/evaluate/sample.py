"""Samples: prompts and answers in a readable form, for files, trackers and the end of a run's output."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl_lite.protocol import DataProto
    from workers.policy.vision import ImageInputs

PREDICTION = "pred"
"""The entry of a reward's result that maj@n uses as the vote."""
OPTIONAL = ("requests", "images")
"""Fields that most samples lack; records contain them only if they are not empty."""
_IMAGE_NAME = re.compile(r"[0-9a-f]{16}-[0-9]+\.jpg")


def is_prediction(name: str) -> bool:
    """Returns True if an entry of a reward's result is a prediction, which is not a metric even if it is a number."""
    return name.split(".")[-1] == PREDICTION


@dataclass(frozen=True)
class Sample:
    """One prompt, its answer, and the answer's score.

    score is None if the reward failed; timed_out is True if the reward exceeded its time limit. sample numbers the
    answers to one prompt. input and gts are for display. prompt (the chat messages), ground_truth and extra_info are
    the inputs of the reward, so that `trainer.score` can compute another reward. requests: requests of an episode's
    program in the form of workers/endpoint/trace.py; empty for all other samples. images: file names of the prompt's
    images in the folder that `SampleFiles.write_images` fills.
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
    ground_truth: Any = None
    extra_info: dict[str, Any] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    images: list[str] = field(default_factory=list)


def samples_of(batch: DataProto, tokenizer: PreTrainedTokenizerBase, step: int) -> list[Sample]:
    """Converts the rows of a batch to samples, without padding rows. Rows of an unscored batch have no score."""
    columns, tensors = batch.non_tensor_batch, batch.batch
    is_padding = tensors["is_padding"].tolist() if "is_padding" in tensors.keys() else [False] * len(batch)
    number = columns.get("sample", np.zeros(len(batch), dtype=np.int64))
    late = columns.get("reward_timed_out", np.zeros(len(batch), dtype=bool))
    infos = columns.get("extra_info", [None] * len(batch))
    images = columns.get("multi_modal_inputs", [None] * len(batch))
    # from attention_mask, because the response_mask of a sample whose reward failed may already be empty
    lengths = tensors["attention_mask"][:, tensors["prompts"].shape[1] :].sum(1)
    scores: list[float | None] = [None] * len(batch)
    if "token_level_scores" in tensors.keys():
        found = zip(columns["reward_failed"], tensors["token_level_scores"].sum(1).tolist(), strict=True)
        scores = [None if failed else score for failed, score in found]
    extras = {name.removeprefix("reward/"): values for name, values in columns.items() if name.startswith("reward/")}
    samples = []
    for row in np.flatnonzero(~np.array(is_padding, dtype=bool)):
        truth = columns["reward_model"][row].get("ground_truth")
        sample = Sample(
            step=step,
            uid=columns["uid"][row],
            data_source=columns["data_source"][row],
            input=columns["raw_prompt"][row][-1]["content"],
            output=str(tokenizer.decode(tensors["responses"][row, : lengths[row]], skip_special_tokens=True)),
            gts="" if truth is None else str(truth),
            score=scores[row],
            response_length=int(lengths[row]),
            finish_reason=columns["finish_reason"][row],
            policy_version=int(tensors["policy_version"][row]),
            extra={name: _plain(name, values[row]) for name, values in extras.items() if values[row] is not None},
            sample=int(number[row]),
            timed_out=bool(late[row]),
            prompt=plain_value(columns["raw_prompt"][row]),
            ground_truth=plain_value(truth),
            extra_info=plain_value(infos[row]) or None,
            images=image_names(images[row]),
        )
        samples.append(sample)
    return samples


def image_names(images: ImageInputs | None) -> list[str]:
    """Returns the file names of a prompt's images. All prompts with the same images have the same names."""
    return [] if images is None else [f"{images.digest:016x}-{place}.jpg" for place in range(len(images.files))]


def valid_image_names(value: Any) -> list[str]:
    """Returns the file names among the entries of a saved `images`, which is untrusted. Names of another form, such as
    paths, are left out."""
    entries = value if isinstance(value, list) else []
    return [entry for entry in entries if isinstance(entry, str) and _IMAGE_NAME.fullmatch(entry)]


def plain_value(value: Any) -> Any:
    """Converts a value of a dataset to a json value: arrays to lists, numbers that are not finite to None, and types
    that json lacks (dates, bytes) to text."""
    if isinstance(value, dict):
        return {str(name): plain_value(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(entry) for entry in value]
    if isinstance(value, np.ndarray | np.generic):
        return plain_value(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def _plain(name: str, value: object) -> float | str:
    is_number = isinstance(value, int | float | np.number | np.bool_) and name != PREDICTION
    return float(cast(float, value)) if is_number else str(value)

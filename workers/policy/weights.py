"""Compares the weight files of a model with its network, before any weight is read into memory.

Names and shapes come from the headers of the files. transformers itself only logs most differences, and initialises
missing weights at random.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypedDict

import torch
from safetensors import safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
)

from verl_lite.errors import UserError
from workers.policy.classifier import causal_lm_class_of
from workers.policy.generation_config import model_file
from workers.policy.model_errors import user_error_on_failure

# weights of heads that other trainers add to a causal language model, which does not read them
_FOREIGN_HEADS = ("v_head.", "value_head.")
_MOST_NAMES = 5


class LoadingReport(TypedDict):
    """How the weight files differ from the network, from `from_pretrained(..., output_loading_info=True)`.

    Attributes:
        missing_keys: names of weights that only the network has.
        unexpected_keys: names of weights that only the files have.
        mismatched_keys: name, shape in the files, and shape in the network of weights whose shapes differ.
    """

    missing_keys: Collection[str]
    unexpected_keys: Collection[str]
    mismatched_keys: Collection[tuple[str, Sequence[int], Sequence[int]]]


def require_fitting_weights(
    network: PreTrainedModel,
    report: LoadingReport,
    shown_path: str,
    *,
    may_lack: Collection[str] = (),
    may_have: Collection[str] = (),
) -> None:
    """Raises UserError if weights are missing, have other shapes than the network, or have no place in it.

    Args:
        network: the network.
        report: transformers' loading info.
        shown_path: the network as messages name it.
        may_lack: names of weights that may be missing from the files.
        may_have: beginnings of names that the files may contain besides the network's weights; "" permits all.
    """
    kind = type(network).__name__
    # transformers would initialise them at random, with no more than a line in the log
    missing = sorted(set(report["missing_keys"]) - set(may_lack))
    if missing:
        raise UserError(
            f"{shown_path}: its weights do not fit a {kind}, which also needs {_listed(missing)}; give a folder with "
            "all weights, or correct its config.json (an output layer that is the embedding: tie_word_embeddings=true)"
        )

    differences = []
    for name, file_shape, own_shape in sorted(report["mismatched_keys"]):
        differences.append(f"{name} {tuple(file_shape)} instead of {tuple(own_shape)}")
    if differences:
        raise UserError(
            f"{shown_path}: the weights cannot be loaded: weights of other sizes than those of its config.json and "
            f"model.override_config: {_listed(differences)}; correct the entry, or give the weights that belong to it"
        )

    # a wrong class or a wrong number of layers leaves weights unread, and would silently compute something else
    beginnings = (*_FOREIGN_HEADS, *may_have)
    unexpected = sorted(name for name in report["unexpected_keys"] if not name.startswith(beginnings))
    if unexpected:
        raise UserError(
            f"{shown_path}: a {kind} does not read {_listed(unexpected)} of its weights, so it would compute another "
            "function than the model that was saved; correct config.json, or remove these weights"
        )


def _listed(names: Collection[str]) -> str:
    """Returns the first names, and the number of the others."""
    first_names = list(names)[:_MOST_NAMES]
    text = ", ".join(first_names)
    num_others = len(names) - _MOST_NAMES
    if num_others > 0:
        text += f" and {num_others} more"
    return text


def has_own_output_layer(path: str, config: PretrainedConfig) -> bool:
    """Returns True if the weights of a causal language model contain an output layer that differs from the embedding.

    Equal weights that are stored twice are no output layer of its own. Returns False if `path` has no weights.

    Raises:
        UserError: the weight files or their index cannot be read.
    """
    tied_names = getattr(causal_lm_class_of(config), "_tied_weights_keys", None)
    # None, or a class of other code
    if not isinstance(tied_names, dict):
        return False
    remedy = "its weight files must be complete; copy or download the folder again"
    with user_error_on_failure(f"model.path={path!r}: the weights cannot be loaded", remedy):
        # with the times of change, because `_differ` remembers its results
        files = []
        for file in weight_files(path):
            changed_at = Path(file).stat().st_mtime_ns
            files.append((file, changed_at))
        for output, embedding in tied_names.items():
            if _differ(tuple(files), _tail(output), _tail(embedding)):
                return True
        return False


def weight_files(path: str) -> list[str]:
    """Returns the weight files that transformers would load from a folder or from the hub's cache."""
    # in the order in which transformers looks for them
    for single, index in ((SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME), (WEIGHTS_NAME, WEIGHTS_INDEX_NAME)):
        single_file = model_file(path, single)
        if single_file is not None:
            return [single_file]
        index_file = model_file(path, index)
        if index_file is not None:
            content = json.loads(Path(index_file).read_text(encoding="utf-8"))
            names = set(content["weight_map"].values())
            shards = [model_file(path, name) for name in sorted(names)]
            return [shard for shard in shards if shard is not None]
    return []


def _tail(name: str) -> str:
    """Returns the last two parts of a parameter's name. Files may have other prefixes than the network."""
    parts = name.split(".")
    return ".".join(parts[-2:])


@lru_cache(maxsize=32)
def _differ(files: tuple[tuple[str, int], ...], output: str, embedding: str) -> bool:
    """Returns True if files, given with their times of change, contain both weights and their values differ."""
    outputs = list(_tensors_named(files, output))
    embeddings = list(_tensors_named(files, embedding))
    if not outputs or not embeddings:
        return False
    return not torch.equal(outputs[0], embeddings[0])


def _tensors_named(files: tuple[tuple[str, int], ...], tail: str) -> Iterator[torch.Tensor]:
    """Yields the tensors whose name is `tail` or ends with it after a dot."""
    ending = f".{tail}"
    for file, _ in files:
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():
                    if f".{name}".endswith(ending):
                        yield tensors.get_tensor(name)
        else:
            # files of torch before 1.6 are not, and cannot be mapped
            is_zip = zipfile.is_zipfile(file)
            state = torch.load(file, map_location="cpu", mmap=is_zip, weights_only=True)
            for name, tensor in state.items():
                if f".{name}".endswith(ending):
                    yield tensor

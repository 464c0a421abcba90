"""From a Hugging Face folder (or cached hub name) to a model in memory, with the config entries the user replaced.

Only rank 0 reads the weights; the others get an empty model of the same shape, which the engine fills with their
shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils.logging import disable_progress_bar

from verl_lite.config import NetworkConfig
from verl_lite.errors import UserError


@dataclass(frozen=True)
class NetworkSpec:
    """How a network is to be built: on the CPU in `dtype`.

    attention: name of an attention function registered with transformers. with_weights=False leaves the parameters
    uninitialised (and untouched: the operating system gives them no memory before they are written); buffers are right.
    """

    model: NetworkConfig
    config: PretrainedConfig
    dtype: torch.dtype
    attention: str
    with_weights: bool


class Policy(nn.Module):
    """A network and what is computed from its hidden states.

    The parameters of `model` appear under the prefix `model.`, followed by their Hugging Face names. forward takes
    `ModelInputs` and options of its own, and gives outputs (b, R) by name.
    """

    model: PreTrainedModel


PolicyBuilder = Callable[[NetworkSpec], Policy]


def load_model_config(model: NetworkConfig) -> PretrainedConfig:
    """The model's own config with `model.override_config` applied. UserError if the path or an override does not
    exist."""
    if model.path is None:
        raise UserError("model.path=null: expected a Hugging Face folder or the name of a cached model")
    try:
        config = AutoConfig.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    except OSError as error:
        raise UserError(
            f"model.path={model.path!r}: expected a folder with config.json and weights in Hugging Face format, "
            "or the name of a model in the local hub cache"
        ) from error
    for name, value in model.override_config.items():
        if not hasattr(config, name):
            raise UserError(f"model.override_config.{name}={value!r}: a {config.model_type} config has no such entry")
        setattr(config, name, value)
    return config


def build_network(auto_class: Any, spec: NetworkSpec) -> PreTrainedModel:
    """A network of a transformers Auto class, without dropout."""
    disable_progress_bar()
    if spec.with_weights:
        network = auto_class.from_pretrained(
            str(spec.model.path),
            config=spec.config,
            dtype=spec.dtype,
            attn_implementation=spec.attention,
            trust_remote_code=spec.model.trust_remote_code,
        )
    else:
        with no_init_weights():
            network = auto_class.from_config(
                spec.config,
                dtype=spec.dtype,
                attn_implementation=spec.attention,
                trust_remote_code=spec.model.trust_remote_code,
            )
        network.tie_weights()
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return network

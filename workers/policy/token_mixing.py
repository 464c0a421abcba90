"""Which layers of a network carry something from token to token, and so in which form it may be given a micro-batch.

A packed row is right only where nothing but attention looks at other tokens, and where this attention is the function
of `workers.engine.packing`, which knows where each sequence begins. Linear attention, convolutions, state-space layers
and attention that chooses its tokens by itself know no borders: one sequence would leak into the next, and nothing
would say so. So a network is packed only if every one of its modules is known: attention by transformers' interface, a
layer with a state that is called for each sequence apart, or a kind of module that looks at one token at a time. A
network with anything else gets the aligned form, which is exact for every causal network.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from verl_lite.config import NetworkConfig
from verl_lite.errors import UserError
from workers.engine.packing import PACKED_ATTENTION, ModelInputs, PackedSequences, align, by_sequences, pack, pad

Arrangement = Callable[[Mapping[str, torch.Tensor]], ModelInputs]

# Modules that look at one token at a time, or hold others: of torch, of transformers and peft, by where they live, and
# the parts of transformers' models by how their classes are called there.
ONE_TOKEN_PACKAGES = re.compile(
    r"torch\.nn\.(modules\.(activation|container|dropout|linear|normalization|sparse)|utils\.parametrize)"
    r"|transformers\.(activations|pytorch_utils)|peft\..*"
)
ONE_TOKEN_CLASSES = re.compile(
    r".*(Activation|AltUp|Embeddings?|Experts|FeedForward|Gate|Gating|Linear|Mlp|MLP|MoA|Moe|MoE|Norm|Router|Scaling"
    r"|Statics)|.*(Block|Decoder|DecoderLayer|Encoder|ForCausalLM|Model|HybridLayer|MoELayer|NeoXLayer)"
)


# Layers with a state that are told of the borders of packed sequences, and may be called by `by_sequences`: each was
# tried (tests/workers/test_model_families.py).
STATE_LAYERS = re.compile(
    r".*(GatedDeltaNet|DeltaAttention|LightningAttention|MambaLayer|ShortConv"
    r"|(Bamba|FalconH1|JambaMamba|Mamba2|Zamba2Mamba)Mixer)"
)
KNOWN_LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention", "attention")


def mixing_layers(model: PreTrainedModel) -> list[str]:
    """Class names of the modules that keep a network from being packed; none = it may be.

    Raises UserError for attention that is not causal: the log-prob of a token would depend on what follows it.
    """
    decoder = model.get_decoder()
    causal = {type(module).__name__: module.is_causal is True for module in decoder.modules() if _is_attention(module)}
    if causal and not any(causal.values()):
        raise UserError(
            f"model.path: a {type(model).__name__} has attention ({', '.join(causal)}) that is not causal, so that the "
            "log-prob of a token depends on the tokens after it: choose a causal language model"
        )
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or ()
    # chunks and the like are in masks alone, which a packed row has not
    unknown = {name: None for name in layer_types if "attention" in name and name not in KNOWN_LAYER_TYPES}
    window = None if layer_types else getattr(config, "sliding_window", None)
    has_window = "sliding_attention" in layer_types or window is not None
    # to attention, what the decoder is called with
    hands_down = model._supports_attention_backend or bool(state_layers(model))
    waiting: list[tuple[nn.Module, bool]] = [(decoder, True)]
    while waiting:
        module, is_told = waiting.pop()  # of the borders, as a keyword argument
        name, takes_more = type(module).__name__, _takes_keywords(module)
        if STATE_LAYERS.fullmatch(name) and is_told:
            continue
        is_told = is_told and (takes_more or isinstance(module, nn.ModuleList | nn.ModuleDict))
        if _is_attention(module):
            known = causal[name] and is_told and hands_down and (_takes_window(module) or not has_window)
        else:
            known = _looks_at_one_token(type(module))
        if not known:
            unknown[name] = None
        else:
            waiting += [(child, is_told) for child in module.children()][::-1]
    return list(unknown)


def state_layers(model: PreTrainedModel) -> set[str]:
    """Class names of the layers with a state that a packed network may have."""
    names = {type(module).__name__ for module in model.get_decoder().modules()}
    return {name for name in names if STATE_LAYERS.fullmatch(name)}


def _takes_keywords(module: nn.Module) -> bool:
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _takes_window(attention: nn.Module) -> bool:
    """It hands its window to the attention function, where others have it in their mask alone."""
    constants = inspect.unwrap(type(attention).forward).__code__.co_consts
    return any(isinstance(names, tuple) and "sliding_window" in names for names in constants)


def _is_attention(module: nn.Module) -> bool:
    """Attention by transformers' interface, which calls the function that is set."""
    code = inspect.unwrap(type(module).forward).__code__
    return "ALL_ATTENTION_FUNCTIONS" in code.co_names and hasattr(module, "is_causal")


def _looks_at_one_token(kind: type[nn.Module]) -> bool:
    if ONE_TOKEN_PACKAGES.fullmatch(kind.__module__):
        return kind is not nn.MultiheadAttention
    # names of classes mean what they say in transformers alone: code that comes with a model may call things otherwise
    return kind.__module__.startswith("transformers.models.") and ONE_TOKEN_CLASSES.fullmatch(kind.__name__) is not None


def arrangement_of(model: PreTrainedModel, network: NetworkConfig) -> Arrangement:
    """The form of a micro-batch that `model` gets, with the attention function that belongs to it set."""
    mixing = mixing_layers(model)
    if network.use_remove_padding and not mixing:
        model.set_attn_implementation(PACKED_ATTENTION)
        for owner in model.get_decoder().modules():
            for layer in owner.children():
                if STATE_LAYERS.fullmatch(type(layer).__name__):
                    _pack_layer(owner, layer)
        return pack
    # transformers' own call of SDPA leaves soft-capping out without a word
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    model.set_attn_implementation("sdpa" if model._supports_sdpa and not capped else "eager")
    return align if mixing else pad


def _pack_layer(owner: nn.Module, layer: nn.Module) -> None:
    """Makes a layer with a state keep to the borders of packed sequences, of which its owner is told."""
    forward = layer.forward
    told: list[PackedSequences | None] = [None]

    def listen(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        told[0] = kwargs.get("packed_sequences")

    def packed_forward(*args: Any, **kwargs: Any) -> Any:
        if told[0] is None:
            name = type(layer).__name__
            raise ValueError(f"{name} is not told of packed sequences; set model.use_remove_padding=false for it")
        return by_sequences(forward, told[0], args, kwargs)

    owner.register_forward_pre_hook(listen, with_kwargs=True)
    vars(layer)["forward"] = packed_forward

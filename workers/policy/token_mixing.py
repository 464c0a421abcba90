"""Which layers of a network carry something from token to token, and so in which form it may be given a micro-batch.

A packed row is right only where nothing but attention looks at other tokens, and where this attention is the function
of `workers.engine.packing`, which knows where each sequence begins. Linear attention, convolutions, state-space layers
and attention that chooses its tokens by itself know no borders: one sequence would leak into the next, and nothing
would say so. So a network is packed only if every one of its modules is known: attention by transformers' interface, a
layer with a state that is called for each sequence apart (or with the borders, where it is seen to keep to them), or a
kind of module that looks at one token at a time. A network with anything else gets the aligned form, which is exact for
every causal network.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
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
        said: set[str] = set()
        for owner in model.get_decoder().modules():
            for layer in owner.children():
                if STATE_LAYERS.fullmatch(type(layer).__name__):
                    _pack_layer(owner, layer, said)
        return pack
    # transformers' own call of SDPA leaves soft-capping out without a word
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    model.set_attn_implementation("sdpa" if model._supports_sdpa and not capped else "eager")
    return align if mixing else pad


def _pack_layer(owner: nn.Module, layer: nn.Module, said: set[str]) -> None:
    """Makes a layer with a state keep to the borders of packed sequences, of which its owner is told. said: how layers
    of this network are called, as the user has read it."""
    forward, names = layer.forward, _border_names(layer)
    told: list[PackedSequences | None] = [None]
    keeps: dict[bool, bool] = {}  # to borders; by layer.training, on which the choice of a kernel depends

    def listen(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        told[0] = kwargs.get("packed_sequences")

    def packed_forward(*args: Any, **kwargs: Any) -> Any:
        name, sequences = type(layer).__name__, told[0]
        if sequences is None:
            raise ValueError(f"{name} is not told of packed sequences; set model.use_remove_padding=false for it")
        hidden, *rest = args or (kwargs.pop("hidden_states"),)

        def call(hidden: torch.Tensor, borders: dict[str, torch.Tensor] | None) -> Any:
            return by_sequences(forward, sequences, (hidden, *rest), kwargs, borders)

        if len(sequences.cu_seqlens) == 2:
            return call(hidden, None)
        borders = {each: sequences.borders[each] for each in names}
        if layer.training not in keeps:  # decided before the call: activation checkpointing repeats it the same way
            keeps[layer.training], found = _try_borders(call, hidden, borders)
            way = f"{name} is called {'once for a packed row' if keeps[layer.training] else 'by sequence'}"
            if way not in said and (not dist.is_initialized() or dist.get_rank() == 0):
                print(f"{way}: told of the borders, it {found}", flush=True)
            said.add(way)
        return call(hidden, borders if keeps[layer.training] else None)

    owner.register_forward_pre_hook(listen, with_kwargs=True)
    vars(layer)["forward"] = packed_forward


def _border_names(layer: nn.Module) -> list[str]:
    """Those of `PackedSequences.borders` that the layer's forward takes."""
    forward = inspect.unwrap(type(layer).forward)
    if not _takes_keywords(layer):
        return [name for name in ("seq_idx", "cu_seq_lens_q") if name in inspect.signature(forward).parameters]
    # where transformers' name is not looked for, keywords go on as they are, and kernels take their own
    return ["seq_idx", "cu_seq_lens_q" if "cu_seq_lens_q" in forward.__code__.co_consts else "cu_seqlens"]


def _try_borders(call: Callable[..., Any], hidden: torch.Tensor, borders: dict[str, torch.Tensor]) -> tuple[bool, str]:
    """Whether a layer that is told of the borders keeps to them, and what was found, for the user.

    CUDA kernels may, the plain torch in their place never does, and nothing says which runs: so output and gradient of
    each token are compared with those of each sequence for itself. They have to agree to half the digits of their type:
    rounding changes far less, a leak far more at the first tokens of a sequence, as the layer untold has to show.
    """
    hidden = hidden.detach().requires_grad_()

    def outcome(told: dict[str, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor]:
        result = call(hidden, told)
        output = result[0] if isinstance(result, tuple) else result
        return output.detach(), torch.autograd.grad(output, hidden, hidden.detach().to(output.dtype))[0]

    # hooks, so that activation checkpointing does not count what is saved here
    with torch.enable_grad(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        expected = outcome(None)
        try:
            pairs = zip((*outcome(borders), outcome({})[0]), (*expected, expected[0]), strict=True)
            output, gradient, leak = torch.stack([_gap(*pair) for pair in pairs]).tolist()
        except Exception as error:  # kernels have exceptions of all kinds; the layer is called without borders
            return False, f"raises {type(error).__name__}: {error}"
    limit = torch.finfo(hidden.dtype).eps ** 0.5
    found = f"is off by {output:.1g} (gradient {gradient:.1g}), untold by {leak:.1g}; allowed {limit:.1g}"
    return output <= limit and gradient <= limit < leak, found


def _gap(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The largest distance of a token's vector (1, T, H) from the expected, relative to its length and the median."""
    found, expected = (value.to(torch.promote_types(value.dtype, torch.float32)) for value in (found, expected))
    length = expected.norm(dim=-1)
    return ((found - expected).norm(dim=-1) / (length + length.median())).max()

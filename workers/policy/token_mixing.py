"""Finds the layers of a network that mix tokens, and selects the form of its micro-batches accordingly.

A packed row gives correct results only if no module except attention mixes tokens, and if attention is computed by the
function of `workers.engine.packing`, which gets the sequence boundaries. Linear attention, convolutions, state-space
layers and attention that selects its tokens ignore the boundaries: one sequence would silently leak into the next.
Therefore a network is packed only if each of its modules is known: attention that uses transformers' interface; a
stateful layer, which is called per sequence, or with the boundaries if a test shows that it respects them; or a module
that processes one token at a time. Every other network gets the aligned form, which is exact for every causal network.
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
from workers.engine.packed_attention import PACKED_ATTENTION, by_sequences
from workers.engine.packed_sequences import PackedSequences
from workers.engine.packing import ModelInputs, align, pack, pad
from workers.engine.sequence_parallel import valid_sizes
from workers.policy.vision import attention_of_text, has_vision

Arrangement = Callable[[Mapping[str, torch.Tensor]], ModelInputs]

# Modules that process one token at a time or are containers: those of torch, transformers and peft by module path, and
# the parts of transformers' models by class name.
ONE_TOKEN_PACKAGES = re.compile(
    r"torch\.nn\.(modules\.(activation|container|dropout|linear|normalization|sparse)|utils\.parametrize)"
    r"|transformers\.(activations|pytorch_utils)|peft\..*"
)
ONE_TOKEN_CLASSES = re.compile(
    r".*(Activation|AltUp|Embeddings?|Experts|FeedForward|Gate|Gating|Linear|Mlp|MLP|MoA|Moe|MoE|Norm|Router|Scaling"
    r"|Statics)|.*(Block|Decoder|DecoderLayer|Encoder|ForCausalLM|Model|HybridLayer|MoELayer|NeoXLayer)"
)


# Stateful layers that receive the boundaries of packed sequences and may be called by `by_sequences`. Each of them is
# tested (tests/workers/test_model_families.py).
STATE_LAYERS = re.compile(
    r".*(GatedDeltaNet|DeltaAttention|LightningAttention|MambaLayer|ShortConv"
    r"|(Bamba|FalconH1|JambaMamba|Mamba2|Zamba2Mamba)Mixer)"
)
KNOWN_LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention", "attention")


def mixing_layers(model: PreTrainedModel) -> list[str]:
    """Class names of the modules that prevent packing of a network; empty if the network can be packed.

    Raises UserError for attention that is not causal: the log-prob of a token would depend on later tokens.
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
    # transformers implements other kinds, such as chunked attention, only in the mask, which a packed row lacks
    unknown = {name: None for name in layer_types if "attention" in name and name not in KNOWN_LAYER_TYPES}
    window = None if layer_types else getattr(config, "sliding_window", None)
    has_window = "sliding_attention" in layer_types or window is not None
    # True if the decoder passes its keyword arguments on to attention
    passes_keywords = model._supports_attention_backend or bool(state_layers(model))
    waiting: list[tuple[nn.Module, bool]] = [(decoder, True)]
    while waiting:
        module, gets_boundaries = waiting.pop()  # as a keyword argument
        name = type(module).__name__
        if STATE_LAYERS.fullmatch(name) and gets_boundaries:
            continue
        is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
        gets_boundaries = gets_boundaries and (_takes_keywords(module) or is_container)
        if _is_attention(module):
            known = causal[name] and gets_boundaries and passes_keywords and (_takes_window(module) or not has_window)
        else:
            known = _is_token_wise(type(module))
        if not known:
            unknown[name] = None
        else:
            waiting += [(child, gets_boundaries) for child in module.children()][::-1]
    return list(unknown)


def state_layers(model: PreTrainedModel) -> set[str]:
    """Class names of the stateful layers of a network that can be packed (`STATE_LAYERS`)."""
    names = {type(module).__name__ for module in model.get_decoder().modules()}
    return {name for name in names if STATE_LAYERS.fullmatch(name)}


def sharding_problem(model: PreTrainedModel, network: NetworkConfig, size: int) -> str | None:
    """Returns why `size` ranks cannot share the tokens of a row, with the remedy; None if they can. They exchange
    tokens only in attention."""
    name, config = type(model).__name__, model.config.get_text_config()
    if not network.use_remove_padding:
        return "only packed rows can be shared; set model.use_remove_padding=true"
    if has_vision(model.config):
        return f"a {name} has a vision tower, whose features are not shared; set 1"
    # a state passes from token to token, and would have to be passed from rank to rank
    if unfit := mixing_layers(model) or sorted(state_layers(model)):
        return f"a {name} has layers of kind {', '.join(unfit[:3])}, which need all tokens on one rank; set 1"
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    # layers with different numbers of heads are checked in the forward
    if isinstance(heads, int) and isinstance(key_value_heads, int) and size not in valid_sizes(heads, key_value_heads):
        return (
            f"a {name} has {heads} query heads, which the size must divide, and {key_value_heads} key/value heads, "
            f"which it must divide or be a multiple of; set one of {valid_sizes(heads, key_value_heads)}"
        )
    return None


def _takes_keywords(module: nn.Module) -> bool:
    """True if the module's forward accepts arbitrary keyword arguments."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _takes_window(attention: nn.Module) -> bool:
    """True if a layer passes its sliding window to the attention function, instead of only using it in the mask."""
    constants = inspect.unwrap(type(attention).forward).__code__.co_consts
    return any(isinstance(names, tuple) and "sliding_window" in names for names in constants)


def _is_attention(module: nn.Module) -> bool:
    """True for attention that calls the function set with transformers' `set_attn_implementation`."""
    code = inspect.unwrap(type(module).forward).__code__
    return "ALL_ATTENTION_FUNCTIONS" in code.co_names and hasattr(module, "is_causal")


def _is_token_wise(kind: type[nn.Module]) -> bool:
    if ONE_TOKEN_PACKAGES.fullmatch(kind.__module__):
        return kind is not nn.MultiheadAttention
    # class names are reliable only in transformers: code that comes with a model may use the same names differently
    return kind.__module__.startswith("transformers.models.") and ONE_TOKEN_CLASSES.fullmatch(kind.__name__) is not None


def arrangement_of(model: PreTrainedModel, network: NetworkConfig) -> Arrangement:
    """Returns the function that prepares micro-batches for `model`, and sets the attention function that it needs."""
    mixing = mixing_layers(model)
    if network.use_remove_padding and not mixing:
        model.set_attn_implementation(attention_of_text(model.config, PACKED_ATTENTION))
        printed: set[str] = set()
        for owner in model.get_decoder().modules():
            for layer in owner.children():
                if STATE_LAYERS.fullmatch(type(layer).__name__):
                    _pack_layer(owner, layer, printed)
        return pack
    # transformers' own call of SDPA silently ignores soft-capping
    capped = getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None
    model.set_attn_implementation("sdpa" if model._supports_sdpa and not capped else "eager")
    return align if mixing else pad


def _pack_layer(owner: nn.Module, layer: nn.Module, printed: set[str]) -> None:
    """Wraps a stateful layer so that it respects the boundaries of packed sequences, which its owner receives.

    printed: the notes that were already printed for this network.
    """
    forward, names = layer.forward, _border_names(layer)
    received: list[PackedSequences | None] = [None]
    respects: dict[bool, bool] = {}  # by layer.training, on which the choice of a kernel depends

    def store_sequences(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        received[0] = kwargs.get("packed_sequences")

    def packed_forward(*args: Any, **kwargs: Any) -> Any:
        name, sequences = type(layer).__name__, received[0]
        if sequences is None:
            raise ValueError(f"{name} received no `packed_sequences`; set model.use_remove_padding=false")
        hidden, *rest = args or (kwargs.pop("hidden_states"),)

        def call(hidden: torch.Tensor, borders: dict[str, torch.Tensor] | None) -> Any:
            return by_sequences(forward, sequences, (hidden, *rest), kwargs, borders)

        if len(sequences.cu_seqlens) == 2:
            return call(hidden, None)
        borders = {each: sequences.borders[each] for each in names}
        if layer.training not in respects:  # decided once, so that activation checkpointing repeats the same call
            respects[layer.training], result = _test_borders(call, hidden, borders)
            note = f"{name} is called {'once for a packed row' if respects[layer.training] else 'by sequence'}"
            if note not in printed and (not dist.is_initialized() or dist.get_rank() == 0):
                print(f"{note}: with the sequence boundaries, it {result}", flush=True)
            printed.add(note)
        return call(hidden, borders if respects[layer.training] else None)

    owner.register_forward_pre_hook(store_sequences, with_kwargs=True)
    vars(layer)["forward"] = packed_forward


def _border_names(layer: nn.Module) -> list[str]:
    """Names of the entries of `PackedSequences.borders` that the layer's forward accepts."""
    forward = inspect.unwrap(type(layer).forward)
    if not _takes_keywords(layer):
        return [name for name in ("seq_idx", "cu_seq_lens_q") if name in inspect.signature(forward).parameters]
    # a forward that does not look up transformers' name passes keywords on to kernels, which have their own name
    return ["seq_idx", "cu_seq_lens_q" if "cu_seq_lens_q" in forward.__code__.co_consts else "cu_seqlens"]


def _test_borders(call: Callable[..., Any], hidden: torch.Tensor, borders: dict[str, torch.Tensor]) -> tuple[bool, str]:
    """Tests if a layer respects the sequence boundaries. Returns the answer and a description for the user.

    Compares the output and the gradient of each token with those of separate calls per sequence. Both must agree to
    half of the dtype's digits, and a call without boundaries must differ by more than that. Rounding causes far smaller
    differences, and a leak causes far larger differences at the first tokens of a sequence.
    """
    # A CUDA kernel may respect boundaries, its fallback in plain torch never does, and transformers does not report
    # which of them runs.
    hidden = hidden.detach().requires_grad_()

    def output_and_gradient(borders: dict[str, torch.Tensor] | None) -> tuple[torch.Tensor, torch.Tensor]:
        result = call(hidden, borders)
        output = result[0] if isinstance(result, tuple) else result
        return output.detach(), torch.autograd.grad(output, hidden, hidden.detach().to(output.dtype))[0]

    # with these hooks activation checkpointing does not count the tensors that are saved here
    with torch.enable_grad(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        expected = output_and_gradient(None)
        try:
            found = (*output_and_gradient(borders), output_and_gradient({})[0])
            pairs = zip(found, (*expected, expected[0]), strict=True)
            output, gradient, leak = torch.stack([_largest_error(*pair) for pair in pairs]).tolist()
        except Exception as error:  # kernels raise exceptions of all kinds; the layer is then called by sequence
            return False, f"raises {type(error).__name__}: {error}"
    limit = torch.finfo(hidden.dtype).eps ** 0.5
    result = f"is off by {output:.1g} (gradient {gradient:.1g}), without them by {leak:.1g}; allowed {limit:.1g}"
    return output <= limit and gradient <= limit < leak, result


def _largest_error(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The largest error of a token's vector, relative to its norm plus the median norm. found, expected: (1, T, H)."""
    found, expected = (value.to(torch.promote_types(value.dtype, torch.float32)) for value in (found, expected))
    length = expected.norm(dim=-1)
    return ((found - expected).norm(dim=-1) / (length + length.median())).max()

"""Decides the form of a network's micro-batches: packed rows, or one row for each sequence.

A network is packed if its family is in the table of `workers.policy.families` and its config asks for nothing that the
family cannot do in a packed row. A stateful layer is called per sequence, or with the boundaries of the sequences if a
test shows that it respects them. Every other network gets the aligned form, which is exact for every causal network.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from verl_lite.config import NetworkConfig
from verl_lite.errors import UserError
from workers.engine.packed_attention import PACKED_ATTENTION, LayerOutput, by_sequences
from workers.engine.packed_sequences import PackedSequences
from workers.engine.packing import ModelInputs, align, pack, pad
from workers.engine.sequence_parallel import valid_sizes
from workers.policy.families import FAMILIES, family_of
from workers.policy.vision import attention_of_text, has_vision

Arrangement = Callable[[Mapping[str, torch.Tensor]], ModelInputs]

KNOWN_LAYER_TYPES = ("full_attention", "sliding_attention", "linear_attention", "attention")


def mixing_layers(model: PreTrainedModel) -> list[str]:
    """Returns the kinds of layers that prevent packing of a network; empty if the network can be packed.

    The decoder of a family that is not in the table counts as such a layer.

    Raises:
        UserError: the attention is not causal, so that the log-prob of a token would depend on later tokens.
    """
    _require_causal_attention(model)
    family = family_of(model)
    if family is None:
        return [type(model.get_decoder()).__name__]

    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None) or ()
    # transformers implements other kinds of attention, such as chunked attention, only in the mask, which a packed row
    # lacks
    mixing: list[str] = []
    for name in layer_types:
        if "attention" in name and name not in KNOWN_LAYER_TYPES:
            mixing.append(name)
    mixing += family.mixing_layers
    has_window = "sliding_attention" in layer_types
    if not layer_types:
        has_window = getattr(config, "sliding_window", None) is not None
    if has_window and not family.passes_window and not mixing:
        mixing.append("sliding_attention")
    return list(dict.fromkeys(mixing))


def unpacked_note(model: PreTrainedModel) -> str:
    """Returns a line for the user if a network cannot be packed; otherwise an empty string."""
    mixing = mixing_layers(model)
    if not mixing:
        return ""
    reason = f"layers of kind {', '.join(mixing[:3])} cannot separate packed sequences"
    remedy = ""
    if family_of(model) is None:
        reason = f"its family {model.config.get_text_config().model_type} is not among the tested ones"
        remedy = ". To pack it, add it to the table in workers/policy/families.py and to the tests that it names"
    return (
        f"model.use_remove_padding=true: a {type(model).__name__} is not packed, because {reason}; each sequence of a "
        f"micro-batch has its own row, padded to the longest{remedy}"
    )


def state_layers(model: PreTrainedModel) -> set[str]:
    """Returns the class names of the stateful layers of a network that can be packed."""
    return {type(layer).__name__ for _, layer in _state_layers(model)}


def _state_layers(model: PreTrainedModel) -> list[tuple[nn.Module, nn.Module]]:
    """Returns the stateful layers that the table lists, each after the module that contains it."""
    family = family_of(model)
    if family is None:
        return []
    layers = []
    for owner in model.get_decoder().modules():
        for layer in owner.children():
            if type(layer).__name__ in family.state_layers:
                layers.append((owner, layer))
    return layers


def _require_causal_attention(model: PreTrainedModel) -> None:
    """Raises UserError if the model has attention, and none of it is causal."""
    is_causal = {}
    for module in model.get_decoder().modules():
        if hasattr(module, "is_causal"):
            is_causal[type(module).__name__] = module.is_causal is True
    if is_causal and not any(is_causal.values()):
        raise UserError(
            f"model.path: a {type(model).__name__} has attention ({', '.join(is_causal)}) that is not causal, so that "
            "the log-prob of a token depends on the tokens after it: choose a causal language model"
        )


def sharding_problem(model: PreTrainedModel, network: NetworkConfig, size: int) -> str | None:
    """Returns why `size` ranks cannot share the tokens of a row, with the remedy; None if they can. They exchange
    tokens only in attention."""
    name = type(model).__name__
    config = model.config.get_text_config()
    if not network.use_remove_padding:
        return "only packed rows can be shared; set model.use_remove_padding=true"
    if has_vision(model.config):
        return f"a {name} has a vision tower, whose features are not shared; set 1"
    # a state passes from token to token, and would have to be passed from rank to rank
    unfit = mixing_layers(model) or sorted(state_layers(model))
    if unfit:
        return f"a {name} has layers of kind {', '.join(unfit[:3])}, which need all tokens on one rank; set 1"
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    # layers with different numbers of heads are checked in the forward
    if not isinstance(heads, int) or not isinstance(key_value_heads, int):
        return None
    sizes = valid_sizes(heads, key_value_heads)
    if size not in sizes:
        return (
            f"a {name} has {heads} query heads, which the size must divide, and {key_value_heads} key/value heads, "
            f"which it must divide or be a multiple of; set one of {sizes}"
        )
    return None


def arrangement_of(model: PreTrainedModel, network: NetworkConfig) -> Arrangement:
    """Returns the function that prepares micro-batches for `model`, and sets the attention function that it needs."""
    mixing = mixing_layers(model)
    text_config = model.config.get_text_config()
    if network.use_remove_padding and not mixing:
        model.set_attn_implementation(attention_of_text(model.config, PACKED_ATTENTION))
        family = FAMILIES[text_config.model_type]
        printed: set[str] = set()
        for owner, layer in _state_layers(model):
            border_names = family.state_layers[type(layer).__name__]
            packed_layer = _PackedLayer(layer, border_names, printed)
            owner.register_forward_pre_hook(packed_layer.receive_sequences, with_kwargs=True)
            vars(layer)["forward"] = packed_layer.forward
        return pack

    # transformers' own call of SDPA silently ignores soft-capping
    is_capped = getattr(text_config, "attn_logit_softcapping", None) is not None
    if model._supports_sdpa and not is_capped:
        model.set_attn_implementation("sdpa")
    else:
        model.set_attn_implementation("eager")
    return align if mixing else pad


class _PackedLayer:
    """The forward of a stateful layer on packed rows, which respects the boundaries of the sequences.

    Args:
        layer: the layer.
        border_names: names of the boundaries that its kernels take.
        printed: the notes that were already printed for this network.
    """

    def __init__(self, layer: nn.Module, border_names: Sequence[str], printed: set[str]) -> None:
        self._layer = layer
        self._name = type(layer).__name__
        self._original_forward = layer.forward
        self._border_names = border_names
        self._printed = printed
        self._sequences: PackedSequences | None = None
        # by layer.training, on which the choice of a kernel depends
        self._respects_borders: dict[bool, bool] = {}

    def receive_sequences(self, owner: nn.Module, args: tuple[object, ...], kwargs: dict[str, PackedSequences]) -> None:
        """Takes the sequences from the arguments of the module that calls the layer.

        A hook of that module: transformers passes the sequences to it, but it does not pass them on to this layer.
        """
        self._sequences = kwargs.get("packed_sequences")

    def forward(self, *args: object, **kwargs: object) -> LayerOutput:
        """Computes the layer's output for a packed row."""
        sequences = self._sequences
        if sequences is None:
            raise ValueError(f"{self._name} received no `packed_sequences`; set model.use_remove_padding=false")
        # some families pass the hidden states by keyword
        hidden, *rest = args or (kwargs.pop("hidden_states"),)
        assert isinstance(hidden, torch.Tensor)

        def call(hidden: torch.Tensor, borders: dict[str, torch.Tensor] | None) -> LayerOutput:
            return by_sequences(self._original_forward, sequences, (hidden, *rest), kwargs, borders)

        # a single sequence has no boundaries to respect
        if len(sequences.cu_seqlens) == 2:
            return call(hidden, None)

        borders = {border: sequences.borders[border] for border in self._border_names}
        is_training = self._layer.training
        # decided once, so that activation checkpointing repeats the same call
        if is_training not in self._respects_borders:
            respects_borders, result = _test_borders(call, hidden, borders)
            self._respects_borders[is_training] = respects_borders
            self._print_note(respects_borders, result)
        if self._respects_borders[is_training]:
            return call(hidden, borders)
        return call(hidden, None)

    def _print_note(self, respects_borders: bool, result: str) -> None:
        """Prints how the layer is called: one line for all layers of a class, from one rank."""
        way = "once for a packed row" if respects_borders else "by sequence"
        note = f"{self._name} is called {way}"
        prints = not dist.is_initialized() or dist.get_rank() == 0
        if prints and note not in self._printed:
            print(f"{note}: with the sequence boundaries, it {result}", flush=True)
        self._printed.add(note)


def _test_borders(
    call: Callable[[torch.Tensor, dict[str, torch.Tensor] | None], LayerOutput],
    hidden: torch.Tensor,
    borders: dict[str, torch.Tensor],
) -> tuple[bool, str]:
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
        assert output is not None
        # of a weighted sum of the outputs, with the hidden states as weights
        weights = hidden.detach().to(output.dtype)
        [gradient] = torch.autograd.grad(output, hidden, weights)
        return output.detach(), gradient

    # with these hooks activation checkpointing does not count the tensors that are saved here
    with torch.enable_grad(), saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        expected_output, expected_gradient = output_and_gradient(None)
        try:
            output, gradient = output_and_gradient(borders)
            # without boundaries, but in one row: a state must pass from one sequence to the next
            output_without_borders, _ = output_and_gradient({})
            errors = [
                _largest_error(output, expected_output),
                _largest_error(gradient, expected_gradient),
                _largest_error(output_without_borders, expected_output),
            ]
            output_error, gradient_error, leak = torch.stack(errors).tolist()
        except Exception as error:  # kernels raise exceptions of all kinds; the layer is then called by sequence
            return False, f"raises {type(error).__name__}: {error}"

    limit = torch.finfo(hidden.dtype).eps ** 0.5
    result = (
        f"is off by {output_error:.1g} (gradient {gradient_error:.1g}), without them by {leak:.1g}; allowed {limit:.1g}"
    )
    respects_borders = output_error <= limit and gradient_error <= limit < leak
    return respects_borders, result


def _largest_error(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Returns the largest error of a token's vector, relative to its norm plus the median norm.

    Args:
        actual: (1, T, H).
        expected: (1, T, H).
    """
    precise = torch.promote_types(expected.dtype, torch.float32)
    actual = actual.to(precise)
    expected = expected.to(precise)
    difference = (actual - expected).norm(dim=-1)
    length = expected.norm(dim=-1)
    # with the median, the rounding error of a vector near zero is no large relative error
    relative_difference = difference / (length + length.median())
    return relative_difference.max()

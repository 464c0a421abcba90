"""Decode steps of common model families in fp32 on a CPU, for the hf engine.

A decode step of a small model through the modules of transformers takes longer in Python and in small operations than
in matrix products. `LeanDecoder` therefore computes the same function from the same parameters: it multiplies once by
all projections that read the same input, rotates queries and keys together, and calls torch without modules between. It
keeps large matrices a second time in oneDNN's layout, which is faster for few rows, until the weights change or the
engine sleeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from verl_lite.json_types import JsonMapping
from workers.engines.slot_cache import SlotCache, slot_attention

if TYPE_CHECKING:
    from transformers.modeling_layers import GradientCheckpointingLayer

LEAN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen2_5_vl", "qwen3_vl")
"""Model families (model_type) that have exactly these layers; the tests compare each with transformers."""
PACKED_ELEMENTS = 1 << 18
"""Smallest matrix that is kept in oneDNN's layout; products with smaller ones are faster without it."""
_ROTARY_OF_LENGTH = ("dynamic", "longrope")  # rotary embeddings that depend on the longest sequence of the batch


def lean_decoder(model: PreTrainedModel, max_length: int) -> LeanDecoder | None:
    """Returns a decoder of the model, or None if its layers, dtype or device are others than those above.

    Args:
        model: The model.
        max_length: Number of positions.
    """
    text_config = model.config.get_text_config()
    rope_parameters = getattr(text_config, "rope_parameters", None)
    if not has_lean_layers(model.config.model_type, rope_parameters):
        return None
    weight = model.get_output_embeddings().weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    return LeanDecoder(model, max_length)


def has_lean_layers(model_type: str, rope_parameters: JsonMapping | None) -> bool:
    """Returns True if `LeanDecoder` has the layers of this model, given by two entries of its config.json."""
    if model_type not in LEAN_FAMILIES:
        return False
    if not rope_parameters:
        return True
    return rope_parameters.get("rope_type", "default") not in _ROTARY_OF_LENGTH


@dataclass(frozen=True)
class _Layer:
    """A layer of transformers with its joined projections."""

    module: GradientCheckpointingLayer
    queries_keys_values: _Projection
    attention_output: _Projection
    gate_up: _Projection
    down: _Projection

    def projections(self) -> Sequence[_Projection]:
        return self.queries_keys_values, self.attention_output, self.gate_up, self.down


class LeanDecoder:
    """Computes the logits (n, V) of one more token of each sequence. Moves the weights of joined projections into
    common tensors, of which the model's parameters become views, so that weight updates of the model apply here too."""

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        self._base: PreTrainedModel = model.get_decoder()
        self._layers: list[_Layer] = []
        for module in self._base.layers:
            attention = module.self_attn
            mlp = module.mlp
            layer = _Layer(
                module,
                queries_keys_values=_Projection(attention.q_proj, attention.k_proj, attention.v_proj),
                attention_output=_Projection(attention.o_proj),
                gate_up=_Projection(mlp.gate_proj, mlp.up_proj),
                down=_Projection(mlp.down_proj),
            )
            self._layers.append(layer)
        self._head = _Projection(model.lm_head)

        # all layers of these families have the same sizes
        attention = self._base.layers[0].self_attn
        self._head_dim = attention.head_dim
        self._scale = attention.scaling
        self._num_queries = attention.q_proj.out_features // self._head_dim
        num_keys = attention.k_proj.out_features // self._head_dim
        self._num_rotated = self._num_queries + num_keys

        # the rotary embedding of every position, once: (max_length, 1, head_dim)
        positions = torch.arange(max_length).unsqueeze(0)
        cos, sin = self._base.rotary_emb(torch.zeros(1), positions)
        self._cos = cos[0].unsqueeze(1)
        # rotate_half(x) * sin is x rolled by half a head, times sin with this sign
        first_half, second_half = sin[0].chunk(2, dim=1)
        signed_sin = torch.cat([-first_half, second_half], dim=1)
        self._sin = signed_sin.unsqueeze(1)

    def discard_copies(self) -> None:
        """Discards the copies in oneDNN's layout. Call it after each change of the model's parameters."""
        self._head.packed = None
        for layer in self._layers:
            for projection in layer.projections():
                projection.packed = None

    def __call__(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: SlotCache,
    ) -> torch.Tensor:
        """Returns the logits (n, V) of the next tokens.

        Args:
            tokens: (n,), the last token of each sequence.
            positions: (n,), their positions.
            mask: the result of `cache.begin_decode`.
            cache: gets the keys and values of these tokens.
        """
        hidden = F.embedding(tokens, self._base.embed_tokens.weight)
        cos = self._cos[positions]
        sin = self._sin[positions]
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attention(layer, index, hidden, cos, sin, mask, cache)

            states = _norm(layer.module.post_attention_layernorm, hidden)
            gate, up = layer.gate_up(states).chunk(2, dim=-1)
            activations = layer.module.mlp.act_fn(gate)
            hidden = hidden + layer.down(activations.mul_(up))
        return self._head(_norm(self._base.norm, hidden))

    def _attention(
        self,
        layer: _Layer,
        index: int,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask: torch.Tensor,
        cache: SlotCache,
    ) -> torch.Tensor:
        """Returns the output (n, H) of a layer's attention.

        Args:
            layer: the layer.
            index: its number.
            hidden: (n, H), the input of the layer.
            cos: (n, 1, head_dim), of the rotary embedding.
            sin: (n, 1, head_dim), with the signs of `_sin`.
            mask: the result of `cache.begin_decode`.
            cache: gets the keys and values of the layer.
        """
        n = len(hidden)
        half = self._head_dim // 2
        attention = layer.module.self_attn
        states = _norm(layer.module.input_layernorm, hidden)
        # (n, heads, head_dim): queries, then keys, then values
        heads = layer.queries_keys_values(states).view(n, -1, self._head_dim)
        queries_and_keys = heads[:, : self._num_rotated]
        # qwen3 normalizes queries and keys before the rotation
        if hasattr(attention, "q_norm"):
            queries = _norm(attention.q_norm, queries_and_keys[:, : self._num_queries])
            keys = _norm(attention.k_norm, queries_and_keys[:, self._num_queries :])
            queries_and_keys = torch.cat([queries, keys], dim=1)
        rotated = torch.addcmul(queries_and_keys * cos, queries_and_keys.roll(half, -1), sin)

        # the cache has a dimension of tokens: one new token per sequence
        new_keys = rotated[:, self._num_queries :].unsqueeze(2)
        new_values = heads[:, self._num_rotated :].unsqueeze(2)
        all_keys, all_values = cache.update(new_keys, new_values, index)
        queries = rotated[:, : self._num_queries].unsqueeze(2)
        output, _ = slot_attention(attention, queries, all_keys, all_values, mask, self._scale)
        return layer.attention_output(output.reshape(n, -1))


class _Projection:
    """Linear layers with the same input as one product. `packed` is the weight in oneDNN's layout, if any."""

    def __init__(self, *layers: nn.Linear) -> None:
        self.packed: torch.Tensor | None = None
        self._weight = _joined([layer.weight.detach() for layer in layers])
        self._bias: torch.Tensor | None = None
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        if biases:
            self._bias = _joined(biases)
        if len(layers) > 1:
            self._share(layers)
        is_large = self._weight.numel() >= PACKED_ELEMENTS
        self._packs = is_large and torch.backends.mkldnn.is_available()

    def _share(self, layers: Sequence[nn.Linear]) -> None:
        """Makes the parameters of the layers views of the joined tensors."""
        sizes = [layer.out_features for layer in layers]
        weights = self._weight.split(sizes)
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight = nn.Parameter(weight, requires_grad=False)
        if self._bias is None:
            return
        biases = self._bias.split(sizes)
        for layer, bias in zip(layers, biases, strict=True):
            layer.bias = nn.Parameter(bias, requires_grad=False)

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if not self._packs:
            return F.linear(states, self._weight, self._bias)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self._weight, None)
        return torch.ops.mkldnn._linear_pointwise(states, self.packed, self._bias, "none", [], "")


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the parts as one tensor; a single part without a copy."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts))


class _RMSNorm(Protocol):
    """A norm of transformers."""

    weight: torch.Tensor
    variance_epsilon: float


def _norm(norm: _RMSNorm, states: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(states, norm.weight.shape, norm.weight, norm.variance_epsilon)

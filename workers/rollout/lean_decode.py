"""Decode steps of dense models with Llama's layers in few operations, for the hf engine in fp32 on a CPU.

A decode step of a small model through the modules of transformers takes longer in Python and in small operations than
in matrix products. `LeanDecoder` computes the same function from the same parameters: it multiplies once by all
projections that read the same input, rotates queries and keys together, and calls torch without modules between. Large
matrices are kept a second time in oneDNN's layout, whose products are faster for the few rows of a decode step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from workers.rollout.slot_cache import SlotCache, slot_attention

LEAN_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model families (model_type) that have exactly these layers; the tests compare each with transformers."""
PACKED_ELEMENTS = 1 << 18
"""Smallest matrix that is kept in oneDNN's layout; products with smaller ones are faster without it."""
_ROTARY_OF_LENGTH = ("dynamic", "longrope")  # rotary embeddings that depend on the longest sequence of the batch


def lean_decoder(model: PreTrainedModel, max_length: int) -> LeanDecoder | None:
    """Returns a decoder of the model, or None if its layers, dtype or device are others than those above.

    max_length: number of positions.
    """
    config, weight = model.config, model.get_output_embeddings().weight
    rotary = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    is_lean = config.model_type in LEAN_FAMILIES and rotary not in _ROTARY_OF_LENGTH
    is_fp32 = weight.device.type == "cpu" and weight.dtype == torch.float32
    return LeanDecoder(model, max_length) if is_lean and is_fp32 else None


class LeanDecoder:
    """Computes the logits (n, V) of one more token of each sequence. Moves the weights of joined projections into
    common tensors, of which the model's parameters become views, so that weight updates of the model apply here too."""

    def __init__(self, model: PreTrainedModel, max_length: int) -> None:
        self._base = model.model
        self._layers: list[tuple[Any, _Projection, _Projection, _Projection, _Projection]] = []
        for layer in self._base.layers:
            attention, mlp = layer.self_attn, layer.mlp
            joined = _Projection(attention.q_proj, attention.k_proj, attention.v_proj), _Projection(attention.o_proj)
            self._layers.append((layer, *joined, _Projection(mlp.gate_proj, mlp.up_proj), _Projection(mlp.down_proj)))
        self._head, first = _Projection(model.lm_head), self._base.layers[0].self_attn
        self._head_dim, self._scale = first.head_dim, first.scaling
        self._queries = first.q_proj.out_features // self._head_dim
        self._rotated = self._queries + first.k_proj.out_features // self._head_dim
        cos, sin = self._base.rotary_emb(torch.zeros(1), torch.arange(max_length).unsqueeze(0))
        half = self._head_dim // 2  # rotate_half(x) * sin is x rolled by half a head, times sin with this sign
        self._cos, self._sin = cos[0].unsqueeze(1), torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=1).unsqueeze(1)

    def use_new_weights(self) -> None:
        """Discards copies of the weights. Call it after each change of the model's parameters."""
        for projection in (self._head, *(each for _, *projections in self._layers for each in projections)):
            projection.packed = None

    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: SlotCache
    ) -> torch.Tensor:
        """tokens, positions: (n,). mask: of `cache.begin_decode`."""
        n, queries, split, size = len(tokens), self._queries, self._rotated, self._head_dim
        hidden = F.embedding(tokens, self._base.embed_tokens.weight)
        cos, sin = self._cos[positions], self._sin[positions]
        for index, (layer, qkv, out, gate_up, down) in enumerate(self._layers):
            heads, attention = qkv(_norm(layer.input_layernorm, hidden)).view(n, -1, size), layer.self_attn
            rotated = heads[:, :split]
            if hasattr(attention, "q_norm"):
                parts = _norm(attention.q_norm, heads[:, :queries]), _norm(attention.k_norm, heads[:, queries:split])
                rotated = torch.cat(parts, dim=1)
            rotated = torch.addcmul(rotated * cos, rotated.roll(size // 2, -1), sin)
            keys, values = cache.update(rotated[:, queries:].unsqueeze(2), heads[:, split:].unsqueeze(2), index)
            output, _ = slot_attention(attention, rotated[:, :queries].unsqueeze(2), keys, values, mask, self._scale)
            hidden = hidden + out(output.reshape(n, -1))
            gate, up = gate_up(_norm(layer.post_attention_layernorm, hidden)).chunk(2, dim=-1)
            hidden = hidden + down(layer.mlp.act_fn(gate).mul_(up))
        return self._head(_norm(self._base.norm, hidden))


class _Projection:
    """Linear layers with the same input as one product. `packed` is the weight in oneDNN's layout, if any."""

    weight: Any
    bias: Any

    def __init__(self, *layers: nn.Linear) -> None:
        self.packed: torch.Tensor | None = None
        for name in ("weight", "bias"):
            parts = [part.detach() for layer in layers if (part := getattr(layer, name)) is not None]
            setattr(self, name, parts[0] if len(parts) == 1 else torch.cat(parts) if parts else None)
            sizes = [len(part) for part in parts]
            for layer, view in zip(layers, getattr(self, name).split(sizes), strict=True) if len(parts) > 1 else ():
                setattr(layer, name, nn.Parameter(view, requires_grad=False))
        self._packs = self.weight.numel() >= PACKED_ELEMENTS and torch.backends.mkldnn.is_available()

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        if not self._packs:
            return F.linear(states, self.weight, self.bias)
        if self.packed is None:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, None)
        return torch.ops.mkldnn._linear_pointwise(states, self.packed, self.bias, "none", [], "")


def _norm(norm: Any, states: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(states, norm.weight.shape, norm.weight, norm.variance_epsilon)

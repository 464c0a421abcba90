"""Batches without padding: a padded micro-batch becomes one long row of real tokens, and results come back to their
rows.

`pack` gives the packed tokens and the index of every position that predicts a response token; `pad` gives the same
index for the plain padded forward (`model.use_remove_padding=false`). The attention function registered here with
transformers keeps
the packed sequences apart: runs of SDPA on a CPU (sequences of equal length together), variable-length flash
attention on CUDA. Packed rows are sorted by length, so that runs are long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

PACKED_ATTENTION = "verl_lite_packed"


@dataclass(frozen=True)
class PackedSequences:
    """Where the sequences lie in a packed row: what attention has to know, computed once per micro-batch.

    runs: (number of sequences, their common length) in packing order. cu_seqlens: (sequences + 1,) int32, on the
    device.
    """

    runs: tuple[tuple[int, int], ...]
    cu_seqlens: torch.Tensor
    max_length: int


@dataclass(frozen=True)
class ModelInputs:
    """What the policy's forward takes, and the way back to the (b, R) matrix of responses.

    input_ids, position_ids: (1, T) packed or (b, S) padded. sequences: set if packed; attention_mask (b, S): set if
    padded.
    predict_index: (N,) positions in the flattened input that predict a response token; targets: (N,) those tokens.
    rows, columns: (N,) their places in the (b, R) response matrix of shape `response_shape`.
    num_active: how many of the N entries count. It is N, or 0 for a stand-in: a micro-batch with nothing to train still
    runs forward and backward on one predicted token, with weight zero, because ranks must take part in collectives
    alike.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    sequences: PackedSequences | None
    attention_mask: torch.Tensor | None
    predict_index: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    response_shape: tuple[int, int]
    num_active: int

    def to(self, device: torch.device) -> ModelInputs:
        """The same on `device`."""
        moved: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                moved[name] = value.to(device)
        if self.sequences is not None:
            moved["sequences"] = replace(self.sequences, cu_seqlens=self.sequences.cu_seqlens.to(device))
        return replace(self, **moved)

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """(N,) values at predicted tokens -> (b, R), zero elsewhere; gradients flow back, as zeros from a stand-in."""
        matrix = values.new_zeros(self.response_shape)
        if self.num_active == 0:
            return matrix + 0.0 * values.sum()
        return matrix.index_put((self.rows, self.columns), values)


def pack(columns: Mapping[str, torch.Tensor]) -> ModelInputs:
    """The packed form of a micro-batch.

    columns: input_ids, attention_mask, position_ids (b, P+R), responses and response_mask (b, R), optionally is_padding
    (b,). Rows whose response_mask is all 0, and padding rows, contribute no tokens.
    """
    mask = _response_mask(columns)
    active = mask.any(dim=1).nonzero().squeeze(1)
    if len(active) == 0:
        return _stand_in(columns["input_ids"].device, tuple(mask.shape))
    lengths = columns["attention_mask"].sum(dim=1)
    order = active[torch.argsort(lengths[active], stable=True)]
    real = columns["attention_mask"][order].bool()
    flat_position = (real.flatten().cumsum(0) - 1).view(real.shape)
    rows, response_columns = mask[order].nonzero(as_tuple=True)
    prompt_width = real.shape[1] - mask.shape[1]
    return ModelInputs(
        input_ids=columns["input_ids"][order][real].unsqueeze(0),
        position_ids=columns["position_ids"][order][real].unsqueeze(0),
        sequences=_packed_sequences(lengths[order]),
        attention_mask=None,
        predict_index=flat_position[rows, prompt_width + response_columns] - 1,
        targets=columns["responses"][order[rows], response_columns],
        rows=order[rows],
        columns=response_columns,
        response_shape=(mask.shape[0], mask.shape[1]),
        num_active=len(rows),
    )


def pad(columns: Mapping[str, torch.Tensor]) -> ModelInputs:
    """The padded form of a micro-batch: the plain reference that `pack` is tested against. Arguments as there."""
    mask = _response_mask(columns)
    rows, response_columns = mask.nonzero(as_tuple=True)
    if len(rows) == 0:
        return replace(
            _stand_in(columns["input_ids"].device, tuple(mask.shape)),
            sequences=None,
            attention_mask=torch.ones(1, 2, dtype=torch.long, device=mask.device),
        )
    width = columns["input_ids"].shape[1]
    return ModelInputs(
        input_ids=columns["input_ids"],
        position_ids=columns["position_ids"],
        sequences=None,
        attention_mask=columns["attention_mask"],
        predict_index=rows * width + (width - mask.shape[1]) + response_columns - 1,
        targets=columns["responses"][rows, response_columns],
        rows=rows,
        columns=response_columns,
        response_shape=(mask.shape[0], mask.shape[1]),
        num_active=len(rows),
    )


def _response_mask(columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """(b, R) bool; False in padding rows."""
    mask = columns["response_mask"].bool()
    return mask & ~columns["is_padding"].unsqueeze(1) if "is_padding" in columns.keys() else mask


def _packed_sequences(lengths: torch.Tensor) -> PackedSequences:
    """From the lengths (n,) in packing order."""
    values, counts = torch.unique_consecutive(lengths, return_counts=True)
    return PackedSequences(
        runs=tuple(zip(counts.tolist(), values.tolist(), strict=True)),
        cu_seqlens=F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        max_length=int(lengths.max()),
    )


def _stand_in(device: torch.device, response_shape: tuple[int, ...]) -> ModelInputs:
    """Two tokens, one prediction, weight zero."""
    return ModelInputs(
        input_ids=torch.zeros(1, 2, dtype=torch.long, device=device),
        position_ids=torch.arange(2, device=device).unsqueeze(0),
        sequences=_packed_sequences(torch.tensor([2], device=device)),
        attention_mask=None,
        predict_index=torch.zeros(1, dtype=torch.long, device=device),
        targets=torch.zeros(1, dtype=torch.long, device=device),
        rows=torch.zeros(0, dtype=torch.long, device=device),
        columns=torch.zeros(0, dtype=torch.long, device=device),
        response_shape=(response_shape[0], response_shape[1]),
        num_active=0,
    )


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    packed_sequences: PackedSequences | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each packed sequence, as an attention function of transformers.

    query: (1, H, T, D); key, value: (1, K, T, D), K dividing H. Returns (1, T, H, D). Raises ValueError for variants of
    attention that it does not compute. Dropout is not applied: a policy gradient needs the policy that sampled.
    """
    remedy = f"set model.use_remove_padding=false for {type(module).__name__}"
    if packed_sequences is None:
        raise ValueError(f"this model does not hand keyword arguments down to its attention layers; {remedy}")
    if softcap is not None or s_aux is not None:
        raise ValueError(f"the packed forward has no attention with soft-capping or sinks; {remedy}")
    window = sliding_window if sliding_window is not None and sliding_window < packed_sequences.max_length else None
    if query.device.type == "cuda" and query.dtype in (torch.float16, torch.bfloat16):
        return _varlen_attention(query, key, value, scaling, packed_sequences, window), None
    return _sdpa_runs(query, key, value, scaling, packed_sequences, window), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _sdpa_runs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    sequences: PackedSequences,
    window: int | None,
) -> torch.Tensor:
    """One SDPA call for each run of equally long sequences. Views only: nothing is copied before the last
    concatenation."""
    outputs = []
    gqa = query.shape[1] != key.shape[1]
    sizes = [count * length for count, length in sequences.runs]
    pieces = (tensor[0].transpose(0, 1).split(sizes) for tensor in (query, key, value))
    for (count, length), *heads in zip(sequences.runs, *pieces, strict=True):
        queries, keys, values = (part.unflatten(0, (count, length)).transpose(1, 2) for part in heads)
        band = _band(length, window, query.device) if window is not None and window < length else None
        output = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=gqa
        )  # (count, heads, length, D)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """(length, length) bool: each token sees itself and the window-1 tokens before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    sequences: PackedSequences,
    window: int | None,
) -> torch.Tensor:
    """Flash attention over cu_seqlens: the flash-attn package where installed, else PyTorch's own, else runs of
    SDPA."""
    arguments = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # (T, heads, D)
    bounds, longest = sequences.cu_seqlens, sequences.max_length
    left = -1 if window is None else window - 1
    if (flash := _flash_attn_varlen()) is not None:
        result = flash(
            *arguments, bounds, bounds, longest, longest, softmax_scale=scaling, causal=True, window_size=(left, 0)
        )
        return result.unsqueeze(0)
    if (varlen := _torch_varlen()) is not None:
        gqa = query.shape[1] != key.shape[1]
        result = varlen(
            *arguments, bounds, bounds, longest, longest, scale=scaling, window_size=(left, 0), enable_gqa=gqa
        )
        return result.unsqueeze(0)
    return _sdpa_runs(query, key, value, scaling, sequences, window)


@cache
def _flash_attn_varlen() -> Any:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:  # an optional accelerator
        return None
    return flash_attn_varlen_func


@cache
def _torch_varlen() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before PyTorch 2.11
        return None
    return varlen_attn

"""Batches without padding: a padded micro-batch becomes one row of the tokens that matter, and results find their way
back.

`pack` leaves out padding, repeated prompts (samples of one prompt in the same micro-batch share its tokens) and
whatever follows the last predicting position. `pad` is the plain padded form (`model.use_remove_padding=false`) that
it is tested against. `align` is the form for networks with other layers than attention that look at several tokens
(`workers.policy.token_mixing`): each sequence in a row of its own, from the first column on, so that padding comes
after everything that counts and no causal layer, of whatever kind, can see it.

The attention function registered here with transformers keeps the sequences of a packed row apart: SDPA by runs of
equal length, on CUDA variable-length flash attention. `by_sequences` does so for a layer with a state, or hands it the
borders. Only these see a shared prompt once per sample; all other layers see it once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

PACKED_ATTENTION = "verl_lite_packed"
HALF = (torch.float16, torch.bfloat16)
MOST_PADDING = 1.25  # tokens of a group of sequences of one layer, padding included, for each real one
LEAST_SHARED = 0.05  # share of tokens saved from which on shared prompts pay for the extra gathering in attention


@dataclass(frozen=True)
class PackedSequences:
    """Where the sequences lie in a packed row: what attention has to know, computed once per micro-batch.

    runs: (number of sequences, their common length) in packing order. cu_seqlens: (sequences + 1,) int32, on the
    device. Where prompts are shared, sequences overlap: `expand` (U,) then gives the token at each place of the row
    with prompts repeated, which runs and cu_seqlens describe, and `collapse` (T,) a place of each token there.
    """

    runs: tuple[tuple[int, int], ...]
    cu_seqlens: torch.Tensor
    max_length: int
    expand: torch.Tensor | None = None
    collapse: torch.Tensor | None = None

    def to(self, device: torch.device) -> PackedSequences:
        """The same on `device`."""
        return _moved(self, device)

    @cached_property
    def groups(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Neighbouring sequences, which are sorted by length: (n, longest) the place of each token in the packed row,
        the last one's again where a sequence is shorter, and (sum of lengths,) which of these n * longest are no
        padding. Made once for all layers, without a wait for the device."""
        lengths = torch.tensor([length for count, length in self.runs for _ in range(count)])
        groups, start, device = [], 0, self.cu_seqlens.device
        while start < len(lengths):
            end = start + 1
            while (
                end < len(lengths) and (end + 1 - start) * lengths[end] <= MOST_PADDING * lengths[start : end + 1].sum()
            ):
                end += 1
            length, column = lengths[start:end].unsqueeze(1), torch.arange(int(lengths[end - 1]))
            first = lengths[:start].sum() + length.cumsum(0) - length
            index = (first + torch.minimum(column, length - 1)).to(device)
            real = (column < length).flatten().nonzero().squeeze(1).to(device)
            groups.append((index if self.expand is None else self.expand[index], real))
            start = end
        return groups

    @cached_property
    def row(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """All sequences, one after the other, as the only one of `groups`: (1, U) and (U,)."""
        places = torch.arange(sum(count * length for count, length in self.runs), device=self.cu_seqlens.device)
        return [((places if self.expand is None else self.expand).unsqueeze(0), places)]

    @cached_property
    def borders(self) -> dict[str, torch.Tensor]:
        """Those in `row`, as transformers' `DataCollatorWithFlattening` tells kernels: seq_idx (1, U) int32, the
        sequence of each token, and cu_seq_lens_q, which flash-linear-attention calls cu_seqlens."""
        places, bounds = self.row[0][1].int(), self.cu_seqlens
        seq_idx = torch.bucketize(places, bounds[1:], right=True, out_int32=True).unsqueeze(0)
        return {"seq_idx": seq_idx, "cu_seq_lens_q": bounds, "cu_seqlens": bounds}


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """What the policy's forward takes, and the way back to the (b, R) matrix of responses.

    input_ids, position_ids: (1, T) packed, (b, S) padded, (n, L) aligned. sequences: set if packed; attention_mask
    (b, S): set if padded.
    predict_index: (N,) positions in the flattened input that predict a response token; targets: (N,) those tokens.
    rows, columns: (N,) their places in the (b, R) response matrix of shape `response_shape`.
    token_index: (b, P+R) where each token of the columns lies in the flattened input; -1 for those that influence no
    prediction. Rows with a shared prompt have the same places there.
    routed_experts: (T, layers, k) of each token of the flattened input, -1 = not recorded; set by
        `workers.policy.router.with_recorded_routes`.
    num_active: how many of the N entries count. It is N, or 0 for a stand-in: a micro-batch with nothing to train still
    runs forward and backward on one predicted token, with weight zero, because ranks must take part in collectives
    alike.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    sequences: PackedSequences | None = None
    attention_mask: torch.Tensor | None = None
    predict_index: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    token_index: torch.Tensor
    response_shape: tuple[int, int]
    num_active: int
    routed_experts: torch.Tensor | None = None

    def to(self, device: torch.device) -> ModelInputs:
        """The same on `device`."""
        return _moved(self, device)

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """(N,) values at predicted tokens -> (b, R), zero elsewhere; gradients flow back, as zeros from a stand-in."""
        matrix = values.new_zeros(self.response_shape)
        if self.num_active == 0:
            return matrix + 0.0 * values.sum()
        return matrix.index_put((self.rows, self.columns), values)


def _moved(inputs: Any, device: torch.device) -> Any:
    """A copy of a dataclass of tensors (and of such dataclasses) on `device`."""
    tensors = {name: value for name, value in vars(inputs).items() if isinstance(value, torch.Tensor | PackedSequences)}
    return replace(inputs, **{name: value.to(device) for name, value in tensors.items()})


def pack(columns: Mapping[str, torch.Tensor]) -> ModelInputs:
    """The packed form of a micro-batch.

    columns: input_ids, attention_mask, position_ids (b, P+R), responses and response_mask (b, R), optionally is_padding
    (b,). Rows whose response_mask is all 0, and padding rows, contribute no tokens.
    """
    mask = _response_mask(columns)
    active = mask.any(dim=1).nonzero().squeeze(1)
    if len(active) == 0:
        return _stand_in(columns, mask, sequences=_packed_sequences(torch.tensor([2])))
    prompt_width = columns["input_ids"].shape[1] - mask.shape[1]
    used = _used_tokens(columns["attention_mask"], mask)
    order = active[torch.argsort(used[active].sum(dim=1), stable=True)]  # sorted, so that runs are long
    used, input_ids = used[order], columns["input_ids"][order]
    owner = _prompt_owners(input_ids[:, :prompt_width], used[:, :prompt_width])
    own = used.clone()
    own[:, :prompt_width] &= (owner == torch.arange(len(owner))).unsqueeze(1)
    sequences = _packed_sequences(used.sum(dim=1))
    if 1 - own.sum() / used.sum() < LEAST_SHARED:
        own, owner = used, torch.arange(len(owner))
    position = (own.flatten().cumsum(0) - 1).view(own.shape)  # of each token in the packed row
    position[:, :prompt_width] = position[owner, :prompt_width]
    if own is not used:
        sequences = replace(sequences, expand=position[used], collapse=own[used].nonzero().squeeze(1))
    ids, positions = input_ids[own].unsqueeze(0), columns["position_ids"][order][own].unsqueeze(0)
    return _inputs(columns, mask, order, used, position, input_ids=ids, position_ids=positions, sequences=sequences)


def _used_tokens(attention_mask: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(b, P+R) bool: real tokens before the last one that is predicted; what follows influences nothing."""
    width, response_width = attention_mask.shape[1], response_mask.shape[1]
    # of a column that counts
    after_last = torch.arange(1, response_width + 1).mul(response_mask).amax(dim=1, keepdim=True)
    before_last = torch.arange(width) < width - response_width + after_last - 1
    return attention_mask.bool() & before_last


def _prompt_owners(prompt_ids: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """(n,) for each row the first row with the same prompt. prompt_ids, real: (n, P)."""
    first: dict[bytes, int] = {}
    keys = prompt_ids.masked_fill(~real, -1).cpu().numpy()
    return torch.tensor([first.setdefault(key.tobytes(), row) for row, key in enumerate(keys)])


def pad(columns: Mapping[str, torch.Tensor]) -> ModelInputs:
    """The padded form of a micro-batch: the plain reference that `pack` is tested against. Arguments as there."""
    mask = _response_mask(columns)
    if not mask.any():
        return _stand_in(columns, mask, attention_mask=torch.ones(1, 2, dtype=torch.long))
    names = ("input_ids", "position_ids", "attention_mask")
    counts = _used_tokens(columns["attention_mask"], mask) & mask.any(dim=1, keepdim=True)
    index = torch.arange(counts.numel()).view(counts.shape)
    return _inputs(columns, mask, torch.arange(len(mask)), counts, index, **{name: columns[name] for name in names})


def align(columns: Mapping[str, torch.Tensor]) -> ModelInputs:
    """The aligned form of a micro-batch: the tokens that `pack` keeps, each sequence from the first column on.
    Arguments as there."""
    mask = _response_mask(columns)
    active = mask.any(dim=1).nonzero().squeeze(1)
    if len(active) == 0:
        return _stand_in(columns, mask)
    used = _used_tokens(columns["attention_mask"], mask)[active]
    column = used.cumsum(dim=1) - 1  # of each token in its new row
    longest = int(column.max()) + 1
    places = used.nonzero()[:, 0], column[used]
    input_ids = columns["input_ids"].new_zeros(len(active), longest)
    input_ids[places] = columns["input_ids"][active][used]
    position_ids = torch.arange(longest).repeat(len(active), 1)  # padding goes on counting
    position_ids[places] = columns["position_ids"][active][used]
    index = column + torch.arange(len(active)).unsqueeze(1) * longest
    return _inputs(columns, mask, active, used, index, input_ids=input_ids, position_ids=position_ids)


def _inputs(
    columns: Mapping[str, torch.Tensor],
    mask: torch.Tensor,
    order: torch.Tensor,
    used: torch.Tensor,
    index: torch.Tensor,
    **form: Any,
) -> ModelInputs:
    """The inputs of the rows `order` (n,) of a micro-batch. used: (n, P+R) tokens that influence a prediction; index:
    (n, P+R) the places of these in the flattened input; form: what differs between the forms."""
    rows, response_columns = mask[order].nonzero(as_tuple=True)
    token_index = torch.full_like(columns["input_ids"], -1)
    token_index[order] = index.masked_fill(~used, -1)
    return ModelInputs(
        predict_index=index[rows, index.shape[1] - mask.shape[1] + response_columns - 1],
        targets=columns["responses"][order[rows], response_columns],
        rows=order[rows],
        columns=response_columns,
        token_index=token_index,
        response_shape=(mask.shape[0], mask.shape[1]),
        num_active=len(rows),
        **form,
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


def _stand_in(columns: Mapping[str, torch.Tensor], mask: torch.Tensor, **form: Any) -> ModelInputs:
    """Two tokens, one prediction, weight zero; arguments as of `_inputs`."""
    nothing = torch.zeros(0, dtype=torch.long)
    return ModelInputs(
        input_ids=torch.zeros(1, 2, dtype=torch.long),
        position_ids=torch.arange(2).unsqueeze(0),
        predict_index=torch.zeros(1, dtype=torch.long),
        targets=torch.zeros(1, dtype=torch.long),
        rows=nothing,
        columns=nothing,
        token_index=torch.full_like(columns["input_ids"], -1),
        response_shape=(mask.shape[0], mask.shape[1]),
        num_active=0,
        **form,
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

    query: (1, H, T, D); key, value: (1, K, T, D), K dividing H. softcap: of the scores, as in Gemma 2. s_aux: (H,)
    sinks, scores that take part in the softmax and give nothing, as in GPT-OSS. Returns (1, T, H, D). Raises
    ValueError for variants of attention that it does not compute. Dropout is not applied: a policy gradient needs the
    policy that sampled.
    """
    remedy = f"set model.use_remove_padding=false for {type(module).__name__}"
    if packed_sequences is None:
        raise ValueError(f"this model does not hand keyword arguments down to its attention layers; {remedy}")
    if attention_mask is not None:
        raise ValueError(f"this model makes an attention mask of its own, which knows no packed sequences; {remedy}")
    if softcap is not None and s_aux is not None:
        raise ValueError(f"the packed forward has no attention with soft-capping and sinks at once; {remedy}")
    window = sliding_window if sliding_window is not None and sliding_window < packed_sequences.max_length else None
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap, s_aux)
    on_cuda = query.device.type == "cuda" and query.dtype in HALF and s_aux is None
    attend = _varlen_attention if on_cuda else _sdpa_runs
    query, key, value = (_rows(tensor[0].transpose(0, 1), packed_sequences.expand) for tensor in (query, key, value))
    output = attend(query, key, value, scores, packed_sequences)
    return _rows(output, packed_sequences.collapse).unsqueeze(0), None


def _rows(tensor: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Those rows of (T, heads, D), all if there is no index. Flat rows are gathered, and scattered back, faster."""
    return tensor if index is None else tensor.flatten(1).index_select(0, index).unflatten(1, tensor.shape[1:])


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def by_sequences(
    forward: Callable[..., Any],
    sequences: PackedSequences,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    borders: dict[str, torch.Tensor] | None = None,
) -> Any:
    """What a causal layer of any kind gives for a packed row, each sequence for itself.

    Tensors (1, T, ...) among the arguments, also in tuples, are those of the row's tokens. The layer is called for
    groups of sequences of about the same length, each in a row of its own; padding repeats the last token. borders: for
    a layer that keeps to them, which is called once for all sequences in one row, with these arguments besides. Returns
    what the layer returns, of a tuple its first entry, the others None.
    """
    total, outputs = len(sequences.row[0][1] if sequences.collapse is None else sequences.collapse), []

    def rows(value: Any, index: torch.Tensor) -> Any:
        if isinstance(value, tuple):
            return tuple(rows(part, index) for part in value)
        if isinstance(value, torch.Tensor) and value.shape[:2] == (1, total):
            return value[0].index_select(0, index.flatten()).unflatten(0, index.shape)
        return value

    for index, real in sequences.groups if borders is None else sequences.row:
        keywords = {name: rows(value, index) for name, value in kwargs.items()}
        result = forward(*rows(args, index), **(keywords | (borders or {})))
        output = result[0] if isinstance(result, tuple) else result
        outputs.append(output.flatten(0, 1).index_select(0, real))
    expanded = torch.cat(outputs)
    output = expanded if sequences.collapse is None else expanded.index_select(0, sequences.collapse)
    return (output.unsqueeze(0), *[None] * (len(result) - 1)) if isinstance(result, tuple) else output.unsqueeze(0)


class Scores(NamedTuple):
    """How attention scores are made: scaled products, within a window of that many tokens, soft-capped, with sinks."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None


def _sdpa_runs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, sequences: PackedSequences
) -> torch.Tensor:
    """One SDPA call for each run of equally long sequences. (U, heads, D) in and out; no copy before the last `cat`."""
    outputs = []
    gqa = query.shape[1] != key.shape[1]
    sizes = [count * length for count, length in sequences.runs]
    pieces = (tensor.split(sizes) for tensor in (query, key, value))
    for (count, length), *heads in zip(sequences.runs, *pieces, strict=True):
        queries, keys, values = (part.unflatten(0, (count, length)).transpose(1, 2) for part in heads)
        window = length if scores.window is None else scores.window
        band = _band(length, window, query.device) if window < length else None
        if scores.softcap is not None:
            output = _capped_attention(queries, keys, values, scores.scale, scores.softcap, window)
        elif scores.sinks is not None:
            output = _sink_attention(queries, keys, values, scores.scale, scores.sinks, window)
        else:
            output = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=band, is_causal=band is None, scale=scores.scale, enable_gqa=gqa
            )  # (count, heads, length, D)
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _capped_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, cap: float, window: int
) -> torch.Tensor:
    """(count, H, length, D) of keys and values (count, K, length, D), with scores cap * tanh(score / cap)."""
    keys, values = (part.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1) for part in (keys, values))
    weights = torch.tanh(queries @ keys.transpose(2, 3) * (scale / cap)) * cap
    weights = weights.masked_fill(~_band(queries.shape[2], window, queries.device), -torch.inf)
    return torch.softmax(weights, dim=-1, dtype=torch.promote_types(weights.dtype, torch.float32)).to(values) @ values


def _sink_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, sinks: torch.Tensor, window: int
) -> torch.Tensor:
    """As `_capped_attention`, with sinks (H,) instead of a cap: one more key in front, whose value is 0 and whose
    product with a query is that head's sink, by a dimension of its own (eight of them, which fast kernels want)."""
    count, heads, length, size = queries.shape
    products = (sinks / scale).to(queries).view(1, -1, 1, 1).expand(count, heads, length, 1)
    sink_key = F.pad(keys.new_ones(count, keys.shape[1], 1, 1), (size, 7))
    return F.scaled_dot_product_attention(
        F.pad(torch.cat([queries, products], dim=3), (0, 7)),
        torch.cat([sink_key, F.pad(keys, (0, 8))], dim=2),
        F.pad(values, (0, 8, 1, 0)),
        attn_mask=F.pad(_band(length, window, queries.device), (1, 0), value=True),
        scale=scale,
        enable_gqa=heads != keys.shape[1],
    )[..., : values.shape[3]]


def _band(length: int, window: int, device: torch.device) -> torch.Tensor:
    """(length, length) bool: each token sees itself and the window-1 tokens before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, sequences: PackedSequences
) -> torch.Tensor:
    """Flash attention over cu_seqlens, (U, heads, D): the flash-attn package, else PyTorch's own, else runs of SDPA."""
    bounds, longest = sequences.cu_seqlens, sequences.max_length
    where = (bounds, bounds, longest, longest)
    left = -1 if scores.window is None else scores.window - 1
    if (flash := _flash_attn_varlen()) is not None:
        more: dict[str, Any] = {} if scores.softcap is None else {"softcap": scores.softcap}
        more["deterministic"] = torch.are_deterministic_algorithms_enabled()
        return flash(query, key, value, *where, softmax_scale=scores.scale, causal=True, window_size=(left, 0), **more)
    if scores.softcap is None and (varlen := _torch_varlen()) is not None:
        group, options = query.shape[1] // key.shape[1], {}
        if "enable_gqa" in signature(varlen).parameters:
            options["enable_gqa"] = group > 1
        elif group > 1:  # PyTorch 2.11
            key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
        return varlen(query, key, value, *where, scale=scores.scale, window_size=(left, 0), **options)
    return _sdpa_runs(query, key, value, scores, sequences)


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

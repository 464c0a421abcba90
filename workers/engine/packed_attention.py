"""Attention and stateful layers on a packed row, so that each sequence is processed separately.

`packed_attention` is an attention function that this module registers with transformers. It calls SDPA per run of
sequences of equal length, SDPA once for all `PromptTrees`, or variable-length flash attention on CUDA. `by_sequences`
calls stateful layers per sequence, or passes them the sequence boundaries. These two process a shared prompt once per
sample; all other layers process it once. With sequence parallelism (`ModelInputs.shard`) a rank holds a part of the
packed row, and attention exchanges tokens for heads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from verl_lite.errors import UserError
from workers.engine.packed_sequences import PackedSequences, PromptTrees

PACKED_ATTENTION = "verl_lite_packed"
HALF = (torch.float16, torch.bfloat16)  # the dtypes of flash attention
LayerOutput: TypeAlias = torch.Tensor | tuple[torch.Tensor | None, ...]


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
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Computes causal attention within each packed sequence; an attention function of transformers.

    Dropout is not applied, because a policy gradient needs the log-probs of the policy that sampled.

    With sequence parallelism T is the size of a shard.

    Args:
        module: the attention layer, for messages.
        query: (1, H, T, D).
        key: (1, K, T, D), where K divides H.
        value: (1, K, T, D).
        attention_mask: must be None.
        scaling: factor of the products of queries and keys; None = D ** -0.5.
        packed_sequences: the sequences in the row of T tokens.
        sliding_window: number of tokens that a token attends to, including itself; None = all before it.
        softcap: soft cap of the scores, as in Gemma 2.
        s_aux: (H,) sinks: scores that take part in the softmax and have no value, as in GPT-OSS.

    Returns:
        The outputs (1, T, H, D), and None.

    Raises:
        ValueError: the layer needs a variant of attention that is not supported.
    """
    remedy = f"set model.use_remove_padding=false for {type(module).__name__}"
    if packed_sequences is None:
        raise ValueError(f"this model does not pass keyword arguments on to its attention layers; {remedy}")
    if attention_mask is not None:
        raise ValueError(f"this model builds its own attention mask, which ignores packed sequences; {remedy}")
    if softcap is not None and s_aux is not None:
        raise ValueError(f"the packed forward does not support soft-capping together with sinks; {remedy}")

    query = query[0].transpose(0, 1)  # (T, H, D)
    key = key[0].transpose(0, 1)
    value = value[0].transpose(0, 1)
    group = packed_sequences.group
    if group is not None:
        # from here on this rank has all tokens of some heads
        query, key, value = group.shards_of_heads(query, key, value, packed_sequences.num_tokens)
        if s_aux is not None:
            s_aux = s_aux[group.own_heads(len(s_aux))]

    # a window that holds every sequence changes nothing, and without one faster functions apply
    window = sliding_window
    if window is not None and window >= packed_sequences.max_length:
        window = None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(scale, window, softcap, s_aux)
    output = _attention_within_sequences(query, key, value, scores, packed_sequences)

    if group is not None:
        output = group.shards_of_tokens(output)
    return output.unsqueeze(0), None


# transformers' networks find the function by this name, which `set_attn_implementation` sets
AttentionInterface.register(PACKED_ATTENTION, packed_attention)


class Scores(NamedTuple):
    """Options of attention scores: scale of the products, sliding window in tokens, soft cap, sinks (H,)."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """True if the scores are the scaled products of all pairs."""
        return self.window is None and self.softcap is None and self.sinks is None


def _attention_within_sequences(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    sequences: PackedSequences,
) -> torch.Tensor:
    """Computes attention of the packed row with the fastest function that supports it.

    Args:
        query: (T, H, D), as the output.
        key: (T, K, D).
        value: (T, K, D).
        scores: options of the scores.
        sequences: the sequences in the row.
    """
    trees = sequences.trees
    # the mask of the trees has no window
    if trees is not None and scores.is_plain:
        return _tree_attention(query, key, value, scores.scale, trees)

    query = _tokens_at(query, sequences.expand)
    key = _tokens_at(key, sequences.expand)
    value = _tokens_at(value, sequences.expand)
    # flash attention has no sinks and no fp32
    is_varlen = query.device.type == "cuda" and query.dtype in HALF and scores.sinks is None
    if is_varlen:
        output = _varlen_attention(query, key, value, scores, sequences)
    else:
        output = _sdpa_runs(query, key, value, scores, sequences)
    return _tokens_at(output, sequences.collapse)


def _tokens_at(tensor: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """Returns the tokens `index` of a tensor (T, heads, D), or all tokens if index is None."""
    if index is None:
        return tensor
    # index_select and its backward are faster on flattened rows
    flat_tokens = tensor.flatten(1)
    selected = flat_tokens.index_select(0, index)
    return selected.unflatten(1, tensor.shape[1:])


def by_sequences(
    forward: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    sequences: PackedSequences,
    args: tuple[object, ...],
    kwargs: dict[str, object],
    borders: dict[str, torch.Tensor] | None = None,
) -> LayerOutput:
    """Applies a causal layer to a packed row so that each sequence is processed separately.

    Calls the layer's `forward` once per group of sequences of similar length, with one row per sequence, padded by
    repeating the last token. Splits tensors (1, T, ...) among the arguments, also in tuples, accordingly.

    Args:
        forward: the layer's own forward.
        sequences: the sequences in the row of T tokens.
        args: positional arguments of the layer for the packed row.
        kwargs: keyword arguments of the layer for the packed row.
        borders: additional keyword arguments for a layer that respects sequence boundaries. The layer is then called
            only once, with all sequences concatenated in one row.

    Returns:
        The layer's output for the packed row. If the layer returns a tuple, all entries except the first become None.
    """
    num_tokens = sequences.num_tokens
    row_groups = sequences.groups if borders is None else sequences.row
    outputs = []
    # entries of the layer's results after the output, all None
    others: list[None] | None = None
    for positions, real in row_groups:
        arguments = [_in_rows(value, positions, num_tokens) for value in args]
        keywords = {name: _in_rows(value, positions, num_tokens) for name, value in kwargs.items()}
        if borders is not None:
            keywords |= borders
        result = forward(*arguments, **keywords)
        if isinstance(result, tuple):
            output = result[0]
            others = [None] * (len(result) - 1)
        else:
            output = result
        # without the repetitions of last tokens
        flat_output = output.flatten(0, 1)
        outputs.append(flat_output.index_select(0, real))

    packed_output = torch.cat(outputs)
    # of the copies of a shared prompt, one
    if sequences.collapse is not None:
        packed_output = packed_output.index_select(0, sequences.collapse)
    packed_output = packed_output.unsqueeze(0)
    # the layer returns no tuple
    if others is None:
        return packed_output
    return packed_output, *others


def _in_rows(value: object, positions: torch.Tensor, num_tokens: int) -> object:
    """Arranges the tokens of an argument (1, T, ...), or of such arguments in a tuple, in rows (n, L) of positions.
    Returns every other argument unchanged."""
    # a tuple: the cosines and sines of rotary positions
    if isinstance(value, tuple):
        return tuple(_in_rows(entry, positions, num_tokens) for entry in value)
    if not isinstance(value, torch.Tensor) or value.shape[:2] != (1, num_tokens):
        return value
    row = value[0]
    tokens = row.index_select(0, positions.flatten())
    return tokens.unflatten(0, positions.shape)


def _tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    trees: PromptTrees,
) -> torch.Tensor:
    """Computes attention with one call of SDPA for all prompts.

    Args:
        query: (T, H, D), as the output.
        key: (T, K, D).
        value: (T, K, D).
        scale: factor of the products.
        trees: the rows of the prompts.
    """

    def rows_of_heads(tensor: torch.Tensor) -> torch.Tensor:
        """Arranges tokens (T, heads, D) in the rows of the trees: (G, heads, L, D)."""
        flat_rows = _tokens_at(tensor, trees.index.flatten())
        rows = flat_rows.unflatten(0, trees.index.shape)
        return rows.transpose(1, 2)

    # (G, H, L, D)
    output = F.scaled_dot_product_attention(
        rows_of_heads(query),
        rows_of_heads(key),
        rows_of_heads(value),
        attn_mask=trees.mask,
        scale=scale,
        enable_gqa=_has_groups(query.shape[1], key.shape[1]),
    )
    # (G * L, H, D)
    flat_output = output.transpose(1, 2).flatten(0, 1)
    return _tokens_at(flat_output, trees.flat_positions)


def _sdpa_runs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    sequences: PackedSequences,
) -> torch.Tensor:
    """Computes attention with one call of SDPA per run of equally long sequences, without copies before the final
    `cat`. Inputs and output: (U, heads, D)."""
    # `split` joins the gradients of all runs in one step; a slice would fill a gradient of U tokens for each run
    sizes = [count * length for count, length in sequences.runs]
    query_runs = query.split(sizes)
    key_runs = key.split(sizes)
    value_runs = value.split(sizes)

    outputs = []
    for number, run in enumerate(sequences.runs):
        # (count, heads, length, D)
        queries = query_runs[number].unflatten(0, run).transpose(1, 2)
        keys = key_runs[number].unflatten(0, run).transpose(1, 2)
        values = value_runs[number].unflatten(0, run).transpose(1, 2)
        output = _causal_attention(queries, keys, values, scores)
        tokens = output.transpose(1, 2).flatten(0, 1)
        outputs.append(tokens)

    # `cat` would copy a single run
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs)


def _causal_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scores: Scores) -> torch.Tensor:
    """Computes attention of sequences of one length.

    Args:
        queries: (count, H, length, D), as the output.
        keys: (count, K, length, D).
        values: (count, K, length, D).
        scores: options of the scores.
    """
    length = queries.shape[2]
    window = length if scores.window is None else scores.window
    if scores.softcap is not None:
        return _capped_attention(queries, keys, values, scores.scale, scores.softcap, window)
    if scores.sinks is not None:
        return _sink_attention(queries, keys, values, scores.scale, scores.sinks, window)

    # without a mask, SDPA can choose faster kernels
    mask = _window_mask(length, window, queries.device) if window < length else None
    return F.scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scores.scale,
        enable_gqa=_has_groups(queries.shape[1], keys.shape[1]),
    )


def _has_groups(heads: int, key_value_heads: int) -> bool:
    """Returns True if several query heads share a key/value head."""
    # a branch, because torch.compile would pass on the comparison as a symbol instead of True or False
    if heads != key_value_heads:
        return True
    return False


def _capped_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    cap: float,
    window: int,
) -> torch.Tensor:
    """Computes causal attention with scores cap * tanh(score / cap).

    Args:
        queries: (count, H, length, D), as the output.
        keys: (count, K, length, D).
        values: (count, K, length, D).
        scale: factor of the products.
        cap: the soft cap.
        window: number of tokens that a token sees, including itself.
    """
    # SDPA has no soft cap, so that the scores are computed here
    heads_per_key = queries.shape[1] // keys.shape[1]
    keys = keys.repeat_interleave(heads_per_key, dim=1)
    values = values.repeat_interleave(heads_per_key, dim=1)

    products = queries @ keys.transpose(2, 3)
    # under one name: the scores are the largest tensors here
    scores = torch.tanh(products * (scale / cap)) * cap
    length = queries.shape[2]
    mask = _window_mask(length, window, queries.device)
    scores = scores.masked_fill(~mask, -torch.inf)

    # the softmax in fp32, as in transformers' eager attention
    dtype = torch.promote_types(scores.dtype, torch.float32)
    probabilities = torch.softmax(scores, dim=-1, dtype=dtype)
    return probabilities.to(values) @ values


def _sink_attention(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    sinks: torch.Tensor,
    window: int,
) -> torch.Tensor:
    """Computes causal attention with sinks (H,). The shapes are those of `_capped_attention`."""
    # A sink is a first key with value 0. One more dimension makes its product with a query equal to the head's sink;
    # seven more of zeros keep the size a multiple of 8 for fast kernels.
    count, heads, length, size = queries.shape
    key_value_heads = keys.shape[1]
    # SDPA multiplies all products by the scale
    sink_products = (sinks / scale).to(queries)
    sink_of_head = sink_products.view(1, -1, 1, 1)
    sink_dimension = sink_of_head.expand(count, heads, length, 1)
    # without names for the parts, which would keep them in memory during the attention
    wide_queries = F.pad(torch.cat([queries, sink_dimension], dim=3), (0, 7))

    # only the sink's key has a 1 in this dimension
    ones = keys.new_ones(count, key_value_heads, 1, 1)
    sink_key = F.pad(ones, (size, 7))
    wide_keys = torch.cat([sink_key, F.pad(keys, (0, 8))], dim=2)
    wide_values = F.pad(values, (0, 8, 1, 0))

    # every token sees the sink, also outside its window
    window_mask = _window_mask(length, window, queries.device)
    mask = F.pad(window_mask, (1, 0), value=True)
    output = F.scaled_dot_product_attention(
        wide_queries,
        wide_keys,
        wide_values,
        attn_mask=mask,
        scale=scale,
        enable_gqa=_has_groups(heads, key_value_heads),
    )
    value_size = values.shape[3]
    return output[..., :value_size]


def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """Returns a bool mask (length, length) in which each token sees itself and the window - 1 tokens before it."""
    all_pairs = torch.ones(length, length, dtype=torch.bool, device=device)
    is_before = all_pairs.tril()
    return is_before.triu(1 - window)


def _varlen_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scores: Scores,
    sequences: PackedSequences,
) -> torch.Tensor:
    """Computes attention (U, heads, D) by flash-attn if it is installed, else by PyTorch's own function for variable
    lengths, else by `_sdpa_runs`."""
    bounds = sequences.cu_seqlens
    longest = sequences.max_length
    # tokens before and after; -1 for all tokens before
    tokens_before = -1 if scores.window is None else scores.window - 1
    window_size = (tokens_before, 0)

    flash_attn = _flash_attn_varlen()
    if flash_attn is not None:
        caps = {}
        # flash-attn before 2.6 does not have this argument
        if scores.softcap is not None:
            caps["softcap"] = scores.softcap
        return flash_attn(
            query,
            key,
            value,
            bounds,
            bounds,
            longest,
            longest,
            softmax_scale=scores.scale,
            causal=True,
            window_size=window_size,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **caps,
        )

    torch_varlen = _torch_varlen()
    # PyTorch's function has no soft cap
    if torch_varlen is None or scores.softcap is not None:
        return _sdpa_runs(query, key, value, scores, sequences)
    options = {}
    heads_per_key = query.shape[1] // key.shape[1]
    # the function of PyTorch 2.11 needs a key/value head for each query head
    if "enable_gqa" in signature(torch_varlen).parameters:
        options["enable_gqa"] = _has_groups(query.shape[1], key.shape[1])
    elif heads_per_key > 1:
        key = key.repeat_interleave(heads_per_key, dim=1)
        value = value.repeat_interleave(heads_per_key, dim=1)
    output = torch_varlen(
        query, key, value, bounds, bounds, longest, longest, scale=scores.scale, window_size=window_size, **options
    )
    # a tuple only with `return_aux`
    assert isinstance(output, torch.Tensor)
    return output


@cache
def _flash_attn_varlen() -> Callable[..., torch.Tensor] | None:
    try:
        from flash_attn import flash_attn_varlen_func
    except ModuleNotFoundError as error:
        if error.name == "flash_attn":  # an optional package
            return None
        raise
    except ImportError as error:
        # the user has installed it in order to use it, so another kernel must not replace it silently
        raise UserError(
            f"flash-attn is installed and cannot be imported: {error}. It may have been built for another version of "
            f"torch than {torch.__version__}: install the one that fits, or remove it (pip uninstall flash-attn), and "
            "PyTorch's own kernel is used"
        ) from error
    kernel: Callable[..., torch.Tensor] = flash_attn_varlen_func
    return kernel


@cache
def _torch_varlen() -> Callable[..., object] | None:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before PyTorch 2.11
        return None
    return varlen_attn

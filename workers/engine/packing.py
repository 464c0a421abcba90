"""Sequence packing: converts a padded micro-batch to model inputs and outputs back to the (b, R) response matrix.

`pack` puts the tokens of all sequences into one row. It drops padding, repeated prompts (samples of the same prompt
share its tokens) and all tokens after the last predicting position. `pad` is the plain padded form
(`model.use_remove_padding=false`), the reference in the tests of `pack`. `align` is the form for networks in which
other layers than attention mix tokens (`workers.policy.token_mixing`): each sequence has its own row and starts in the
first column, so that padding comes after all tokens that count and no causal layer can see it.

The attention function that this module registers with transformers separates the sequences of a packed row: it calls
SDPA per run of sequences of equal length, or variable-length flash attention on CUDA. `by_sequences` calls stateful
layers per sequence, or passes them the sequence boundaries. These two process a shared prompt once per sample; all
other layers process it once. With sequence parallelism (`ModelInputs.shard`) a rank holds a part of the packed row, and
attention exchanges tokens for heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from verl_lite.schema import column
from workers.engine.sequence_parallel import SequenceGroup

PACKED_ATTENTION = "verl_lite_packed"
HALF = (torch.float16, torch.bfloat16)
MAX_PADDING = 1.25  # maximum ratio of padded to real tokens in a group of sequences of a stateful layer
MIN_SHARED = 0.05  # minimum share of tokens saved for which sharing prompts pays for the extra gathers in attention
MAX_TREE = 1024  # maximum tokens of a row of `PromptTrees`, whose mask takes the square of this number
_PROMPT, _FILLING = -1, -2  # in place of the number of a token's sequence: tokens of a prompt, and after the last token


@dataclass(frozen=True)
class PromptTrees:
    """Rows of tokens for attention, one row per prompt: the prompt once, followed by all its answers.

    A mask keeps the answers to one prompt apart. Short answers to a long prompt need fewer scores and fewer copies in
    this form than with a copy of the prompt for each answer.

    Attributes:
        index: (G, L) position in the packed row of each token; rows are filled up with the packed row's first token.
        mask: (G, 1, L, L) bool, True where a token (third dimension) attends to another one (fourth dimension).
        places: (T,) position of each token of the packed row in the flattened rows.
    """

    index: torch.Tensor
    mask: torch.Tensor
    places: torch.Tensor

    def to(self, device: torch.device) -> PromptTrees:
        """Returns a copy on `device`."""
        return PromptTrees(self.index.to(device), self.mask.to(device), self.places.to(device))


@dataclass(frozen=True)
class PackedSequences:
    """The boundaries of the sequences in a packed row, computed once per micro-batch.

    If prompts are shared, the sequences overlap in the packed row of T tokens. `runs` and `cu_seqlens` then describe
    the expanded row of U tokens, in which each sequence has its own copy of the prompt.

    runs: (number of sequences, their common length) of each run of equally long sequences, in packing order.
    cu_seqlens: (sequences + 1,) int32, cumulative sequence lengths, on the device.
    expand, collapse: (U,) index in the packed row of each token of the expanded row, and (T,) an index in the expanded
        row of each token of the packed row; None if no prompt is shared.
    trees: the same sequences with one row per prompt; None on a GPU, and if that needs more scores than `runs`.
    group: the ranks that share the tokens of the packed row; None if each rank has its own row.
    """

    runs: tuple[tuple[int, int], ...]
    cu_seqlens: torch.Tensor
    max_length: int
    expand: torch.Tensor | None = None
    collapse: torch.Tensor | None = None
    trees: PromptTrees | None = None
    group: SequenceGroup | None = None

    def to(self, device: torch.device) -> PackedSequences:
        """Returns a copy on `device`, without `trees` unless it is a CPU: other devices have attention for `runs`."""
        kept = self if device.type == "cpu" else replace(self, trees=None)
        return _moved(kept, device)

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens of the packed row."""
        return sum(count * length for count, length in self.runs) if self.collapse is None else len(self.collapse)

    @cached_property
    def groups(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Groups of neighbouring sequences of similar length, for layers that need one row per sequence. Each entry is
        a pair: (n, longest) the index in the packed row of each token, where a shorter sequence repeats its last token;
        and (sum of lengths,) the flat indices of the n * longest entries that are not padding. Computed once for all
        layers, without synchronising with the device."""
        lengths = torch.tensor([length for count, length in self.runs for _ in range(count)])
        groups, start, device = [], 0, self.cu_seqlens.device
        while start < len(lengths):
            end = start + 1
            while (
                end < len(lengths) and (end + 1 - start) * lengths[end] <= MAX_PADDING * lengths[start : end + 1].sum()
            ):
                end += 1
            length = lengths[start:end].unsqueeze(1)
            column = torch.arange(int(lengths[end - 1]))
            first = lengths[:start].sum() + length.cumsum(0) - length
            index = (first + torch.minimum(column, length - 1)).to(device)
            real = (column < length).flatten().nonzero().squeeze(1).to(device)
            groups.append((index if self.expand is None else self.expand[index], real))
            start = end
        return groups

    @cached_property
    def row(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """All sequences concatenated in one row, as a single entry in the format of `groups`: (1, U) and (U,)."""
        places = torch.arange(sum(count * length for count, length in self.runs), device=self.cu_seqlens.device)
        return [((places if self.expand is None else self.expand).unsqueeze(0), places)]

    @cached_property
    def borders(self) -> dict[str, torch.Tensor]:
        """Keyword arguments with the sequence boundaries of `row`, as in transformers' `DataCollatorWithFlattening`:
        seq_idx (1, U) int32, the sequence number of each token, and cu_seq_lens_q, the cumulative lengths, which
        flash-linear-attention names cu_seqlens."""
        places, bounds = self.row[0][1].int(), self.cu_seqlens
        seq_idx = torch.bucketize(places, bounds[1:], right=True, out_int32=True).unsqueeze(0)
        return {"seq_idx": seq_idx, "cu_seq_lens_q": bounds, "cu_seqlens": bounds}


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """The inputs of the policy's forward, and the indices that map its outputs to the (b, R) response matrix.

    input_ids, position_ids: (1, T) packed, (b, S) padded, (n, L) aligned.
    sequences: sequence boundaries; only in the packed form.
    attention_mask: (b, S); only in the padded form.
    predict_index: (N,) positions in the flattened input that predict a response token.
    targets: (N,) the predicted response tokens.
    rows, columns: (N,) indices of the predicted tokens in the response matrix.
    token_index: (b, P+R) position of each token in the flattened input, -1 for tokens that influence no prediction.
        Rows with a shared prompt have the same positions for it.
    response_shape: (b, R).
    num_active: number of entries that count: N, or 0 for a placeholder. A micro-batch with nothing to train still runs
        forward and backward on one predicted token with weight zero, because all ranks must take part in collectives.
    extra: values of further columns by name, (T, ...) for the tokens of the flattened input or (N, ...) for the
        predicted tokens; see `with_column`.
    images: keyword arguments of the network with the images of the prompts (`workers.policy.vision`), empty if these
        rows have none; None if the whole batch has none. With images, position_ids have a first dimension of size 3.
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
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    images: dict[str, torch.Tensor] | None = None

    def to(self, device: torch.device) -> ModelInputs:
        """Returns a copy on `device`."""
        extra = {name: value.to(device) for name, value in self.extra.items()}
        images = None if self.images is None else {name: value.to(device) for name, value in self.images.items()}
        return replace(_moved(self, device), extra=extra, images=images)

    @property
    def origin(self) -> torch.Tensor:
        """(T,) flat index in (b, P+R) of each token of the flattened input: of its first row if several rows share it,
        and b * (P+R) if it influences no prediction."""
        places = self.token_index.flatten()
        rows = (places >= 0).nonzero().squeeze(1)
        first = torch.full((self.input_ids.numel(),), len(places))
        return first.scatter_reduce(0, places[rows], rows, "amin")

    def with_column(self, name: str, values: torch.Tensor) -> ModelInputs:
        """Returns the inputs with the values of one more column in `extra`: (N, ...) of the predicted tokens for values
        (b, R, ...); (T, ...) for (b, P+R, ...), where a shared prompt gets the values of its first row. Raises
        ValueError if a column (b, P+R, ...) marks a token of the inputs as absent."""
        entry = column(name)
        if entry.is_of_response:
            predicted = values[self.rows, self.columns]
            if self.num_active == 0:  # a placeholder has one prediction
                predicted = values.new_full((1, *values.shape[2:]), entry.absent or 0)
            return replace(self, extra=self.extra | {name: predicted})
        values = values.flatten(0, 1)
        places = self.token_index.flatten()
        rows = (places >= 0).nonzero().squeeze(1)
        if entry.absent is not None and (values[rows] == entry.absent).any():
            raise ValueError(f"column {name!r} has no value for a token of the network's input; see {entry.writer}")
        first = self.origin
        known = first < len(places)
        arranged = values.new_full((len(first), *values.shape[1:]), entry.absent or 0)
        arranged[known] = values[first[known]]
        return replace(self, extra=self.extra | {name: arranged})

    def shard(self, group: SequenceGroup) -> ModelInputs:
        """Returns this rank's shard of packed inputs: its tokens, and the predictions that it computes. The sequence
        boundaries remain those of the whole row, which attention sees. Tokens that fill up the last shards belong to no
        sequence."""
        assert self.sequences is not None
        start, size = group.bounds(self.sequences.num_tokens)
        end = start + size

        def own(values: torch.Tensor, fill: int = 0) -> torch.Tensor:
            part = values[start:end]
            return torch.cat([part, part.new_full((size - len(part), *part.shape[1:]), fill)])

        own_predictions = (self.predict_index >= start) & (self.predict_index < end)
        # a placeholder has one prediction and no row for it
        chosen = {name: getattr(self, name)[own_predictions] for name in ("rows", "columns")} if self.num_active else {}
        return replace(
            self,
            input_ids=own(self.input_ids[0]).unsqueeze(0),
            position_ids=own(self.position_ids[0]).unsqueeze(0),
            sequences=replace(self.sequences, group=group),
            predict_index=self.predict_index[own_predictions] - start,
            targets=self.targets[own_predictions],
            token_index=(self.token_index - start).masked_fill(
                (self.token_index < start) | (self.token_index >= end), -1
            ),
            extra={
                name: values[own_predictions] if column(name).is_of_response else own(values, column(name).absent or 0)
                for name, values in self.extra.items()
            },
            **chosen,
        )

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sums values over the ranks that share these sequences; the identity without sequence parallelism."""
        group = None if self.sequences is None else self.sequences.group
        return values if group is None else group.sum(values)

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """Puts values (N, ...) of the predicted tokens into a (b, R, ...) matrix, zero elsewhere. Differentiable; the
        gradient of a placeholder is zero."""
        matrix = values.new_zeros(*self.response_shape, *values.shape[1:])
        if self.num_active == 0:
            return matrix + 0 * values.sum(dtype=values.dtype)
        return self.total(matrix.index_put((self.rows, self.columns), values))


_MOVED = (torch.Tensor, PackedSequences, PromptTrees)


def _moved(inputs: Any, device: torch.device) -> Any:
    """A copy of a dataclass of tensors (and of such dataclasses) on `device`."""
    tensors = {name: value for name, value in vars(inputs).items() if isinstance(value, _MOVED)}
    return replace(inputs, **{name: value.to(device) for name, value in tensors.items()})


def pack(columns: Mapping[str, torch.Tensor]) -> ModelInputs:
    """The packed form of a micro-batch. Padding rows and rows whose response_mask is all 0 contribute no tokens.

    columns: input_ids, attention_mask, position_ids (b, P+R), responses, response_mask (b, R), optionally is_padding
    (b,), and prompt_digests (b,), by which prompts differ that have the same tokens.
    """
    mask = _response_mask(columns)
    active = mask.any(dim=1).nonzero().squeeze(1)
    if len(active) == 0:
        return _placeholder_inputs(columns, mask, sequences=_packed_sequences(torch.tensor([2])))
    prompt_width = columns["input_ids"].shape[1] - mask.shape[1]
    used = _used_tokens(columns["attention_mask"], mask)
    order = active[torch.argsort(used[active].sum(dim=1), stable=True)]  # sorted by length, which makes runs long
    used, input_ids = used[order], columns["input_ids"][order]
    digests = columns["prompt_digests"][order] if "prompt_digests" in columns.keys() else None
    owner = _prompt_owners(input_ids[:, :prompt_width], used[:, :prompt_width], digests)
    own = used.clone()
    own[:, :prompt_width] &= (owner == torch.arange(len(owner))).unsqueeze(1)
    sequences = _packed_sequences(used.sum(dim=1))
    if 1 - own.sum() / used.sum() < MIN_SHARED:
        own, owner = used, torch.arange(len(owner))
    position = (own.flatten().cumsum(0) - 1).view(own.shape)  # position of each token in the packed row
    position[:, :prompt_width] = position[owner, :prompt_width]
    if own is not used:
        sequences = replace(
            sequences,
            expand=position[used],
            collapse=own[used].nonzero().squeeze(1),
            trees=_prompt_trees(own, used, owner, prompt_width, position),
        )
    ids = input_ids[own].unsqueeze(0)
    positions = columns["position_ids"][order][own].unsqueeze(0)
    return _inputs(columns, mask, order, used, position, input_ids=ids, position_ids=positions, sequences=sequences)


def is_tree_cheaper(prompts: int, longest: int, scores_of_sequences: int) -> bool:
    """Returns True if attention uses `PromptTrees`.

    Args:
        prompts: Number of different prompts.
        longest: Tokens of the longest row, which contains a prompt and all its answers.
        scores_of_sequences: Scores of attention with a row for each sequence, the sum of the squares of their lengths.
    """
    return longest <= MAX_TREE and prompts * longest**2 <= scores_of_sequences


def _prompt_trees(
    own: torch.Tensor, used: torch.Tensor, owner: torch.Tensor, prompt_width: int, position: torch.Tensor
) -> PromptTrees | None:
    """Builds the rows of `PromptTrees`. Returns None if a row is longer than MAX_TREE, or if their attention has more
    scores than that of the sequences.

    Args:
        own: (n, P+R) bool, tokens of each sequence that the packed row contains; a shared prompt belongs to its owner.
        used: (n, P+R) bool, all tokens of each sequence.
        owner: (n,) the sequence that owns the prompt of each sequence.
        prompt_width: P.
        position: (n, P+R) position of each token in the packed row.
    """
    owners, tree_of = owner.unique(return_inverse=True)
    sizes = torch.zeros(len(owners), dtype=torch.long).index_add_(0, tree_of, own.sum(dim=1))
    longest = int(sizes.max())
    scores_of_sequences = int(used.sum(dim=1).square().sum())
    if not is_tree_cheaper(len(owners), longest, scores_of_sequences):
        return None

    # the owner of a prompt is the first of its sequences, so that a stable order puts the prompt before all answers
    sequence, token_column = own.nonzero(as_tuple=True)
    order = torch.argsort(tree_of[sequence], stable=True)
    tree = tree_of[sequence][order]
    branch = torch.where(token_column < prompt_width, _PROMPT, sequence)[order]
    column = torch.arange(len(tree)) - (sizes.cumsum(0) - sizes)[tree]

    index = torch.zeros(len(owners), longest, dtype=torch.long)
    packed_position = position[own][order]
    index[tree, column] = packed_position
    places = torch.empty(len(tree), dtype=torch.long)
    places[packed_position] = tree * longest + column

    branches = torch.full((len(owners), longest), _FILLING)
    branches[tree, column] = branch
    is_visible = (branches.unsqueeze(2) == branches.unsqueeze(1)) | (branches == _PROMPT).unsqueeze(1)
    mask = is_visible & torch.ones(longest, longest, dtype=torch.bool).tril()
    return PromptTrees(index, mask.unsqueeze(1), places)


def _used_tokens(attention_mask: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """(b, P+R) bool: True for real tokens before the last predicted token; later tokens influence no prediction."""
    width, response_width = attention_mask.shape[1], response_mask.shape[1]
    # response column after the last token that counts
    after_last = torch.arange(1, response_width + 1).mul(response_mask).amax(dim=1, keepdim=True)
    before_last = torch.arange(width) < width - response_width + after_last - 1
    return attention_mask.bool() & before_last


def _prompt_owners(prompt_ids: torch.Tensor, real: torch.Tensor, digests: torch.Tensor | None) -> torch.Tensor:
    """Returns (n,) the index of the first row with the same prompt, for each row. prompt_ids, real: (n, P). digests:
    (n,), also equal for the same prompt."""
    first: dict[bytes, int] = {}
    keys = prompt_ids.masked_fill(~real, -1)
    keys = keys if digests is None else torch.cat([keys, digests.unsqueeze(1)], dim=1)
    return torch.tensor([first.setdefault(key.tobytes(), row) for row, key in enumerate(keys.cpu().numpy())])


def pad(columns: Mapping[str, torch.Tensor]) -> ModelInputs:
    """The padded form of a micro-batch, the reference in the tests of `pack`. Arguments as in `pack`."""
    mask = _response_mask(columns)
    if not mask.any():
        return _placeholder_inputs(columns, mask, attention_mask=torch.ones(1, 2, dtype=torch.long))
    names = ("input_ids", "position_ids", "attention_mask")
    counts = _used_tokens(columns["attention_mask"], mask) & mask.any(dim=1, keepdim=True)
    index = torch.arange(counts.numel()).view(counts.shape)
    return _inputs(columns, mask, torch.arange(len(mask)), counts, index, **{name: columns[name] for name in names})


def align(columns: Mapping[str, torch.Tensor]) -> ModelInputs:
    """The aligned form of a micro-batch: each sequence in its own row from the first column on, with the tokens that
    `pack` keeps. Arguments as in `pack`."""
    mask = _response_mask(columns)
    active = mask.any(dim=1).nonzero().squeeze(1)
    if len(active) == 0:
        return _placeholder_inputs(columns, mask)
    used = _used_tokens(columns["attention_mask"], mask)[active]
    column = used.cumsum(dim=1) - 1  # column of each token in its new row
    longest = int(column.max()) + 1
    places = used.nonzero()[:, 0], column[used]
    input_ids = columns["input_ids"].new_zeros(len(active), longest)
    input_ids[places] = columns["input_ids"][active][used]
    position_ids = torch.arange(longest).repeat(len(active), 1)  # also consecutive in the padding
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
    """Builds the inputs of the rows `order` (n,) of a micro-batch. used: (n, P+R) True for tokens that influence a
    prediction; index: (n, P+R) their positions in the flattened input; form: the fields that depend on the form."""
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
    """The response_mask (b, R) as bool, False in padding rows."""
    mask = columns["response_mask"].bool()
    return mask & ~columns["is_padding"].unsqueeze(1) if "is_padding" in columns.keys() else mask


def _packed_sequences(lengths: torch.Tensor) -> PackedSequences:
    """Builds the boundaries from the lengths (n,) of the sequences in packing order."""
    values, counts = torch.unique_consecutive(lengths, return_counts=True)
    return PackedSequences(
        runs=tuple(zip(counts.tolist(), values.tolist(), strict=True)),
        cu_seqlens=F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        max_length=int(lengths.max()),
    )


def _placeholder_inputs(columns: Mapping[str, torch.Tensor], mask: torch.Tensor, **form: Any) -> ModelInputs:
    """A placeholder with two tokens and one prediction of weight zero. Arguments as in `_inputs`."""
    empty = torch.zeros(0, dtype=torch.long)
    return ModelInputs(
        input_ids=torch.zeros(1, 2, dtype=torch.long),
        position_ids=torch.arange(2).unsqueeze(0),
        predict_index=torch.zeros(1, dtype=torch.long),
        targets=torch.zeros(1, dtype=torch.long),
        rows=empty,
        columns=empty,
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
    """Computes causal attention within each packed sequence; an attention function of transformers.

    Dropout is not applied, because a policy gradient needs the log-probs of the policy that sampled.

    With sequence parallelism T is the size of a shard.

    Args:
        query: (1, H, T, D). key, value: (1, K, T, D), where K divides H.
        softcap: soft cap of the scores, as in Gemma 2.
        s_aux: (H,) sinks: scores that take part in the softmax and have no value, as in GPT-OSS.

    Returns:
        (1, T, H, D) and None. Raises ValueError for a variant of attention that is not supported.
    """
    remedy = f"set model.use_remove_padding=false for {type(module).__name__}"
    if packed_sequences is None:
        raise ValueError(f"this model does not pass keyword arguments on to its attention layers; {remedy}")
    if attention_mask is not None:
        raise ValueError(f"this model builds its own attention mask, which ignores packed sequences; {remedy}")
    if softcap is not None and s_aux is not None:
        raise ValueError(f"the packed forward does not support soft-capping together with sinks; {remedy}")
    window = sliding_window if sliding_window is not None and sliding_window < packed_sequences.max_length else None
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    group = packed_sequences.group
    if group is not None:
        s_aux = None if s_aux is None else s_aux[group.own_heads(len(s_aux))]
        query, key, value = group.shards_of_heads(query, key, value, packed_sequences.num_tokens)
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap, s_aux)
    on_cuda = query.device.type == "cuda" and query.dtype in HALF and s_aux is None
    trees = packed_sequences.trees
    if trees is not None and scores.is_plain:
        output = _tree_attention(query, key, value, scores.scale, trees)
    else:
        attend = _varlen_attention if on_cuda else _sdpa_runs
        query, key, value = (_rows(tensor, packed_sequences.expand) for tensor in (query, key, value))
        output = _rows(attend(query, key, value, scores, packed_sequences), packed_sequences.collapse)
    return (output if group is None else group.shards_of_tokens(output)).unsqueeze(0), None


def _rows(tensor: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    """The rows `index` of tensor (T, heads, D), or all rows if index is None."""
    # index_select and its backward are faster on flattened rows
    return tensor if index is None else tensor.flatten(1).index_select(0, index).unflatten(1, tensor.shape[1:])


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def by_sequences(
    forward: Callable[..., Any],
    sequences: PackedSequences,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    borders: dict[str, torch.Tensor] | None = None,
) -> Any:
    """Applies a causal layer to a packed row so that each sequence is processed separately.

    Calls the layer's `forward` once per group of sequences of similar length, with one row per sequence, padded by
    repeating the last token. Splits tensors (1, T, ...) among the arguments, also in tuples, accordingly. Returns the
    output for the packed row; if the layer returns a tuple, all entries except the first become None.

    borders: additional keyword arguments for a layer that respects sequence boundaries. The layer is then called only
    once, with all sequences concatenated in one row.
    """
    total, outputs = sequences.num_tokens, []

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
    """Options of attention scores: scale of the products, sliding window in tokens, soft cap, sinks (H,)."""

    scale: float
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None

    @property
    def is_plain(self) -> bool:
        """True if the scores are the scaled products of all pairs."""
        return self.window is None and self.softcap is None and self.sinks is None


def _tree_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, trees: PromptTrees
) -> torch.Tensor:
    """Computes attention with one call of SDPA for all prompts. query and output: (T, H, D); key, value: (T, K, D)."""

    def rows_of_heads(tensor: torch.Tensor) -> torch.Tensor:
        """(G, heads, L, D)"""
        return _rows(tensor, trees.index.flatten()).unflatten(0, trees.index.shape).transpose(1, 2)

    output = F.scaled_dot_product_attention(
        rows_of_heads(query),
        rows_of_heads(key),
        rows_of_heads(value),
        attn_mask=trees.mask,
        scale=scale,
        enable_gqa=_has_groups(query.shape[1], key.shape[1]),
    )  # (G, H, L, D)
    return _rows(output.transpose(1, 2).flatten(0, 1), trees.places)


def _sdpa_runs(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, sequences: PackedSequences
) -> torch.Tensor:
    """Computes attention with one call of SDPA per run of equally long sequences, without copies before the final
    `cat`. Inputs and output: (U, heads, D)."""
    outputs = []
    gqa = _has_groups(query.shape[1], key.shape[1])
    sizes = [count * length for count, length in sequences.runs]
    pieces = (tensor.split(sizes) for tensor in (query, key, value))
    for (count, length), *heads in zip(sequences.runs, *pieces, strict=True):
        queries, keys, values = (part.unflatten(0, (count, length)).transpose(1, 2) for part in heads)
        window = length if scores.window is None else scores.window
        band = _window_mask(length, window, query.device) if window < length else None
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


def _has_groups(heads: int, key_value_heads: int) -> bool:
    """True if several query heads share a key/value head."""
    if heads != key_value_heads:  # a branch, because torch.compile keeps the comparison itself as a symbol
        return True
    return False


def _capped_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, cap: float, window: int
) -> torch.Tensor:
    """Causal attention with scores cap * tanh(score / cap). queries and output: (count, H, length, D); keys and values:
    (count, K, length, D)."""
    keys, values = (part.repeat_interleave(queries.shape[1] // keys.shape[1], dim=1) for part in (keys, values))
    weights = torch.tanh(queries @ keys.transpose(2, 3) * (scale / cap)) * cap
    weights = weights.masked_fill(~_window_mask(queries.shape[2], window, queries.device), -torch.inf)
    return torch.softmax(weights, dim=-1, dtype=torch.promote_types(weights.dtype, torch.float32)).to(values) @ values


def _sink_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, sinks: torch.Tensor, window: int
) -> torch.Tensor:
    """Causal attention with sinks (H,). Shapes as in `_capped_attention`."""
    # A sink is a first key with value 0. One more dimension makes its product with a query equal to the head's sink;
    # seven more of zeros keep the size a multiple of 8 for fast kernels.
    count, heads, length, size = queries.shape
    products = (sinks / scale).to(queries).view(1, -1, 1, 1).expand(count, heads, length, 1)
    sink_key = F.pad(keys.new_ones(count, keys.shape[1], 1, 1), (size, 7))
    return F.scaled_dot_product_attention(
        F.pad(torch.cat([queries, products], dim=3), (0, 7)),
        torch.cat([sink_key, F.pad(keys, (0, 8))], dim=2),
        F.pad(values, (0, 8, 1, 0)),
        attn_mask=F.pad(_window_mask(length, window, queries.device), (1, 0), value=True),
        scale=scale,
        enable_gqa=_has_groups(heads, keys.shape[1]),
    )[..., : values.shape[3]]


def _window_mask(length: int, window: int, device: torch.device) -> torch.Tensor:
    """A (length, length) bool mask in which each token sees itself and the window - 1 tokens before it."""
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def _varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scores: Scores, sequences: PackedSequences
) -> torch.Tensor:
    """Variable-length attention, (U, heads, D): flash-attn if installed, otherwise PyTorch's own, then `_sdpa_runs`."""
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
            options["enable_gqa"] = _has_groups(query.shape[1], key.shape[1])
        elif group > 1:  # PyTorch 2.11
            key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
        return varlen(query, key, value, *where, scale=scores.scale, window_size=(left, 0), **options)
    return _sdpa_runs(query, key, value, scores, sequences)


@cache
def _flash_attn_varlen() -> Any:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:  # an optional package
        return None
    return flash_attn_varlen_func


@cache
def _torch_varlen() -> Any:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before PyTorch 2.11
        return None
    return varlen_attn

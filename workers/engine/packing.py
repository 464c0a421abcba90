"""Sequence packing: converts a padded micro-batch to model inputs and outputs back to the (b, R) response matrix.

`pack` puts the tokens of all sequences into one row. It drops padding, repeated prompts (samples of the same prompt
share its tokens) and all tokens after the last predicting position. `pad` is the plain padded form
(`model.use_remove_padding=false`), the reference in the tests of `pack`. `align` is the form for networks in which
other layers than attention mix tokens (`workers.policy.token_mixing`): each sequence has its own row and starts in the
first column, so that padding comes after all tokens that count and no causal layer can see it.

`workers.engine.packed_attention` separates the sequences of a packed row in attention and in stateful layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from verl_lite.schema import Column, column
from workers.engine.packed_sequences import PackedSequences, PromptTrees, moved
from workers.engine.sequence_parallel import SequenceGroup

MIN_SHARED = 0.05  # minimum share of tokens saved for which sharing prompts pays for the extra gathers in attention
MAX_TREE = 1024  # maximum tokens of a row of `PromptTrees`, whose mask takes the square of this number
# The branch of a token in `PromptTrees` is the number of its sequence, or one of these: for tokens of a prompt, and for
# what fills a row after its last token.
_PROMPT = -1
_FILLING = -2


@dataclass(frozen=True, kw_only=True)
class ModelInputs:
    """The inputs of the policy's forward, and the indices that map its outputs to the (b, R) response matrix.

    Attributes:
        input_ids: (1, T) packed, (b, S) padded, (n, L) aligned.
        position_ids: in the shape of input_ids; with images after a first dimension of size 3.
        sequences: sequence boundaries; only in the packed form.
        attention_mask: (b, S); only in the padded form.
        predict_index: (N,) positions in the flattened input that predict a response token.
        targets: (N,) the predicted response tokens.
        rows: (N,) rows of the predicted tokens in the response matrix.
        columns: (N,) columns of the predicted tokens in the response matrix.
        token_index: (b, P+R) position of each token in the flattened input, -1 for tokens that influence no prediction.
            Rows with a shared prompt have the same positions for it.
        response_shape: (b, R).
        num_active: number of entries that count: N, or 0 for a placeholder. A micro-batch with nothing to train still
            runs forward and backward on one predicted token with weight zero, because all ranks must take part in
            collectives.
        extra: values of further columns by name, (T, ...) for the tokens of the flattened input or (N, ...) for the
            predicted tokens; see `with_column`.
        images: keyword arguments of the network with the images of the prompts (`workers.policy.vision`), empty if
            these rows have none; None if the whole batch has none.
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
        sequences = self.sequences
        if sequences is not None:
            sequences = sequences.to(device)
        images = self.images
        if images is not None:
            images = {name: values.to(device) for name, values in images.items()}
        extra = {name: values.to(device) for name, values in self.extra.items()}
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            sequences=sequences,
            attention_mask=moved(self.attention_mask, device),
            predict_index=self.predict_index.to(device),
            targets=self.targets.to(device),
            rows=self.rows.to(device),
            columns=self.columns.to(device),
            token_index=self.token_index.to(device),
            extra=extra,
            images=images,
        )

    @property
    def origin(self) -> torch.Tensor:
        """(T,) flat index in (b, P+R) of each token of the flattened input: of its first row if several rows share it,
        and b * (P+R) if it influences no prediction."""
        positions = self.token_index.flatten()
        used = (positions >= 0).nonzero().squeeze(1)
        no_row = len(positions)
        num_inputs = self.input_ids.numel()
        origin = torch.full((num_inputs,), no_row)
        # the smallest index is that of the first row with the token
        return origin.scatter_reduce(0, positions[used], used, "amin")

    def with_column(self, name: str, values: torch.Tensor) -> ModelInputs:
        """Returns the inputs with the values of one more column in `extra`.

        Args:
            name: a column of `verl_lite.schema`.
            values: (b, R, ...), of which `extra` gets the values of the predicted tokens (N, ...); or (b, P+R, ...), of
                which it gets those of the inputs' tokens (T, ...), and of the first row for a shared prompt.

        Raises:
            ValueError: a column (b, P+R, ...) marks a token of the inputs as absent.
        """
        entry = column(name)
        if entry.is_of_response:
            arranged = self._of_predicted_tokens(entry, values)
        else:
            arranged = self._of_input_tokens(entry, values)
        return replace(self, extra=self.extra | {name: arranged})

    def _of_predicted_tokens(self, entry: Column, values: torch.Tensor) -> torch.Tensor:
        """Selects the values (N, ...) of the predicted tokens from a column (b, R, ...)."""
        # a placeholder has one prediction, and no row for it
        if self.num_active == 0:
            shape = (1, *values.shape[2:])
            return values.new_full(shape, entry.absent or 0)
        return values[self.rows, self.columns]

    def _of_input_tokens(self, entry: Column, values: torch.Tensor) -> torch.Tensor:
        """Selects the values (T, ...) of the tokens of the flattened input from a column (b, P+R, ...)."""
        flat_values = values.flatten(0, 1)
        if entry.absent is not None:
            is_used = self.token_index.flatten() >= 0
            is_absent = flat_values[is_used] == entry.absent
            if is_absent.any():
                problem = f"column {entry.name!r} has no value for a token of the network's input"
                raise ValueError(f"{problem}; see {entry.writer}")

        origin = self.origin
        has_origin = origin < len(flat_values)
        shape = (len(origin), *flat_values.shape[1:])
        arranged = values.new_full(shape, entry.absent or 0)
        arranged[has_origin] = flat_values[origin[has_origin]]
        return arranged

    def shard(self, group: SequenceGroup) -> ModelInputs:
        """Returns this rank's shard of packed inputs: its tokens, and the predictions that it computes.

        The sequence boundaries remain those of the whole row, which attention sees. Tokens that fill up the last shards
        belong to no sequence.
        """
        assert self.sequences is not None
        start, size = group.own_shard(self.sequences.num_tokens)
        end = start + size

        def own_tokens(values: torch.Tensor, fill: int = 0) -> torch.Tensor:
            # all shards have the same size, which the all-to-all around attention needs
            part = values[start:end]
            filling_shape = (size - len(part), *part.shape[1:])
            filling = part.new_full(filling_shape, fill)
            return torch.cat([part, filling])

        own_predictions = (self.predict_index >= start) & (self.predict_index < end)
        rows = self.rows
        columns = self.columns
        # a placeholder has one prediction and no row for it
        if self.num_active:
            rows = rows[own_predictions]
            columns = columns[own_predictions]
        # the shared prompt of a sequence may be on another rank
        is_elsewhere = (self.token_index < start) | (self.token_index >= end)
        token_index = (self.token_index - start).masked_fill(is_elsewhere, -1)

        # columns of input tokens and of predicted tokens have different lengths
        extra = {}
        for name, values in self.extra.items():
            entry = column(name)
            if entry.is_of_response:
                extra[name] = values[own_predictions]
            else:
                extra[name] = own_tokens(values, entry.absent or 0)

        return replace(
            self,
            input_ids=own_tokens(self.input_ids[0]).unsqueeze(0),
            position_ids=own_tokens(self.position_ids[0]).unsqueeze(0),
            sequences=replace(self.sequences, group=group),
            predict_index=self.predict_index[own_predictions] - start,
            targets=self.targets[own_predictions],
            rows=rows,
            columns=columns,
            token_index=token_index,
            extra=extra,
        )

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Sums values over the ranks that share these sequences; the identity without sequence parallelism."""
        sequences = self.sequences
        if sequences is None or sequences.group is None:
            return values
        return sequences.group.sum(values)

    def scatter(self, values: torch.Tensor) -> torch.Tensor:
        """Puts values (N, ...) of the predicted tokens into a (b, R, ...) matrix, zero elsewhere. Differentiable; the
        gradient of a placeholder is zero."""
        zeros = values.new_zeros(*self.response_shape, *values.shape[1:])
        if self.num_active == 0:
            # depends on the values, so that this rank's backward runs through the same layers as the others'
            return zeros + 0 * values.sum(dtype=values.dtype)
        entries = (self.rows, self.columns)
        own_matrix = zeros.index_put(entries, values)
        # with sequence parallelism each rank has put only its predictions into it
        return self.total(own_matrix)


def pack(columns: Mapping[str, torch.Tensor]) -> ModelInputs:
    """Builds the packed form of a micro-batch.

    Padding rows and rows whose response_mask is all 0 contribute no tokens.

    Args:
        columns: input_ids, attention_mask, position_ids (b, P+R), responses, response_mask (b, R), optionally
            is_padding (b,), and prompt_digests (b,), by which prompts differ that have the same tokens.
    """
    mask = _response_mask(columns)
    active = mask.any(dim=1).nonzero().squeeze(1)
    if len(active) == 0:
        only_sequence = _packed_sequences(torch.tensor([2]))
        return _placeholder_inputs(columns, mask, sequences=only_sequence)

    # sorted by length, which makes the runs of equally long sequences long
    used_of_batch = _used_tokens(columns["attention_mask"], mask)
    lengths_of_batch = used_of_batch.sum(dim=1)
    by_length = torch.argsort(lengths_of_batch[active], stable=True)
    order = active[by_length]
    used = used_of_batch[order]
    input_ids = columns["input_ids"][order]
    position_ids = columns["position_ids"][order]

    prompt_width = input_ids.shape[1] - mask.shape[1]
    digests = None
    if "prompt_digests" in columns.keys():
        digests = columns["prompt_digests"][order]

    # of the samples of a prompt, the first one owns it, and the packed row has only the owner's copy
    prompt_ids = input_ids[:, :prompt_width]
    owner = _prompt_owners(prompt_ids, used[:, :prompt_width], digests)
    own = _without_repeated_prompts(used, owner, prompt_width)
    # attention gathers the copies again, which costs more than it saves if few tokens are shared
    shared = 1 - own.sum() / used.sum()
    shares_prompts = bool(shared >= MIN_SHARED)
    if not shares_prompts:
        own = used
        owner = torch.arange(len(owner))

    # (n, P+R) position of each token in the packed row; a shared prompt has the positions of its owner's copy
    packed_positions = own.flatten().cumsum(0) - 1
    position = packed_positions.view(own.shape)
    position[:, :prompt_width] = position[owner, :prompt_width]
    sequences = _packed_sequences(used.sum(dim=1))
    if shares_prompts:
        # the expanded row has all used tokens, the packed row only the own ones among them
        is_packed = own[used]
        sequences = replace(
            sequences,
            expand=position[used],
            collapse=is_packed.nonzero().squeeze(1),
            trees=_prompt_trees(own, used, owner, prompt_width, position),
        )

    return _model_inputs(
        columns,
        mask,
        order,
        used,
        position,
        input_ids=input_ids[own].unsqueeze(0),
        position_ids=position_ids[own].unsqueeze(0),
        sequences=sequences,
    )


def _without_repeated_prompts(used: torch.Tensor, owner: torch.Tensor, prompt_width: int) -> torch.Tensor:
    """Returns (n, P+R) bool, the used tokens without those of prompts that another sequence owns."""
    rows = torch.arange(len(owner))
    is_owner = owner == rows
    own = used.clone()
    own[:, :prompt_width] &= is_owner.unsqueeze(1)
    return own


def is_tree_cheaper(prompts: int, longest: int, scores_of_sequences: int) -> bool:
    """Returns True if attention uses `PromptTrees`.

    Args:
        prompts: Number of different prompts.
        longest: Tokens of the longest row, which contains a prompt and all its answers.
        scores_of_sequences: Scores of attention with a row for each sequence, the sum of the squares of their lengths.
    """
    scores_of_trees = prompts * longest**2
    return longest <= MAX_TREE and scores_of_trees <= scores_of_sequences


def _prompt_trees(
    own: torch.Tensor,
    used: torch.Tensor,
    owner: torch.Tensor,
    prompt_width: int,
    position: torch.Tensor,
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
    # a tree for each prompt, with the tokens that its sequences own
    owners, tree_of_sequence = owner.unique(return_inverse=True)
    num_trees = len(owners)
    sizes = torch.zeros(num_trees, dtype=torch.long)
    own_lengths = own.sum(dim=1)
    sizes.index_add_(0, tree_of_sequence, own_lengths)
    longest = int(sizes.max())
    lengths = used.sum(dim=1)
    scores_of_sequences = int(lengths.square().sum())
    if not is_tree_cheaper(num_trees, longest, scores_of_sequences):
        return None

    # The tokens of the packed row, tree by tree. The owner of a prompt is the first of its sequences, so that a stable
    # order puts the prompt before all answers.
    sequence, token_column = own.nonzero(as_tuple=True)
    tree_of_token = tree_of_sequence[sequence]
    branch_of_token = torch.where(token_column < prompt_width, _PROMPT, sequence)
    position_of_token = position[own]
    order = torch.argsort(tree_of_token, stable=True)
    tree = tree_of_token[order]
    branch = branch_of_token[order]
    packed_position = position_of_token[order]

    # the column of each token in the row of its tree
    first_of_tree = sizes.cumsum(0) - sizes
    column = torch.arange(len(tree)) - first_of_tree[tree]
    index = torch.zeros(num_trees, longest, dtype=torch.long)
    index[tree, column] = packed_position
    flat_positions = torch.empty(len(tree), dtype=torch.long)
    flat_positions[packed_position] = tree * longest + column

    # a token sees the tokens before it of its own answer and of the prompt
    branches = torch.full((num_trees, longest), _FILLING)
    branches[tree, column] = branch
    is_of_same_branch = branches.unsqueeze(2) == branches.unsqueeze(1)
    is_of_prompt = (branches == _PROMPT).unsqueeze(1)
    is_before = torch.ones(longest, longest, dtype=torch.bool).tril()
    mask = (is_of_same_branch | is_of_prompt) & is_before
    return PromptTrees(index, mask.unsqueeze(1), flat_positions)


def _used_tokens(attention_mask: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Returns (b, P+R) bool: the real tokens before the last predicted token. Later tokens influence no prediction."""
    width = attention_mask.shape[1]
    response_width = response_mask.shape[1]
    prompt_width = width - response_width
    # the response column after the last token that counts; 0 for a row without any
    next_columns = torch.arange(1, response_width + 1)
    after_last = (next_columns * response_mask).amax(dim=1, keepdim=True)
    # without the last predicted token itself, which predicts nothing
    end = prompt_width + after_last - 1
    is_before_last = torch.arange(width) < end
    return attention_mask.bool() & is_before_last


def _prompt_owners(prompt_ids: torch.Tensor, real: torch.Tensor, digests: torch.Tensor | None) -> torch.Tensor:
    """Returns the index (n,) of the first row with the same prompt, for each row.

    Args:
        prompt_ids: (n, P) tokens.
        real: (n, P) bool, False in the padding.
        digests: (n,) numbers that are also equal for the same prompt.
    """
    # padding may contain any token
    keys = prompt_ids.masked_fill(~real, -1)
    # prompts with different images can have equal tokens
    if digests is not None:
        keys = torch.cat([keys, digests.unsqueeze(1)], dim=1)

    # as bytes, by which a dictionary finds equal rows in one pass
    first_row_with: dict[bytes, int] = {}
    owners = []
    for row, key in enumerate(keys.cpu().numpy()):
        owner = first_row_with.setdefault(key.tobytes(), row)
        owners.append(owner)
    return torch.tensor(owners)


def pad(columns: Mapping[str, torch.Tensor]) -> ModelInputs:
    """Builds the padded form of a micro-batch, the reference in the tests of `pack`. Arguments as in `pack`."""
    mask = _response_mask(columns)
    is_active = mask.any(dim=1, keepdim=True)
    if not is_active.any():
        both_real = torch.ones(1, 2, dtype=torch.long)
        return _placeholder_inputs(columns, mask, attention_mask=both_real)

    # every token keeps its place, so that the forward sees the micro-batch as it is
    used = _used_tokens(columns["attention_mask"], mask) & is_active
    order = torch.arange(len(mask))
    position = torch.arange(used.numel()).view(used.shape)
    # the model may have no embedding for the tokenizer's pad token, which was added to the tokenizer alone
    is_padding = columns["attention_mask"] == 0
    input_ids = columns["input_ids"].masked_fill(is_padding, 0)
    return _model_inputs(
        columns,
        mask,
        order,
        used,
        position,
        input_ids=input_ids,
        position_ids=columns["position_ids"],
        attention_mask=columns["attention_mask"],
    )


def align(columns: Mapping[str, torch.Tensor]) -> ModelInputs:
    """Builds the aligned form of a micro-batch: each sequence in its own row from the first column on, with the tokens
    that `pack` keeps. Arguments as in `pack`."""
    mask = _response_mask(columns)
    active = mask.any(dim=1).nonzero().squeeze(1)
    if len(active) == 0:
        return _placeholder_inputs(columns, mask)

    used_of_batch = _used_tokens(columns["attention_mask"], mask)
    used = used_of_batch[active]
    num_rows = len(active)
    # the used tokens of a row move to its beginning; columns of other tokens have no meaning
    new_column = used.cumsum(dim=1) - 1
    longest = int(new_column.max()) + 1
    first_of_row = torch.arange(num_rows).unsqueeze(1) * longest
    position = first_of_row + new_column

    # of the used tokens alone, in the flattened input
    new_positions = position[used]
    ids_of_rows = columns["input_ids"][active]
    input_ids = ids_of_rows.new_zeros(num_rows, longest)
    input_ids.view(-1)[new_positions] = ids_of_rows[used]

    # also consecutive in the padding
    position_ids = torch.arange(longest).repeat(num_rows, 1)
    positions_of_rows = columns["position_ids"][active]
    position_ids.view(-1)[new_positions] = positions_of_rows[used]
    return _model_inputs(columns, mask, active, used, position, input_ids=input_ids, position_ids=position_ids)


def _model_inputs(
    columns: Mapping[str, torch.Tensor],
    mask: torch.Tensor,
    order: torch.Tensor,
    used: torch.Tensor,
    position: torch.Tensor,
    *,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    sequences: PackedSequences | None = None,
    attention_mask: torch.Tensor | None = None,
) -> ModelInputs:
    """Builds the inputs of some rows of a micro-batch.

    Args:
        columns: the micro-batch.
        mask: (b, R) bool, the tokens to predict.
        order: (n,) the rows, in the order of the inputs.
        used: (n, P+R) True for tokens that influence a prediction.
        position: (n, P+R) their positions in the flattened input.
        input_ids, position_ids, sequences, attention_mask: fields of the inputs in one of the three forms.
    """
    ordered_rows, response_columns = mask[order].nonzero(as_tuple=True)
    batch_rows = order[ordered_rows]
    prompt_width = position.shape[1] - mask.shape[1]
    # a token is predicted at the position of the token before it
    token_columns = prompt_width + response_columns
    predict_index = position[ordered_rows, token_columns - 1]
    token_index = torch.full_like(columns["input_ids"], -1)
    token_index[order] = position.masked_fill(~used, -1)
    return ModelInputs(
        input_ids=input_ids,
        position_ids=position_ids,
        sequences=sequences,
        attention_mask=attention_mask,
        predict_index=predict_index,
        targets=columns["responses"][batch_rows, response_columns],
        rows=batch_rows,
        columns=response_columns,
        token_index=token_index,
        response_shape=(mask.shape[0], mask.shape[1]),
        num_active=len(batch_rows),
    )


def _response_mask(columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Returns the response_mask (b, R) as bool, False in padding rows."""
    mask = columns["response_mask"].bool()
    if "is_padding" in columns.keys():
        mask = mask & ~columns["is_padding"].unsqueeze(1)
    return mask


def _packed_sequences(lengths: torch.Tensor) -> PackedSequences:
    """Builds the boundaries from the lengths (n,) of the sequences in packing order."""
    lengths_of_runs, counts = torch.unique_consecutive(lengths, return_counts=True)
    runs = zip(counts.tolist(), lengths_of_runs.tolist(), strict=True)
    # 0 and the end of each sequence; int32, as the kernels of flash-attn expect
    bounds = F.pad(lengths.cumsum(0), (1, 0))
    cu_seqlens = bounds.to(torch.int32)
    longest = int(lengths.max())
    return PackedSequences(tuple(runs), cu_seqlens, longest)


def _placeholder_inputs(
    columns: Mapping[str, torch.Tensor],
    mask: torch.Tensor,
    *,
    sequences: PackedSequences | None = None,
    attention_mask: torch.Tensor | None = None,
) -> ModelInputs:
    """Builds a placeholder with two tokens and one prediction of weight zero. Arguments as in `_model_inputs`."""
    # two tokens: the first one predicts the second one
    empty = torch.zeros(0, dtype=torch.long)
    return ModelInputs(
        input_ids=torch.zeros(1, 2, dtype=torch.long),
        position_ids=torch.arange(2).unsqueeze(0),
        sequences=sequences,
        attention_mask=attention_mask,
        predict_index=torch.zeros(1, dtype=torch.long),
        targets=torch.zeros(1, dtype=torch.long),
        rows=empty,
        columns=empty,
        token_index=torch.full_like(columns["input_ids"], -1),
        response_shape=(mask.shape[0], mask.shape[1]),
        num_active=0,
    )

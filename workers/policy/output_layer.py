"""The output layer of a policy: log-probs, entropies and most probable tokens from hidden states.

Logits are computed in tiles of some tokens and a part of the vocabulary, and recomputed in the backward pass, so the
memory for logits depends neither on the number of tokens nor on the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from workers.policy.logit_tiles import LogitTiles
from workers.policy.logit_transform import PLAIN_LOGITS, LogitTransform
from workers.policy.tile_functions import TILE_FUNCTIONS, TileFunctions

# Logits up to this size are saved for the backward pass instead of recomputed, which is faster.
KEPT_LOGITS_BYTES = 32 << 20
# Up to three tiles of logits are in memory at a time; compiled, one and a half. On a CPU a tile stays in the caches.
TILE_BYTES = {"cpu": 16 << 20, "cuda": 96 << 20, "cuda, compiled": 240 << 20}
FINITE_LOGIT = -1e30  # replaces -inf in the entropy, which multiplies the logit by its probability 0


def output_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes hidden @ weight.T + bias, (N, V) in fp32 (fp64 for fp64 inputs), without gradient.

    Products of bf16 numbers are summed in fp32 and not rounded to bf16: bf16 numbers around 16, and therefore log-probs
    computed from them, have a resolution of only 0.125.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.dtype != dtype and has_wide_products(hidden.device):
        logits = torch.mm(hidden, weight.t(), out_dtype=dtype)
        if bias is not None:
            logits = logits.add_(bias)
        return logits

    if bias is not None:
        bias = bias.to(dtype)
    return F.linear(hidden.to(dtype), weight.to(dtype), bias)


def has_wide_products(device: torch.device) -> bool:
    """Returns True if `torch.mm` on this device can multiply bf16 matrices into an fp32 result (`out_dtype`)."""
    return device.type == "cuda"


class TokenStatistics(NamedTuple):
    """Statistics of softmax(logits / temperature) at N tokens, in fp32 (fp64 for fp64 inputs).

    Attributes:
        log_probs: log-probs of the targets, in their shape (N,) or (N, M).
        entropys: (N,) entropies in nats.
        sum_pi_squared: (N,) sums of p^2 over the vocabulary, without gradient.
    """

    log_probs: torch.Tensor
    entropys: torch.Tensor | None
    sum_pi_squared: torch.Tensor | None


def token_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    calculate_entropy: bool,
    calculate_sum_pi_squared: bool = False,
    transform: LogitTransform = PLAIN_LOGITS,
    functions: TileFunctions = TILE_FUNCTIONS,
    candidates: torch.Tensor | None = None,
) -> TokenStatistics:
    """Computes the statistics of the logits transform(hidden @ weight.T + bias) / temperature.

    Args:
        hidden: (N, H) hidden states.
        weight: (V, H) weight of the output layer.
        bias: (V,) bias of the output layer, or None.
        targets: (N,) or (N, M) tokens whose log-probs to compute.
        temperature: divides the transformed logits.
        chunk_tokens: maximum number of tokens in a tile of logits.
        calculate_entropy: whether to compute entropies.
        calculate_sum_pi_squared: whether to compute sums of squared probabilities.
        transform: the model's transform of its logits.
        functions: TILE_FUNCTIONS, or compiled forms.
        candidates: (N, C) tokens that the distribution of each row is restricted to; -1 where there are fewer; rows of
            -1 are not restricted.
    """
    options = _Options(
        transform.divided_by(temperature), chunk_tokens, calculate_entropy, calculate_sum_pi_squared, functions
    )
    targets_of_rows = targets if targets.ndim == 2 else targets.unsqueeze(1)  # (N, M)
    log_probs, entropys, squares = _TokenLogProbs.apply(hidden, weight, bias, targets_of_rows, candidates, options)
    # an autograd function returns tensors only, which are empty for what was not calculated
    if not calculate_entropy:
        entropys = None
    if not calculate_sum_pi_squared:
        squares = None
    return TokenStatistics(log_probs.view(targets.shape), entropys, squares)


@torch.no_grad()
def top_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    k: int,
    transform: LogitTransform,
    chunk_tokens: int,
    candidates: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Computes the k most probable tokens of softmax(transform(hidden @ weight.T + bias)), most probable first.

    Args:
        hidden: (N, H) hidden states.
        weight: (V, H) weight of the output layer.
        bias: (V,) bias of the output layer, or None.
        k: number of tokens; at most V.
        transform: the transform of the logits, including the division by the temperature.
        chunk_tokens: maximum number of tokens in a tile of logits.
        candidates: see `token_log_probs`.

    Returns:
        `ids` int32 and `log_probs`, both (N, k).
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    no_targets = hidden.new_empty(len(hidden), 0, dtype=torch.long)
    tile_bytes = TILE_BYTES[hidden.device.type]
    tiles = LogitTiles(no_targets, len(weight), dtype.itemsize, chunk_tokens, tile_bytes, KEPT_LOGITS_BYTES)
    logits = _Logits(hidden, weight, bias, transform, candidates)
    shape = len(hidden), min(k, len(weight))
    top_ids = hidden.new_empty(shape, dtype=torch.int32)
    top_values = hidden.new_empty(shape, dtype=dtype)
    for rows in tiles.rows:
        ids, values = _top_of_rows(logits, rows, tiles.columns, k)
        top_ids[rows] = ids.int()
        top_values[rows] = values
    return {"ids": top_ids, "log_probs": top_values}


def _top_of_rows(logits: _Logits, rows: slice, tiles: list[slice], k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the k most probable tokens (n, k) of some rows, most probable first, and their log-probs.

    Args:
        logits: the logits of all rows.
        rows: the rows.
        tiles: parts that make up the vocabulary.
        k: number of tokens; all tokens if the vocabulary has fewer.
    """
    dtype = torch.promote_types(logits.hidden.dtype, torch.float32)
    num_rows = rows.stop - rows.start
    best_logits = logits.hidden.new_empty(num_rows, 0, dtype=dtype)
    best_ids = best_logits.long()
    normalizers = []
    for columns in tiles:
        tile = logits.tile(rows, columns)
        normalizers.append(tile.logsumexp(dim=1))
        num_in_tile = min(k, tile.shape[1])
        tile_logits, tile_columns = tile.topk(num_in_tile, dim=1)
        tile_ids = tile_columns + columns.start

        # the best of this tile and of the tiles before it
        merged_logits = torch.cat([best_logits, tile_logits], dim=1)
        merged_ids = torch.cat([best_ids, tile_ids], dim=1)
        num_best = min(k, merged_logits.shape[1])
        best_logits, order = merged_logits.topk(num_best, dim=1)
        best_ids = merged_ids.gather(1, order)

    normalizer_of_vocabulary = torch.stack(normalizers).logsumexp(dim=0)
    return best_ids, best_logits - normalizer_of_vocabulary.unsqueeze(1)


@dataclass(frozen=True)
class _Logits:
    """The transformed logits of N tokens, computed tile by tile.

    Attributes:
        hidden: (N, H).
        weight: (V, H).
        bias: (V,) or None.
        transform: applied to hidden @ weight.T + bias.
        candidates: (N, C) or None, see `token_log_probs`.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    transform: LogitTransform
    candidates: torch.Tensor | None

    def tile(self, rows: slice, columns: slice) -> torch.Tensor:
        """Returns one tile. Entries of -inf, which a bias can contain, and tokens outside a row's candidate set become
        FINITE_LOGIT."""
        bias = None if self.bias is None else self.bias[columns]
        plain = output_logits(self.hidden[rows], self.weight[columns], bias)
        logits = self.transform(plain)
        if bias is not None:
            logits = logits.clamp_(min=FINITE_LOGIT)
        if self.candidates is None:
            return logits

        candidates = self.candidates[rows]
        width = logits.shape[1]
        columns_in_tile = candidates.long() - columns.start
        is_inside = (columns_in_tile >= 0) & (columns_in_tile < width)
        index = columns_in_tile.where(is_inside, 0)
        candidate_logits = logits.gather(1, index).where(is_inside, FINITE_LOGIT)

        # first exclude all tokens of the restricted rows, then put the candidates back
        is_restricted = (candidates >= 0).any(dim=1, keepdim=True)
        logits = logits.masked_fill_(is_restricted, FINITE_LOGIT)
        # candidates outside the tile write FINITE_LOGIT to its first column, which must not replace a candidate's
        # logit: maximum
        return logits.scatter_reduce_(1, index, candidate_logits, "amax")


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Adds left @ right to `total`; products of bf16 numbers are summed in fp32 if `total` is fp32."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif has_wide_products(total.device):
        product = torch.mm(left, right, out_dtype=total.dtype)
        total.add_(product)
    else:
        total.add_(left @ right)


@dataclass(frozen=True)
class _Options:
    """The arguments of `token_log_probs` that are not tensors. `transform` includes the division by the temperature."""

    transform: LogitTransform
    chunk_tokens: int
    calculate_entropy: bool
    calculate_sum_pi_squared: bool
    functions: TileFunctions

    def tile_bytes(self, device: torch.device) -> int:
        """Returns the size of a tile on `device`."""
        if device.type == "cpu":
            return TILE_BYTES["cpu"]
        if self.functions is TILE_FUNCTIONS:
            return TILE_BYTES["cuda"]
        return TILE_BYTES["cuda, compiled"]


class _TileResults(NamedTuple):
    """Results of all tiles.

    Attributes:
        at_targets: (M, N) logits of the targets.
        statistics: (1 to 3, tiles of the vocabulary, N) what `tile_statistics` returns after the targets' logits: the
            normalizers, and with their options the mean logits and the sums of squares.
        last_tile: the logits of the last tile.
    """

    at_targets: torch.Tensor
    statistics: torch.Tensor
    last_tile: torch.Tensor


def _results_of_tiles(logits: _Logits, targets: torch.Tensor, tiles: LogitTiles, options: _Options) -> _TileResults:
    """Runs `tile_statistics` on each tile, with the targets (N, M) that it contains."""
    num_tokens, num_targets = targets.shape
    hidden = logits.hidden
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    calculated = (options.calculate_entropy, options.calculate_sum_pi_squared)
    num_statistics = 1 + sum(calculated)

    # The logit of a target is needed from the one tile that contains it. Of single targets, `values` of all tiles is
    # stored, and the right one selected at the end in one step. Of several targets, which would need more memory, the
    # right one is added up tile by tile.
    has_single_targets = tiles.inside is not None
    num_stored = num_statistics + int(has_single_targets)
    stored = hidden.new_empty(num_stored, len(tiles.columns), num_tokens, dtype=dtype)
    at_targets = hidden.new_zeros(num_targets, num_tokens, dtype=dtype)
    tile = hidden.new_empty(0, dtype=dtype)
    for number, columns in enumerate(tiles.columns):
        for rows in tiles.rows:
            tile = logits.tile(rows, columns)
            index, inside = tiles.targets_in(number, rows)
            # the logits at the targets' columns, and the statistics after them
            values = options.functions["tile_statistics"](tile, index, *calculated)
            stored[:, number, rows] = values[-num_stored:]
            if not has_single_targets:
                at_targets[:, rows] += values[:num_targets].where(inside.t(), 0)
    if tiles.inside is not None:
        in_tiles = stored[:1].where(tiles.inside.squeeze(2), 0)
        at_targets = in_tiles.sum(dim=1)
    return _TileResults(at_targets, stored[-num_statistics:], tile)


@dataclass(frozen=True)
class _LogitGradients:
    """The gradient of the logits, computed tile by tile; see `tile_gradient` for its formula.

    Attributes:
        logits: the logits, which are computed again unless they were kept.
        kept_logits: the logits, if they are one tile.
        normalizers: (N,).
        slope: (N,).
        offset: (N,) or None.
        grad_log_probs: (N, M) gradient of the log-probs.
        at_targets: (tiles of the vocabulary, N, 1) grad_log_probs where the target is in the tile; None unless M = 1.
        dtype: dtype of the tiles.
    """

    logits: _Logits
    kept_logits: torch.Tensor
    normalizers: torch.Tensor
    slope: torch.Tensor
    offset: torch.Tensor | None
    grad_log_probs: torch.Tensor
    at_targets: torch.Tensor | None
    dtype: torch.dtype

    def tile(self, tiles: LogitTiles, number: int, rows: slice, functions: TileFunctions) -> torch.Tensor:
        """Returns the gradient of the logits of `rows` in a tile of the vocabulary, before the model's transform."""
        tile = self.kept_logits if tiles.keep else self.logits.tile(rows, tiles.columns[number])
        index, inside = tiles.targets_in(number, rows)
        if self.at_targets is None:
            at_target = inside * self.grad_log_probs[rows]
        else:
            at_target = self.at_targets[number, rows]
        offset = None if self.offset is None else self.offset[rows]
        return functions["tile_gradient"](
            tile,
            self.normalizers[rows],
            self.slope[rows],
            offset,
            index,
            at_target,
            self.logits.transform,
            self.dtype,
        )


def _input_gradients(
    gradients: _LogitGradients,
    tiles: LogitTiles,
    functions: TileFunctions,
    weight_learns: bool,
    bias_learns: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Computes the gradients of hidden states, weight and bias from those of the logits, tile by tile.

    Args:
        gradients: the gradients of the logits.
        tiles: the tiles.
        functions: TILE_FUNCTIONS, or compiled forms.
        weight_learns: False skips the gradient of the weight, which is then None.
        bias_learns: False skips the gradient of the bias, which is then None.
    """
    hidden = gradients.logits.hidden
    weight = gradients.logits.weight
    bias = gradients.logits.bias
    dtype = gradients.normalizers.dtype

    # sums over tiles need fp32; a weight in bf16 is added to in fp32 for one part of the vocabulary at a time
    grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    grad_weight = torch.zeros_like(weight) if weight_learns else None
    grad_bias = None
    if bias is not None and bias_learns:
        grad_bias = torch.zeros(bias.shape, dtype=dtype, device=bias.device)

    for number, columns in enumerate(tiles.columns):
        # of an fp32 weight a view, into which the products are added; of a bf16 weight a copy, written back below
        grad_columns = None if grad_weight is None else grad_weight[columns].to(dtype)
        for rows in tiles.rows:
            gradient = gradients.tile(tiles, number, rows, functions)
            # its sum over the tokens needs fp32
            if grad_bias is not None:
                grad_bias[columns] += gradient.sum(dim=0)
                gradient = gradient.to(hidden.dtype)
            _add_product(grad_hidden[rows], gradient, weight[columns])
            if grad_columns is not None:
                _add_product(grad_columns, gradient.t(), hidden[rows])
        if grad_weight is not None and grad_columns is not None and grad_columns.dtype != weight.dtype:
            grad_weight[columns] = grad_columns

    if bias is not None and grad_bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    return grad_hidden.to(hidden.dtype), grad_weight, grad_bias


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        candidates: torch.Tensor | None,
        options: _Options,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        tile_bytes = options.tile_bytes(hidden.device)
        tiles = LogitTiles(targets, len(weight), dtype.itemsize, options.chunk_tokens, tile_bytes, KEPT_LOGITS_BYTES)
        logits = _Logits(hidden, weight, bias, options.transform, candidates)
        at_targets, statistics, last_tile = _results_of_tiles(logits, targets, tiles, options)

        # the statistics of softmax over the vocabulary from those over the tiles, in place
        tile_normalizers, *others = statistics
        normalizers = tile_normalizers.logsumexp(dim=0)
        # share of each tile in the probability
        tile_shares = (tile_normalizers - normalizers).exp_()
        log_probs = (at_targets - normalizers).t().contiguous()
        empty = log_probs.new_empty(0)
        entropys = empty
        squares = empty
        if options.calculate_entropy:
            mean_logits = others[0].mul_(tile_shares).sum(dim=0)
            entropys = normalizers - mean_logits
        # last, because it overwrites the shares
        if options.calculate_sum_pi_squared:
            squares = others[-1].mul_(tile_shares.square_()).sum(dim=0)

        kept_logits = last_tile if tiles.keep else empty
        ctx.save_for_backward(hidden, weight, bias, normalizers, entropys, kept_logits, candidates)
        ctx.tiles = tiles
        ctx.options = options
        ctx.mark_non_differentiable(squares)
        return log_probs, entropys, squares

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, normalizers, entropys, kept_logits, candidates = ctx.saved_tensors
        grad_log_probs, grad_entropys, _ = grad_outputs
        # False for a model with an adapter, whose output layer is frozen
        _, weight_learns, bias_learns, *_ = ctx.needs_input_grad
        options: _Options = ctx.options
        tiles: LogitTiles = ctx.tiles

        # d log_prob / d z_j = [j is target] - p_j;  d entropy / d z_j = -p_j (z_j - normalizer + entropy)
        slope = -grad_log_probs.sum(dim=1)
        offset = None
        if options.calculate_entropy:
            offset = grad_entropys * (normalizers - entropys) + slope
            slope = -grad_entropys
        at_targets = None if tiles.inside is None else tiles.inside * grad_log_probs
        gradients = _LogitGradients(
            logits=_Logits(hidden, weight, bias, options.transform, candidates),
            kept_logits=kept_logits,
            normalizers=normalizers,
            slope=slope,
            offset=offset,
            grad_log_probs=grad_log_probs,
            at_targets=at_targets,
            dtype=normalizers.dtype if bias_learns else hidden.dtype,
        )
        input_gradients = _input_gradients(gradients, tiles, options.functions, weight_learns, bias_learns)
        return *input_gradients, None, None, None

"""A Hugging Face causal language model as a policy: log-probs and entropies of response tokens from hidden states.

The backbone runs once over the (packed) tokens. The output layer is applied in chunks, and only to positions that
predict a response token, so the logits of the whole batch never exist at once. Logits are computed in tiles of some
tokens and a part of the vocabulary, and recomputed in the backward pass, so the memory for logits
depends neither on the number of tokens nor on the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from verl_lite.config import ModelConfig
from verl_lite.errors import UserError
from verl_lite.schema import SAMPLING_CANDIDATES
from workers.engine.packing import ModelInputs
from workers.policy.adapter import add_adapter
from workers.policy.loading import NetworkSpec, Policy, PolicyBuilder, build_network
from workers.policy.model_errors import user_error_on_failure
from workers.policy.router import ROUTED_EXPERTS, Routers, load_balancing_loss, replay_counts
from workers.policy.vision import placeholder_ids

TEACHER_IDS = "teacher_ids"

# Logits up to this size are saved for the backward pass instead of recomputed, which is faster.
KEPT_LOGITS_BYTES = 32 << 20
# Up to three tiles of logits are in memory at a time; compiled, one and a half. On a CPU a tile stays in the caches.
TILE_BYTES = {"cpu": 16 << 20, "cuda": 96 << 20, "cuda, compiled": 240 << 20}
FINITE_LOGIT = -1e30  # replaces -inf in the entropy, which multiplies the logit by its probability 0

_REMEDY = "choose a model whose logits are a linear layer of its last hidden states, scaled and soft-capped at most"


class LogitTransform(NamedTuple):
    """A model's transform of its output layer's logit z: cap * tanh(scale * z / cap), or scale * z without a cap."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Transforms the logits in place."""
        logits = logits if self.scale == 1.0 else logits.mul_(self.scale)
        return logits if self.cap is None else logits.div_(self.cap).tanh_().mul_(self.cap)

    def divided_by(self, temperature: float) -> LogitTransform:
        """Returns this transform followed by a division by `temperature`."""
        inverse = 1.0 / temperature
        return LogitTransform(self.scale * inverse, None if self.cap is None else self.cap * inverse)

    def backward(self, gradient: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Computes the gradient of z from the gradient of the transformed logits, in place."""
        if self.cap is not None:
            # a logit below the cap is FINITE_LOGIT, whose square would be infinite and its gradient of 0 a NaN
            gradient = gradient.addcmul_(gradient, (logits / self.cap).clamp_(min=-1.0).square_(), value=-1.0)
        return gradient if self.scale == 1.0 else gradient.mul_(self.scale)


PLAIN_LOGITS = LogitTransform()


class CausalLMPolicy(Policy):
    """The policy network.

    model: a `...ForCausalLM`. Its parameters have the prefix `model.`, followed by their Hugging Face names.
    chunk_tokens: maximum number of tokens in a tile of logits, if all logits need over KEPT_LOGITS_BYTES.
    routers: the routers of the model, if the forward needs them.
    vocab_size: number of tokens with a probability, for a teacher with more tokens than its student; None = all.
    Raises UserError if the model's transform of its logits is no `LogitTransform`.
    """

    extra_inputs = (*Policy.extra_inputs, ROUTED_EXPERTS, SAMPLING_CANDIDATES, TEACHER_IDS)

    def __init__(
        self,
        model: PreTrainedModel,
        chunk_tokens: int,
        routers: Routers | None = None,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.logit_transform = logit_transform(model)
        self.chunk_tokens = chunk_tokens
        self.routers = routers
        self.functions = TILE_FUNCTIONS
        size = model.config.get_text_config().vocab_size
        self.excluded_tokens = (*placeholder_ids(model.config), *range(vocab_size or size, size))

    def forward(
        self,
        inputs: ModelInputs,
        temperature: float,
        calculate_entropy: bool,
        calculate_sum_pi_squared: bool = False,
        calculate_router_aux_loss: bool = False,
        count_router_replay: bool = False,
        calculate_topk: int = 0,
    ) -> dict[str, torch.Tensor]:
        """Computes log_probs (b, R) and the outputs whose option is True, 0 at tokens that are not predicted.

        entropys and sum_pi_squared (b, R): see `TokenStatistics`. With the column sampling_candidates, these and the
        log-probs are those of the distribution over the candidates of each token. router_aux_loss (b,): see
        `load_balancing_loss`. router_replay (b, 2): see `replay_counts`. topk_ids and topk_log_probs (b, R, K), without
        gradient: the `calculate_topk` most probable tokens. If the batch has the column teacher_ids (b, R, K),
        log_probs_at_ids (b, R, K) are the log-probs of these tokens.
        """
        outputs = {}
        if self.routers is None:
            hidden = self.hidden_states(inputs)
        else:
            with self.routers.watched(inputs.extra.get(ROUTED_EXPERTS)) as routes:
                hidden = self.hidden_states(inputs)
            if calculate_router_aux_loss:
                outputs["router_aux_loss"] = load_balancing_loss(routes, inputs)
            if count_router_replay:
                outputs["router_replay"] = replay_counts(routes, inputs)
        hidden = hidden.flatten(0, 1).index_select(0, inputs.predict_index)
        head = self.model.get_output_embeddings()
        bias, targets, ids = self._output_bias(head), inputs.targets, inputs.extra.get(TEACHER_IDS)
        if calculate_topk:
            divided = self.logit_transform.divided_by(temperature)
            options = (calculate_topk, divided, self.chunk_tokens, inputs.extra.get(SAMPLING_CANDIDATES))
            found = top_log_probs(hidden, head.weight, bias, *options)
            outputs |= {f"topk_{name}": inputs.scatter(value) for name, value in found.items()}
        statistics = token_log_probs(
            hidden,
            head.weight,
            bias,
            targets if ids is None else torch.cat([targets.unsqueeze(1), ids], dim=1),
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            calculate_entropy=calculate_entropy,
            calculate_sum_pi_squared=calculate_sum_pi_squared,
            transform=self.logit_transform,
            functions=self.functions,
            candidates=inputs.extra.get(SAMPLING_CANDIDATES),
        )
        named = statistics._asdict()
        if ids is not None:
            named |= {"log_probs": statistics.log_probs[:, 0], "log_probs_at_ids": statistics.log_probs[:, 1:]}
        return {name: inputs.scatter(value) for name, value in named.items() if value is not None} | outputs

    def _output_bias(self, head: Any) -> torch.Tensor | None:
        """The bias of the output layer: -inf for tokens that the rollout engines never sample."""
        bias: torch.Tensor | None = getattr(head, "bias", None)
        if not self.excluded_tokens:
            return bias
        bias = torch.zeros(len(head.weight), device=head.weight.device) if bias is None else bias
        return bias.index_fill(0, torch.tensor(self.excluded_tokens, device=bias.device), -torch.inf)


def causal_lm(chunk_tokens: int, with_routers: bool = False, vocab_size: int | None = None) -> PolicyBuilder:
    """Returns a builder of a `CausalLMPolicy`, which adds an adapter if `model.lora_rank` is above 0.

    chunk_tokens: maximum number of tokens in a tile of logits. with_routers: the forward needs the routers. vocab_size:
    see `CausalLMPolicy`.
    """

    def build(spec: NetworkSpec) -> CausalLMPolicy:
        model = build_network(AutoModelForCausalLM, spec)
        policy = CausalLMPolicy(model, chunk_tokens, Routers(model) if with_routers else None, vocab_size)
        if isinstance(spec.model, ModelConfig) and spec.model.lora_rank > 0:
            policy.adapter = add_adapter(policy.model, spec.model)
        return policy

    return build


class _Outputs:
    """Outputs of a backbone with hidden states only; all other attributes are None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.last_hidden_state


@torch.no_grad()
def logit_transform(model: PreTrainedModel) -> LogitTransform:
    """Determines the logit transform of `model` by running its forward with known hidden states and known logits.

    Backbone and output layer are replaced during the run, so the model's parameters are not read.

    Raises UserError if the output layer does not receive the hidden states, or if the model applies more than a scale
    and a soft cap to the logits: log-probs computed here would then be those of another distribution.
    """
    backbone, head = model.base_model, model.get_output_embeddings()
    hidden = torch.arange(8.0).view(1, 1, 8)  # exact in each dtype: some networks cast it to the dtype of their weights
    points = 2.0 ** torch.arange(-10, 41, dtype=torch.float64)
    given = torch.cat([-points, points])[None, None]
    seen: list[torch.Tensor] = []

    def known(states: torch.Tensor) -> torch.Tensor:
        seen.append(states)
        return given.clone()

    try:
        backbone.forward, head.forward = lambda *args, **kwargs: _Outputs(hidden), known
        problem = f"model.path: the transform of the logits of a {type(model).__name__} cannot be determined"
        with user_error_on_failure(problem, _REMEDY):
            found = model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits.double()
    finally:
        del backbone.forward, head.forward
    scale = float(found[0, 0, len(points)] / points[0])
    largest = float(found[0, 0, -1])
    cap = largest if largest < 0.5 * scale * float(points[-1]) else None
    transform = LogitTransform(1.0 if abs(scale - 1.0) < 1e-6 else scale, cap)
    is_plain = len(seen) == 1 and torch.equal(seen[0].float(), hidden)
    if not is_plain or not torch.allclose(transform(given.clone()), found, rtol=1e-5, atol=0.0):
        raise UserError(
            f"model.path: a {type(model).__name__} transforms its hidden states or logits by more than a scale and a "
            f"soft cap; {_REMEDY}"
        )
    return transform


def output_logits(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Computes hidden @ weight.T + bias, (N, V) in fp32 (fp64 for fp64 inputs), without gradient.

    Products of bf16 numbers are summed in fp32 and not rounded to bf16: bf16 numbers around 16, and therefore log-probs
    computed from them, have a resolution of only 0.125.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    if hidden.dtype != dtype and has_wide_products(hidden.device):
        logits = torch.mm(hidden, weight.t(), out_dtype=dtype)
        return logits if bias is None else logits.add_(bias)
    return F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


def has_wide_products(device: torch.device) -> bool:
    """True if `torch.mm` on this device can multiply bf16 matrices into an fp32 result (`out_dtype`)."""
    return device.type == "cuda"


class TokenStatistics(NamedTuple):
    """Statistics of softmax(logits / temperature) at N tokens, each (N,) in fp32 (fp64 for fp64 inputs): log-probs of
    the targets, in their shape (N,) or (N, M), entropies in nats, and sums of p^2 over the vocabulary, without
    gradient."""

    log_probs: torch.Tensor
    entropys: torch.Tensor | None
    sum_pi_squared: torch.Tensor | None


def tile_statistics(
    logits: torch.Tensor, index: torch.Tensor, calculate_entropy: bool, calculate_sum_pi_squared: bool
) -> torch.Tensor:
    """Computes statistics of softmax(logits) over the columns of a tile of logits (n, v).

    index: (n, M) columns. Returns (M + 1 to M + 3, n): the logits in the columns `index`, the logarithm of the
    normalizer, and with their options the mean of the logits and the sum of squared probabilities.
    """
    peak = logits.amax(dim=1)
    picked = logits.gather(1, index)
    scores = (logits - peak.unsqueeze(1)).exp_()
    total = scores.sum(dim=1)
    found = [peak + total.log()]
    squares = [scores.square().sum(dim=1) / total.square()] if calculate_sum_pi_squared else []
    if calculate_entropy:
        found.append(scores.mul_(logits).sum(dim=1) / total)
    return torch.cat([picked.t(), *(values.unsqueeze(0) for values in found + squares)])


def tile_gradient(
    logits: torch.Tensor,
    normalizers: torch.Tensor,
    slope: torch.Tensor,
    offset: torch.Tensor | None,
    index: torch.Tensor,
    at_target: torch.Tensor,
    transform: LogitTransform,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Computes p_j (slope z_j + offset) + [j = index] at_target for a tile (n, v) of transformed logits z, where p_j is
    exp(z_j - normalizer), and from this the gradient of the logits before `transform`. Without an offset: p_j slope.
    index and at_target have the shape (n, M), the other tensors (n,). Returns (n, v) in `dtype`.
    """
    gradient = (logits - normalizers.unsqueeze(1)).exp_()
    if offset is None:
        gradient.mul_(slope.unsqueeze(1))
    else:
        gradient.mul_(torch.addcmul(offset.unsqueeze(1), slope.unsqueeze(1), logits))
    if torch.compiler.is_compiling() and index.shape[1] == 1:  # a comparison is fused with the rest, unlike a scatter
        is_target = torch.arange(logits.shape[1], device=logits.device) == index
        gradient = gradient + is_target * at_target
    else:
        gradient.scatter_add_(1, index, at_target)
    return transform.backward(gradient, logits).to(dtype)


TILE_FUNCTIONS: Mapping[str, Callable[..., Any]] = {"tile_statistics": tile_statistics, "tile_gradient": tile_gradient}


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
    functions: Mapping[str, Callable[..., Any]] = TILE_FUNCTIONS,
    candidates: torch.Tensor | None = None,
) -> TokenStatistics:
    """Computes the statistics of the logits transform(hidden @ weight.T + bias) whose option is True.

    hidden: (N, H); weight: (V, H); bias: (V,) or None; targets: (N,) or (N, M). functions: TILE_FUNCTIONS, or compiled
    forms. candidates: (N, C) tokens that the distribution of each row is restricted to; -1 where there are fewer; rows
    of -1 are not restricted.
    """
    options = (calculate_entropy, calculate_sum_pi_squared)
    divided, several = transform.divided_by(temperature), targets if targets.ndim == 2 else targets.unsqueeze(1)
    log_probs, entropys, squares = _TokenLogProbs.apply(
        hidden, weight, bias, several, divided, chunk_tokens, *options, functions, candidates
    )
    return TokenStatistics(
        log_probs.view(targets.shape),
        entropys if calculate_entropy else None,
        squares if calculate_sum_pi_squared else None,
    )


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

    hidden: (N, H); weight: (V, H); bias: (V,) or None. candidates: see `token_log_probs`. Returns `ids` int32 and
    `log_probs`, both (N, k).
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    none = hidden.new_empty(len(hidden), 0, dtype=torch.long)
    tiles = _Tiles(none, len(weight), dtype.itemsize, chunk_tokens, TILE_BYTES[hidden.device.type])
    shape = len(hidden), min(k, len(weight))
    found = {"ids": hidden.new_empty(shape, dtype=torch.int32), "log_probs": hidden.new_empty(shape, dtype=dtype)}
    for rows in tiles.rows:
        best = hidden.new_empty(rows.stop - rows.start, 0, dtype=dtype)
        ids, normalizers = best.long(), []
        for columns in tiles.columns:
            logits = _logits(hidden, weight, bias, rows, columns, transform, candidates)
            normalizers.append(logits.logsumexp(dim=1))
            values, places = logits.topk(min(k, logits.shape[1]), dim=1)
            best, ids = torch.cat([best, values], dim=1), torch.cat([ids, places + columns.start], dim=1)
            best, order = best.topk(min(k, best.shape[1]), dim=1)
            ids = ids.gather(1, order)
        found["ids"][rows] = ids.int()
        found["log_probs"][rows] = best - torch.stack(normalizers).logsumexp(dim=0).unsqueeze(1)
    return found


class _Tiles:
    """Division of the logits (N, V) into tiles of tile_bytes, or one tile if they need at most KEPT_LOGITS_BYTES.

    targets: (N, M) tokens, M = 0 for none. rows, columns: slices of the tokens and of the vocabulary. inside: (tiles of
    the vocabulary, N, 1) True where the target of a token is in the tile; None unless M = 1.
    """

    def __init__(self, targets: torch.Tensor, vocab: int, itemsize: int, chunk_tokens: int, tile_bytes: int) -> None:
        count = len(targets)
        self.keep = count * vocab * itemsize <= KEPT_LOGITS_BYTES
        blocks = 1 if self.keep else -(-count // chunk_tokens)
        height = max(1, -(-count // blocks))
        number = 1 if self.keep else -(-vocab * height * itemsize // tile_bytes)
        width = -(-vocab // (number * 8)) * 8 if number * 8 <= vocab else 1  # multiples of 8 for fast kernels
        self.rows = [slice(start, min(start + height, count)) for start in range(0, count, height)]
        self.columns = [slice(start, min(start + width, vocab)) for start in range(0, vocab, width)]
        self._targets, self._width = targets, width
        self.inside: torch.Tensor | None = None
        if targets.shape[1] == 1:  # for all tiles at once, which needs fewer kernels but M times the memory
            local = targets - torch.arange(0, vocab, width, device=targets.device).view(-1, 1, 1)
            self.inside = (local >= 0) & (local < width)
            self._index = local.where(self.inside, 0)

    def places(self, number: int, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the column (n, M) of each target in a tile, 0 for targets in other tiles, and a bool mask (n, M) of
        the targets in the tile."""
        if self.inside is not None:
            return self._index[number, rows], self.inside[number, rows]
        local = self._targets[rows] - self.columns[number].start
        inside = (local >= 0) & (local < self._width)
        return local.where(inside, 0), inside


def _add_product(total: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> None:
    """Adds one @ other to `total`; products of bf16 numbers are summed in fp32 if `total` is fp32."""
    if total.dtype == one.dtype:
        total.addmm_(one, other)
    elif has_wide_products(total.device):
        total.add_(torch.mm(one, other, out_dtype=total.dtype))
    else:
        total.add_(one @ other)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        transform: LogitTransform,
        chunk_tokens: int,
        calculate_entropy: bool,
        calculate_sum_pi_squared: bool,
        functions: Mapping[str, Callable[..., Any]],
        candidates: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        kind = "cpu" if hidden.device.type == "cpu" else "cuda" if functions is TILE_FUNCTIONS else "cuda, compiled"
        tiles = _Tiles(targets, len(weight), dtype.itemsize, chunk_tokens, TILE_BYTES[kind])
        options, number_of_targets = (calculate_entropy, calculate_sum_pi_squared), targets.shape[1]
        # statistics of each tile; before them, with one target per token, the logit at its column in the tile
        kept_targets = int(tiles.inside is not None)
        shape = (kept_targets + 1 + sum(options), len(tiles.columns), len(targets))
        parts = torch.empty(shape, dtype=dtype, device=hidden.device)
        at_targets = torch.zeros(targets.t().shape, dtype=dtype, device=hidden.device)
        logits = hidden.new_empty(0, dtype=dtype)
        for number, columns in enumerate(tiles.columns):
            for rows in tiles.rows:
                logits = _logits(hidden, weight, bias, rows, columns, transform, candidates)
                index, inside = tiles.places(number, rows)
                values = functions["tile_statistics"](logits, index, *options)
                parts[:, number, rows] = values[number_of_targets - kept_targets :]
                if not kept_targets:
                    at_targets[:, rows] += values[:number_of_targets].where(inside.t(), 0)
        if tiles.inside is not None:
            at_targets = parts[:1].where(tiles.inside.squeeze(2), 0).sum(dim=1)
        partial, *more = parts[kept_targets:]
        normalizers = partial.logsumexp(dim=0)
        share = (partial - normalizers).exp_()  # of each tile in the probability
        log_probs = (at_targets - normalizers).t().contiguous()
        none = log_probs.new_empty(0)
        entropys = normalizers - more[0].mul_(share).sum(dim=0) if calculate_entropy else none
        squares = more[-1].mul_(share.square_()).sum(dim=0) if calculate_sum_pi_squared else none
        kept = logits if tiles.keep else none
        ctx.save_for_backward(hidden, weight, bias, normalizers, entropys, kept, candidates)
        ctx.transform, ctx.tiles, ctx.functions, ctx.calculate_entropy = transform, tiles, functions, calculate_entropy
        ctx.mark_non_differentiable(squares)
        return log_probs, entropys, squares

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, normalizers, entropys, kept, candidates = ctx.saved_tensors
        grad_log_probs, grad_entropys, _ = grad_outputs
        tiles, dtype = ctx.tiles, normalizers.dtype
        _, weight_learns, bias_learns, *_ = ctx.needs_input_grad  # False for a model with an adapter
        # d log_prob / d z_j = [j is target] - p_j;  d entropy / d z_j = -p_j (z_j - normalizer + entropy)
        slope, offset = -grad_log_probs.sum(dim=1), None
        if ctx.calculate_entropy:
            slope, offset = -grad_entropys, grad_entropys * (normalizers - entropys) + slope
        grad_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
        grad_weight = torch.zeros_like(weight) if weight_learns else None
        grad_bias = torch.zeros(bias.shape, dtype=dtype, device=bias.device) if bias_learns else None
        spread = None if tiles.inside is None else tiles.inside * grad_log_probs
        for number, columns in enumerate(tiles.columns):
            total = None if grad_weight is None else grad_weight[columns].to(dtype)  # a view in fp32
            for rows in tiles.rows:
                logits = kept
                if not tiles.keep:
                    logits = _logits(hidden, weight, bias, rows, columns, ctx.transform, candidates)
                index, inside = tiles.places(number, rows)
                at_target = inside * grad_log_probs[rows] if spread is None else spread[number, rows]
                gradient = ctx.functions["tile_gradient"](
                    logits,
                    normalizers[rows],
                    slope[rows],
                    None if offset is None else offset[rows],
                    index,
                    at_target,
                    ctx.transform,
                    dtype if bias_learns else hidden.dtype,
                )
                del logits
                if grad_bias is not None:
                    grad_bias[columns] += gradient.sum(dim=0)
                    gradient = gradient.to(hidden.dtype)
                _add_product(grad_hidden[rows], gradient, weight[columns])
                if total is not None:
                    _add_product(total, gradient.t(), hidden[rows])
            if grad_weight is not None and total is not None and total.dtype != weight.dtype:
                grad_weight[columns] = total
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, *[None] * 7


def _logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: slice,
    columns: slice,
    transform: LogitTransform,
    candidates: torch.Tensor | None,
) -> torch.Tensor:
    """A tile of the transformed logits, in which FINITE_LOGIT replaces the -inf that a bias can contain, and the logits
    outside the candidates of rows that have some."""
    logits = transform(output_logits(hidden[rows], weight[columns], None if bias is None else bias[columns]))
    logits = logits if bias is None else logits.clamp_(min=FINITE_LOGIT)
    if candidates is None:
        return logits
    local = candidates[rows].long() - columns.start
    is_inside = (local >= 0) & (local < logits.shape[1])
    index = local.where(is_inside, 0)
    kept = logits.gather(1, index).where(is_inside, FINITE_LOGIT)
    is_restricted = (candidates[rows] >= 0).any(dim=1, keepdim=True)
    # candidates outside the tile write FINITE_LOGIT to its first column, which must not replace a kept logit: maximum
    return logits.masked_fill_(is_restricted, FINITE_LOGIT).scatter_reduce_(1, index, kept, "amax")

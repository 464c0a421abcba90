"""A Hugging Face causal language model as a policy: log-probs and entropies of response tokens from hidden states.

The backbone runs once over the (packed) tokens. The output layer is applied in chunks, and only to positions that
predict a response token, so the logits of the whole batch never exist at once. The backward pass recomputes the logits
of each chunk from the hidden states, so the memory for logits does not grow with the number of tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from verl_lite.config import ModelConfig
from verl_lite.errors import UserError
from workers.engine.packing import ModelInputs
from workers.policy.adapter import add_adapter
from workers.policy.loading import NetworkSpec, Policy, PolicyBuilder, build_network
from workers.policy.model_errors import user_error_on_failure
from workers.policy.router import ROUTED_EXPERTS, Routers, load_balancing_loss, replay_counts

# Logits up to this size are saved for the backward pass instead of recomputed, which is faster.
KEPT_LOGITS_BYTES = 32 << 20
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
            gradient = gradient.mul_(1.0 - (logits / self.cap).square_())
        return gradient.mul_(self.scale)


PLAIN_LOGITS = LogitTransform()


class CausalLMPolicy(Policy):
    """The policy network.

    model: a `...ForCausalLM`. Its parameters have the prefix `model.`, followed by their Hugging Face names.
    chunk_tokens: number of tokens whose logits exist at one time, if all logits need over KEPT_LOGITS_BYTES.
    routers: the routers of the model, if the forward needs them.
    Raises UserError if the model's transform of its logits is no `LogitTransform`.
    """

    extra_inputs = (ROUTED_EXPERTS,)

    def __init__(self, model: PreTrainedModel, chunk_tokens: int, routers: Routers | None = None) -> None:
        super().__init__()
        self.model = model
        self.logit_transform = logit_transform(model)
        self.chunk_tokens = chunk_tokens
        self.routers = routers

    def forward(
        self,
        inputs: ModelInputs,
        temperature: float,
        calculate_entropy: bool,
        calculate_sum_pi_squared: bool = False,
        calculate_router_aux_loss: bool = False,
        count_router_replay: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Computes log_probs (b, R) and the outputs whose option is True, 0 at tokens that are not predicted.

        entropys and sum_pi_squared (b, R): see `TokenStatistics`. router_aux_loss (b,): see `load_balancing_loss`.
        router_replay (b, 2): see `replay_counts`.
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
        statistics = token_log_probs(
            hidden,
            head.weight,
            getattr(head, "bias", None),
            inputs.targets,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            calculate_entropy=calculate_entropy,
            calculate_sum_pi_squared=calculate_sum_pi_squared,
            transform=self.logit_transform,
        )
        named = statistics._asdict().items()
        return {name: inputs.scatter(value) for name, value in named if value is not None} | outputs


def causal_lm(chunk_tokens: int, with_routers: bool = False) -> PolicyBuilder:
    """Returns a builder of a `CausalLMPolicy`, which adds an adapter if `model.lora_rank` is above 0.

    chunk_tokens: number of tokens whose logits exist at one time. with_routers: the forward needs the routers.
    """

    def build(spec: NetworkSpec) -> CausalLMPolicy:
        model = build_network(AutoModelForCausalLM, spec)
        policy = CausalLMPolicy(model, chunk_tokens, Routers(model) if with_routers else None)
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
    the targets, entropies in nats, and sums of p^2 over the vocabulary, without gradient."""

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
) -> TokenStatistics:
    """Computes the statistics of the logits transform(hidden @ weight.T + bias) whose option is True.

    hidden: (N, H); weight: (V, H); bias: (V,) or None; targets: (N,).
    """
    divided = transform.divided_by(temperature)
    log_probs, entropys, squares = _TokenLogProbs.apply(
        hidden, weight, bias, targets, divided, chunk_tokens, calculate_entropy, calculate_sum_pi_squared
    )
    return TokenStatistics(
        log_probs, entropys if calculate_entropy else None, squares if calculate_sum_pi_squared else None
    )


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
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        count = hidden.shape[0]
        keep = count * weight.shape[0] * dtype.itemsize <= KEPT_LOGITS_BYTES
        size = max(1, count) if keep else chunk_tokens
        log_probs = torch.empty(count, dtype=dtype, device=hidden.device)
        normalizers = torch.empty_like(log_probs)
        entropys = torch.empty_like(log_probs) if calculate_entropy else log_probs.new_empty(0)
        squares = torch.empty_like(log_probs) if calculate_sum_pi_squared else log_probs.new_empty(0)
        logits = log_probs.new_empty(0, weight.shape[0])
        for start in range(0, count, size):
            part = slice(start, start + size)
            logits = transform(output_logits(hidden[part], weight, bias))
            normalizers[part] = logits.logsumexp(dim=-1)
            log_probs[part] = logits.gather(1, targets[part].unsqueeze(1)).squeeze(1) - normalizers[part]
            if calculate_entropy or calculate_sum_pi_squared:
                probs = (logits - normalizers[part].unsqueeze(1)).exp_()
            if calculate_entropy:
                finite = logits if bias is None else logits.clamp_(min=FINITE_LOGIT)  # a bias can be -inf
                entropys[part] = normalizers[part] - torch.linalg.vecdot(probs, finite)
            if calculate_sum_pi_squared:
                squares[part] = torch.linalg.vecdot(probs, probs)
        ctx.save_for_backward(
            hidden, weight, bias, targets, normalizers, entropys, logits if keep else logits.new_empty(0)
        )
        ctx.transform, ctx.size, ctx.keep = transform, size, keep
        ctx.calculate_entropy = calculate_entropy
        ctx.mark_non_differentiable(squares)
        return log_probs, entropys, squares

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, normalizers, entropys, kept = ctx.saved_tensors
        grad_log_probs, grad_entropys, _ = grad_outputs
        dtype = normalizers.dtype
        grad_hidden = torch.empty_like(hidden)
        _, weight_learns, bias_learns, *_ = ctx.needs_input_grad  # False for a model with an adapter
        single = hidden.shape[0] <= ctx.size
        grad_weight = (
            torch.zeros(weight.shape, dtype=dtype, device=weight.device) if weight_learns and not single else None
        )
        grad_bias = torch.zeros(bias.shape, dtype=dtype, device=bias.device) if bias_learns else None
        for start in range(0, hidden.shape[0], ctx.size):
            part = slice(start, start + ctx.size)
            logits = kept if ctx.keep else ctx.transform(output_logits(hidden[part], weight, bias))
            probs = (logits - normalizers[part].unsqueeze(1)).exp_()
            # d log_prob / d z_j = [j is target] - p_j;  d entropy / d z_j = -p_j (z_j - normalizer + entropy)
            if ctx.calculate_entropy:
                offset = (entropys[part] - normalizers[part]).unsqueeze(1)
                slope = logits + offset
                slope = slope if bias is None else slope.clamp_(min=FINITE_LOGIT)
                slope = slope.mul_(grad_entropys[part].unsqueeze(1)).add_(grad_log_probs[part].unsqueeze(1))
                grad_logits = probs.mul_(slope).neg_()
            else:
                grad_logits = probs.mul_(grad_log_probs[part].neg().unsqueeze(1))
            grad_logits.scatter_add_(1, targets[part].unsqueeze(1), grad_log_probs[part].unsqueeze(1))
            grad_logits = ctx.transform.backward(grad_logits, logits)
            if grad_bias is not None:
                grad_bias += grad_logits.sum(dim=0)
            grad_logits = grad_logits.to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[part])
            if weight_learns:
                product = grad_logits.t() @ hidden[part]
                grad_weight = product if grad_weight is None else grad_weight.add_(product)
        if weight_learns:
            grad_weight = torch.zeros_like(weight) if grad_weight is None else grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None

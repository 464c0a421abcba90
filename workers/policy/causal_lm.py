"""A Hugging Face causal language model as a policy: log-probs and entropies of response tokens from hidden states.

The backbone runs once over the (packed) tokens; only positions that predict a response token go through the output
layer, in chunks, so that the logits of the whole batch never exist. The backward pass computes each chunk's logits
again from the hidden states and the saved log-sum-exp; peak memory does not grow with the number of tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from verl_lite.config import ModelConfig
from workers.engine.packing import ModelInputs
from workers.policy.adapter import add_adapter
from workers.policy.loading import NetworkSpec, Policy, PolicyBuilder, build_network
from workers.policy.router import Routers, load_balancing_loss

# Logits up to this size are kept for the backward pass instead of being computed again: faster, and small.
KEPT_LOGITS_BYTES = 32 << 20

# Entries of a model's config that change the logits after the output layer; with these values they do nothing.
LOGIT_TRANSFORMS: dict[str, tuple[Any, ...]] = {
    "final_logit_softcapping": (None,),
    "logit_scale": (None, 1.0),
    "logits_scaling": (None, 1.0),
    "lm_head_multiplier": (None, 1.0),
}


class CausalLMPolicy(Policy):
    """The policy network.

    model: a `...ForCausalLM`. Its parameters appear under the prefix `model.`, followed by their Hugging Face names.
    chunk_tokens: tokens whose logits exist at one time (where they would need more than KEPT_LOGITS_BYTES in all).
    routers: of the model, where something is asked of them.
    Raises ValueError for a model whose logits are not a linear function of its hidden states.
    """

    def __init__(self, model: PreTrainedModel, chunk_tokens: int, routers: Routers | None = None) -> None:
        super().__init__()
        refuse_logit_transforms(model.config)
        self.model = model
        self.chunk_tokens = chunk_tokens
        self.routers = routers

    def forward(
        self,
        inputs: ModelInputs,
        temperature: float,
        calculate_entropy: bool,
        calculate_sum_pi_squared: bool = False,
        calculate_router_aux_loss: bool = False,
    ) -> dict[str, torch.Tensor]:
        """log_probs (b, R), and where asked for entropys and sum_pi_squared (b, R): see `TokenStatistics`; 0 elsewhere.
        Where asked for, router_aux_loss (b,): see `load_balancing_loss`."""
        outputs = {}
        if calculate_router_aux_loss:
            assert self.routers is not None
            with self.routers.watched() as routes:
                hidden = self.hidden_states(inputs)
            outputs["router_aux_loss"] = load_balancing_loss(routes, inputs.token_index)
        else:
            hidden = self.hidden_states(inputs)
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
        )
        named = statistics._asdict().items()
        return {name: inputs.scatter(value) for name, value in named if value is not None} | outputs


def causal_lm(chunk_tokens: int, with_routers: bool = False) -> PolicyBuilder:
    """Builds a `CausalLMPolicy`, with an adapter if `model.lora_rank` is above 0.

    chunk_tokens: tokens whose logits exist at one time. with_routers: something will be asked of its routers.
    """

    def build(spec: NetworkSpec) -> CausalLMPolicy:
        model = build_network(AutoModelForCausalLM, spec)
        policy = CausalLMPolicy(model, chunk_tokens, Routers(model) if with_routers else None)
        if isinstance(spec.model, ModelConfig) and spec.model.lora_rank > 0:
            policy.adapter = add_adapter(policy.model, spec.model)
        return policy

    return build


def refuse_logit_transforms(config: Any) -> None:
    """Raises ValueError if the config transforms logits after the output layer."""
    for name, harmless in LOGIT_TRANSFORMS.items():
        value = getattr(config, name, None)
        if value not in harmless:
            raise ValueError(
                f"model.path: the {config.model_type} model sets {name}={value}, which transforms its logits after the "
                "output layer; the log-probs here expect plain logits. Choose a model without it."
            )


class TokenStatistics(NamedTuple):
    """Of softmax(logits / temperature) at N tokens, each (N,), fp32 (fp64 for fp64 inputs).

    log_probs: of the targets. entropys: in nats. sum_pi_squared: sum of p^2 over the vocabulary, without gradient.
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
) -> TokenStatistics:
    """The log-prob of each target, and what else is asked for, with logits hidden @ weight.T + bias.

    hidden: (N, H); weight: (V, H); bias: (V,) or None; targets: (N,).
    """
    log_probs, entropys, squares = _TokenLogProbs.apply(
        hidden, weight, bias, targets, 1.0 / temperature, chunk_tokens, calculate_entropy, calculate_sum_pi_squared
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
        inverse_temperature: float,
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
            logits = _scaled_logits(hidden[part], weight, bias, inverse_temperature, dtype)
            normalizers[part] = logits.logsumexp(dim=-1)
            log_probs[part] = logits.gather(1, targets[part].unsqueeze(1)).squeeze(1) - normalizers[part]
            if calculate_entropy or calculate_sum_pi_squared:
                probs = (logits - normalizers[part].unsqueeze(1)).exp_()
            if calculate_entropy:
                entropys[part] = normalizers[part] - torch.linalg.vecdot(probs, logits)
            if calculate_sum_pi_squared:
                squares[part] = torch.linalg.vecdot(probs, probs)
        ctx.save_for_backward(
            hidden, weight, bias, targets, normalizers, entropys, logits if keep else logits.new_empty(0)
        )
        ctx.inverse_temperature, ctx.size, ctx.keep = inverse_temperature, size, keep
        ctx.calculate_entropy = calculate_entropy
        ctx.mark_non_differentiable(squares)
        return log_probs, entropys, squares

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, normalizers, entropys, kept = ctx.saved_tensors
        grad_log_probs, grad_entropys, _ = grad_outputs
        dtype, scale = normalizers.dtype, ctx.inverse_temperature
        grad_hidden = torch.empty_like(hidden)
        _, weight_learns, bias_learns, *_ = ctx.needs_input_grad  # frozen beside an adapter
        single = hidden.shape[0] <= ctx.size
        grad_weight = (
            torch.zeros(weight.shape, dtype=dtype, device=weight.device) if weight_learns and not single else None
        )
        grad_bias = torch.zeros(bias.shape, dtype=dtype, device=bias.device) if bias_learns else None
        for start in range(0, hidden.shape[0], ctx.size):
            part = slice(start, start + ctx.size)
            logits = kept if ctx.keep else _scaled_logits(hidden[part], weight, bias, scale, dtype)
            probs = (logits - normalizers[part].unsqueeze(1)).exp_()
            # d log_prob / d z_j = [j is target] - p_j;  d entropy / d z_j = -p_j (z_j - normalizer + entropy)
            if ctx.calculate_entropy:
                offset = (entropys[part] - normalizers[part]).unsqueeze(1)
                slope = (logits + offset).mul_(grad_entropys[part].unsqueeze(1)).add_(grad_log_probs[part].unsqueeze(1))
                grad_logits = probs.mul_(slope).neg_()
            else:
                grad_logits = probs.mul_(grad_log_probs[part].neg().unsqueeze(1))
            grad_logits.scatter_add_(1, targets[part].unsqueeze(1), grad_log_probs[part].unsqueeze(1))
            grad_logits = grad_logits.mul_(scale)
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


def _scaled_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """(n, V) logits / temperature in `dtype`."""
    logits = F.linear(hidden, weight, bias).to(dtype)
    return logits if scale == 1.0 else logits.mul_(scale)

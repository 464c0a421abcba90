"""The transform that a causal language model applies to the logits of its output layer: a scale and a soft cap."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from verl_lite.errors import UserError
from workers.policy.model_errors import user_error_on_failure

_REMEDY = "choose a model whose logits are a linear layer of its last hidden states, scaled and soft-capped at most"


class LogitTransform(NamedTuple):
    """A model's transform of its output layer's logit z: cap * tanh(scale * z / cap), or scale * z without a cap."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Transforms the logits in place."""
        if self.scale != 1.0:
            logits = logits.mul_(self.scale)
        if self.cap is not None:
            logits = logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits

    def divided_by(self, temperature: float) -> LogitTransform:
        """Returns this transform followed by a division by `temperature`."""
        inverse = 1.0 / temperature
        cap = None if self.cap is None else self.cap * inverse
        return LogitTransform(self.scale * inverse, cap)

    def backward(self, gradient: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Computes the gradient of z from the gradient of the transformed logits, in place."""
        if self.cap is not None:
            # d (cap tanh(x)) / dx = cap (1 - tanh(x)^2), where tanh(x) = logit / cap. A logit below the cap is
            # FINITE_LOGIT, whose square would be infinite and its gradient of 0 a NaN.
            squared_tanh = (logits / self.cap).clamp_(min=-1.0).square_()
            gradient = gradient.addcmul_(gradient, squared_tanh, value=-1.0)
        if self.scale != 1.0:
            gradient = gradient.mul_(self.scale)
        return gradient


PLAIN_LOGITS = LogitTransform()


class _BackboneOutputs:
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

    Raises:
        UserError: the output layer does not receive the hidden states, or the model applies more than a scale and a
            soft cap to the logits: log-probs computed from such a transform would be those of another distribution.
    """
    # exact in each dtype: some networks cast it to the dtype of their weights
    hidden = torch.arange(8.0).view(1, 1, 8)
    # powers of two are exact, and over this range the scale shows at one end and a cap at the other
    magnitudes = 2.0 ** torch.arange(-10, 41, dtype=torch.float64)
    plain = torch.cat([-magnitudes, magnitudes]).view(1, 1, -1)
    received: list[torch.Tensor] = []

    def output_layer(states: torch.Tensor) -> torch.Tensor:
        received.append(states)
        return plain.clone()

    backbone = model.base_model
    head = model.get_output_embeddings()
    problem = f"model.path: the transform of the logits of a {type(model).__name__} cannot be determined"
    try:
        backbone.forward = lambda *args, **kwargs: _BackboneOutputs(hidden)
        head.forward = output_layer
        with user_error_on_failure(problem, _REMEDY):
            one_token = torch.zeros(1, 1, dtype=torch.long)
            outputs = model(input_ids=one_token, use_cache=False)
            transformed = outputs.logits.double()
    finally:
        del backbone.forward, head.forward

    # the smallest positive logit is too small for a cap to change it, and the largest one reaches any cap
    scale = float(transformed[0, 0, len(magnitudes)] / magnitudes[0])
    largest = float(transformed[0, 0, -1])
    cap = None
    if largest < 0.5 * scale * float(magnitudes[-1]):
        cap = largest
    if abs(scale - 1.0) < 1e-6:
        scale = 1.0
    transform = LogitTransform(scale, cap)

    # the model is accepted only if this transform explains all of its logits
    has_plain_input = len(received) == 1 and torch.equal(received[0].float(), hidden)
    expected = transform(plain.clone())
    if not has_plain_input or not torch.allclose(expected, transformed, rtol=1e-5, atol=0.0):
        raise UserError(
            f"model.path: a {type(model).__name__} transforms its hidden states or logits by more than a scale and a "
            f"soft cap; {_REMEDY}"
        )
    return transform

"""The critic's loss. `core_algos.compute_value_loss` has it with verl's arguments."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl_lite.algos.loss_inputs import Aggregation
from verl_lite.algos.masked import check_shapes, masked_mean, masked_values


@dataclass(frozen=True, kw_only=True)
class ValueLossInputs:
    """What the value loss reads. Values under mask 0, even NaN, have no effect.

    Attributes:
        vpreds: (b, R) values of the critic, with gradient.
        returns: (b, R) the targets.
        values: (b, R) the critic's values before the update.
        response_mask: (b, R), nonzero at the policy's tokens.
        cliprange_value: largest change of a value that lowers the loss, above 0.
        aggregation: the aggregation mode and the denominators.

    Raises:
        ValueError: if cliprange_value is not above 0 or the shapes differ.
    """

    vpreds: Tensor
    returns: Tensor
    values: Tensor
    response_mask: Tensor
    cliprange_value: float
    aggregation: Aggregation

    def __post_init__(self) -> None:
        if self.cliprange_value <= 0:
            raise ValueError(f"value loss: cliprange_value={self.cliprange_value}: expected a number above 0.")
        check_shapes(
            "value loss",
            vpreds=self.vpreds,
            returns=self.returns,
            values=self.values,
            response_mask=self.response_mask,
        )


def value_loss(inputs: ValueLossInputs) -> tuple[Tensor, Tensor]:
    """Computes the clipped value loss 1/2 max((v - G)^2, (clip(v, v_old - c, v_old + c) - G)^2), aggregated.

    v are the vpreds, G the returns, v_old the values, and c is cliprange_value (PPO's reference implementation,
    arXiv:2005.12729). Returns the loss, and the share of the valid tokens whose clip was active.
    """
    mask = inputs.response_mask
    # values under mask 0 may be NaN, whose product with the mask is NaN
    values = masked_values(inputs.vpreds, mask)
    old_values = masked_values(inputs.values, mask)
    targets = masked_values(inputs.returns, mask)

    cliprange = inputs.cliprange_value
    clipped_values = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    plain = (values - targets).square()
    clipped = (clipped_values - targets).square()
    losses = torch.maximum(plain, clipped)
    loss = 0.5 * inputs.aggregation(losses, mask)

    is_clipped = (clipped > plain).to(loss.dtype)
    clip_fraction = masked_mean(is_clipped, mask)
    return loss, clip_fraction

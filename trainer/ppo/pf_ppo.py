"""PF-PPO: resamples a batch with replacement, weighted by how informative each row's score is (arXiv:2409.06957).

Applied after the advantages: rows with a clear score may occur several times in the batch, other rows not at all.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verl_lite.algos.advantages import outcome_scores
from verl_lite.protocol import DataProto

REWEIGHT_METHODS = ("pow", "max_min", "max_random")
# every valid row can be drawn, even if all scores are 0
_SMALLEST = 1e-8


def pf_ppo_weights(scores: Tensor, valid: Tensor, reweight_method: str = "pow", weight_pow: float = 2.0) -> Tensor:
    """Returns the unnormalised sampling weights (B,) in fp64; 0 for invalid rows.

      pow          |score| ^ weight_pow
      max_min      1 for the largest and the smallest score of the batch, 0 for the others
      max_random   0.4 for the largest score, 0.1 for the others

    plus 1e-8.

    Args:
        scores: (B,) score of each row.
        valid: (B,) bool, rows with a valid token (in verl all rows are valid).
        reweight_method: one of the methods above.
        weight_pow: exponent of pow.

    Raises:
        ValueError: the method is unknown.
    """
    if reweight_method not in REWEIGHT_METHODS:
        raise ValueError(f"reweight_method={reweight_method!r}: expected one of {', '.join(REWEIGHT_METHODS)}.")
    values = torch.where(valid, scores.double(), 0)
    if not bool(valid.any()):
        return torch.zeros_like(values)

    valid_values = values[valid]
    is_largest = values == valid_values.max()
    is_smallest = values == valid_values.min()
    if reweight_method == "pow":
        weights = values.abs() ** weight_pow
    elif reweight_method == "max_min":
        weights = (is_largest | is_smallest).double()
    else:
        # a tensor, because torch.where of two numbers is fp32
        large = torch.full_like(values, 0.4)
        weights = torch.where(is_largest, large, 0.1)
    return torch.where(valid, weights + _SMALLEST, 0)


def compute_pf_ppo_reweight_data(
    data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0, seed: int | Sequence[int] | None = None
) -> DataProto:
    """Draws len(data) rows from `data` with replacement, weighted by `pf_ppo_weights`.

    Args:
        data: token_level_scores and response_mask (B, R); the score of a row is the sum of its token scores.
        reweight_method: see `pf_ppo_weights`.
        weight_pow: see `pf_ppo_weights`.
        seed: equal seeds draw equal rows on any machine; None draws a random seed (verl: the global generator).

    Returns:
        The drawn rows; a batch without valid rows unchanged.
    """
    mask = data.batch["response_mask"]
    valid = (mask != 0).any(dim=-1)
    scores = outcome_scores(data.batch["token_level_scores"], mask)
    weights = pf_ppo_weights(scores, valid, reweight_method, weight_pow).numpy()
    # no row is valid, so there is nothing to draw
    if not weights.any():
        return data
    generator = np.random.default_rng(seed)
    num_rows = len(data)
    probabilities = weights / weights.sum()
    rows = generator.choice(num_rows, size=num_rows, p=probabilities)
    return data.select_idxs(rows)

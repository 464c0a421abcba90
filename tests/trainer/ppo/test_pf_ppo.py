"""PF-PPO: weights by hand, and draws that follow them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainer.ppo.pf_ppo import compute_pf_ppo_reweight_data, pf_ppo_weights
from verl_lite.protocol import DataProto

SCORES = torch.tensor([-3.0, 1.0, 2.0, 2.0, 9.0])
VALID = torch.tensor([True, True, True, True, False])


@pytest.mark.parametrize(
    ("method", "power", "expected"),
    [
        ("pow", 2.0, [9.0, 1.0, 4.0, 4.0]),
        ("pow", 1.0, [3.0, 1.0, 2.0, 2.0]),
        ("max_min", 2.0, [1.0, 0.0, 1.0, 1.0]),
        ("max_random", 2.0, [0.1, 0.1, 0.4, 0.4]),
    ],
)
def test_weights_by_hand(method: str, power: float, expected: list[float]) -> None:
    weights = pf_ppo_weights(SCORES, VALID, method, power)
    assert weights.dtype == torch.float64
    assert weights.tolist() == pytest.approx([weight + 1e-8 for weight in expected] + [0.0], rel=1e-12)


def batch(scores: torch.Tensor, valid: torch.Tensor) -> DataProto:
    mask = torch.tensor([[1, 1, 0]]) * valid[:, None]
    token_level_scores = torch.zeros(len(scores), 3)
    token_level_scores[:, 1] = scores
    return DataProto.from_dict(
        tensors={"token_level_scores": token_level_scores, "response_mask": mask, "advantages": scores[:, None] * mask},
        non_tensors={"sample_id": np.arange(len(scores))},
    )


def test_rows_are_drawn_whole_as_often_as_their_weight_says() -> None:
    data = batch(SCORES.repeat(2000), VALID.repeat(2000))
    drawn = compute_pf_ppo_reweight_data(data, "pow", 2.0, seed=3)
    assert len(drawn) == len(data)
    kinds = drawn.non_tensor_batch["sample_id"] % 5
    shares = np.bincount(kinds, minlength=5) / len(kinds)
    assert shares.tolist() == pytest.approx([9 / 18, 1 / 18, 4 / 18, 4 / 18, 0.0], abs=0.015)
    assert torch.equal(drawn.batch["token_level_scores"][:, 1], SCORES[torch.from_numpy(kinds)]), "rows stay together"
    assert torch.equal(drawn.batch["advantages"][:, 0], SCORES[torch.from_numpy(kinds)])


def test_the_draw_follows_the_seed() -> None:
    data = batch(torch.arange(50.0), torch.ones(50, dtype=torch.bool))
    first, again, other = (compute_pf_ppo_reweight_data(data, seed=seed) for seed in ([1, 4], [1, 4], [1, 5]))
    ids = [list(part.non_tensor_batch["sample_id"]) for part in (first, again, other)]
    assert ids[0] == ids[1] != ids[2]


def test_scores_that_are_all_zero_are_drawn_evenly_and_no_score_leaves_the_batch() -> None:
    data = batch(torch.zeros(4000), torch.ones(4000, dtype=torch.bool))
    drawn = compute_pf_ppo_reweight_data(data, seed=0)
    assert len(set(drawn.non_tensor_batch["sample_id"])) == pytest.approx(4000 * (1 - np.exp(-1)), rel=0.05)
    failed = batch(torch.ones(3), torch.zeros(3, dtype=torch.bool))
    assert list(compute_pf_ppo_reweight_data(failed, seed=0).non_tensor_batch["sample_id"]) == [0, 1, 2]

"""Functions that users of ROLL and verl import by name: by hand, and under masks."""

from __future__ import annotations

import pytest
import torch

from verl_lite.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    AdvantageEstimator,
    compute_approx_kl,
    compute_clip_fraction,
    compute_gae_advantage_return,
    compute_reinforce_return,
    get_adv_estimator_fn,
    kl_penalty,
    masked_normalize,
)

NAN = float("nan")


def test_masked_normalize_by_hand() -> None:
    values = torch.tensor([[1.0, 3.0, NAN, 5.0], [2.0, 2.0, 2.0, 2.0], [NAN, NAN, NAN, NAN]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [0, 0, 0, 0]])
    # row 0: mean 3, deviations -2 0 2, biased variance 8/3; row 1: no variance, so the least, 1e-8, stands for it
    scale = (8 / 3) ** -0.5
    expected = torch.tensor([[-2 * scale, 0, 0, 2 * scale], [0, 0, 0, 0], [0, 0, 0, 0]])
    torch.testing.assert_close(masked_normalize(values, mask), expected)
    torch.testing.assert_close(masked_normalize(values.T, mask.T, dim=0), expected.T)


def test_clip_fraction_counts_padding_too() -> None:
    assert compute_clip_fraction(torch.tensor([[-2.0, 0.0, 0.5], [1.0, 3.0, 0.0]]), 1.0, -1.0) == 2 / 6
    assert compute_clip_fraction(torch.zeros(0), 1.0, -1.0) == 0.0


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "k3"])
def test_approx_kl_is_kl_penalty_under_the_mask(kind: str) -> None:
    new, base = torch.tensor([[-1.0, -2.0, NAN]]), torch.tensor([[-1.5, -1.0, -1.0]])
    mask = torch.tensor([[1, 1, 0]])
    expected = kl_penalty(new[:, :2], base[:, :2], kind)
    torch.testing.assert_close(compute_approx_kl(new, base, mask, kind), torch.nn.functional.pad(expected, (0, 1)))
    assert compute_approx_kl(new[:, :2], base[:, :2], kl_penalty=kind).equal(expected)


def test_verls_enum_names_every_estimator() -> None:
    assert [str(member) for member in AdvantageEstimator] == list(ADV_ESTIMATOR_REGISTRY)[: len(AdvantageEstimator)]
    assert get_adv_estimator_fn(AdvantageEstimator.GRPO) is get_adv_estimator_fn("grpo")


def test_rolls_names_take_rolls_arguments() -> None:
    """What they compute is in test_core_algos_advantages.py."""
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    _, returns = compute_gae_advantage_return(token_level_rewards=rewards, values=values, gamma=1.0, lambd=1.0)
    assert returns.tolist() == [[1.0, 1.0]]
    assert compute_reinforce_return(torch.tensor([[1.0, 4.0, 2.0]]), 0.5, 1.0)[0].tolist() == [[3.5, 5.0, 2.0]]

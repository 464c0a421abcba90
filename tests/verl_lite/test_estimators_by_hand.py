"""Every registered advantage estimator on an example small enough for paper; the arithmetic stands beside it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verl_lite.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    compute_agentic_reinforce_return,
    compute_gae_advantage_return,
    compute_reinforce_return,
)


@dataclass(frozen=True)
class Case:
    """What goes in, and what must come out; returns are the advantages unless given."""

    rewards: list[list[float]]
    mask: list[list[int]]
    advantages: list[list[float]]
    returns: list[list[float]] | None = None
    index: list[str] | None = None
    more: dict[str, Any] = field(default_factory=dict)


# Three answers to two questions: scores 3 and 1 for question a, 5 for question b.
SCORES = {"rewards": [[3, 0], [0, 1], [0, 5]], "mask": [[1, 0], [1, 1], [1, 1]], "index": ["a", "a", "b"]}
ROOT_HALF = 0.5**0.5

CASES: dict[str, list[Case]] = {
    "gae": [
        # gamma = lam = 1/2; the observation at t = 2 is passed over.
        # t = 3: delta = 1 + 0 - 1/4 = 3/4                    A = 3/4               A + V = 1
        # t = 1: delta = 0 + 1/2 * 1/4 - 1/2 = -3/8           A = -3/8 + 1/4 * 3/4 = -3/16     A + V = 5/16
        # whitened, two values a < b become -1/sqrt(2), 1/sqrt(2)
        Case(
            rewards=[[0, 9, 1, 0]],
            mask=[[1, 0, 1, 0]],
            advantages=[[-ROOT_HALF, 0, ROOT_HALF, 0]],
            returns=[[5 / 16, 0, 1, 0]],
            more={"values": torch.tensor([[0.5, 7, 0.25, 3]], dtype=torch.float64), "gamma": 0.5, "lam": 0.5},
        )
    ],
    "grpo": [
        # a: mean 2, std sqrt(((3 - 2)^2 + (1 - 2)^2) / 1) = sqrt(2): +-1 / sqrt(2); b alone: (5 - 0) / 1
        Case(**SCORES, advantages=[[ROOT_HALF, 0], [-ROOT_HALF] * 2, [5, 5]]),
        # Dr.GRPO: not divided
        Case(**SCORES, advantages=[[1, 0], [-1, -1], [5, 5]], more={"norm_adv_by_std_in_grpo": False}),
    ],
    "grpo_vectorized": [Case(**SCORES, advantages=[[ROOT_HALF, 0], [-ROOT_HALF] * 2, [5, 5]])],
    "grpo_passk": [
        # a: best 4, second 2, lead 2; undivided. b: the best tie, so nobody learns.
        Case(
            rewards=[[1], [4], [2], [5], [5], [0]],
            mask=[[1]] * 6,
            index=["a"] * 3 + ["b"] * 3,
            advantages=[[0], [2], [0], [0], [0], [0]],
            more={"norm_adv_by_std_in_grpo": False},
        ),
        # scores 1, 4, 2: mean 7/3, squares 16/9 + 25/9 + 1/9 = 42/9, variance 21/9 = 7/3; 2 / sqrt(7/3)
        Case(
            rewards=[[1], [4], [2]],
            mask=[[1]] * 3,
            index=["a"] * 3,
            advantages=[[0], [2 / (7 / 3) ** 0.5], [0]],
        ),
    ],
    "gdpo": [
        # reward p: 1, 3 -> -+1/sqrt(2); reward q: 5, 1 -> +-1/sqrt(2); weights 3 and 1: -+2/sqrt(2), whitened
        Case(
            rewards=[[0], [0]],
            mask=[[1], [1]],
            index=["a", "a"],
            advantages=[[-ROOT_HALF], [ROOT_HALF]],
            more={
                "config": SimpleNamespace(gdpo_reward_keys=["p", "q"], gdpo_reward_weights=[3.0, 1.0]),
                "non_tensor_batch": {"p": np.array([1.0, 3.0]), "q": np.array([5.0, 1.0])},
            },
        )
    ],
    # a: 3 - 1 and 1 - 3, each against the other; b has no other
    "rloo": [Case(**SCORES, advantages=[[2, 0], [-2, -2], [5, 5]])],
    "rloo_vectorized": [Case(**SCORES, advantages=[[2, 0], [-2, -2], [0, 0]])],
    # a: lengths 1 and 2, baseline (1 * 3 + 2 * 1) / 3 = 5/3
    "opo": [Case(**SCORES, advantages=[[3 - 5 / 3, 0], [1 - 5 / 3] * 2, [5, 5]])],
    "gpg": [
        Case(**SCORES, advantages=[[1, 0], [-1, -1], [5, 5]]),  # no score is 0: alpha = 3 / 3
        # scores 4 and 0: alpha = 2 / 1, mean 2
        Case(rewards=[[4], [0]], mask=[[1], [1]], index=["a", "a"], advantages=[[4], [-4]]),
        Case(rewards=[[4], [0]], mask=[[1], [1]], index=["a", "a"], advantages=[[1], [-1]], more={"f_norm": 4.0}),
    ],
    "reinforce_plus_plus": [
        # gamma = 1/2: G_3 = 2, G_1 = 3 + 1/2 * 2 = 4, past the observation; mean 3, std sqrt(2)
        Case(
            rewards=[[3, 9, 2]],
            mask=[[1, 0, 1]],
            advantages=[[ROOT_HALF, 0, -ROOT_HALF]],
            returns=[[4, 0, 2]],
            more={"gamma": 0.5},
        )
    ],
    "reinforce_plus_plus_baseline": [
        # centred 1 | -1 -1 | 5 5 over five tokens: mean 9/5, variance (0.64 + 2 * 7.84 + 2 * 10.24) / 4 = 9.2
        Case(**SCORES, advantages=[[-0.8 / 9.2**0.5, 0], [-2.8 / 9.2**0.5] * 2, [3.2 / 9.2**0.5] * 2])
    ],
    "remax": [
        # rewards to come 1 + 2 = 3 and 2; the greedy answer had 1/2
        Case(
            rewards=[[1, 9, 2]],
            mask=[[1, 0, 1]],
            advantages=[[2.5, 0, 1.5]],
            returns=[[3, 0, 2]],
            more={"reward_baselines": torch.tensor([0.5], dtype=torch.float64)},
        )
    ],
    "optimal_token_baseline": [
        # w = 1 - 2 pi + S. Row 1: pi = 1/2, S = 1/2 throughout: w = 1/2 1/2 1/2, W = 1/2 1 3/2, G = 4 4 4.
        # Row 2: pi = 1/4 1/2, S = 1/2: w = 1 1/2, W = 1 3/2, G = 1 1.
        # B_1 = (4 * 1/2 + 1 * 1) / (3/2) = 2; B_2 = (4 * 1 + 1 * 3/2) / (5/2) = 11/5; t = 3 is row 1 alone: no baseline
        Case(
            rewards=[[0, 0, 4], [0, 1, 0]],
            mask=[[1, 1, 1], [1, 1, 0]],
            index=["a", "a"],
            advantages=[[2, 4 - 11 / 5, 4], [-1, 1 - 11 / 5, 0]],
            returns=[[4, 4, 4], [1, 1, 0]],
            more={
                "old_log_probs": torch.tensor([[0.5, 0.5, 0.5], [0.25, 0.5, 1]], dtype=torch.float64).log(),
                "sum_pi_squared": torch.full((2, 3), 0.5, dtype=torch.float64),
            },
        )
    ],
    "tir_optimal_token_baseline": [
        # as above, but row 1 has an observation in between; its second token is compared with row 2's second
        Case(
            rewards=[[0, 9, 4], [0, 1, 0]],
            mask=[[1, 0, 1], [1, 1, 0]],
            index=["a", "a"],
            advantages=[[2, 0, 4 - 11 / 5], [-1, 1 - 11 / 5, 0]],
            returns=[[4, 0, 4], [1, 1, 0]],
            more={
                "old_log_probs": torch.tensor([[0.5, 0.1, 0.5], [0.25, 0.5, 1]], dtype=torch.float64).log(),
                "sum_pi_squared": torch.full((2, 3), 0.5, dtype=torch.float64),
            },
        )
    ],
    "reinforce": [
        # gamma = 1/2, and the column in between takes time: 1 + 1/2 * (0 + 1/2 * 2)
        Case(rewards=[[1, 9, 2]], mask=[[1, 0, 1]], advantages=[[1.5, 0, 2]], more={"gamma": 0.5})
    ],
    "agentic_reinforce": [
        # gamma = 1/2; turns (1 2) and (4 5), last rewards 1 and 2: C_2 = 2, C_1 = 1 + 1/2 * 2; rewards 9 are not read
        Case(
            rewards=[[9, 1, 5, 9, 2, 9]],
            mask=[[1, 1, 0, 1, 1, 0]],
            advantages=[[2, 2, 0, 2, 2, 0]],
            more={"gamma": 0.5},
        )
    ],
    "step_reinforce": [
        # one episode of two steps, scores 3 (row 2) then 2 (row 1); step discount 1/2: returns 3 + 1/2 * 2 = 4 and 2.
        # On the last token of each row, and back along the tokens with gamma = 1/2: row 2 has 1/2 * 4 and 4.
        Case(
            rewards=[[2, 0], [0, 3]],
            mask=[[1, 0], [1, 1]],
            index=["a", "a"],
            advantages=[[2, 0], [2, 4]],
            more={"traj_id": ["e", "e"], "step": [1, 0], "step_reward_gamma": 0.5, "gamma": 0.5},
        )
    ],
    "gigpo": [
        # Task a, episodes e (scores 0 then 1) and f (0 then 0); both start in state s.
        # Episodes: 1 1 0 0, mean 1/2, std sqrt(4 * 1/4 / 3) = 1 / sqrt(3): +-sqrt(3) / 2.
        # Steps, discount 1/2: returns 1/2 1 0 0. In state s: 1/2 and 0, mean 1/4, std sqrt(2 * 1/16): +-1 / sqrt(2);
        # the other states have one visit each, and a std of one value is none: 0. Weights 1 and 2.
        Case(
            rewards=[[0], [1], [0], [0]],
            mask=[[1]] * 4,
            index=["a"] * 4,
            advantages=[[3**0.5 / 2 + 2 * ROOT_HALF], [3**0.5 / 2], [-(3**0.5) / 2 - 2 * ROOT_HALF], [-(3**0.5) / 2]],
            more={
                "traj_id": ["e", "e", "f", "f"],
                "step": [0, 1, 0, 1],
                "state_hash": ["s", "t", "s", "u"],
                "step_reward_gamma": 0.5,
                "step_reward_weight": 2.0,
            },
        )
    ],
}


def test_every_estimator_has_a_case() -> None:
    assert set(CASES) == set(ADV_ESTIMATOR_REGISTRY)


@pytest.mark.parametrize(("name", "case"), [(name, case) for name in CASES for case in CASES[name]])
def test_by_hand(name: str, case: Case) -> None:
    advantages, returns = ADV_ESTIMATOR_REGISTRY[name](
        token_level_rewards=torch.tensor(case.rewards, dtype=torch.float64),
        response_mask=torch.tensor(case.mask),
        index=case.index,
        **case.more,
    )
    wanted = torch.tensor(case.advantages, dtype=torch.float64)
    # 1e-6 is added to a group's std, 1e-8 to the variance of a whitening
    torch.testing.assert_close(advantages, wanted, rtol=1e-5, atol=1e-6)
    wanted = wanted if case.returns is None else torch.tensor(case.returns, dtype=torch.float64)
    torch.testing.assert_close(returns, wanted, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- rolls names


def test_gae_takes_rolls_arguments() -> None:
    """gamma = lambd = 1, no mask: V + A is the sum of rewards to come."""
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    _, returns = compute_gae_advantage_return(token_level_rewards=rewards, values=values, gamma=1.0, lambd=1.0)
    assert returns.tolist() == [[1.0, 1.0]]


def test_rolls_returns() -> None:
    """2; 4 + 1/2 * 2 = 5; 1 + 1/2 * 5 = 3.5. By turns: see agentic_reinforce above."""
    assert compute_reinforce_return(torch.tensor([[1.0, 4.0, 2.0]]), 0.5, 1.0)[0].tolist() == [[3.5, 5.0, 2.0]]
    case = CASES["agentic_reinforce"][0]
    returns, same = compute_agentic_reinforce_return(torch.tensor(case.rewards), 0.5, 1.0, torch.tensor(case.mask))
    assert returns.tolist() == case.advantages and torch.equal(returns, same)

"""Every registered policy loss, the value loss and segment ratios on examples for paper; the arithmetic beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from verl_lite.config import ActorConfig, PolicyLossConfig
from verl_lite.core_algos import POLICY_LOSS_REGISTRY, compute_policy_loss, compute_value_loss

E, LOG_2 = math.e, math.log(2)
CONFIG = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, policy_loss=PolicyLossConfig(dro_beta=0.5))
"""Clip range [0.9, 1.3], dual clip at 3."""


@dataclass(frozen=True)
class Token:
    """One token: ratio new / old, advantage, loss; the old log-prob is -1, so the new one is log(ratio) - 1."""

    ratio: float
    advantage: float
    loss: float
    config: ActorConfig | None = None


def with_options(**options: Any) -> ActorConfig:
    return ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, policy_loss=PolicyLossConfig(**options))


TOKENS: dict[str, list[Token]] = {
    "vanilla": [
        Token(1.0, 2.0, -2.0),  # -2 * 1
        Token(1.5, 2.0, -2.6),  # clipped above: -2 * 1.3 > -2 * 1.5
        Token(0.5, 2.0, -1.0),  # not clipped below: -2 * 0.5 > -2 * 0.9
        Token(0.5, -2.0, 1.8),  # clipped below: 2 * 0.9 > 2 * 0.5
        Token(1.5, -2.0, 3.0),  # not clipped above: 2 * 1.5 > 2 * 1.3
        Token(9.0, -2.0, 6.0),  # dual clip: 2 * 9 bounded by 2 * 3
    ],
    # one token: the row's ratio is its own, and there is no dual clip
    "gspo": [Token(1.5, 2.0, -2.6), Token(1.5, -2.0, 3.0), Token(9.0, -2.0, 18.0)],
    "sapo": [
        Token(1.0, 2.0, -4.0),  # -2 * 4 / 1 * sigmoid(0) = -2 * 4 * 1/2
        Token(1.0, -2.0, 4 / 1.05),  # 2 * 4 / 1.05 * 1/2
        Token(2.0, 1.0, -4 / (1 + math.exp(-1))),  # sigmoid(1 * (2 - 1))
    ],
    "geo_mean": [
        Token(2.0, 1.0, -math.exp(0.3)),  # d = log 2 = 0.69, A > 0: clamped to 0.3
        Token(2.0, -1.0, 2.0),  # A < 0: 0.69 is the worse, not clamped
        Token(0.5, -1.0, math.exp(-0.1)),  # d = -0.69, A < 0: clamped to -0.1
    ],
    "gpg": [Token(1.0, 3.0, 3.0)],  # -3 * -1
    "cispo": [
        Token(2.0, 1.0, 1.3 * (1 - LOG_2)),  # -1.3 * 1 * (log 2 - 1)
        Token(0.5, 1.0, 0.9 * (1 + LOG_2)),
        Token(2.0, 1.0, 0.0, with_options(cispo_unified_mask=True)),  # PPO's clip would drop it
        Token(2.0, -1.0, -1.3 * (1 - LOG_2), with_options(cispo_unified_mask=True)),
    ],
    "tis": [Token(2.0, 1.0, 1 - LOG_2), Token(0.5, 1.0, 0.5 * (1 + LOG_2))],  # weights 1 and 1/2
    "topr": [
        Token(2.0, 1.0, 1 - LOG_2),  # good: weight 1
        Token(0.5, -1.0, -0.5 * (1 + LOG_2)),  # bad: weight 1/2
        Token(2.0, -1.0, -3 * (1 - LOG_2), with_options(topr_negative_weight=3.0)),  # bad: 3 * 1
    ],
    "kimi15": [Token(E, 1.0, 0.05)],  # -1 * (1 - 1) + 0.1 / 2 * 1^2
    "dro": [Token(E, 1.0, 0.25)],  # -(1 * (1 - 1) - 0.5 / 2 * 1^2)
    "dppo_tv": [
        Token(2.0, 1.0, 0.0),  # p - p_old = (2 - 1) / e = 0.37 > 0.3
        Token(2.0, -1.0, -2 * (1 - LOG_2)),  # A < 0: only a fall by more than 0.1 counts as outside
        Token(0.5, -1.0, 0.0),  # -1/2 / e = -0.18 < -0.1
        Token(0.5, 1.0, 0.5 * (1 + LOG_2)),
    ],
    "dppo_kl": [
        Token(1.0, 1.0, 1.0),  # divergence 0
        # p_old = 1/e, p = 2/e: (log 1/2) / e + (1 - 1/e) log((1 - 1/e) / (1 - 2/e)) = -0.255 + 0.551 = 0.296 <= 0.3
        Token(2.0, 1.0, 2 * (1 - LOG_2)),
        Token(2.5, 1.0, 0.0),  # (-log 2.5) / e + (1 - 1/e) log((1 - 1/e) / (1 - 2.5/e)) = -0.337 + 1.304 > 0.3
        Token(2.5, -1.0, -2.5 * (1 - math.log(2.5))),  # on its way back
    ],
}

# Four tokens of a row: A = 2 0 -1 -1 (mean 0), new log-probs -1 -2 -3 -2 (mean -2), covariances 2 * 1, 0, -1 * -1, 0.
# Only the first moved: d = 1/2.
FOUR = {
    "old_log_prob": torch.tensor([[-1.5, -2.0, -3.0, -2.0]], dtype=torch.float64),
    "log_prob": torch.tensor([[-1.0, -2.0, -3.0, -2.0]], dtype=torch.float64),
    "advantages": torch.tensor([[2.0, 0.0, -1.0, -1.0]], dtype=torch.float64),
    "response_mask": torch.ones(1, 4),
}
CHOOSING = {
    # a quarter of four tokens with covariance between 1/2 and 3/2: the third. PPO: -2 * 1.3, 0, dropped, 1.
    "clip_cov": (with_options(clip_cov_ratio=0.25, clip_cov_lb=0.5, clip_cov_ub=1.5), -2.6 + 0 + 0 + 1),
    # the quarter of largest covariance: the first. -2 e^(1/2) + 0.1 * 1/2, 0, 1, 1
    "kl_cov": (with_options(kl_cov_ratio=0.25), -2 * math.exp(0.5) + 0.05 + 0 + 1 + 1),
}


def test_every_loss_has_a_case() -> None:
    assert set(TOKENS) | set(CHOOSING) == set(POLICY_LOSS_REGISTRY)


def label(value: str | Token) -> str:
    return value if isinstance(value, str) else f"ratio {value.ratio:g} advantage {value.advantage:g}"


def one(token: Token) -> dict[str, torch.Tensor]:
    numbers = {
        "old_log_prob": -1.0,
        "log_prob": math.log(token.ratio) - 1,
        "advantages": token.advantage,
        "response_mask": 1.0,
    }
    return {name: torch.tensor([[value]], dtype=torch.float64) for name, value in numbers.items()}


@pytest.mark.parametrize(("name", "token"), [(name, token) for name in TOKENS for token in TOKENS[name]], ids=label)
def test_one_token_by_hand(name: str, token: Token) -> None:
    loss, metrics = POLICY_LOSS_REGISTRY[name](*one(token).values(), "token-mean", token.config or CONFIG)
    assert loss.item() == pytest.approx(token.loss, rel=1e-6, abs=1e-12)
    assert metrics["ppo_kl"].value == pytest.approx(-math.log(token.ratio), abs=1e-6)


@pytest.mark.parametrize("token", TOKENS["vanilla"], ids=label)
def test_the_seeds_signature_by_hand(token: Token) -> None:
    loss, clipfrac, kl, lower = compute_policy_loss(*one(token).values(), cliprange=0.3, cliprange_low=0.1)
    assert loss.item() == pytest.approx(token.loss)
    is_clipped = token.ratio > 1.3 if token.advantage > 0 else token.ratio < 0.9
    assert (clipfrac.item() > 0.5, lower.item() > 0.5) == (is_clipped, token.ratio == 9)
    assert kl.item() == pytest.approx(-math.log(token.ratio), abs=1e-6)


@pytest.mark.parametrize("name", sorted(CHOOSING))
def test_chosen_tokens_by_hand(name: str) -> None:
    config, expected = CHOOSING[name]
    loss, metrics = POLICY_LOSS_REGISTRY[name](*FOUR.values(), "token-sum", config)
    assert loss.item() == pytest.approx(expected)
    if name == "clip_cov":
        assert metrics["pg_clipfrac"].value == pytest.approx(1 / 4)


def test_gspo_and_geo_mean_of_a_row_by_hand() -> None:
    """Log-ratios 0.4 and -0.2, the row's mean 0.1. GSPO: both tokens have ratio e^0.1, within the range."""
    row = {
        "old_log_prob": torch.zeros(1, 3, dtype=torch.float64),
        "log_prob": torch.tensor([[0.4, -0.2, 9.0]], dtype=torch.float64),
        "advantages": torch.tensor([[1.0, 3.0, 9.0]], dtype=torch.float64),
        "response_mask": torch.tensor([[1, 1, 0]]),
    }
    gspo, _ = POLICY_LOSS_REGISTRY["gspo"](*row.values(), "token-mean", CONFIG)
    assert gspo.item() == pytest.approx(-(1 + 3) / 2 * math.exp(0.1))
    # GMPO: A > 0, so min(d, clamp(d, -0.1, 0.3)): 0.3 and -0.2; mean 0.05; mean advantage 2
    geo_mean, _ = POLICY_LOSS_REGISTRY["geo_mean"](*row.values(), "token-mean", CONFIG)
    assert geo_mean.item() == pytest.approx(-2 * math.exp(0.05))


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_counts_ratios_above_c_among_the_tokens_inside(name: str) -> None:
    """A bad token that grew fivefold goes on its way back: inside, with a weight of c = 3 in place of 5."""
    token = one(Token(5.0, -1.0, 0.0)) | {"old_log_prob": torch.full((1, 1), -9.0), "log_prob": torch.tensor([[-7.4]])}
    loss, metrics = POLICY_LOSS_REGISTRY[name](*token.values(), "token-mean", CONFIG)
    assert loss.item() == pytest.approx(3 * -7.4)
    assert (metrics["pg_clipfrac"].value, metrics["pg_clipfrac_lower"].value) == (0, 1)


def test_importance_weights_by_hand() -> None:
    """A token's loss counts times its weight: -2 * 3. A row of geo_mean by their geometric mean: sqrt(1 * 4)."""
    token = one(Token(1.0, 2.0, -2.0))
    weighed, _ = POLICY_LOSS_REGISTRY["vanilla"](*token.values(), "token-mean", CONFIG, torch.tensor([[3.0]]))
    assert weighed.item() == pytest.approx(-6)
    row = {name: column.repeat(1, 2) for name, column in token.items()}
    weighed, _ = POLICY_LOSS_REGISTRY["geo_mean"](*row.values(), "token-mean", CONFIG, torch.tensor([[1.0, 4.0]]))
    assert weighed.item() == pytest.approx(-4)


def test_segment_ratios_by_hand() -> None:
    """Two turns: the mean log-ratio of each, at each of its tokens; the observation between them parts them."""
    columns = {
        "old_log_prob": torch.zeros(1, 4, dtype=torch.float64),
        "log_prob": torch.tensor([[0.1, 0.3, 9.0, -0.4]], dtype=torch.float64, requires_grad=True),
        "advantages": torch.tensor([[1.0, 1.0, 1.0, -1.0]], dtype=torch.float64),
        "response_mask": torch.tensor([[1, 1, 0, 1]]),
    }
    config = ActorConfig(clip_ratio=0.5, ratio_type="segment")
    loss, metrics = POLICY_LOSS_REGISTRY["vanilla"](*columns.values(), "token-sum", config)
    assert loss.item() == pytest.approx(-2 * math.exp(0.2) + math.exp(-0.4))
    loss.backward()
    gradients = [-math.exp(0.2), -math.exp(0.2), 0.0, math.exp(-0.4)]  # sum of A over the turn, times ratio / n
    assert columns["log_prob"].grad is not None
    assert columns["log_prob"].grad.tolist()[0] == pytest.approx(gradients)
    assert metrics["ppo_kl"].value == pytest.approx(0.0, abs=1e-7)


def test_topr_by_scores() -> None:
    """An answer is good by its score, whatever its advantage: weight 1 against the ratio cut at 1."""
    topr = POLICY_LOSS_REGISTRY["topr"]
    for score, weight in ((1.0, 1.0), (0.0, 0.5)):
        loss, _ = topr(*one(Token(0.5, -1.0, 0.0)).values(), "token-mean", CONFIG, scores=torch.tensor([score]))
        assert loss.item() == pytest.approx(-weight * (1 + LOG_2))


def test_value_loss_by_hand() -> None:
    new = torch.tensor([[1.0, 0.0, math.nan]], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([[3.0, 0.5, math.nan]], dtype=torch.float64)
    old = torch.tensor([[0.2, 0.1, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0]])
    loss, clipfrac = compute_value_loss(new, returns, old, mask, cliprange_value=0.5)
    # token 1: (1 - 3)^2 = 4, clipped to 0.7: 2.3^2 = 5.29; token 2: within the range, 0.5^2 = 0.25
    assert loss.item() == pytest.approx(0.5 * (5.29 + 0.25) / 2)
    assert clipfrac.item() == pytest.approx(0.5)
    loss.backward()
    # token 1: the clip has no gradient; token 2: 1/2 * 2 * (0 - 0.5) / 2
    assert new.grad is not None and new.grad.tolist() == [[0.0, -0.25, 0.0]]

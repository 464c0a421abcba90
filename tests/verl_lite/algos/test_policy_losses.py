"""Every policy loss against plain loops, its gradient against finite differences, wrong arguments; tokens chosen.

What every loss promises is in test_contracts.py, independence of the cut in tests/workers/test_loss_invariance.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.verl_lite.naive_losses import NAIVE_TOKEN_LOSSES, clip, naive_policy_loss, naive_value_loss
from verl_lite.algos.covariance_losses import TOKEN_SELECTIONS, select_clip_cov
from verl_lite.config import ActorConfig, PolicyLossConfig
from verl_lite.contracts import ROWS, WIDTH, loss_batch
from verl_lite.core_algos import LOSS_AGG_MODES, POLICY_LOSS_REGISTRY, compute_value_loss, get_policy_loss_fn

NAMES = sorted(POLICY_LOSS_REGISTRY)
OPTIONS = PolicyLossConfig(dro_beta=0.5, clip_cov_ratio=0.3, clip_cov_lb=0.0, clip_cov_ub=9.0, kl_cov_ratio=0.2)
CONFIG = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, policy_loss=OPTIONS)
CLIPPED = ("vanilla", "gspo", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "clip_cov")
CHOSEN = torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % 3 == 0


def batch(name: str, seed: int = 0) -> dict[str, torch.Tensor]:
    ages = {"staleness": torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % 5} if name == "a3po" else {}
    return loss_batch(seed) | ({"selected": CHOSEN} if name in TOKEN_SELECTIONS else ages)


def call(
    name: str, columns: dict[str, Any], config: ActorConfig = CONFIG, mode: str = "token-mean", **counts: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    named = dict(columns)
    first = [named.pop(key) for key in ("old_log_prob", "log_prob", "advantages", "response_mask")]
    return get_policy_loss_fn(name)(*first, mode, config, **named, **counts)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", NAMES)
def test_losses_equal_plain_loops(name: str, mode: str) -> None:
    columns = batch(name)
    loss, _ = call(name, columns, mode=mode)
    assert loss.item() == pytest.approx(naive_policy_loss(name, columns, mode, CONFIG), rel=1e-12)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("vanilla", replace(CONFIG, clip_ratio_c=1.2)),
        ("sapo", replace(CONFIG, tau_pos=3.0, tau_neg=0.5)),
        ("cispo", replace(CONFIG, policy_loss=PolicyLossConfig(cispo_unified_mask=True))),
        ("tis", replace(CONFIG, policy_loss=PolicyLossConfig(tis_lower_bound=0.5, tis_upper_bound=2.0))),
        ("topr", replace(CONFIG, policy_loss=PolicyLossConfig(topr_positive_weight=2.0, topr_negative_weight=0.5))),
        ("kimi15", replace(CONFIG, policy_loss=PolicyLossConfig(kimi15_tau=3.0))),
        ("dro", replace(CONFIG, policy_loss=PolicyLossConfig(dro_beta=3.0))),
        ("dppo_tv", replace(CONFIG, clip_ratio_c=1.2)),
        ("dppo_kl", replace(CONFIG, clip_ratio_low=0.01, clip_ratio_high=0.02)),
        ("kl_cov", replace(CONFIG, policy_loss=PolicyLossConfig(ppo_kl_coef=2.0))),
        *((name, replace(CONFIG, clip_ratio_c=None)) for name in ("vanilla", "dppo_tv")),
        ("a3po", ActorConfig(clip_ratio=0.02, policy_loss=OPTIONS)),
        *((name, ActorConfig(clip_ratio=0.05, policy_loss=OPTIONS)) for name in ("vanilla", "gspo", "geo_mean")),
    ],
)
def test_options_equal_plain_loops(name: str, config: ActorConfig) -> None:
    columns = batch(name, seed=1)
    loss, _ = call(name, columns, config)
    assert loss.item() == pytest.approx(naive_policy_loss(name, columns, "token-mean", config), rel=1e-12)
    assert loss.item() != pytest.approx(call(name, columns)[0].item(), rel=1e-4), "the option has an effect here"


def one_token(old: float, new: float, advantage: float) -> dict[str, torch.Tensor]:
    columns = {"old_log_prob": old, "log_prob": new, "advantages": advantage, "response_mask": 1.0}
    return {name: torch.tensor([[value]]) for name, value in columns.items()}


@pytest.mark.parametrize("name", ["dppo_tv", "dppo_kl"])
def test_dppo_counts_ratios_above_c_among_the_tokens_inside(name: str) -> None:
    """A bad token that grew almost fivefold is on its way back: inside, with a weight of c = 3."""
    loss, metrics = call(name, one_token(-9.0, -7.4, -1.0))
    assert loss.item() == pytest.approx(3 * -7.4)
    assert (metrics["pg_clipfrac"].value, metrics["pg_clipfrac_lower"].value) == (0, 1)


def test_a3po_by_hand() -> None:
    columns = one_token(-1.0, -1.0 + math.log(1.44), 1.0)
    config = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.1)
    for age, wanted in ((0, -1.1), (1, -1.1), (2, -1.2 * 1.1), (3, -(1.44 ** (2 / 3)) * 1.1)):
        loss, metrics = call("a3po", columns | {"staleness": torch.tensor([[age]])}, config)
        assert loss.item() == pytest.approx(wanted) and metrics["pg_clipfrac"].value == 1.0
    columns["log_prob"].requires_grad_()
    call("a3po", columns | {"staleness": torch.tensor([[9]])}, config)[0].backward()
    # 1.44 ** (1 / 9) is in the clip range, so the loss is -A pi / pi_old
    assert columns["log_prob"].grad.item() == pytest.approx(-1.44)


def test_a3po_has_no_gradient_through_the_proximal_policy() -> None:
    """s = 2 and pi / pi_old = 1.44: pi / pi_prox = 1.2 is above the clip range of 1.1, so the token is constant with
    A = 1. With A = -1 it is not clipped: the loss is pi_prox / pi_old * pi / pi_prox = 1.44, its slope 1.44."""
    config = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.1)
    for advantage, loss, slope in ((1.0, -1.2 * 1.1, 0.0), (-1.0, 1.44, 1.44)):
        columns = one_token(-1.0, -1.0 + math.log(1.44), advantage)
        columns["log_prob"].requires_grad_()
        found, _ = call("a3po", columns | {"staleness": torch.tensor([[2]])}, config)
        found.backward()
        assert found.item() == pytest.approx(loss)
        assert columns["log_prob"].grad.item() == pytest.approx(slope)


def test_topr_by_scores() -> None:
    """An answer is good by its score, whatever its advantage: weight 1 against the ratio cut at 1. l = -1 - log 2."""
    for score, weight in ((1.0, 1.0), (0.0, 0.5)):
        loss, _ = call("topr", one_token(-1.0, -1 - math.log(2), -1.0) | {"scores": torch.tensor([score])})
        assert loss.item() == pytest.approx(-weight * (1 + math.log(2)))


@pytest.mark.parametrize("name", ["vanilla", "sapo", "geo_mean", "kimi15", "dro", "gpg", "clip_cov", "kl_cov"])
def test_gradients_by_finite_differences(name: str) -> None:
    columns = batch(name, seed=3)

    def loss(log_prob: torch.Tensor) -> torch.Tensor:
        return call(name, {**columns, "log_prob": log_prob})[0]

    assert torch.autograd.gradcheck(loss, columns["log_prob"].requires_grad_(), eps=1e-7, atol=1e-6)


def gradient(name: str, columns: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the token-sum or, for losses of rows, of the mean over rows."""
    log_prob = columns["log_prob"].clone().requires_grad_()
    call(name, {**columns, "log_prob": log_prob}, mode="token-sum")[0].backward()
    assert log_prob.grad is not None
    return log_prob.grad


@pytest.mark.parametrize("name", ["cispo", "tis", "topr", "dppo_tv", "dppo_kl"])
def test_weights_without_gradient(name: str) -> None:
    """These are weight times -A log_prob with a weight held fixed: the gradient is loss / log_prob."""
    columns = batch(name, seed=3)
    formula = NAIVE_TOKEN_LOSSES[name]
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for row, t in columns["response_mask"].nonzero().tolist():
        old, new, a = (float(columns[key][row, t]) for key in ("old_log_prob", "log_prob", "advantages"))
        expected[row, t] = formula(old, new, a, CONFIG, False) / new * float(columns["rollout_is_weights"][row, t])
    torch.testing.assert_close(gradient(name, columns), expected, rtol=1e-6, atol=1e-9)


def test_the_gradient_of_gspo() -> None:
    """Each token of a row gets A_t s / n, as if s were its own ratio; 0 where the clip holds."""
    columns = batch("gspo", seed=3)
    del columns["rollout_is_weights"]
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for row, mask in enumerate(columns["response_mask"] != 0):
        if mask.any():
            s = (columns["log_prob"] - columns["old_log_prob"])[row, mask].mean().exp()
            a = columns["advantages"][row, mask]
            is_clipped = torch.where(a > 0, s > 1.3, s < 0.9)
            expected[row, mask] = torch.where(is_clipped, 0, -a * s / len(a))
    assert (expected == 0).sum() > (columns["response_mask"] == 0).sum()
    alive = columns["response_mask"].any(dim=1).sum()
    torch.testing.assert_close(gradient("gspo", columns), expected / alive, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("column", ["old_log_prob", "log_prob", "advantages", "rollout_is_weights", "selected"])
@pytest.mark.parametrize("name", NAMES)
def test_a_shape_that_does_not_match_is_named(name: str, column: str) -> None:
    columns = batch(name)
    if column not in columns:
        return
    columns[column] = columns[column][:, :1]
    with pytest.raises(ValueError, match=rf"policy loss: {column} has shape \({ROWS}, 1\), expected .*{WIDTH}\)"):
        call(name, columns)


@pytest.mark.parametrize(
    ("name", "config", "named"),
    [
        *((name, ActorConfig(clip_ratio_c=1.0), "clip_ratio_c=1.0") for name in ("vanilla", "dppo_tv", "dppo_kl")),
        *((name, ActorConfig(clip_ratio_low=-0.1), "clip_ratio_low=-0.1.*at least 0") for name in CLIPPED),
        *((name, ActorConfig(clip_ratio_high=-0.1), "clip_ratio_high=-0.1.*at least 0") for name in CLIPPED),
        ("sapo", ActorConfig(tau_neg=0.0), "tau_neg=0.0: sapo needs both above 0"),
        ("dro", ActorConfig(), "dro_beta=None: dro needs a number above 0"),
        (
            "tis",
            ActorConfig(policy_loss=PolicyLossConfig(tis_lower_bound=2.0)),
            "tis_lower_bound=2.0, tis_upper_bound=1.0: the lower is expected below",
        ),
    ],
)
def test_an_option_out_of_range_is_named(name: str, config: ActorConfig, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call(name, batch(name), config)


def test_clip_cov_draws_among_the_candidates() -> None:
    columns = loss_batch(5)
    old, a, mask = (columns[key] for key in ("old_log_prob", "advantages", "response_mask"))
    kept = mask != 0
    covariances = torch.where(kept, (a - a[kept].mean()) * (old - old[kept].mean()), 0)
    candidates = {tuple(place) for place in ((covariances > 0) & (covariances < 9)).nonzero().tolist()}
    wanted = int(0.3 * int(mask.sum()))
    assert wanted < len(candidates)
    draws = set()
    for seed in range(5):
        found = select_clip_cov(old, a, mask, CONFIG, generator=torch.Generator().manual_seed(seed))
        places = frozenset(tuple(place) for place in found.nonzero().tolist())
        assert len(places) == wanted and places <= candidates
        draws.add(places)
    assert len(draws) > 1
    # with the log-probs of now, tokens that the clip drops already are no candidates
    new = columns["log_prob"]
    found = select_clip_cov(old, a, mask, CONFIG, log_prob=new)
    for row, t in found.nonzero().tolist():
        r, x = float((new - old)[row, t].exp()), float(a[row, t])
        assert not (-x * clip(r, 0.9, 1.3) > -x * r)


def value_columns(seed: int = 1) -> dict[str, torch.Tensor]:
    columns = loss_batch(seed)
    names = {"vpreds": "log_prob", "returns": "advantages", "values": "old_log_prob", "response_mask": "response_mask"}
    return {name: columns[source] for name, source in names.items()}


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_value_loss_equals_a_plain_loop(mode: str) -> None:
    columns = value_columns()
    loss, clipfrac = compute_value_loss(**columns, cliprange_value=0.4, loss_agg_mode=mode)
    assert loss.item() == pytest.approx(naive_value_loss(columns, 0.4, mode), rel=1e-12)
    assert 0 < clipfrac.item() < 1


def test_value_loss_names_what_is_wrong() -> None:
    columns = value_columns()
    with pytest.raises(ValueError, match="cliprange_value=0"):
        compute_value_loss(**columns, cliprange_value=0.0)
    for name in columns:
        with pytest.raises(ValueError, match=r"value loss: \w+ has shape .* expected \(B, T\)"):
            compute_value_loss(**columns | {name: torch.zeros(ROWS, 1)}, cliprange_value=0.5)
    with pytest.raises(ValueError, match="loss_mask keeps no token"):
        compute_value_loss(**columns | {"response_mask": torch.zeros(ROWS, WIDTH)}, cliprange_value=0.5)

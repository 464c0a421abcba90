"""Every policy loss against a hand-worked case and a naive loop, its gradient against finite differences; one contract.

Independence of how a batch is cut is in test_split_invariance.py, vanilla PPO also in test_core_algos.py.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch

from verl_lite.config import ActorConfig, PolicyLossConfig
from verl_lite.core_algos import POLICY_LOSS_REGISTRY, compute_value_loss, get_policy_loss_fn
from verl_lite.covariance_losses import TOKEN_SELECTIONS, select_clip_cov, select_kl_cov
from verl_lite.policy_losses import SEQUENCE_MEANS

NAMES = sorted(POLICY_LOSS_REGISTRY)
ROWS, WIDTH = 12, 6
OPTIONS = PolicyLossConfig(dro_beta=0.5, clip_cov_ratio=0.3, clip_cov_lb=0.0, clip_cov_ub=9.0, kl_cov_ratio=0.2)
CONFIG = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, policy_loss=OPTIONS)


def batch(seed: int = 0, spread: float = 0.6) -> dict[str, torch.Tensor]:
    """Ragged rows with holes, row 2 empty, in fp64; the new policy is some way off the old one."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)

    mask = (draw() > -0.8).long()
    mask[2] = 0
    old = -draw().abs() - 0.7
    return {
        "old_log_prob": old,
        "log_prob": (old + spread * draw()).clamp(max=-0.01),
        "advantages": draw(),
        "response_mask": mask,
    }


def call(name: str, columns: dict[str, Any], config: Any = CONFIG, **extras: Any) -> tuple[torch.Tensor, dict]:
    if name in TOKEN_SELECTIONS and "selected" not in extras:
        mask = columns["response_mask"]
        extras["selected"] = torch.arange(mask.numel()).view(mask.shape) % 3 == 0
    mode = extras.pop("mode", "token-mean")
    order = ("old_log_prob", "log_prob", "advantages", "response_mask")
    return get_policy_loss_fn(name)(*(columns[key] for key in order), mode, config, **extras)


# ---------------------------------------------------------------------------------------------------- the contract


def test_the_names_of_verl_and_roll_are_there() -> None:
    assert set(NAMES) >= {
        *("vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "dppo_tv", "dppo_kl", "dro", "cispo"),
        *("tis", "topr", "kimi15"),
    }


@pytest.mark.parametrize("ratio_type", ["token", "segment"])
@pytest.mark.parametrize("name", NAMES)
def test_nan_under_mask_0_reaches_neither_loss_nor_gradient(name: str, ratio_type: str) -> None:
    config = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, policy_loss=OPTIONS, ratio_type=ratio_type)
    columns, results = batch(), []
    weights = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64) + 0.5
    for hidden in (0.0, math.nan):
        poisoned = {
            key: torch.where(columns["response_mask"] != 0, value, hidden) if key != "response_mask" else value
            for key, value in columns.items()
        }
        poisoned["log_prob"].requires_grad_()
        is_weights = torch.where(columns["response_mask"] != 0, weights, hidden)
        loss, metrics = call(name, poisoned, config, rollout_is_weights=is_weights, mode="seq-mean-token-mean")
        loss.backward()
        assert all(math.isfinite(metric.value) for metric in metrics.values()) and "ppo_kl" in metrics
        results.append((loss.detach(), poisoned["log_prob"].grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[1][1].abs().max() > 1e-3 and not results[1][1][columns["response_mask"] == 0].any()


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_tokens_has_loss_0_and_gradient_0(name: str) -> None:
    columns = batch()
    columns["response_mask"] = torch.zeros(ROWS, WIDTH)
    columns["log_prob"].requires_grad_()
    loss, _ = call(name, columns, batch_num_tokens=9, global_batch_size=3)
    loss.backward()
    assert loss.item() == 0 and not columns["log_prob"].grad.any()
    with pytest.raises(ValueError, match="loss_mask keeps no token"):
        call(name, columns)


@pytest.mark.parametrize("name", NAMES)
def test_log_ratios_out_of_bounds_stay_finite(name: str) -> None:
    columns = batch()
    columns["log_prob"] = torch.where(columns["advantages"] > 0, columns["log_prob"], -700.0).requires_grad_()
    loss, metrics = call(name, columns)
    loss.backward()
    assert torch.isfinite(loss) and bool(torch.isfinite(columns["log_prob"].grad).all())
    assert all(math.isfinite(metric.value) for metric in metrics.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_shape_that_does_not_match_is_named(name: str) -> None:
    columns = batch()
    columns["advantages"] = columns["advantages"][:, :1]
    with pytest.raises(ValueError, match=rf"{name}: advantages has shape \({ROWS}, 1\), expected .*{WIDTH}\)"):
        call(name, columns)


@pytest.mark.parametrize("name", sorted(SEQUENCE_MEANS))
def test_sequence_losses_read_no_mode(name: str) -> None:
    columns = batch()
    assert torch.equal(call(name, columns, mode="token-mean")[0], call(name, columns, mode="seq-mean-token-mean")[0])


# ---------------------------------------------------------------------------------------------------- naive references


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def naive_token(name: str, old: float, new: float, a: float, chosen: bool) -> float:
    """The value of one token's loss; stop-gradients do not matter for it."""
    d = new - old
    r = math.exp(d)
    match name:
        case "vanilla":
            loss = max(-a * r, -a * clip(r, 0.9, 1.3))
            return min(loss, -a * 3.0) if a < 0 else loss
        case "sapo":
            tau = 1.0 if a > 0 else 1.05
            return -a * 4 / tau * sigmoid(tau * (r - 1))
        case "gpg":
            return -a * new
        case "cispo":
            return -clip(r, 0.9, 1.3) * a * new
        case "tis":
            return -clip(r, 0.0, 1.0) * a * new
        case "topr":
            return -a * new * (1.0 if a > 0 else clip(r, 0.0, 1.0))
        case "kimi15":
            return -a * new + 0.05 * d * d
        case "dro":
            return -(a * new - 0.25 * d * d)
        case "dppo_tv":
            shift = math.exp(new) - math.exp(old)
            return -a * min(r, 3.0) * new if (shift <= 0.3 if a > 0 else shift >= -0.1) else 0.0
        case "dppo_kl":
            p, q = math.exp(old), math.exp(new)
            kl = p * (old - new) + (1 - p) * math.log((1 - p) / (1 - q))
            inside = (kl <= 0.3 or q <= p) if a > 0 else (kl <= 0.1 or q >= p)
            return -a * min(r, 3.0) * new if inside else 0.0
        case "clip_cov":
            return 0.0 if chosen else max(-a * r, -a * clip(r, 0.9, 1.3))
        case "kl_cov":
            return -a * r + (0.1 * abs(d) if chosen else 0.0)
    raise AssertionError(name)


def naive_row(name: str, old: np.ndarray, new: np.ndarray, a: np.ndarray, weights: np.ndarray) -> float:
    """A row's mean loss, for the losses of whole rows."""
    if name == "gspo":
        s = math.exp((new - old).mean())
        return float(np.mean([w * max(-x * s, -x * clip(s, 0.9, 1.3)) for x, w in zip(a, weights, strict=True)]))
    worse = []
    for d, x in zip(new - old, a, strict=True):
        sign = np.sign(x)
        worse.append(sign * min(sign * d, sign * clip(d, -0.1, 0.3)))
    return -a.mean() * math.exp(np.mean(worse)) * math.exp(np.log(weights).mean())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_losses_equal_naive_loops(name: str, seed: int) -> None:
    columns = batch(seed)
    weights = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    old, new, a = (columns[key].numpy() for key in ("old_log_prob", "log_prob", "advantages"))
    by_row = []
    for row in range(ROWS):
        kept = columns["response_mask"][row].nonzero().flatten().tolist()
        if not kept:
            continue
        if name in ("gspo", "geo_mean"):
            by_row.append(naive_row(name, old[row, kept], new[row, kept], a[row, kept], weights[row, kept].numpy()))
        else:
            tokens = [
                naive_token(name, old[row, t], new[row, t], a[row, t], (row * WIDTH + t) % 3 == 0) * weights[row, t]
                for t in kept
            ]
            by_row.append(float(np.mean(tokens)))
    loss, _ = call(name, columns, rollout_is_weights=weights, mode="seq-mean-token-mean")
    assert loss.item() == pytest.approx(np.mean(by_row), rel=1e-6)


SMOOTH = {
    "vanilla": None,
    "sapo": None,
    "geo_mean": None,
    "kimi15": None,
    "dro": None,
    "gpg": None,
    "clip_cov": None,
    "kl_cov": None,
}


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_by_finite_differences(name: str) -> None:
    columns = batch(3)

    def loss(log_prob: torch.Tensor) -> torch.Tensor:
        return call(name, {**columns, "log_prob": log_prob})[0]

    assert torch.autograd.gradcheck(loss, columns["log_prob"].requires_grad_(), eps=1e-7, atol=1e-6)


def gradient(name: str, columns: dict[str, torch.Tensor], **extras: Any) -> torch.Tensor:
    """Of the token-sum or, for losses of rows, of the mean over rows."""
    log_prob = columns["log_prob"].clone().requires_grad_()
    call(name, {**columns, "log_prob": log_prob}, mode="token-sum", **extras)[0].backward()
    assert log_prob.grad is not None
    return log_prob.grad


@pytest.mark.parametrize("name", ["cispo", "tis", "topr", "dppo_tv", "dppo_kl"])
def test_weights_without_gradient(name: str) -> None:
    """These are weight times -A log_prob with a weight held fixed: the gradient is loss / log_prob."""
    columns = batch(3)
    old, new, a = (columns[key] for key in ("old_log_prob", "log_prob", "advantages"))
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for row, t in columns["response_mask"].nonzero().tolist():
        expected[row, t] = naive_token(name, float(old[row, t]), float(new[row, t]), float(a[row, t]), False)
    torch.testing.assert_close(gradient(name, columns), expected / new, rtol=1e-6, atol=1e-9)


def test_the_gradient_of_gspo() -> None:
    """Each token of a row gets A_t s / n, as if s were its own ratio; 0 where the clip holds."""
    columns = batch(3)
    found = gradient("gspo", columns)
    alive = int(columns["response_mask"].any(dim=1).sum())
    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    for row, mask in enumerate(columns["response_mask"] != 0):
        if not mask.any():
            continue
        s = float((columns["log_prob"] - columns["old_log_prob"])[row, mask].mean().exp())
        for t in mask.nonzero().flatten().tolist():
            a = float(columns["advantages"][row, t])
            is_clipped = s > 1.3 if a > 0 else s < 0.9
            expected[row, t] = 0 if is_clipped else -a * s / int(mask.sum()) / alive
    assert (expected == 0).sum() > (columns["response_mask"] == 0).sum()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- by hand


def one(ratio: float, advantage: float, old: float = -1.0) -> dict[str, torch.Tensor]:
    new = old + math.log(ratio)
    tensors = {"old_log_prob": old, "log_prob": new, "advantages": advantage, "response_mask": 1.0}
    return {key: torch.tensor([[value]], dtype=torch.float64) for key, value in tensors.items()}


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "expected"),
    [
        ("gspo", 1.5, 2.0, -2.6),
        ("gspo", 1.5, -2.0, 3.0),
        ("sapo", 1.0, 2.0, -4.0),  # 4 / 1 * sigmoid(0) = 2
        ("sapo", 1.0, -2.0, 4.0 / 1.05),
        ("geo_mean", 2.0, 1.0, -math.exp(0.3)),
        ("geo_mean", 2.0, -1.0, 2.0),
        ("gpg", 1.0, 3.0, 3.0),
        ("cispo", 2.0, 1.0, 1.3 * (1 - math.log(2))),
        ("tis", 2.0, 1.0, 1 - math.log(2)),
        ("topr", 2.0, 1.0, 1 - math.log(2)),
        ("topr", 0.5, -1.0, -0.5 * (1 + math.log(2))),
        ("kimi15", math.e, 1.0, 0.0 + 0.05),
        ("dro", math.e, 1.0, 0.0 + 0.25),
        ("dppo_tv", 2.0, 1.0, 0.0),  # e^-1 (2 - 1) = 0.37 > 0.3
        ("dppo_tv", 2.0, -1.0, -2 * (1 - math.log(2))),
        ("dppo_kl", 1.0, 1.0, 1.0),
    ],
)
def test_one_token_by_hand(name: str, ratio: float, advantage: float, expected: float) -> None:
    loss, _ = call(name, one(ratio, advantage))
    assert loss.item() == pytest.approx(expected, rel=1e-9)


def test_segment_ratios_by_hand() -> None:
    """Two turns: the mean log-ratio of each, at each of its tokens; the observation between them parts them."""
    d = torch.tensor([[0.1, 0.3, 9.0, -0.4]], dtype=torch.float64)
    columns = {
        "old_log_prob": torch.zeros(1, 4, dtype=torch.float64),
        "log_prob": d.clone().requires_grad_(),
        "advantages": torch.tensor([[1.0, 1.0, 1.0, -1.0]], dtype=torch.float64),
        "response_mask": torch.tensor([[1, 1, 0, 1]]),
    }
    config = ActorConfig(clip_ratio=0.5, ratio_type="segment")
    loss, metrics = call("vanilla", columns, config, mode="token-sum")
    assert loss.item() == pytest.approx(-2 * math.exp(0.2) + math.exp(-0.4))
    loss.backward()
    gradients = [-math.exp(0.2), -math.exp(0.2), 0.0, math.exp(-0.4)]  # sum of A over the turn, times ratio / n
    assert columns["log_prob"].grad is not None
    assert columns["log_prob"].grad.tolist()[0] == pytest.approx(gradients)
    assert metrics["ppo_kl"].value == pytest.approx(0.0, abs=1e-7)


def test_topr_by_scores() -> None:
    columns = one(2.0, -1.0)
    good, _ = call("topr", columns, scores=torch.tensor([1.0]))
    bad, _ = call("topr", columns, scores=torch.tensor([0.0]))
    assert (good.item(), bad.item()) == (pytest.approx(-(1 - math.log(2))), pytest.approx(-(1 - math.log(2))))
    good, _ = call("topr", one(0.5, -1.0), scores=torch.tensor([1.0]))
    assert good.item() == pytest.approx(-(1 + math.log(2)))


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_dropped"),
    [(1.5, 1.0, True), (1.5, -1.0, False), (0.8, 1.0, False), (0.8, -1.0, True), (1.0, 1.0, False), (1.2, 1.0, False)],
)
def test_cispo_unified_mask(ratio: float, advantage: float, is_dropped: bool) -> None:
    """The clip range is [0.9, 1.3]; dropped is what PPO's clip would drop."""
    options = PolicyLossConfig(cispo_unified_mask=True)
    config = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.3, policy_loss=options)
    loss, _ = call("cispo", one(ratio, advantage), config)
    plain, _ = call("cispo", one(ratio, advantage))
    assert loss.item() == (0.0 if is_dropped else plain.item()) and plain.item() != 0


def test_a_loss_names_what_else_it_reads() -> None:
    for name, argument in {"clip_cov": "selected", "kl_cov": "selected", "topr": "scores", "vanilla": None}.items():
        named = set(inspect.signature(get_policy_loss_fn(name)).parameters) & {"selected", "scores"}
        assert named == ({argument} if argument else set())


@pytest.mark.parametrize("name", ["vanilla", "gspo", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "clip_cov"])
def test_a_negative_clip_range_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=r"clip_ratio_low=0.2, clip_ratio_high=-0.1 .* at least 0"):
        call(name, one(1.0, 1.0), ActorConfig(clip_ratio_high=-0.1))


def test_dro_needs_its_beta() -> None:
    for beta in (None, 0.0):
        config = ActorConfig(policy_loss=PolicyLossConfig(dro_beta=beta))
        with pytest.raises(ValueError, match=f"dro_beta={beta}"):
            call("dro", one(1.0, 1.0), config)


# ---------------------------------------------------------------------------------------------------- chosen tokens


def covariances(columns: dict[str, torch.Tensor], new: torch.Tensor) -> dict[tuple[int, int], float]:
    kept = [tuple(place) for place in columns["response_mask"].nonzero().tolist()]
    a = [float(columns["advantages"][place]) for place in kept]
    log_probs = [float(new[place]) for place in kept]
    pairs = zip(kept, a, log_probs, strict=True)
    return {place: (x - np.mean(a)) * (y - np.mean(log_probs)) for place, x, y in pairs}


def test_kl_cov_takes_the_largest_covariances() -> None:
    columns = batch(5)
    found = select_kl_cov(columns["old_log_prob"], columns["advantages"], columns["response_mask"], CONFIG)
    by_size = sorted(covariances(columns, columns["old_log_prob"]).items(), key=lambda pair: -pair[1])
    wanted = int(0.2 * len(by_size))
    assert {tuple(place) for place in found.nonzero().tolist()} == {place for place, _ in by_size[:wanted]}


def test_clip_cov_draws_among_the_candidates() -> None:
    columns = batch(5)
    old, a, mask = (columns[key] for key in ("old_log_prob", "advantages", "response_mask"))
    candidates = {place for place, cov in covariances(columns, old).items() if 0.0 < cov < 9.0}
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


@pytest.mark.parametrize("name", sorted(TOKEN_SELECTIONS))
def test_a_whole_mini_batch_chooses_by_itself(name: str) -> None:
    columns = batch(5)
    own = TOKEN_SELECTIONS[name](
        columns["old_log_prob"], columns["advantages"], columns["response_mask"], CONFIG, log_prob=columns["log_prob"]
    )
    _, metrics = call(name, columns, selected=None)
    if name == "clip_cov":
        assert metrics["pg_clipfrac"].total == int(own.sum())
    else:
        assert torch.equal(call(name, columns, selected=None)[0], call(name, columns, selected=own)[0])


# ---------------------------------------------------------------------------------------------------- value loss


def test_value_loss_by_hand() -> None:
    new = torch.tensor([[1.0, 0.0, math.nan]], dtype=torch.float64, requires_grad=True)
    returns = torch.tensor([[3.0, 0.5, math.nan]], dtype=torch.float64)
    old = torch.tensor([[0.2, 0.1, math.nan]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0]])
    loss, clipfrac = compute_value_loss(new, returns, old, mask, cliprange_value=0.5)
    # token 1: (1 - 3)^2 = 4, clipped to 0.7: 5.29; token 2: within the range, 0.25
    assert loss.item() == pytest.approx(0.5 * (5.29 + 0.25) / 2)
    assert clipfrac.item() == pytest.approx(0.5)
    loss.backward()
    assert new.grad is not None and new.grad.tolist() == [[0.0, -0.25, 0.0]]


def test_value_loss_gradient_and_denominators() -> None:
    columns = batch(1)
    arguments = (columns["advantages"], columns["old_log_prob"], columns["response_mask"], 0.4)

    def loss(new: torch.Tensor) -> torch.Tensor:
        return compute_value_loss(new, *arguments, "seq-mean-token-sum", 2, 99, 7)[0]

    assert torch.autograd.gradcheck(loss, columns["log_prob"].requires_grad_(), eps=1e-7, atol=1e-6)
    total, _ = compute_value_loss(columns["log_prob"], *arguments, "token-sum")
    mean, clipfrac = compute_value_loss(columns["log_prob"], *arguments, "token-mean", 2, batch_num_tokens=100)
    assert mean.item() == pytest.approx(total.item() / 50)
    assert 0 < clipfrac.item() < 1
    empty = (columns["log_prob"], *arguments[:2], torch.zeros(ROWS, WIDTH), 0.4)
    assert compute_value_loss(*empty, batch_num_tokens=100)[0].item() == 0
    with pytest.raises(ValueError, match="loss_mask keeps no token"):
        compute_value_loss(*empty)


def test_value_loss_names_what_is_wrong() -> None:
    one_by_one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match="cliprange_value=0"):
        compute_value_loss(one_by_one, one_by_one, one_by_one, one_by_one, 0.0)
    with pytest.raises(ValueError, match=r"compute_value_loss: returns has shape \(1, 2\)"):
        compute_value_loss(one_by_one, torch.zeros(1, 2), one_by_one, one_by_one, 0.5)

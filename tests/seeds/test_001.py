"""The seed on `compute_policy_loss`: its example as it stands, and its contract against plain loops."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.verl_lite.naive_losses import naive_policy_loss
from verl_lite.core_algos import compute_policy_loss, compute_policy_loss_vanilla
from verl_lite.metrics import values

ROOT = Path(__file__).resolve().parents[2]
SIZES = (5, 9)
Batch = dict[str, torch.Tensor]


def batch(seed: int = 0) -> Batch:
    """Ratios from e^-3 to e^3, so that both clips and the dual clip act; a ragged mask with a hole and an empty row."""
    generator = torch.Generator().manual_seed(seed)
    old = torch.randn(SIZES, generator=generator, dtype=torch.float64) * 0.5 - 2.0
    mask = (torch.arange(SIZES[1]) < torch.tensor([9, 4, 1, 0, 7])[:, None]).long()
    mask[0, 3] = 0
    return {
        "old_log_prob": old,
        "log_prob": old + torch.empty(SIZES, dtype=torch.float64).uniform_(-3, 3, generator=generator),
        "advantages": torch.randn(SIZES, generator=generator, dtype=torch.float64),
        "response_mask": mask,
    }


def by_hand(given: Batch, low: float, high: float, c: float, mode: str) -> list[float]:
    """(loss, clip fraction, KL, lower clip fraction), token by token in Python's floats."""
    config = SimpleNamespace(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c)
    clipped, lower, kl = [], [], []
    for old, new, advantage, valid in zip(*(given[name].flatten().tolist() for name in given), strict=True):
        if valid:
            ratio = math.exp(new - old)
            plain, bounded = -advantage * ratio, -advantage * min(max(ratio, 1 - low), 1 + high)
            clipped.append(bounded > plain)
            lower.append(advantage < 0 and max(plain, bounded) > -advantage * c)
            kl.append(old - new)
    assert any(clipped) and any(lower)
    shares = (sum(numbers) / len(numbers) for numbers in (clipped, kl, lower))
    return [naive_policy_loss("vanilla", given, mode, config), *shares]


def test_the_example_of_the_seed_runs_as_it_stands() -> None:
    batch_size = 8
    response_length = 128

    # Log-probabilities from rollout (old policy) and current policy
    old_log_prob = torch.randn(batch_size, response_length) * 0.5 - 2.0
    log_prob = old_log_prob + torch.randn(batch_size, response_length) * 0.05

    # Advantages from GRPO or GAE
    advantages = torch.randn(batch_size, response_length)

    # Response mask
    response_mask = torch.ones(batch_size, response_length)

    log_prob.requires_grad_()
    with pytest.warns(DeprecationWarning, match="compute_policy_loss_vanilla") as warned:
        pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower = compute_policy_loss(
            old_log_prob=old_log_prob,
            log_prob=log_prob,
            advantages=advantages,
            response_mask=response_mask,
            cliprange=0.2,
            cliprange_low=0.2,
            cliprange_high=0.28,
            clip_ratio_c=3.0,
            loss_agg_mode="token-mean",
        )

    assert [warning.filename for warning in warned] == [__file__], "the caller's line is shown"
    assert all(number.shape == () for number in (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower))
    assert ppo_kl.item() == pytest.approx((old_log_prob - log_prob).mean().item(), abs=1e-6)
    pg_loss.backward()  # pg_loss is the scalar loss to backpropagate
    assert log_prob.grad is not None and log_prob.grad.abs().sum() > 0


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_all_four_outputs_equal_a_plain_loop(mode: str) -> None:
    given = batch()
    with pytest.warns(DeprecationWarning):
        ranges = {"cliprange_low": 0.1, "cliprange_high": 0.4}
        found = compute_policy_loss(**given, **ranges, clip_ratio_c=2.5, loss_agg_mode=mode)
    assert [one.item() for one in found] == pytest.approx(by_hand(given, 0.1, 0.4, 2.5, mode), rel=1e-12)


def test_defaults_are_those_of_the_seed() -> None:
    """Each side falls back to cliprange, which has to be given; the dual clip is 3 and above 1; token-mean."""
    given = batch(1)
    with pytest.warns(DeprecationWarning):
        sides = {"cliprange_low": (0.1, 0.3), "cliprange_high": (0.3, 0.1)}
        for name, (low, high) in sides.items():
            found = compute_policy_loss(**given, cliprange=0.3, **{name: 0.1})
            expected = by_hand(given, low, high, 3.0, "token-mean")
            assert [one.item() for one in found] == pytest.approx(expected, rel=1e-12)
        with pytest.raises(ValueError, match="give cliprange"):
            compute_policy_loss(**given)
        with pytest.raises(ValueError, match="clip_ratio_c=1.0"):
            compute_policy_loss(**given, cliprange=0.2, clip_ratio_c=1.0)
    shown = {name: one.default for name, one in inspect.signature(compute_policy_loss).parameters.items()}
    required = dict.fromkeys(("old_log_prob", "log_prob", "advantages", "response_mask"), inspect.Parameter.empty)
    ranges = dict.fromkeys(("cliprange", "cliprange_low", "cliprange_high"))
    assert shown == {**required, **ranges, "clip_ratio_c": 3.0, "loss_agg_mode": "token-mean"}


def test_the_function_that_it_names_has_verls_defaults(recwarn: pytest.WarningsRecorder) -> None:
    given = batch(2)
    verl = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None, "clip_ratio_c": 3.0}
    config = SimpleNamespace(**verl, loss_scale_factor=None)
    loss, metrics = compute_policy_loss_vanilla(**given, config=config)
    numbers = values(metrics)
    found = [loss.item(), *(numbers[name] for name in ("pg_clipfrac", "ppo_kl", "pg_clipfrac_lower"))]
    assert found == pytest.approx(by_hand(given, 0.2, 0.2, 3.0, "token-mean"), rel=1e-12)
    assert not [warning for warning in recwarn if warning.category is DeprecationWarning]
    with pytest.raises(ValueError, match="config is missing; an ActorConfig"):
        compute_policy_loss_vanilla(**given)


def test_our_own_code_never_calls_the_deprecated_one() -> None:
    files = [path for top in ("verl_lite", "workers", "trainer", "recipes") for path in (ROOT / top).rglob("*.py")]
    calls = [path.name for path in files for _ in re.findall(r"(?<!def )\bcompute_policy_loss\(", path.read_text())]
    assert len(files) > 200 and not calls

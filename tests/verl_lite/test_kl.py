"""KL estimators by exact enumeration over a vocabulary of five tokens; KL in the reward, its controllers; entropy."""

import math
from types import SimpleNamespace

import pytest
import torch

from verl_lite.core_algos import (
    KL_ALIASES,
    AdaptiveKLController,
    FixedKLController,
    apply_kl_penalty,
    entropy_from_logits,
    get_kl_controller,
    kl_penalty,
    logprobs_from_logits,
    masked_sum,
)

POLICY = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15], dtype=torch.float64)

# What the expectation over tokens drawn from the policy is: of the value, and of the gradient of the value at the drawn
# token, which is what training averages. "exact" means that of KL(policy || reference).
EXPECTATIONS = {
    "k1": ("exact", "zero"),
    "abs": ("other", "other"),
    "k2": ("other", "exact"),
    "k3": ("exact", "reverse"),  # that of KL(reference || policy)
    "k1+": ("exact", "exact"),
    "abs+": ("other", "exact"),
    "k2+": ("other", "exact"),
    "k3+": ("exact", "exact"),
}
NAMES = [name + suffix for name in KL_ALIASES for suffix in ("", "+")]


def expected(name: str) -> tuple[str, str]:
    return EXPECTATIONS[KL_ALIASES[name.removesuffix("+")] + ("+" if name.endswith("+") else "")]


def divergence(logits: torch.Tensor, reverse: bool = False) -> torch.Tensor:
    log_probs = torch.log_softmax(logits, 0)
    if reverse:
        return (REFERENCE * (REFERENCE.log() - log_probs)).sum()
    return (log_probs.exp() * (log_probs - REFERENCE.log())).sum()


@pytest.mark.parametrize("name", NAMES)
def test_expected_value_by_enumeration(name: str) -> None:
    estimate = (POLICY * kl_penalty(POLICY.log(), REFERENCE.log(), name)).sum()
    is_exact = math.isclose(estimate.item(), divergence(POLICY.log()).item(), rel_tol=1e-12)
    assert is_exact == (expected(name)[0] == "exact")


@pytest.mark.parametrize("name", NAMES)
def test_expected_gradient_by_enumeration(name: str) -> None:
    logits = POLICY.log().requires_grad_()
    log_probs = torch.log_softmax(logits, 0)
    (found,) = torch.autograd.grad((POLICY * kl_penalty(log_probs, REFERENCE.log(), name)).sum(), logits)
    candidates = {
        "exact": torch.autograd.grad(divergence(logits), logits)[0],
        "reverse": torch.autograd.grad(divergence(logits, reverse=True), logits)[0],
        "zero": torch.zeros(5, dtype=torch.float64),
    }
    assert all((a - b).abs().max() > 0.01 for a in candidates.values() for b in candidates.values() if a is not b)
    matches = [kind for kind, wanted in candidates.items() if torch.allclose(found, wanted, atol=1e-12)]
    assert (matches or ["other"]) == [expected(name)[1]]


def test_values_by_hand() -> None:
    """d = 0.5 and -1: |d|, d^2 / 2, exp(-d) + d - 1."""
    new, reference = torch.tensor([0.5, -1.0]), torch.tensor([0.0, 0.0])
    values = {
        "k1": [0.5, -1.0],
        "abs": [0.5, 1.0],
        "k2": [0.125, 0.5],
        "k3": [math.exp(-0.5) + 0.5 - 1, math.e - 1 - 1],
    }
    for name in NAMES:
        assert kl_penalty(new, reference, name).tolist() == pytest.approx(
            values[KL_ALIASES[name.removesuffix("+")]], rel=1e-5
        )


@pytest.mark.parametrize("name", NAMES)
def test_bounds(name: str) -> None:
    """k3 is cut at 10, and nothing overflows: exp(700) would."""
    new = torch.tensor([-50.0, -700.0, 700.0], requires_grad=True)
    values = kl_penalty(new, torch.zeros(3), name)
    values.sum().backward()
    assert bool(torch.isfinite(values).all()) and new.grad is not None and bool(torch.isfinite(new.grad).all())
    assert KL_ALIASES[name.removesuffix("+")] != "k3" or values.tolist() == [10.0, 10.0, 10.0]


def test_names_and_shapes_are_checked() -> None:
    with pytest.raises(NotImplementedError, match="full"):
        kl_penalty(POLICY, REFERENCE, "full")
    with pytest.raises(ValueError, match=r"Unknown kl_penalty: 'k4'\. Expected one of kl, k1, abs"):
        kl_penalty(POLICY, REFERENCE, "k4")
    with pytest.raises(ValueError, match=r"kl_penalty: ref_logprob has shape \(4,\), expected that of logprob, \(5,\)"):
        kl_penalty(POLICY, REFERENCE[:4], "k1")
    with pytest.raises(ValueError, match="kl_penalty: response_mask has shape"):
        kl_penalty(POLICY, REFERENCE, "k1", torch.ones(1))
    two = torch.zeros(2, 2)
    with pytest.raises(ValueError, match="apply_kl_penalty: response_mask has shape"):
        apply_kl_penalty(two, two, two, torch.ones(2, 1), 0.1)


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_keeps_nan_out_of_the_gradient(name: str) -> None:
    new = torch.tensor([0.5, 0.5], requires_grad=True)
    mask = torch.tensor([1, 0])
    kl = kl_penalty(new, torch.tensor([0.0, math.nan]), name, mask)
    masked_sum(kl, mask).backward()
    assert new.grad is not None and bool(torch.isfinite(new.grad).all()) and new.grad[1] == 0


def test_kl_in_reward_by_hand() -> None:
    """Means of the rows that have a token: (0.1 + 0.3) / 2 and 0.4."""
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])
    scores = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 0.0]])
    new = torch.tensor([[0.1, 0.3], [0.4, math.nan], [math.nan, math.nan]])
    rewards, mean_kl = apply_kl_penalty(scores, new, torch.zeros(3, 2), mask, kl_coef=0.5)
    torch.testing.assert_close(rewards, torch.tensor([[-0.05, 0.85], [1.8, 0.0], [0.0, 0.0]]))
    assert mean_kl == pytest.approx((0.2 + 0.4) / 2)


def test_controllers_by_hand() -> None:
    fixed = FixedKLController(0.1)
    fixed.update(current_kl=9.0, n_steps=100)
    assert fixed.value == 0.1
    adaptive = AdaptiveKLController(0.1, target_kl=0.5, horizon=1000)
    adaptive.update(current_kl=5.0, n_steps=100)
    assert adaptive.value == pytest.approx(0.1 * (1 + 0.2 * 0.1))  # error 9, clipped to 0.2; 100 of 1000 sequences
    adaptive.update(current_kl=0.45, n_steps=100)
    assert adaptive.value == pytest.approx(0.1 * 1.02 * (1 - 0.1 * 0.1))
    restored = AdaptiveKLController(1.0, 0.5, 1000)
    restored.load_state_dict(adaptive.state_dict())
    assert restored.value == adaptive.value
    with pytest.raises(ValueError, match="target_kl=0"):
        AdaptiveKLController(0.1, target_kl=0.0, horizon=10)


def test_controller_by_config() -> None:
    kl_ctrl = SimpleNamespace(type="adaptive", kl_coef=0.3, target_kl=0.5, horizon=7)
    adaptive = get_kl_controller(kl_ctrl)
    assert isinstance(adaptive, AdaptiveKLController)
    assert (adaptive.value, adaptive.target, adaptive.horizon) == (0.3, 0.5, 7)
    kl_ctrl.type = "fixed"
    assert type(get_kl_controller(kl_ctrl)) is FixedKLController
    kl_ctrl.type = "adaptiv"
    with pytest.raises(ValueError, match="algorithm.kl_ctrl.type='adaptiv'"):
        get_kl_controller(kl_ctrl)


def test_entropy() -> None:
    """A logit of -inf (a suppressed token) has probability 0 and adds nothing, to value and gradient."""
    assert entropy_from_logits(POLICY.log() + 3.0).item() == pytest.approx(-(POLICY * POLICY.log()).sum().item())
    logits = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    entropy = entropy_from_logits(logits)
    entropy.backward()
    assert entropy.item() == pytest.approx(math.log(2))
    assert logits.grad is not None and logits.grad.tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-7)


def test_log_probs_of_labels() -> None:
    """Of logits log p + 3 they are log p; computed in fp32 from bf16."""
    found = logprobs_from_logits((POLICY.log() + 3.0).repeat(2, 1), torch.tensor([4, 0]))
    assert found.tolist() == pytest.approx([math.log(0.05), math.log(0.4)])
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = torch.log_softmax(logits.double(), dim=-1)[:, 7]
    assert torch.allclose(logprobs_from_logits(logits, torch.full((3,), 7)).double(), expected, atol=1e-6)

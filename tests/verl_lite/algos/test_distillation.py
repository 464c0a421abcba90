"""The losses of distillation: against enumeration, plain torch and worked examples, and the bin for the rest."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from verl_lite.algos.distillation import divergence, sampled_reverse_kl

KINDS = ("forward_kl", "reverse_kl", "jsd")


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_expected_gradient_of_k1_is_that_of_the_reverse_kl() -> None:
    """Over all tokens of a vocabulary of 7, weighted with their probability, at each of 3 positions."""
    logits, teacher = draw(3, 7).requires_grad_(), draw(3, 7, seed=1).log_softmax(-1)
    student = logits.log_softmax(-1)
    exact = torch.autograd.grad((student.exp() * (student - teacher)).sum(), logits, retain_graph=True)[0]
    losses = sampled_reverse_kl(student, student.detach(), teacher, clip_low=0.2, clip_high=0.2)
    found = torch.autograd.grad((student.detach().exp() * losses).sum(), logits)[0]
    assert torch.allclose(found, exact, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_divergence_over_the_whole_vocabulary_equals_plain_torch(kind: str) -> None:
    """Values and gradients with respect to the logits."""
    logits, log_q = draw(2, 3, 7).requires_grad_(), draw(2, 3, 7, seed=1).log_softmax(-1)
    log_p = logits.log_softmax(-1)
    mean = ((log_p.exp() + log_q.exp()) / 2).log()
    plain = {  # F.kl_div(a, b, log_target=True) is KL(b | a)
        "forward_kl": F.kl_div(log_p, log_q, reduction="none", log_target=True),
        "reverse_kl": F.kl_div(log_q, log_p, reduction="none", log_target=True),
        "jsd": sum(F.kl_div(mean, each, reduction="none", log_target=True) for each in (log_p, log_q)) / 2,
    }[kind].sum(-1)
    found = divergence(log_p, log_q, kind, with_rest=False)
    assert torch.allclose(found, plain, atol=1e-12)
    gradients = [torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in (found, plain)]
    assert torch.allclose(*gradients, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_over_the_top_tokens_equals_enumeration_with_a_merged_bin(kind: str) -> None:
    """Of a vocabulary of 9, three tokens are compared; the other six are one token of a smaller vocabulary."""
    logits, teacher = draw(4, 9).requires_grad_(), draw(4, 9, seed=1).log_softmax(-1)
    ids = teacher.topk(3).indices
    student = logits.log_softmax(-1)
    found = divergence(student.gather(1, ids), teacher.gather(1, ids), kind, with_rest=True)

    def merged(log_probs: torch.Tensor) -> torch.Tensor:
        rest = log_probs.exp().scatter(1, ids, 0.0).sum(1, keepdim=True)
        return torch.cat([log_probs.gather(1, ids), rest.log()], dim=1)

    expected = divergence(merged(student), merged(teacher), kind, with_rest=False)
    assert torch.allclose(found, expected, atol=1e-12)
    gradients = [torch.autograd.grad(each.sum(), logits, retain_graph=True)[0] for each in (found, expected)]
    assert torch.allclose(*gradients, atol=1e-10)


def test_without_the_bin_the_reverse_kl_falls_when_probability_leaves_the_top_tokens() -> None:
    """Teacher 0.6, 0.3 and 0.1 for the rest. The student keeps the proportions of the first two, with less mass."""
    teacher = torch.tensor([0.6, 0.3], dtype=torch.float64).log()
    masses = torch.tensor([0.9, 0.6, 0.3, 0.05], dtype=torch.float64)
    students = masses.log().unsqueeze(1) + torch.tensor([2 / 3, 1 / 3], dtype=torch.float64).log()
    without, with_rest = (divergence(students, teacher.expand(4, 2), "reverse_kl", each) for each in (False, True))
    assert without[0] > without[2] and without.min() < -0.3  # m ln(m / 0.9), smallest at m = 0.9 / e
    assert torch.allclose(without, masses * (masses / 0.9).log(), atol=1e-12)
    assert with_rest.abs()[0] < 1e-12 and (with_rest.diff() > 0).all()  # smallest where the student is the teacher
    assert torch.allclose(with_rest, without + (1 - masses) * ((1 - masses) / 0.1).log(), atol=1e-12)


def test_worked_examples() -> None:
    """p = (1/2, 1/4, rest 1/4), q = (1/4, 1/2, rest 1/4)."""
    p, q = (torch.tensor([[values]], dtype=torch.float64).log() for values in ([0.5, 0.25], [0.25, 0.5]))
    assert divergence(p, q, "forward_kl", True).item() == pytest.approx(0.25 * math.log(2))
    assert divergence(p, q, "reverse_kl", True).item() == pytest.approx(0.25 * math.log(2))
    mean = 0.375  # of both tokens
    jsd = 0.5 * math.log(0.5 / mean) + 0.25 * math.log(0.25 / mean)
    assert divergence(p, q, "jsd", True).item() == pytest.approx(jsd)
    with pytest.raises(ValueError, match="kind='kl'"):
        divergence(p, q, "kl", True)


def test_k1_clips_the_ratio_and_bounds_the_advantage() -> None:
    """Advantages 1 and -20, bounded to -10; ratios 1.5 and 0.5, of which PPO clips the first to 1.2 and the second, at
    a negative advantage, to 0.8."""
    old, teacher = torch.tensor([[-2.0, -1.0]]), torch.tensor([[-1.0, -21.0]])
    new = (old + torch.tensor([[1.5, 0.5]]).log()).requires_grad_()
    losses = sampled_reverse_kl(new, old, teacher, max_advantage=10.0, clip_low=0.2, clip_high=0.2)
    assert losses.tolist()[0] == pytest.approx([-1.2, 8.0])
    losses.sum().backward()
    assert new.grad is not None and not new.grad.any()


def test_k1_clips_below_and_above_with_their_own_ranges() -> None:
    """Ratios 2 at a positive and 1/4 at a negative advantage of 1, with the clip range from 1 - 0.1 to 1 + 0.5."""
    old, teacher = torch.tensor([[-2.0, -2.0]]), torch.tensor([[-1.0, -3.0]])
    new = old + torch.tensor([[2.0, 0.25]]).log()
    losses = sampled_reverse_kl(new, old, teacher, clip_low=0.1, clip_high=0.5)
    assert losses.tolist()[0] == pytest.approx([-1.5, 0.9])


def test_k1_is_finite_for_any_ratio_and_any_teacher() -> None:
    """log p - log p_old = 700 is clamped to 20. At A = -1 the loss is exp(20), without a gradient beyond the clamp. A
    token that the teacher excludes has log q = -100, so A = -100 + 1."""
    old = torch.tensor([[-701.0, -1.0, -1.0]])
    new = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    teacher = torch.tensor([[-702.0, -math.inf, -9999.0]])
    losses = sampled_reverse_kl(new, old, teacher, max_advantage=1000.0, clip_low=0.2, clip_high=0.2)
    assert losses.tolist()[0] == pytest.approx([-1.2 * 601, 99.0, 99.0])
    worse = sampled_reverse_kl(new[:, :1], old[:, :1], torch.tensor([[-800.0]]), clip_low=0.2, clip_high=0.2)
    assert worse.item() == pytest.approx(-1.2 * 601)
    grown = sampled_reverse_kl(
        torch.tensor([[-1.0]]), torch.tensor([[-99.0]]), torch.tensor([[-100.0]]), clip_low=0.2, clip_high=0.2
    )
    assert grown.item() == pytest.approx(math.exp(20.0), rel=1e-5)
    losses.sum().backward()
    assert new.grad is not None and new.grad.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_extreme_distributions_have_finite_losses_and_gradients(kind: str) -> None:
    """All probability inside or outside of the compared tokens, in fp32, and tokens that the teacher excludes."""
    logits = torch.tensor([[60.0, 0.0, 0.0, 0.0], [0.0, 0.0, 60.0, 0.0]], requires_grad=True)
    teacher = torch.tensor([[-1e30, 0.0], [0.0, -1e30]])
    for with_rest in (True, False):
        losses = divergence(logits.log_softmax(-1)[:, :2], teacher, kind, with_rest)
        [gradient] = torch.autograd.grad(losses.sum(), logits)
        assert losses.isfinite().all() and gradient.isfinite().all() and gradient.abs().max() < 60


def test_a_rest_below_its_bound_still_has_a_gradient() -> None:
    """The student has 1e-7 outside of the two compared tokens and the teacher 0.2: d/dz of an outside token j is
    -0.2 p_j / rest, with the bound 1e-6 in place of the rest."""
    logits = torch.tensor([16.0, 16.0, 0.0, 0.0], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([0.5, 0.3], dtype=torch.float64).log()
    [gradient] = torch.autograd.grad(divergence(logits.log_softmax(-1)[:2], teacher, "forward_kl", True), logits)
    outside = math.exp(-16) / (2 + 2 * math.exp(-16))
    assert gradient[2:].tolist() == pytest.approx([-0.2 * outside / 1e-6] * 2, rel=1e-4)

"""Chunked log-probs and entropies against the naive formula: values, gradients, memory."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from workers.policy import causal_lm
from workers.policy.causal_lm import refuse_logit_transforms, token_log_probs


def naive(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row, by the definitions."""
    log_probs, entropys = [], []
    for row, target in zip(hidden, targets.tolist(), strict=True):
        logits = (weight @ row + (0 if bias is None else bias)) / temperature
        log_p = logits - logits.exp().sum().log()
        log_probs.append(log_p[target])
        entropys.append(-(log_p.exp() * log_p).sum())
    return torch.stack(log_probs), torch.stack(entropys)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 100])
@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_naive_in_fp64(
    monkeypatch: pytest.MonkeyPatch, chunk_tokens: int, kept_bytes: int, with_bias: bool
) -> None:
    monkeypatch.setattr(causal_lm, "KEPT_LOGITS_BYTES", kept_bytes)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = [draw(11, 5), draw(17, 5), draw(17) if with_bias else None]
    targets = torch.randint(17, (11,), generator=generator)
    weights = draw(2, 11).detach()
    variables = [tensor for tensor in inputs if tensor is not None]

    def loss(log_probs: torch.Tensor, entropys: torch.Tensor) -> torch.Tensor:
        return (weights[0] * log_probs).sum() + (weights[1] * entropys).sum()

    expected = naive(*inputs, targets, 0.7)
    found = token_log_probs(*inputs, targets, temperature=0.7, chunk_tokens=chunk_tokens, calculate_entropy=True)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    expected_grads = torch.autograd.grad(loss(*expected), variables)
    for one, other in zip(torch.autograd.grad(loss(*found), variables), expected_grads, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    without, none = token_log_probs(
        *inputs, targets, temperature=0.7, chunk_tokens=chunk_tokens, calculate_entropy=False
    )
    assert none is None
    expected_grads = torch.autograd.grad((weights[0] * naive(*inputs, targets, 0.7)[0]).sum(), variables)
    for one, other in zip(torch.autograd.grad((weights[0] * without).sum(), variables), expected_grads, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_gradcheck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_lm, "KEPT_LOGITS_BYTES", 0)
    torch.manual_seed(0)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, 3, 3, 1])

    def function(hidden: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropys = token_log_probs(
            hidden, weight, None, targets, temperature=1.3, chunk_tokens=2, calculate_entropy=True
        )
        assert entropys is not None
        return log_probs, entropys

    assert torch.autograd.gradcheck(function, (hidden, weight))


def test_half_precision_reduces_in_fp32() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32).bfloat16(), torch.randn(1000, 32).bfloat16()
    targets = torch.randint(1000, (64,))
    found, _ = token_log_probs(hidden, weight, None, targets, temperature=1.0, chunk_tokens=16, calculate_entropy=False)
    logits = (hidden @ weight.t()).double()
    expected = logits.log_softmax(-1).gather(1, targets.unsqueeze(1)).squeeze(1)
    assert found.dtype == torch.float32
    assert (found.double() - expected).abs().max() < 1e-4


MEMORY_SCRIPT = """
import resource, sys, torch
from workers.policy.causal_lm import token_log_probs
tokens, vocab, width = int(sys.argv[1]), 50_000, 16
torch.set_num_threads(1)
def run(count):
    hidden = torch.randn(count, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    targets = torch.randint(vocab, (count,))
    log_probs, entropys = token_log_probs(
        hidden, weight, None, targets, temperature=1.0, chunk_tokens=200, calculate_entropy=True)
    (log_probs.sum() + entropys.sum()).backward()
run(10)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(tokens)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_peak_memory_does_not_grow_with_tokens() -> None:
    """Peak resident memory over a small call, in a process of its own: 40 MB of logits a chunk, up to 600 MB in all."""
    peak_mb = {}
    for tokens in (600, 3000):
        output = subprocess.run(
            [sys.executable, "-c", MEMORY_SCRIPT, str(tokens)], capture_output=True, text=True, check=True
        )
        peak_mb[tokens] = int(output.stdout) / 1024
    assert peak_mb[3000] < 300, peak_mb
    assert peak_mb[3000] < 1.2 * peak_mb[600] + 10, peak_mb


def test_models_with_transformed_logits_are_refused() -> None:
    plain = SimpleNamespace(model_type="qwen2", final_logit_softcapping=None, logits_scaling=1.0)
    refuse_logit_transforms(plain)
    for name, value in (("final_logit_softcapping", 30.0), ("logit_scale", 0.0625), ("logits_scaling", 8.0)):
        with pytest.raises(ValueError, match=name):
            refuse_logit_transforms(SimpleNamespace(model_type="other", **{name: value}))

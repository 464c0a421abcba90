"""Sampling as a pure function, against Python integers, naive loops and exact probabilities; test_engines.py has what
draws do not depend on."""

from __future__ import annotations

import math

import pytest
import torch

from workers.rollout.sampling import sample, uniform

MASK = 2**64 - 1


def _splitmix64_finalizer(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_uniform_equals_unsigned_integer_arithmetic() -> None:
    seeds = [0, 1, 2, 2**62 + 12345, 2**63 - 1]
    positions = [0, 1, 500, 131071, 3]
    expected = [
        (_splitmix64_finalizer((_splitmix64_finalizer(seed) + (position + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11)
        / 2**53
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert uniform(torch.tensor(seeds), torch.tensor(positions)).tolist() == expected


def _draw(logits: torch.Tensor, count: int, position: int = 0, **options: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` draws from one row of logits."""
    tensors = {name: torch.full((count,), value) for name, value in options.items()}
    return sample(
        logits.expand(count, -1),
        temperature=tensors.pop("temperature", torch.ones(count)),
        seeds=torch.arange(count),
        positions=torch.full((count,), position),
        **tensors,
    )


def test_frequencies_follow_the_tempered_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.5, 0.3])
    expected = torch.softmax(logits / 0.7, dim=0)
    chi_squares = []
    for position in range(40):
        tokens, log_probs = _draw(logits, 5000, position, temperature=0.7)
        torch.testing.assert_close(log_probs, expected.log()[tokens])
        counts = torch.bincount(tokens, minlength=5)
        chi_squares.append(((counts - 5000 * expected) ** 2 / (5000 * expected)).sum().item())
    mean = sum(chi_squares) / 40  # of 40 values with mean 4 and variance 8
    assert abs(mean - 4) < 4 * math.sqrt(8 / 40)


@pytest.mark.parametrize(("top_k", "top_p"), [(3, 1.0), (-1, 0.6), (-1, 1e-6), (2, 0.6), (4, 0.75), (100, 0.999)])
def test_truncation_keeps_exactly_the_naive_set(top_k: int, top_p: float) -> None:
    logits = torch.tensor([0.1, 1.2, -0.4, 2.0, 0.3, -3.0])
    probs = torch.softmax(logits, dim=0).tolist()
    ranked = sorted(range(6), key=lambda token: -probs[token])[: top_k if top_k > 0 else None]
    mass, kept = 0.0, set()
    total = sum(probs[token] for token in ranked)
    for token in ranked:
        if mass >= top_p * total:
            break
        kept.add(token)
        mass += probs[token]
    tokens, log_probs = _draw(logits, 6000, top_k=top_k, top_p=top_p)
    assert set(tokens.tolist()) == kept
    torch.testing.assert_close(log_probs, torch.log_softmax(logits, 0)[tokens])  # of the full distribution

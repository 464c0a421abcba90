"""Sampling as a pure function, against Python integers, naive loops and exact probabilities; test_engines.py has what
draws do not depend on."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.workers.peak_memory import PeakMemory
from workers.engines.sampling import Truncation, sample, uniform

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


def _draw(
    logits: torch.Tensor,
    count: int,
    position: int = 0,
    temperature: float = 1.0,
    truncation: tuple[float, ...] | None = None,
    num_candidates: int = 0,
    limit: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`count` draws from one row of logits. truncation: top_k, top_p and min_p."""
    return sample(
        logits.expand(count, -1),
        temperature=torch.full((count,), temperature),
        seeds=torch.arange(count),
        positions=torch.full((count,), position),
        truncation=None if truncation is None else Truncation(*(torch.full((count,), x) for x in truncation), limit),
        num_candidates=num_candidates,
    )


def test_frequencies_follow_the_tempered_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -1.0, 2.5, 0.3])
    expected = torch.softmax(logits / 0.7, dim=0)
    chi_squares = []
    for position in range(40):
        tokens, log_probs, none = _draw(logits, 5000, position, temperature=0.7)
        assert none is None
        torch.testing.assert_close(log_probs, expected.log()[tokens])
        counts = torch.bincount(tokens, minlength=5)
        chi_squares.append(((counts - 5000 * expected) ** 2 / (5000 * expected)).sum().item())
    mean = sum(chi_squares) / 40  # of 40 values with mean 4 and variance 8
    assert abs(mean - 4) < 4 * math.sqrt(8 / 40)


def naive_candidates(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> list[int]:
    """The tokens that vLLM's documentation keeps of one row of logits: min_p, then top_k, then top_p."""
    probs = torch.softmax(logits.double(), dim=0).tolist()
    ranked = [token for token in range(len(probs)) if probs[token] >= min_p * max(probs)]
    ranked = sorted(ranked, key=lambda token: -probs[token])[: top_k if top_k > 0 else None]
    mass, kept, total = 0.0, [], sum(probs[token] for token in ranked)
    for token in ranked:
        if mass >= top_p * total:
            break
        kept.append(token)
        mass += probs[token]
    return kept


CASES = [(3, 1.0, 0), (-1, 0.6, 0), (-1, 1e-6, 0), (2, 0.6, 0), (4, 0.75, 0), (100, 0.999, 0), (-1, 1.0, 0.2)]
CASES += [(5, 1.0, 0.13), (5, 0.92, 0.2), (4, 0.9, 0.19)]  # in the last two, top_p before min_p would keep more


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), CASES)
def test_truncation_keeps_exactly_the_naive_set(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.tensor([0.1, 1.2, -0.4, 2.0, 0.3, -3.0])
    kept = naive_candidates(logits, top_k, top_p, min_p)
    width = top_k if 0 < top_k < 6 else 0
    given: Any = {"truncation": (top_k, top_p, min_p), "num_candidates": width}
    tokens, log_probs, candidates = _draw(logits, 6000, **given)
    if top_k > 0:
        limited = _draw(logits, 6000, **given, limit=top_k)
        assert torch.equal(limited[0], tokens) and torch.equal(limited[1], log_probs)
    assert set(tokens.tolist()) == set(kept)
    torch.testing.assert_close(log_probs, logits[tokens] - logits[kept].exp().sum().log())
    if candidates is not None:
        assert candidates.dtype == torch.int32 and (candidates == candidates[0]).all()
        assert candidates[0].tolist() == kept + [-1] * (width - len(kept))


def test_other_rows_of_a_batch_have_no_candidates_and_whole_log_probs() -> None:
    """A training row, a row of validation with another top_k, a greedy one, and an untruncated one; also alone."""
    logits = torch.tensor([0.1, 1.2, -0.4, 2.0, 0.3, -3.0]).expand(4, -1)
    rows = Truncation(torch.tensor([2, 4, 2, -1]), torch.ones(4), torch.zeros(4))
    given = {"temperature": torch.tensor([1.0, 1, 0, 1]), "seeds": torch.arange(4), "positions": torch.arange(4)}
    tokens, log_probs, candidates = sample(logits, **given, truncation=rows, num_candidates=2)
    assert candidates is not None and candidates.tolist() == [[3, 1], [-1, -1], [-1, -1], [-1, -1]]
    sizes = [[3, 1], [3, 1, 4, 0], range(6), range(6)]
    expected = [
        logits[0, token] - logits[0, list(kept)].exp().sum().log() for token, kept in zip(tokens, sizes, strict=True)
    ]
    torch.testing.assert_close(log_probs, torch.stack(expected))
    alone = sample(logits[3:], **{name: value[3:] for name, value in given.items()}, num_candidates=2)
    assert alone[0] == tokens[3] and alone[2] is not None and alone[2].tolist() == [[-1, -1]]


def test_a_truncated_draw_holds_few_tensors_of_the_size_of_the_logits() -> None:
    rows, vocab = 8, 8192
    one = torch.ones(rows)
    truncation = Truncation(torch.full((rows,), 20), one, torch.zeros(rows), 20)
    logits = torch.randn(rows, vocab)
    numbers = torch.arange(rows)
    with PeakMemory() as memory:
        sample(logits, temperature=one, seeds=numbers, positions=numbers, truncation=truncation)
    # log-probs, probabilities, two masks of bytes, and the cumulative sum in fp64
    assert memory.peak / logits.nbytes == pytest.approx(1 + 1 + 0.5 + 2, abs=0.1)

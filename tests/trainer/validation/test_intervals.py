"""pass@k against enumeration of every subset; the interval against its coverage, and against tables of Student's t."""

import itertools
import math

import numpy as np
import pytest

from trainer.validation.metrics import half_width, pass_at_k, student_t


@pytest.mark.parametrize("count", [1, 3, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(count: int) -> None:
    for k in range(1, count + 1):
        for right in range(count + 1):
            outcomes = [True] * right + [False] * (count - right)
            subsets = list(itertools.combinations(outcomes, k))
            assert pass_at_k(right, count, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_quantiles_of_student_t_are_those_of_the_tables() -> None:
    tables = {1: 12.706, 2: 4.3027, 3: 3.1824, 5: 2.5706, 10: 2.2281, 30: 2.0423, 120: 1.9799, 100_000: 1.96}
    for degrees, quantile in tables.items():
        assert student_t(degrees) == pytest.approx(quantile, rel=3e-3 if degrees < 5 else 2e-4)


@pytest.mark.parametrize("answers", [1, 8])
def test_the_interval_covers_the_truth_about_95_times_in_100(answers: int) -> None:
    """200 prompts of different difficulty, drawn anew 3,000 times; intervals over answers would be too narrow."""
    random = np.random.default_rng(1)
    covered = too_narrow = 0
    for _ in range(3000):
        chances = random.beta(1, 1, size=200)  # mean 0.5
        means = random.binomial(answers, chances) / answers
        covered += abs(means.mean() - 0.5) <= half_width(means, True)
        over_answers = 1.96 * math.sqrt(means.mean() * (1 - means.mean()) / (200 * answers))
        too_narrow += abs(means.mean() - 0.5) <= over_answers
    assert 0.935 < covered / 3000 < 0.965  # 3.8 standard errors
    assert answers == 1 or too_narrow / 3000 < 0.75


def test_without_spread_the_width_is_what_the_number_of_prompts_allows() -> None:
    all_right = half_width(np.ones(100), True)
    assert all_right == pytest.approx(3 / 100, rel=0.02) and 0.95 == pytest.approx(1 - (1 - all_right) ** 100)
    assert half_width(np.zeros(100), True) == all_right
    assert half_width(np.full(100, 0.5), True) == 0.0 and half_width(np.ones(100), False) == 0.0
    assert half_width(np.ones(1), True) is None

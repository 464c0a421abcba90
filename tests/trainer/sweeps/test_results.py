"""Is the best better than the second? By hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.sweeps.results import compare, difference
from trainer.sweeps.study import RunRecord, TrialRecord


def trial(number: int, *values: float) -> TrialRecord:
    runs = [RunRecord(seed, Path("x"), [], "done", value) for seed, value in enumerate(values)]
    return TrialRecord(number, "complete", {}, sum(values) / len(values), Path("x"), runs=runs)


def test_the_interval_of_a_difference_is_welchs() -> None:
    # variances over counts 2 / 2 and 1 / 3: standard error sqrt(4 / 3); degrees of freedom
    # (4 / 3)^2 / (1^2 / 1 + (1 / 3)^2 / 2) = 1.68, of which 1 counts: t = 12.706
    assert difference([1.0, 3.0], [0.0, 1.0, 2.0]) == (1.0, pytest.approx(12.706 * (4 / 3) ** 0.5, rel=1e-4))


def test_equal_variances_by_hand() -> None:
    # variances 1 and 1, three values each: standard error sqrt(2/3), 4 degrees of freedom, t = 2.776
    found = difference([1.0, 2.0, 3.0], [5.0, 6.0, 7.0])
    assert found == (-4.0, pytest.approx(2.776 * (2 / 3) ** 0.5, rel=2e-3))
    assert difference([1.0], [2.0, 3.0]) is None and difference([1.0, 1.0], [2.0, 2.0]) == (-1.0, 0.0)


def test_what_is_said() -> None:
    assert "more than chance explains" in compare(trial(3, 5.0, 6.0, 7.0), trial(1, 1.0, 2.0, 3.0))
    assert "not told apart" in compare(trial(3, 1.0, 2.0, 3.1), trial(1, 1.0, 2.0, 3.0))
    assert "with one run each nobody knows" in compare(trial(3, 2.0), trial(1, 1.0))
    assert trial(0, 1.0, 2.0, 3.0).half_width == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    assert trial(0, 1.0).half_width is None

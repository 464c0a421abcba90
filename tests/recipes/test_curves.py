"""Statistics and drawing of several runs: intervals, running means, bands."""

from __future__ import annotations

import math

import pytest
from matplotlib.figure import Figure

from recipes import curves

T_2 = 4.302653
"""97.5% quantile of Student's t with two degrees of freedom, from a table."""


def test_the_interval_is_students_t_over_the_seeds() -> None:
    mean, half = curves.interval([0.1, 0.2, 0.6])
    # deviations -0.2, -0.1, 0.3: variance 0.14 / 2
    assert mean == pytest.approx(0.3)
    assert half == pytest.approx(T_2 * math.sqrt(0.07 / 3), rel=1e-5)

    assert curves.interval([0.4]) == (0.4, None)
    assert curves.with_interval([0.4]) == "0.400"


def test_a_running_mean_starts_with_the_values_that_exist() -> None:
    assert curves.running_mean([1.0, 2.0, 6.0, 4.0], 3) == pytest.approx([1.0, 1.5, 3.0, 4.0])


def test_the_panels_have_the_mean_and_the_interval_of_each_place() -> None:
    panel = Figure().subplots()
    curves.draw_band(panel, [1, 2], [[0.1, 0.0], [0.2, 0.0], [0.6, 0.0]], "side")
    assert panel.lines[0].get_ydata() == pytest.approx([0.3, 0.0])
    band = panel.collections[0].get_paths()[0].vertices[:, 1]
    half = T_2 * math.sqrt(0.07 / 3)
    assert (band.min(), band.max()) == pytest.approx((0.3 - half, 0.3 + half), rel=1e-5)

    single = Figure().subplots()
    curves.draw_band(single, [1, 2], [[0.1, 0.2]], "side")
    assert not single.collections
    assert "one seed, therefore without an interval" in curves.caption(steps=2, seeds=1)

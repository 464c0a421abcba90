"""The soak finds what grows, and only that: on numbers by hand, on simulated runs, and on short real ones that leak."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.soak.__main__ import as_series, last_step, main, parse, size_of
from tests.soak.growth import LEAST_SAMPLES, Series, Verdict, growth_of, robust_slope

STEPS = np.arange(0, 300, 3.0)
BOUNDS = {"memory MiB": {"": 4.0}}


def simulated(leak_per_step: float, seed: int = 0, noise: float = 2.0) -> Series:
    """400 MiB with noise, a heap that settles within the first tenth of the run, one sample in twelve far off."""
    rng = np.random.default_rng(seed)
    settling = 60 * (1 - np.exp(-STEPS / 15))
    values = 400 + settling + noise * rng.standard_normal(len(STEPS)) + leak_per_step * STEPS
    values[::12] += rng.uniform(20, 80, len(values[::12]))
    return Series("driver", "memory MiB", STEPS.tolist(), values.tolist())


def test_the_slope_is_the_median_of_the_slopes_of_all_pairs() -> None:
    # pairs: (1-0)/1, (5-0)/2, (6-0)/3, (5-1)/1, (6-1)/2, (6-5)/1 = 1, 2.5, 2, 4, 2.5, 1; sorted 1 1 2 2.5 2.5 4
    slope, low, high = robust_slope(np.array([0.0, 1, 2, 3]), np.array([0.0, 1, 5, 6]))
    # variance of S for n = 4 without ties: 4 * 3 * 13 / 18, and 1.96 of its roots are 5.77: the interval is everything
    assert (slope, low, high) == (2.25, 1.0, 4.0)


def test_the_interval_is_between_the_ranks_that_sen_gives() -> None:
    """The data of Sen (JASA 63, 1968), slope 4: of 21 slopes those of ranks (21 -+ 1.96 sqrt(7 * 6 * 19 / 18)) / 2 =
    3.97 and 17.02, counted from 1, bound the interval; rounded outwards to the 4th and the 18th."""
    x, y = np.array([1.0, 2, 3, 4, 10, 12, 18]), np.array([9.0, 15, 19, 20, 45, 55, 78])
    slopes = sorted((y[j] - y[i]) / (x[j] - x[i]) for i in range(7) for j in range(i + 1, 7))
    slope, low, high = robust_slope(x, y)
    assert slope == pytest.approx(4.0)
    assert (low, high) == (slopes[3], slopes[17])


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_is_found_and_its_size_told_through_noise_and_warm_up(seed: int) -> None:
    growth = growth_of(simulated(0.1, seed), 300, BOUNDS)
    assert growth.verdict is Verdict.GROWS
    assert growth.slope == pytest.approx(10, abs=1.0)
    assert growth.low < 10 < growth.high


@pytest.mark.parametrize("seed", range(5))
def test_what_only_warms_up_is_bounded(seed: int) -> None:
    assert growth_of(simulated(0.0, seed), 300, BOUNDS).verdict is Verdict.BOUNDED


def test_a_bound_inside_the_interval_is_unclear_and_few_samples_are_no_verdict() -> None:
    noisy = growth_of(simulated(0.03, noise=30.0), 300, BOUNDS)
    assert noisy.low < 4 < noisy.high and noisy.verdict is not Verdict.BOUNDED
    few = Series("driver", "memory MiB", STEPS[:LEAST_SAMPLES].tolist(), [1.0] * LEAST_SAMPLES)
    assert growth_of(few, 300, BOUNDS).verdict is Verdict.TOO_FEW


def test_files_that_stay_open_are_found_and_a_few_at_the_start_are_not() -> None:
    opened = [20 + step // 20 for step in range(300)]
    assert growth_of(Series("rank 0", "open files", list(range(300)), opened), 300).verdict is Verdict.GROWS
    settled = [min(40, 20 + step // 2) for step in range(300)]
    assert growth_of(Series("rank 0", "open files", list(range(300)), settled), 300).verdict is Verdict.BOUNDED


def test_the_bound_is_the_roles_own_or_that_of_its_kind() -> None:
    ranks = [growth_of(Series(name, "memory MiB", [0], [1]), 10).bound for name in ("rank 0", "rank 12", "ray raylet")]
    assert ranks == [4.0, 4.0, 1.0]


def test_samples_become_series_where_a_role_comes_and_goes() -> None:
    samples = [(1, {("driver", "threads"): 3.0}), (2, {("driver", "threads"): 4.0, ("rank 0", "threads"): 1.0})]
    assert as_series(samples) == [
        Series("driver", "threads", [1, 2], [3.0, 4.0]),
        Series("rank 0", "threads", [2], [1.0]),
    ]


def test_the_last_whole_line_tells_the_step(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert last_step(metrics) == 0
    metrics.write_text('{"step": 4, "data": {}}\n{"step": 5, "da')
    assert last_step(metrics) == 4


def test_options() -> None:
    assert (size_of("1MB"), size_of("64KB"), size_of("file")) == (1 << 20, 64 << 10, 0)
    assert parse(["--steps", "5", "trainer.seed=3"]).overrides == ["trainer.seed=3"]


@pytest.mark.slow
@pytest.mark.parametrize(("leak", "role"), [("driver=1MB", "driver"), ("reward=64KB", "reward processes")])
def test_a_leak_in_a_real_run_is_found(leak: str, role: str, capfd: pytest.CaptureFixture[str]) -> None:
    """In the driver 100 MiB in 100 steps against a bound of 4; in a reward process 64 KiB x 8 samples a step."""
    options = ["--steps", "40", "--samples", "40", "--backend", "inline", "--engine", "hf", "--save-freq", "0"]
    assert main([*options, "--leak", leak]) == 1
    grown = [line for line in capfd.readouterr().out.splitlines() if "GROWS" in line]
    assert grown and all(role in line for line in grown), grown

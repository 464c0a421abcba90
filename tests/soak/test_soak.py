"""The soak finds what grows, and only that: on numbers by hand, on simulated runs, and on short real ones that leak."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.soak.__main__ import last_step, main
from tests.soak.growth import LEAST_SAMPLES, Series, Verdict, growth_of, robust_slope

STEPS = np.arange(0, 300, 3.0)


def simulated(leak_per_step: float, seed: int = 0) -> Series:
    """400 MiB with noise, a heap that settles within the first tenth of the run, one sample in twelve far off."""
    rng = np.random.default_rng(seed)
    values = 400 + 60 * (1 - np.exp(-STEPS / 15)) + 2 * rng.standard_normal(len(STEPS)) + leak_per_step * STEPS
    values[::12] += rng.uniform(20, 80, len(values[::12]))
    return Series("driver", "memory MiB", STEPS.tolist(), values.tolist())


def test_the_slope_is_the_median_of_the_slopes_of_all_pairs() -> None:
    # pairs: (1-0)/1, (5-0)/2, (6-0)/3, (5-1)/1, (6-1)/2, (6-5)/1 = 1, 2.5, 2, 4, 2.5, 1; sorted 1 1 2 2.5 2.5 4
    assert robust_slope(np.array([0.0, 1, 2, 3]), np.array([0.0, 1, 5, 6]))[0] == 2.25


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_is_found_and_its_size_told_through_noise_and_warm_up(seed: int) -> None:
    growth = growth_of(simulated(0.1, seed), 300)
    assert growth.verdict is Verdict.GROWS
    assert growth.slope == pytest.approx(10, abs=1.0) and growth.low < 10 < growth.high
    assert growth_of(simulated(0.0, seed), 300).verdict is Verdict.BOUNDED


def test_files_that_stay_open_are_found_and_a_few_at_the_start_are_not() -> None:
    opened = [20 + step // 20 for step in range(300)]
    assert growth_of(Series("rank 0", "open files", list(range(300)), opened), 300).verdict is Verdict.GROWS
    settled = [min(40, 20 + step // 2) for step in range(300)]
    assert growth_of(Series("rank 0", "open files", list(range(300)), settled), 300).verdict is Verdict.BOUNDED
    few = Series("driver", "memory MiB", STEPS[:LEAST_SAMPLES].tolist(), [1.0] * LEAST_SAMPLES)
    assert growth_of(few, 300).verdict is Verdict.TOO_FEW


def test_the_last_whole_line_tells_the_step(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert last_step(metrics) == 0
    metrics.write_text('{"step": 4, "data": {}}\n{"step": 5, "da')
    assert last_step(metrics) == 4


@pytest.mark.long
@pytest.mark.parametrize(("leak", "role"), [("driver", "driver"), ("reward", "reward processes")])
def test_a_leak_in_a_real_run_is_found(leak: str, role: str, capfd: pytest.CaptureFixture[str]) -> None:
    """In the driver 100 MiB in 100 steps against a bound of 4; in a reward process 64 KiB x 8 samples a step."""
    inline = ["trainer.backend=inline", "rollout.name=hf", "trainer.n_gpus_per_node=1", "trainer.save_freq=0"]
    assert main(["--steps", "40", "--samples", "40", "--leak", leak, *inline]) == 1
    grown = [line for line in capfd.readouterr().out.splitlines() if "GROWS" in line]
    assert grown and all(role in line for line in grown), grown

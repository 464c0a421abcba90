"""The soak finds what grows, and only that: on numbers by hand, on simulated runs, and on short real ones that leak."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.soak.__main__ import last_step, main
from tests.soak.growth import BOUNDED, GROWS, LEAST_SAMPLES, TOO_FEW, growth_of, robust_slope

STEPS = np.arange(0, 300, 3.0)


def test_the_slope_is_the_median_of_the_slopes_of_all_pairs() -> None:
    # pairs: (1-0)/1, (5-0)/2, (6-0)/3, (5-1)/1, (6-1)/2, (6-5)/1 = 1, 2.5, 2, 4, 2.5, 1; sorted 1 1 2 2.5 2.5 4
    assert robust_slope(np.array([0.0, 1, 2, 3]), np.array([0.0, 1, 5, 6]))[0] == 2.25


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_is_found_and_its_size_told_through_noise_and_warm_up(seed: int) -> None:
    """400 MiB with noise, a heap that settles within the first tenth of the run, one sample in twelve far off."""
    rng = np.random.default_rng(seed)
    settled = 400 + 60 * (1 - np.exp(-STEPS / 15)) + 2 * rng.standard_normal(len(STEPS))
    settled[::12] += rng.uniform(20, 80, len(settled[::12]))
    leaking, sound = (
        growth_of("driver", "memory MiB", list(zip(STEPS, settled + leak * STEPS, strict=True)), 300)
        for leak in (0.1, 0.0)
    )
    assert leaking.verdict == GROWS and sound.verdict == BOUNDED
    assert leaking.slope == pytest.approx(10, abs=1.0) and leaking.low < 10 < leaking.high


def test_files_that_stay_open_are_found_and_a_few_at_the_start_are_not() -> None:
    opened = [(step, 20 + step // 20) for step in range(300)]
    assert growth_of("rank 0", "open files", opened, 300).verdict == GROWS
    settled = [(step, min(40, 20 + step // 2)) for step in range(300)]
    assert growth_of("rank 0", "open files", settled, 300).verdict == BOUNDED
    assert growth_of("driver", "memory MiB", opened[:LEAST_SAMPLES], 300).verdict == TOO_FEW


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

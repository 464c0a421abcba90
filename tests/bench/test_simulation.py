"""The simulation of a run's sampling against arithmetic."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.bench.simulation import Workload, median_of, simulate

EQUAL = Workload(prompts=8, samples=2, median=1000, sigma=0.0, longest=1000, base=1.0, per_sequence=0.1, update=1000.0)
TICK = EQUAL.longest / 400


def test_equal_answers_take_their_tokens_times_a_step_and_then_the_update() -> None:
    found = simulate(EQUAL, num_engines=4, steps=5)
    decoding = 1000 * (1.0 + 0.1 * 4)  # 16 answers on 4 engines
    assert found.seconds == pytest.approx(5 * (decoding + 1000), abs=5 * TICK)
    assert found.tokens == pytest.approx(16 * 1000 / (decoding + 1000), rel=0.01)
    assert found.trainer_idle == found.engine_idle == pytest.approx(0.0, abs=0.01)


def test_synchronous_engines_on_their_own_devices_wait_for_the_update_and_the_trainer_for_them() -> None:
    found = simulate(EQUAL, num_engines=4, steps=5, is_separate=True)
    assert found.engine_idle == pytest.approx(1000 / 2400, abs=0.01)
    assert found.trainer_idle == pytest.approx(1400 / 2400, abs=0.01)


def test_one_batch_ahead_both_sides_work_at_the_same_time() -> None:
    found = simulate(EQUAL, num_engines=4, steps=20, is_separate=True, threshold=1, partial=True)
    assert found.seconds == pytest.approx(20 * 1400, rel=0.1), "the longer of 1,400 and 1,000 per step"
    assert found.staleness == 1
    asleep = simulate(EQUAL, num_engines=4, steps=20, threshold=1, partial=True, sleeps=True)
    both = 1000 * (1.0 + 0.1 * 8)  # two batches decode together, and the update follows
    assert asleep.seconds == pytest.approx(20 * (both / 2 + 1000), rel=0.02)


def test_an_engine_decodes_as_many_sequences_as_it_has_seats() -> None:
    found = simulate(replace(EQUAL, seats=1), num_engines=4, steps=2)
    assert found.seconds == pytest.approx(2 * (4 * 1000 * 1.1 + 1000), rel=0.02)


def test_slow_groups_go_to_engines_that_run_few() -> None:
    """Skewed lengths: dealing groups out in blocks would leave engines idle."""
    skewed = replace(EQUAL, prompts=64, sigma=1.2, median=100.0, update=1.0)
    blocks, pulled = (
        simulate(skewed, 16, 10, is_separate=is_separate, threshold=1, partial=True) for is_separate in (False, True)
    )
    assert pulled.engine_idle < blocks.engine_idle


@pytest.mark.parametrize("mean", [100.0, 2000.0, 4000.0])
def test_the_median_belongs_to_the_mean_of_the_lengths_after_the_cut(mean: float) -> None:
    lengths = np.random.default_rng(5).lognormal(np.log(median_of(mean, 1.2, 8192)), 1.2, 400_000)
    assert np.minimum(lengths, 8192).mean() == pytest.approx(mean, rel=0.02)

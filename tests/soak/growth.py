"""Does a series grow? A robust slope with its interval, the bound of its kind, and a verdict.

The slope is the median of the slopes between all pairs of samples (Theil 1950, Sen 1968): a quarter of the samples may
be wild and it hardly moves. Its interval is a bootstrap's over the samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WARM_UP = 0.2
"""Share of the steps at the start that does not count: caches fill, lazy imports happen, heaps find their size."""
LEAST_SAMPLES = 8

# Growth per 100 steps that is still no leak. Memory: a tensor of a step that stays alive is at least 8 MiB a step for
# 1,024 rows; allowed is 1% of that and less, so 10,000 steps add at most 400 MiB. Files, threads and processes: what is
# opened in every step, save or validation is ten times the bound. Disk: a line of metrics is 3 KiB, so 0.3 MiB; with
# samples and trackers a few times that.
BOUNDS: dict[str, dict[str, float]] = {
    "memory MiB": {"driver": 4.0, "rank": 4.0, "guard": 0.1, "": 1.0},
    "open files": {"": 1.0},
    "threads": {"": 1.0},
    "processes": {"": 1.0},
    "disk MiB": {"run folder": 4.0, "": 1.0},
}
GROWS, BOUNDED, UNCLEAR, TOO_FEW = "GROWS", "bounded", "unclear", "too few samples"
"""Verdicts. GROWS: past the bound, and surely above 0. unclear: the bound lies inside the interval."""


@dataclass(frozen=True)
class Growth:
    """What became of a quantity (a key of `BOUNDS`) of a role after the warm-up. slope, low, high and bound: per 100
    steps; low to high is 95%."""

    role: str
    kind: str
    slope: float
    low: float
    high: float
    bound: float
    verdict: str


def growth_of(role: str, kind: str, points: Sequence[tuple[float, float]], total_steps: int) -> Growth:
    """points: training steps at the moment of each sample, and its value. Its bound is that of its role ("rank 3" is
    "rank"), else of its kind."""
    bound = BOUNDS[kind].get(role.rstrip("0123456789 "), BOUNDS[kind][""])
    late = [point for point in points if point[0] > WARM_UP * total_steps]
    if len({x for x, _ in late}) < LEAST_SAMPLES:
        return Growth(role, kind, math.nan, math.nan, math.nan, bound, TOO_FEW)
    slope, low, high = (100 * one for one in robust_slope(*np.array(late, dtype=float).T))
    verdict = GROWS if slope > bound and low > 0 else BOUNDED if high <= bound else UNCLEAR
    return Growth(role, kind, slope, low, high, bound, verdict)


def robust_slope(x: np.ndarray, y: np.ndarray, draws: int = 200) -> tuple[float, float, float]:
    """(slope, low, high) of y over x: the median of all pairs' slopes and its 95% interval. x (N,), y (N,), N >= 2."""
    slopes = (y[None] - y[:, None]) / np.where(x[None] == x[:, None], np.nan, x[None] - x[:, None])
    rng = np.random.default_rng(0)
    drawn = [rows for rows in rng.integers(len(x), size=(draws, len(x))) if np.ptp(rows)]
    low, high = np.quantile([np.nanmedian(slopes[np.ix_(rows, rows)]) for rows in drawn], [0.025, 0.975])
    return float(np.nanmedian(slopes)), float(low), float(high)

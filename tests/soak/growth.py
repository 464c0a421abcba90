"""Does a series grow? A robust slope with its interval, the bound of its kind, and a verdict.

Takes what was measured at some steps of a run; gives a `Growth` for each series. The slope is the median of the slopes
between all pairs of samples (Theil 1950, Sen 1968): a quarter of the samples may be wild and it hardly moves. Its
interval is Sen's, from the variance of Kendall's rank statistic.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

WARM_UP = 0.2
"""Share of the steps at the start that does not count: caches fill, lazy imports happen, heaps find their size."""
LEAST_SAMPLES = 8
_TWO_SIDED_95 = 1.96

# Growth per 100 steps that is still no leak. Memory: a tensor of a step that stays alive is at least one row of token
# columns, 8 KiB x samples: the smallest leak of a real batch (1,024 rows) is 8 MiB a step. What is allowed here is 1%
# of that and less; 10,000 steps add at most 400 MiB to a process that works with tensors (twice that in the driver
# where the engine is in it), 100 MiB to one that does not, and 10 MiB to the guard, which only waits. A heap that
# fragments grows fast at first and then ever slower, and the bounds leave it room. Files, threads and processes: one
# for each hundred steps reaches the usual limit of 1,024 open files only after 100,000 steps, and what is opened in
# every step, every save or every validation is ten times that. Disk: a line of metrics is 3 KiB, so 0.3 MiB; with
# samples and trackers a few times that. Checkpoints with retention do not add up.
BOUNDS: dict[str, dict[str, float]] = {
    "memory MiB": {"driver": 4.0, "rank": 4.0, "guard": 0.1, "": 1.0},
    "open files": {"": 1.0},
    "threads": {"": 1.0},
    "processes": {"": 1.0},
    "disk MiB": {"run folder": 4.0, "": 1.0},
}


class Verdict(Enum):
    """grows: past the bound, and surely above 0. unclear: the bound lies inside the interval, more steps would tell."""

    BOUNDED = "bounded"
    UNCLEAR = "unclear"
    GROWS = "GROWS"
    TOO_FEW = "too few samples"


@dataclass(frozen=True)
class Series:
    """One quantity of one role. kind: a key of `BOUNDS`. steps: training steps at the moment of each sample."""

    role: str
    kind: str
    steps: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True)
class Growth:
    """What became of a series after the warm-up. slope, low, high and bound: per 100 steps; low to high is 95%."""

    series: Series
    start: float
    end: float
    slope: float
    low: float
    high: float
    bound: float
    verdict: Verdict


def growth_of(series: Series, total_steps: int, bounds: Mapping[str, Mapping[str, float]] = BOUNDS) -> Growth:
    """The growth of a series over a run of so many steps."""
    bound = bound_of(series, bounds)
    late = [(x, y) for x, y in zip(series.steps, series.values, strict=True) if x > WARM_UP * total_steps]
    if len({x for x, _ in late}) < LEAST_SAMPLES:
        ends = (series.values[0], series.values[-1])
        return Growth(series, *ends, math.nan, math.nan, math.nan, bound, Verdict.TOO_FEW)
    steps, values = np.array(late, dtype=float).T
    slope, low, high = (100 * one for one in robust_slope(steps, values))
    third = max(1, len(values) // 10)
    ends = float(np.median(values[:third])), float(np.median(values[-third:]))
    return Growth(series, *ends, slope, low, high, bound, verdict_of(slope, low, high, bound))


def verdict_of(slope: float, low: float, high: float, bound: float) -> Verdict:
    """What a slope and its interval say about a bound."""
    if slope > bound and low > 0:
        return Verdict.GROWS
    return Verdict.BOUNDED if high <= bound else Verdict.UNCLEAR


def bound_of(series: Series, bounds: Mapping[str, Mapping[str, float]] = BOUNDS) -> float:
    """The bound of a series: that of its role without a number ("rank 3" is "rank"), else of its kind."""
    of_kind = bounds[series.kind]
    return of_kind.get(series.role.rstrip("0123456789 "), of_kind[""])


def robust_slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """(slope, low, high) of y over x: the median of all pairs' slopes and its 95% interval. x (N,), y (N,), N >= 2."""
    first, second = np.triu_indices(len(x), k=1)
    apart = x[second] != x[first]
    slopes = np.sort((y[second] - y[first])[apart] / (x[second] - x[first])[apart])
    spread = _TWO_SIDED_95 * math.sqrt(_rank_variance(x, y))
    low = int(math.floor((len(slopes) - spread) / 2))
    high = int(math.ceil((len(slopes) + spread) / 2)) - 1
    last = len(slopes) - 1
    return float(np.median(slopes)), float(slopes[min(max(low, 0), last)]), float(slopes[min(max(high, 0), last)])


def _rank_variance(x: np.ndarray, y: np.ndarray) -> float:
    """Variance of Kendall's S if x and y had nothing to do with each other, with its correction for ties in either."""

    def ties(values: np.ndarray) -> np.ndarray:
        return np.unique(values, return_counts=True)[1].astype(float)

    n, t, u = float(len(x)), ties(x), ties(y)
    plain = n * (n - 1) * (2 * n + 5) - (t * (t - 1) * (2 * t + 5)).sum() - (u * (u - 1) * (2 * u + 5)).sum()
    threes = (t * (t - 1) * (t - 2)).sum() * (u * (u - 1) * (u - 2)).sum() / (9 * n * (n - 1) * (n - 2))
    twos = (t * (t - 1)).sum() * (u * (u - 1)).sum() / (2 * n * (n - 1))
    return float(max(0.0, plain / 18 + threes + twos))

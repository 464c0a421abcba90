"""Metrics with a declared reduction, combinable over micro-batches and ranks.

A micro-batch on one rank has a total and a count, and a step reports the quotient over all micro-batches and ranks. A
`Metric` keeps both parts, so that combining metrics in any order and grouping gives the same number.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

Part = float | torch.Tensor
Reduction = Literal["mean", "sum", "max", "min", "last"]
# how the totals of two parts of a metric are combined
_JOIN: dict[Reduction, Callable[[float, float], float]] = {
    "mean": operator.add,
    "sum": operator.add,
    # np.maximum and np.minimum propagate NaN, max and min do not
    "max": np.maximum,
    "min": np.minimum,
    "last": lambda first, last: last,
}
# how lists of plain numbers are reduced
_REDUCERS: dict[str, Callable[[np.ndarray], float]] = {"mean": np.mean, "sum": np.sum, "max": np.max, "min": np.min}


@dataclass(frozen=True, slots=True)
class Metric:
    """A partial result: `total` over `count` elements, and the reduction that combines two of them.

    The five class methods construct it. A loss passes scalar tensors, which stay on their device so that the host does
    not wait for them; `to_host` converts them to floats once per batch. A metric with a count of 0 is not reported.
    """

    reduction: Reduction
    total: Part
    count: Part = 1.0

    @classmethod
    def mean(cls, total: Part, count: Part) -> Metric:
        """A sum over `count` elements, reported as total / count."""
        return cls("mean", _part(total), _part(count))

    @classmethod
    def sum(cls, value: Part) -> Metric:
        """Reported as the sum of all parts."""
        return cls("sum", _part(value))

    @classmethod
    def max(cls, value: Part, count: Part = 1) -> Metric:
        """A maximum over `count` elements, reported as the largest part; NaN if any part is NaN."""
        return cls("max", _part(value), _part(count))

    @classmethod
    def min(cls, value: Part, count: Part = 1) -> Metric:
        """A minimum over `count` elements, reported as the smallest part; NaN if any part is NaN."""
        return cls("min", _part(value), _part(count))

    @classmethod
    def last(cls, value: Part) -> Metric:
        """A setting such as a learning rate, reported as the part that was combined last."""
        return cls("last", _part(value))

    @property
    def value(self) -> float:
        """The reported number; NaN for a mean with a count of 0."""
        if self.reduction != "mean":
            return float(self.total)
        if not self.count:
            return math.nan
        return float(self.total) / float(self.count)

    def __add__(self, other: Metric) -> Metric:
        """Combines two parts. Raises ValueError if their reductions differ."""
        if self.reduction != other.reduction:
            raise ValueError(f"Metric: cannot combine a {self.reduction} with a {other.reduction}.")
        join_totals = _JOIN[self.reduction]
        total = join_totals(float(self.total), float(other.total))
        count = float(self.count) + float(other.count)
        return Metric(self.reduction, float(total), count)


def _part(value: Part) -> Part:
    if isinstance(value, torch.Tensor):
        # a metric that is kept until the end of the step must not keep the graph of its micro-batch
        return value.detach()
    return float(value)


def to_host(parts: Sequence[Mapping[str, Metric]]) -> list[dict[str, Metric]]:
    """Returns the same metrics with floats instead of tensors, in one transfer from the device."""
    tensors = []
    for part in parts:
        for metric in part.values():
            for value in (metric.total, metric.count):
                if isinstance(value, torch.Tensor):
                    # fp32 would round counts above 2^24
                    tensors.append(value.double())
    values_on_host: list[float] = []
    if tensors:
        # a single transfer, because each of them waits for all work of the device
        values_on_host = torch.stack(tensors).tolist()
    numbers = iter(values_on_host)

    def on_host(value: Part) -> float:
        if isinstance(value, torch.Tensor):
            return next(numbers)
        return value

    # the numbers come in the order in which the tensors were collected
    result = []
    for part in parts:
        metrics = {}
        for name, metric in part.items():
            total = on_host(metric.total)
            count = on_host(metric.count)
            metrics[name] = Metric(metric.reduction, total, count)
        result.append(metrics)
    return result


def declared(metrics: Mapping[str, Metric | Part], tokens: torch.Tensor, num_tokens: Part | None) -> dict[str, Metric]:
    """Converts the metrics that a loss returned for one micro-batch to `Metric`s.

    A plain number is a mean over the `tokens` of the micro-batch unless its name has one of ROLL's suffixes, which are
    removed: `@sum`, `@max`, `@min` or `@mean`. Names that end in _max or _min need no suffix. With `@sum` the numbers
    of the micro-batches of a mini-batch are added, and the mean over mini-batches is reported.

    Args:
        metrics: the returned metrics, numbers or `Metric`s.
        tokens: number of valid tokens of the micro-batch.
        num_tokens: number of valid tokens of the mini-batch, for `@sum`. None = this micro-batch is all of it.

    Raises:
        ValueError: a name has another suffix.
    """
    tokens_of_mini_batch: Part = tokens.clamp(min=1)
    if num_tokens is not None:
        tokens_of_mini_batch = max(1, float(num_tokens))
    # the count of a part of `@sum`: counts add up to 1 in each mini-batch, so that the mean is over mini-batches
    share = tokens / tokens_of_mini_batch
    result: dict[str, Metric] = {}
    for name, value in metrics.items():
        if isinstance(value, Metric):
            result[name] = value
            continue
        plain, _, suffix = name.partition("@")
        if not suffix:
            suffix = "mean"
            if name.endswith("_max"):
                suffix = "max"
            elif name.endswith("_min"):
                suffix = "min"
        match suffix:
            case "max":
                result[plain] = Metric.max(value, tokens)
            case "min":
                result[plain] = Metric.min(value, tokens)
            case "mean":
                result[plain] = Metric.mean(value * tokens, tokens)
            case "sum":
                result[plain] = Metric.mean(value, share)
            case _:
                raise ValueError(f"metric {name!r}: expected one of the suffixes @mean, @sum, @max, @min, or none")
    return result


def combine(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combines the metrics of several ranks or micro-batches. A name can be missing in some of them.

    Raises ValueError naming the metric if it was declared with two reductions.
    """
    result: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            if name not in result:
                result[name] = metric
                continue
            try:
                result[name] += metric
            except ValueError as error:
                raise ValueError(f"metric {name!r}: {error}") from error
    return result


def join(parts: Mapping[str, Sequence[Metric]]) -> dict[str, Metric]:
    """Combines the metrics of all ranks by name; `DataProto.concat` collects them in lists."""
    return {name: functools.reduce(operator.add, metrics) for name, metrics in parts.items() if len(metrics)}


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Returns the numbers to report. Metrics with a count of 0 are left out, because they have no value."""
    return {name: metric.value for name, metric in metrics.items() if metric.count}


def reduce_metrics(metrics: Mapping[str, object]) -> dict[str, float]:
    """Reduces each entry (a Metric, a list of Metrics, a number or a list of numbers) to one number.

    Lists of numbers are reduced as in ROLL if the name ends in @mean, @sum, @max or @min (ValueError for other
    suffixes), and otherwise as in verl: by the maximum if the name contains "max", by the minimum if it contains "min",
    else by the mean. Empty lists are left out, and a list of numbers and Metrics is a ValueError.
    """
    result: dict[str, float] = {}
    for name, entry in metrics.items():
        entries = [entry]
        # a text is one value, not a sequence of characters
        if isinstance(entry, Sequence | np.ndarray) and not isinstance(entry, str):
            entries = list(entry)
        if not entries:
            continue

        parts = [part for part in entries if isinstance(part, Metric)]
        if parts:
            if len(parts) < len(entries):
                raise ValueError(f"metric {name!r}: {len(parts)} of {len(entries)} entries are a Metric; expected all")
            result |= values(join({name: parts}))
            continue
        reducer = _REDUCERS.get(_suffix_or_extreme(name))
        if reducer is None:
            raise ValueError(f"metric {name!r}: expected one of the suffixes @{', @'.join(_REDUCERS)}, or none")
        numbers = np.asarray(entries, dtype=np.float64)
        result[name] = float(reducer(numbers))
    return result


def _suffix_or_extreme(name: str) -> str:
    """Returns the reduction of a list of numbers: the suffix of its name, or the extreme that the name contains."""
    suffix = name.partition("@")[2]
    if suffix:
        return suffix
    for extreme in ("max", "min"):
        if extreme in name:
            return extreme
    return "mean"

"""Numbers on their way to a dashboard, each with the reduction it needs declared beside it.

A micro-batch on one rank knows a total and a count; what a step reports is their quotient over all of them. A `Metric`
carries the parts, so that combining it in any order and grouping gives the same number.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

Part = float | torch.Tensor
Reduction = Literal["mean", "sum", "max", "min", "last"]
_JOIN: dict[Reduction, Any] = {
    "mean": operator.add,
    "sum": operator.add,
    "max": np.maximum,  # these two keep NaN
    "min": np.minimum,
    "last": lambda first, last: last,
}
_OF_LISTS: dict[str, Any] = {"mean": np.mean, "sum": np.sum, "max": np.max, "min": np.min}


@dataclass(frozen=True, slots=True)
class Metric:
    """A partial result: `total` over `count` things, and how two of them become one.

    Build it with one of the five class methods. What a loss gives are scalar tensors that stay on their device, so that
    nobody waits for it; `to_host` makes floats of them, once a batch. Over a count of 0 it is left out of the report.
    """

    reduction: Reduction
    total: Part
    count: Part = 1.0

    @classmethod
    def mean(cls, total: Part, count: Part) -> Metric:
        """A sum over `count` things, reported as total / count."""
        return cls("mean", _part(total), _part(count))

    @classmethod
    def sum(cls, value: Part) -> Metric:
        """Reported as the sum of all parts."""
        return cls("sum", _part(value))

    @classmethod
    def max(cls, value: Part, count: Part = 1) -> Metric:
        """Of `count` things; reported as the largest part; NaN if any part is."""
        return cls("max", _part(value), _part(count))

    @classmethod
    def min(cls, value: Part, count: Part = 1) -> Metric:
        """Of `count` things; reported as the smallest part; NaN if any part is."""
        return cls("min", _part(value), _part(count))

    @classmethod
    def last(cls, value: Part) -> Metric:
        """Reported as the part combined last: a setting, such as a learning rate."""
        return cls("last", _part(value))

    @property
    def value(self) -> float:
        """The number to report; NaN for a mean over nothing."""
        if self.reduction == "mean":
            return float(self.total) / float(self.count) if self.count else math.nan
        return float(self.total)

    def __add__(self, other: Metric) -> Metric:
        """Both parts as one. Raises ValueError if their reductions differ."""
        if self.reduction != other.reduction:
            raise ValueError(f"Metric: cannot combine a {self.reduction} with a {other.reduction}.")
        total = _JOIN[self.reduction](float(self.total), float(other.total))
        return Metric(self.reduction, float(total), float(self.count) + float(other.count))


def _part(value: Part) -> Part:
    return value.detach() if isinstance(value, torch.Tensor) else float(value)


def to_host(parts: Sequence[Mapping[str, Metric]]) -> list[dict[str, Metric]]:
    """The same with floats inside, in one transfer for all."""
    metrics = [metric for part in parts for metric in part.values()]
    tensors = [each for metric in metrics for each in (metric.total, metric.count) if isinstance(each, torch.Tensor)]
    numbers = iter(torch.stack([tensor.double() for tensor in tensors]).tolist() if tensors else ())

    def on_host(part: Part) -> float:
        return next(numbers) if isinstance(part, torch.Tensor) else part

    return [
        {name: Metric(metric.reduction, on_host(metric.total), on_host(metric.count)) for name, metric in part.items()}
        for part in parts
    ]


def declared(metrics: Mapping[str, Any], tokens: torch.Tensor, num_tokens: Part | None) -> dict[str, Metric]:
    """A loss's metrics of one micro-batch as Metrics; plain numbers count as means over its `tokens`.

    A name may say otherwise by ROLL's suffix, which is taken off: `@sum`, parts that add up over a mini-batch of
    num_tokens (None = all tokens are here), reported as the mean over mini-batches; `@max` or `@min`, as do names that
    end in _max or _min; `@mean`. ValueError for other suffixes, which parts do not give.
    """
    share = tokens / (tokens.clamp(min=1) if num_tokens is None else max(1, float(num_tokens)))
    result: dict[str, Metric] = {}
    for name, value in metrics.items():
        plain, _, tag = name.partition("@")
        tag = tag or next((end for end in ("max", "min") if name.endswith(f"_{end}")), "mean")
        if isinstance(value, Metric):
            result[name] = value
        elif tag in ("max", "min"):
            result[plain] = (Metric.max if tag == "max" else Metric.min)(value, tokens)
        elif tag in ("mean", "sum"):
            result[plain] = Metric.mean(value, share) if tag == "sum" else Metric.mean(value * tokens, tokens)
        else:
            raise ValueError(f"metric {name!r}: expected one of @mean, @sum, @max, @min, or none, behind its name")
    return result


def combine(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Metrics of several ranks or micro-batches as one dict; a name may be missing in some.

    Raises ValueError naming the metric if it was declared with two reductions.
    """
    result: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            try:
                result[name] = result[name] + metric if name in result else metric
            except ValueError as error:
                raise ValueError(f"metric {name!r}: {error}") from error
    return result


def join(parts: Mapping[str, Sequence[Metric]]) -> dict[str, Metric]:
    """One Metric per name from those of all ranks, as `DataProto.concat` collects them."""
    return {name: functools.reduce(operator.add, metrics) for name, metrics in parts.items() if len(metrics)}


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The numbers to report; what is over nothing is left out, since it has no value (0 would be a lie)."""
    return {name: metric.value for name, metric in metrics.items() if metric.count}


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """One number per name from a Metric, a list of Metrics, a number, or a list of numbers.

    Plain lists follow ROLL where a name ends in @mean, @sum, @max or @min (ValueError for other suffixes), and verl
    elsewhere: the largest if the name contains "max", the smallest if it contains "min", else the mean. Empty lists are
    left out.
    """
    result: dict[str, float] = {}
    for name, entry in metrics.items():
        entries: Any = entry if isinstance(entry, Sequence | np.ndarray) and not isinstance(entry, str) else [entry]
        if len(entries) and isinstance(entries[0], Metric):
            result |= values(join({name: entries}))
        elif len(entries):
            tag = name.partition("@")[2] or next((end for end in ("max", "min") if end in name), "mean")
            if tag not in _OF_LISTS:
                raise ValueError(f"metric {name!r}: expected one of @{', @'.join(_OF_LISTS)}, or none, behind its name")
            result[name] = float(_OF_LISTS[tag](np.asarray(entries, dtype=np.float64)))
    return result

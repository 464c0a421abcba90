"""Metric: the same number however the parts are grouped; reduce_metrics: verl's rule for plain lists."""

import math
import random

import numpy as np
import pytest
import torch

from verl_lite.metrics import Metric, combine, declared, reduce_metrics, values


def test_each_reduction_by_hand() -> None:
    made = {"sum": Metric.sum, "max": Metric.max, "min": Metric.min, "last": Metric.last}
    parts = [{name: make(v) for name, make in made.items()} | {"mean": Metric.mean(v, 1)} for v in (1.0, 3.0, 2.0)]
    assert values(combine(parts)) == {"sum": 6.0, "max": 3.0, "min": 1.0, "last": 2.0, "mean": 2.0}
    for make in (Metric.max, Metric.min):  # NaN is not swallowed
        assert math.isnan((make(math.nan) + make(1.0)).value) and math.isnan((make(1.0) + make(math.nan)).value)


def test_grouping_does_not_change_the_result() -> None:
    source = random.Random(0)
    parts = [{"m": Metric.mean(source.randint(0, 9), source.randint(0, 4)), "x": Metric.max(i % 7)} for i in range(20)]
    flat = values(combine(parts))
    assert flat == values(combine([combine(parts[:3]), combine(parts[3:4]), combine(parts[4:])]))
    assert flat["m"] == sum(p["m"].total for p in parts) / sum(p["m"].count for p in parts)


def test_mean_over_nothing_is_left_out_and_mixed_reductions_are_named() -> None:
    merged = combine([{"a": Metric.mean(0.0, 0)}, {"b": Metric.sum(2.0)}])
    assert values(merged) == {"b": 2.0} and math.isnan(merged["a"].value)
    with pytest.raises(ValueError, match="metric 'actor/lr': .*cannot combine a last with a sum"):
        combine([{"actor/lr": Metric.last(1.0)}, {"actor/lr": Metric.sum(1.0)}])


def test_reduce_metrics_by_name_and_by_metric() -> None:
    lists = {"a/max": [1.0, 5.0], "a/min": np.array([1.0, 5.0]), "a/loss": [1, 5], "a/lr": 0.5, "a/none": []}
    own = {"a/metric": [Metric.mean(1.0, 1), Metric.mean(0.0, 3)], "a/one": Metric.sum(7.0)}
    expected = {"a/max": 5.0, "a/min": 1.0, "a/loss": 3.0, "a/lr": 0.5, "a/metric": 0.25, "a/one": 7.0}
    assert reduce_metrics(lists | own) == expected


def test_suffixes_of_roll_are_read_and_unknown_ones_named() -> None:
    lists = {"a@sum": [1.0, 5.0], "a_max@mean": [1.0, 5.0], "a@max": [1.0, 5.0], "a@min": [1.0, 5.0], "b@sum": 2.0}
    assert reduce_metrics(lists) == {"a@sum": 6.0, "a_max@mean": 3.0, "a@max": 5.0, "a@min": 1.0, "b@sum": 2.0}
    for read in (reduce_metrics, lambda metrics: declared(metrics, torch.tensor(1.0), 1)):
        with pytest.raises(ValueError, match="'a@middle': expected one of the suffixes .*@sum"):
            read({"a@middle": 1.0})


def test_numbers_of_a_loss_become_what_their_names_say() -> None:
    """Two mini-batches of 4 tokens, the first in micro-batches of 1 and 3: sums are those of a mini-batch."""
    own = Metric.sum(1.0)
    parts = [(1.0, 1), (2.0, 3), (7.0, 4)]
    names = ("part@sum", "mean@mean", "plain", "top@max", "low@min", "ratio_max", "ratio_min")
    found = values(
        combine(declared(dict.fromkeys(names, value) | {"own": own}, torch.tensor(n), 4) for value, n in parts)
    )
    means = {"part": (3.0 + 7.0) / 2, "mean": 35 / 8, "plain": 35 / 8, "own": 3.0}
    assert found == means | {"top": 7.0, "low": 1.0, "ratio_max": 7.0, "ratio_min": 1.0}
    assert values(declared({"part@sum": 3.0}, torch.tensor(4.0), None)) == {"part": 3.0}


@pytest.mark.parametrize("entries", [[Metric.sum(1.0), 2.0], [2.0, Metric.sum(1.0)]])
def test_a_list_of_numbers_and_metrics_is_refused(entries: list[object]) -> None:
    with pytest.raises(ValueError, match="metric 'loss': 1 of 2 entries are a Metric; expected all"):
        reduce_metrics({"loss": entries})

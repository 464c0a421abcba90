"""Validation numbers by data source, under verl's names: mean@N, best@n, worst@n, maj@n of N answers to each prompt;
and beside them the unbiased pass@k and 95% intervals (`trainer.evaluate.intervals`). EVALUATION.md has each formula.

verl estimates best@n, worst@n and maj@n by resampling n of the N answers with replacement. For best and worst the
expectation of that has a closed form, which is used here: exact, fast, the same in any order of rows. maj@n is
resampled from a fixed seed with the answers in a canonical order. An answer whose reward failed is not a 0: it is left
out, and its prompt is judged by the others; val-aux/{source}/reward/error_rate and timeout_rate count such answers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.evaluate.intervals import Floats, half_width, pass_at_k
from trainer.evaluate.sample import PREDICTION, Sample

INTERVAL = "/ci95"  # ends the name of the half width of the 95% interval of a mean
MEAN_OF_SOURCES = "mean_of_sources"
_OVERALL = ("mean@", "best@", "maj@", "pass@")
RESAMPLES = 1000
SEED = 42


def validation_metrics(samples: Sequence[Sample], prefix: str = "") -> dict[str, float]:
    """val-core/{source}/{acc|reward}/{mean@N,best@N/...,maj@N/...}, and the rest as val-aux/{source}/{variable}/...

    samples: the N answers to each prompt, in any order. The core variable is `acc` if the reward function returns one,
    else `reward`. With a `prefix` such as "greedy/" all names are val-aux/{source}/{prefix}{variable}/... Shares of
    answers whose reward failed are val-aux/{source}/{prefix}reward/{error_rate,timeout_rate}.
    """
    names = {name for sample in samples for name in sample.extra}
    infos: dict[str, Sequence[Any]] = {"reward": [sample.score for sample in samples]}
    for name in sorted(names):
        infos[name] = [None if sample.score is None else sample.extra.get(name) for sample in samples]
    sources = [sample.data_source for sample in samples]
    results = process_validation_metrics(sources, [sample.uid for sample in samples], infos)
    metrics = name_metrics(results, prefix)
    for source in dict.fromkeys(sources):
        own = [sample for sample in samples if sample.data_source == source]
        start = f"val-aux/{source}/{prefix}reward/"
        metrics[f"{start}error_rate"] = sum(sample.score is None for sample in own) / len(own)
        metrics[f"{start}timeout_rate"] = sum(sample.timed_out for sample in own) / len(own)
    return metrics


def name_metrics(results: Mapping[str, Mapping[str, Mapping[str, float]]], prefix: str = "") -> dict[str, float]:
    """Flat names for {source: {variable: {metric: value}}}.

    val-core: mean, best and maj of the core variable over the largest number of answers; val-aux: everything else, and
    with several sources their mean as val-aux/mean_of_sources/{variable}/...
    """
    flat = {}
    for source, variables in results.items():
        core = "acc" if "acc" in variables else "reward"
        for variable, metrics in variables.items():
            largest = max((_samples_of(metric) for metric in metrics), default=0)
            for metric, value in metrics.items():
                is_headline = metric.startswith(("mean", "best", "maj")) and _samples_of(metric) == largest
                is_core = variable == core and is_headline and not prefix and not metric.endswith(INTERVAL)
                flat[f"{'val-core' if is_core else 'val-aux'}/{source}/{prefix}{variable}/{metric}"] = value
    return flat | {f"val-aux/{MEAN_OF_SOURCES}/{prefix}{name}": x for name, x in mean_of_sources(results).items()}


def mean_of_sources(results: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, float]:
    """`{variable}/{metric}`: the mean of the sources, each counting alike, of what all of them have; nothing for one
    source. Half widths of intervals add as those of independent numbers: sqrt(sum h^2) / S."""
    if len(results) < 2:
        return {}
    means = {}
    first, *others = results.values()
    for variable, metrics in first.items():
        for metric in metrics:
            if not metric.startswith(_OVERALL) or metric.endswith("/std"):
                continue
            found = [value for each in (first, *others) if (value := each.get(variable, {}).get(metric)) is not None]
            if len(found) == len(results):
                whole = math.hypot(*sorted(found)) if metric.endswith(INTERVAL) else math.fsum(found)
                means[f"{variable}/{metric}"] = whole / len(found)
    return means


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[Any]],
    seed: int = SEED,
) -> dict[str, dict[str, dict[str, float]]]:
    """{source: {variable: {metric: mean over prompts}}}.

    data_sources, sample_uids: (B,); rows of one source that share a uid are the N answers to one prompt. infos_dict:
    variables by name, (B,) each, numbers or bools; None or NaN = that row has none. An entry `pred` is what votes are
    counted over; other entries that are not numbers are ignored.
    For N > 1: mean@N, std@N, and for n = 2, 4, 8 ... below N, and N: {best,worst,maj}@n/{mean,std}. For N = 1: mean@1.
    For variables that are 0 or 1 everywhere in a source, with N > 1: pass@k for k = 1, 2, 4 ... below N, and N; a
    prompt with fewer than k values is not in it. Half widths of 95% intervals: mean@N/ci95, {best,maj}@N/ci95 and
    pass@k/ci95.
    N counts all answers of a prompt, also those that have no value.
    """
    groups = _rows_by_prompt(data_sources, sample_uids)
    largest: dict[str, int] = {}
    for source, size in groups:
        largest[source] = max(size, largest.get(source, 0))
    numbers = {name: _as_numbers(values) for name, values in infos_dict.items() if name != PREDICTION}
    results: dict[str, dict[str, dict[str, float]]] = {}
    for variable, values in numbers.items():
        if values is None:
            continue
        binary = {source for source in largest if _is_binary(values, data_sources, source)}
        found = _values_of_prompts(groups, values, infos_dict.get(PREDICTION), binary, seed)
        for (source, metric), parts in found.items():
            per_prompt = np.sort(np.concatenate(parts))  # sums of floats depend on their order, which must not
            of_variable = results.setdefault(source, {}).setdefault(variable, {})
            of_variable[metric] = float(per_prompt.mean())
            name, most = metric.removesuffix("/mean"), largest[source]
            if name.startswith("pass@") or name in (f"mean@{most}", f"best@{most}", f"maj@{most}"):
                half = half_width(per_prompt, source in binary)
                of_variable |= {} if half is None else {f"{name}{INTERVAL}": half}
    return results


def _values_of_prompts(
    groups: Mapping[tuple[str, int], NDArray[np.int64]],
    values: Floats,
    votes: Sequence[Any] | None,
    binary: Collection[str],
    seed: int,
) -> dict[tuple[str, str], list[Floats]]:
    """For (source, metric) of one variable the values of the prompts, in parts: prompts that have equally many values
    are computed together. values, votes: (B,); binary: sources in which the variable is 0 or 1."""
    collected: dict[tuple[str, str], list[Floats]] = defaultdict(list)
    for (source, size), members in groups.items():
        present = ~np.isnan(values[members])
        for count in np.unique(present.sum(1)):
            if count == 0:
                continue
            prompts = present.sum(1) == count
            sample = values[members[prompts]][present[prompts]].reshape(-1, count)
            found = _of_samples(sample, size)
            if size > 1 and source in binary:
                found |= _of_outcomes(sample, size)
            if size > 1 and votes is not None:
                ballots = [votes[row] for row in members[prompts][present[prompts]]]
                found |= _of_votes(sample, ballots, size, seed)
            for metric, per_prompt in found.items():
                collected[source, metric].append(per_prompt)
    return collected


def best_of(sample: Floats, n: int) -> tuple[Floats, Floats]:
    """Mean and standard deviation of the largest of n values drawn with replacement, for each row of sample (G, N).

    With values ascending, the largest draw is the i-th with probability (i/N)^n - ((i-1)/N)^n.
    """
    count = sample.shape[1]
    edges = (np.arange(count + 1) / count) ** n
    ordered, probability = np.sort(sample, axis=1), np.diff(edges)
    mean = ordered @ probability
    return mean, np.sqrt(((ordered - mean[:, None]) ** 2) @ probability)


def majority_of(values: Floats, ballots: Sequence[Any], n: int, seed: int = SEED) -> tuple[float, float]:
    """Mean and standard deviation of the value of the most frequent ballot among n drawn with replacement.

    values, ballots: (N,) of one prompt. The value of a ballot is the mean over the answers that cast it; of tied
    ballots, the mean over them.
    """
    ascending = np.argsort(values, kind="stable")  # sums of floats depend on their order, which must not
    values, ballots = values[ascending], [ballots[i] for i in ascending]
    names, voters = np.unique([str(ballot) for ballot in ballots], return_inverse=True)
    sizes = np.bincount(voters)
    worth = np.bincount(voters, weights=values) / sizes
    outcomes = _shares_of_victory(tuple(sizes.tolist()), n, seed) @ worth
    return float(outcomes.mean()), float(outcomes.std())


@lru_cache(maxsize=256)
def _shares_of_victory(sizes: tuple[int, ...], n: int, seed: int) -> Floats:
    """(draws, ballots): 1 for the most frequent ballot among n answers drawn, shared by those that tie.

    sizes: answers that cast each ballot. Kept, since many prompts split their votes alike.
    """
    shares = np.array(sizes) / sum(sizes)
    counts = np.random.default_rng([seed, n]).multinomial(n, shares, size=RESAMPLES)
    wins = counts == counts.max(axis=1, keepdims=True)
    return wins / wins.sum(axis=1, keepdims=True)


def _rows_by_prompt(data_sources: Sequence[str], uids: Sequence[str]) -> dict[tuple[str, int], NDArray[np.int64]]:
    """Rows of each prompt, (G, N) for each data source and number of answers N."""
    rows: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row, key in enumerate(zip(data_sources, uids, strict=True)):
        rows[key].append(row)
    by_size: dict[tuple[str, int], list[list[int]]] = defaultdict(list)
    for (source, _), members in rows.items():
        by_size[source, len(members)].append(members)
    return {key: np.array(members) for key, members in by_size.items()}


def _as_numbers(values: Sequence[Any]) -> Floats | None:
    """(B,) with NaN for None, or None if something in it is not a number."""
    if not all(value is None or isinstance(value, bool | int | float | np.number | np.bool_) for value in values):
        return None
    return np.array([np.nan if value is None else float(value) for value in values])


def _is_binary(values: Floats, data_sources: Sequence[str], source: str) -> bool:
    """Whether every value that there is in a source is 0 or 1. values, data_sources: (B,)."""
    present = values[~np.isnan(values) & (np.array(data_sources, dtype=object) == source)]
    return bool(np.isin(present, (0.0, 1.0)).all())


def _subset_sizes(size: int) -> list[int]:
    """2, 4, 8 ... below `size`, and `size`."""
    return [2**power for power in range(1, size.bit_length()) if 2**power < size] + [size]


def _of_samples(sample: Floats, size: int) -> dict[str, Floats]:
    """Metrics (G,) of the values (G, count) of prompts with `size` answers."""
    ordered = np.sort(sample, axis=1)
    metrics = {f"mean@{size}": ordered.mean(axis=1)}
    if size == 1:
        return metrics
    metrics[f"std@{size}"] = ordered.std(axis=1)
    for n in _subset_sizes(size):
        metrics[f"best@{n}/mean"], metrics[f"best@{n}/std"] = best_of(ordered, n)
        lowest, metrics[f"worst@{n}/std"] = best_of(-ordered, n)
        metrics[f"worst@{n}/mean"] = -lowest
    return metrics


def _of_outcomes(sample: Floats, size: int) -> dict[str, Floats]:
    """pass@k (G,) of the outcomes (G, count), 0 or 1, of prompts with `size` answers."""
    count, right = sample.shape[1], sample.sum(axis=1).astype(np.int64)
    return {f"pass@{k}": pass_at_k(right, count, k) for k in [1, *_subset_sizes(size)] if k <= count}


def _of_votes(sample: Floats, ballots: list[Any], size: int, seed: int) -> dict[str, Floats]:
    """maj metrics (G,) of values (G, count); ballots: G * count, in the same order."""
    count = sample.shape[1]
    metrics = {}
    for n in _subset_sizes(size):
        pairs = [majority_of(row, ballots[i * count : (i + 1) * count], n, seed) for i, row in enumerate(sample)]
        metrics[f"maj@{n}/mean"] = np.array([mean for mean, _ in pairs])
        metrics[f"maj@{n}/std"] = np.array([std for _, std in pairs])
    return metrics


def _samples_of(metric: str) -> int:
    return int(metric.split("@")[1].split("/")[0])

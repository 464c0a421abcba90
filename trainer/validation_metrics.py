"""Validation numbers by data source, under verl's names: mean@N, best@n, worst@n, maj@n of N answers to each prompt.

verl estimates best@n, worst@n and maj@n by resampling n of the N answers with replacement. For best and worst the
expectation of that has a closed form, which is used here: exact, fast, the same in any order of rows. maj@n is
resampled from a fixed seed with the answers in a canonical order. An answer whose reward failed is not a 0: it is left
out, and its prompt is judged by the others; val-aux/{source}/reward/error_rate and timeout_rate count such answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from verl_lite.protocol import DataProto

Floats = NDArray[np.float64]
PREDICTION = "pred"  # the entry of a reward's result that maj@n counts votes over
RESAMPLES = 1000
SEED = 42


def validation_metrics(batch: DataProto, prefix: str = "") -> dict[str, float]:
    """val-core/{source}/{acc|reward}/{mean@N,best@N/...,maj@N/...}, and the rest as val-aux/{source}/{variable}/...

    Reads token_level_scores, uid, data_source; reward_failed, reward_timed_out, is_padding and `reward/<name>` where
    present. The core variable is `acc` if the reward function returns one, else `reward`. With a `prefix` such as
    "greedy/" all names are val-aux/{source}/{prefix}{variable}/... Shares of answers whose reward failed are
    val-aux/{source}/{prefix}reward/{error_rate,timeout_rate}.
    """
    columns, tensors = batch.non_tensor_batch, batch.batch
    if tensors is None:
        raise ValueError("validation metrics: the batch has no tensors.")
    kept = np.ones(len(batch), dtype=bool)
    if "is_padding" in tensors.keys():
        kept &= ~tensors["is_padding"].bool().numpy()
    failed = np.asarray(columns.get("reward_failed", np.zeros(len(batch))), dtype=bool)
    scores: list[float | None] = tensors["token_level_scores"].sum(-1).tolist()
    infos: dict[str, Sequence[Any]] = {"reward": [None if bad else x for x, bad in zip(scores, failed, strict=True)]}
    for name, values in columns.items():
        if name.startswith("reward/"):
            infos[name.removeprefix("reward/")] = [None if bad else x for x, bad in zip(values, failed, strict=True)]
    sources = columns["data_source"][kept]
    results = process_validation_metrics(
        sources.tolist(),
        columns["uid"][kept].tolist(),
        {name: [values[row] for row in np.flatnonzero(kept)] for name, values in infos.items()},
    )
    metrics = name_metrics(results, prefix)
    for column, rate in (("reward_failed", "error_rate"), ("reward_timed_out", "timeout_rate")):
        if column in columns:
            values = np.asarray(columns[column], dtype=bool)[kept]
            metrics |= {f"val-aux/{x}/{prefix}reward/{rate}": float(values[sources == x].mean()) for x in set(sources)}
    return metrics


def name_metrics(results: Mapping[str, Mapping[str, Mapping[str, float]]], prefix: str = "") -> dict[str, float]:
    """Flat names for {source: {variable: {metric: value}}}.

    val-core: mean, best and maj of the core variable over the largest number of answers; val-aux: everything else.
    """
    flat = {}
    for source, variables in results.items():
        core = "acc" if "acc" in variables else "reward"
        for variable, metrics in variables.items():
            largest = max((_samples_of(metric) for metric in metrics), default=0)
            for metric, value in metrics.items():
                is_headline = metric.startswith(("mean", "best", "maj")) and _samples_of(metric) == largest
                section = "val-core" if variable == core and is_headline and not prefix else "val-aux"
                flat[f"{section}/{source}/{prefix}{variable}/{metric}"] = value
    return flat


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
    N counts all answers of a prompt, also those that have no value.
    """
    groups = _rows_by_prompt(data_sources, sample_uids)
    numbers = {name: _as_numbers(values) for name, values in infos_dict.items() if name != PREDICTION}
    variables = {name: values for name, values in numbers.items() if values is not None}
    votes = infos_dict.get(PREDICTION)
    collected: dict[tuple[str, str, str], list[Floats]] = defaultdict(list)
    for (source, size), members in groups.items():
        for variable, values in variables.items():
            present = ~np.isnan(values[members])
            for count in np.unique(present.sum(1)):
                if count == 0:
                    continue
                prompts = present.sum(1) == count
                sample = values[members[prompts]][present[prompts]].reshape(-1, count)
                for metric, per_prompt in _of_samples(sample, size).items():
                    collected[source, variable, metric].append(per_prompt)
                if votes is not None and size > 1:
                    ballots = [votes[row] for row in members[prompts][present[prompts]]]
                    for metric, per_prompt in _of_votes(sample, ballots, size, seed).items():
                        collected[source, variable, metric].append(per_prompt)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for (source, variable, metric), parts in collected.items():
        mean = float(np.sort(np.concatenate(parts)).mean())
        results.setdefault(source, {}).setdefault(variable, {})[metric] = mean
    return results


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

"""Validation numbers by data source, under verl's names: mean@N, best@n, worst@n, maj@n of N answers to each prompt;
and beside them the unbiased pass@k and 95% intervals. EVALUATION.md has each formula.

verl estimates best@n, worst@n and maj@n by resampling n of the N answers with replacement. For best and worst the
expectation of that has a closed form, which is used here: exact, fast, the same in any order of rows. maj@n is
resampled from a fixed seed with the answers in a canonical order. An answer whose reward failed is not a 0: it is left
out, and its prompt is judged by the others; val-aux/{source}/reward/error_rate and timeout_rate count such answers.

A prompt is the unit that is drawn: answers to one prompt resemble each other, so an interval over answers would be too
narrow. Each prompt gives one value (its mean over answers, its pass@k ...), and the interval is that of the mean of
these values (Miller, Adding Error Bars to Evals, 2024: errors clustered by prompt, which for equal numbers of answers
is this).
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.evaluate.sample import PREDICTION, Sample

Floats = NDArray[np.float64]
LEVEL = 0.95
INTERVAL = "/ci95"  # ends the name of the half width of the 95% interval of a mean
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

    val-core: mean, best and maj of the core variable over the largest number of answers; val-aux: everything else.
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
    For variables that are 0 or 1 everywhere in a source, with N > 1: pass@k for k = 1, 2, 4 ... below N, and N; a
    prompt with fewer than k values is not in it. Half widths of 95% intervals: mean@N/ci95, {best,maj}@N/ci95 and
    pass@k/ci95.
    N counts all answers of a prompt, also those that have no value.
    """
    sources: dict[str, dict[str, list[int]]] = {}
    for row, (source, uid) in enumerate(zip(data_sources, sample_uids, strict=True)):
        sources.setdefault(source, {}).setdefault(uid, []).append(row)
    votes = infos_dict.get(PREDICTION)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for variable, given in infos_dict.items():
        is_number = (value is None or isinstance(value, bool | int | float | np.number | np.bool_) for value in given)
        if variable == PREDICTION or not all(is_number):
            continue
        values = np.array([np.nan if value is None else float(value) for value in given])
        for source, prompts in sources.items():
            kept = {uid: [row for row in rows if not np.isnan(values[row])] for uid, rows in prompts.items()}
            is_binary = all(values[row] in (0.0, 1.0) for rows in kept.values() for row in rows)
            found: dict[str, list[float]] = defaultdict(list)
            for uid, rows in kept.items():
                ballots = None if votes is None else [votes[row] for row in rows]
                of_prompt = _of_prompt(values[rows], len(prompts[uid]), is_binary, ballots, seed) if rows else {}
                for metric, value in of_prompt.items():
                    found[metric].append(value)
            if found:
                largest = max(map(len, prompts.values()))
                results.setdefault(source, {})[variable] = _over_prompts(found, largest, is_binary)
    return results


def _of_prompt(
    values: Floats, size: int, is_binary: bool, ballots: Sequence[Any] | None, seed: int
) -> dict[str, float]:
    """Metrics of one prompt. values, ballots: (count,) of its answers that have a value, of `size` answers."""
    ordered = np.sort(values)
    metrics = {f"mean@{size}": float(ordered.mean())}
    if size == 1:
        return metrics
    metrics[f"std@{size}"] = float(ordered.std())
    for n in (sizes := [2**power for power in range(1, size.bit_length()) if 2**power < size] + [size]):
        metrics[f"best@{n}/mean"], metrics[f"best@{n}/std"] = map(float, best_of(ordered, n))
        lowest, deviation = map(float, best_of(-ordered, n))
        metrics |= {f"worst@{n}/mean": -lowest, f"worst@{n}/std": deviation}
        if ballots is not None:
            metrics[f"maj@{n}/mean"], metrics[f"maj@{n}/std"] = majority_of(values, ballots, n, seed)
    if is_binary:
        count, right = len(values), int(values.sum())
        metrics |= {f"pass@{k}": pass_at_k(right, count, k) for k in [1, *sizes] if k <= count}
    return metrics


def _over_prompts(found: Mapping[str, Sequence[float]], largest: int, is_binary: bool) -> dict[str, float]:
    """Means over prompts, with half widths of intervals where there are some. largest: number of answers."""
    means: dict[str, float] = {}
    for metric, values in found.items():
        per_prompt = np.sort(values)  # sums of floats depend on their order, which must not
        means[metric] = float(per_prompt.mean())
        name = metric.removesuffix("/mean")
        if name.startswith("pass@") or name in (f"mean@{largest}", f"best@{largest}", f"maj@{largest}"):
            half = half_width(per_prompt, is_binary)
            means |= {} if half is None else {f"{name}{INTERVAL}": half}
    return means


def best_of(sample: Floats, n: int) -> tuple[Floats, Floats]:
    """Mean and standard deviation of the largest of n values drawn with replacement, for each row of sample (..., N).

    With values ascending, the largest draw is the i-th with probability (i/N)^n - ((i-1)/N)^n.
    """
    count = sample.shape[-1]
    ordered, probability = np.sort(sample), np.diff((np.arange(count + 1) / count) ** n)
    mean = ordered @ probability
    return mean, np.sqrt(((ordered - mean[..., None]) ** 2) @ probability)


def majority_of(values: Floats, ballots: Sequence[Any], n: int, seed: int = SEED) -> tuple[float, float]:
    """Mean and standard deviation of the value of the most frequent ballot among n drawn with replacement.

    values, ballots: (N,) of one prompt. Of tied ballots, and of a ballot's answers, each is as likely to give its value
    (verl takes the first one of the draw, which is the same).
    """
    ascending = np.argsort(values, kind="stable")  # sums of floats depend on their order, which must not
    values, ballots = values[ascending], [ballots[i] for i in ascending]
    _, voters = np.unique([str(ballot) for ballot in ballots], return_inverse=True)
    sizes = np.bincount(voters)
    shares = _shares_of_victory(tuple(sizes.tolist()), n, seed)
    mean = float((shares @ (np.bincount(voters, weights=values) / sizes)).mean())
    squares = np.bincount(voters, weights=(values - mean) ** 2) / sizes
    return mean, float(np.sqrt((shares @ squares).mean()))


@lru_cache(maxsize=256)
def _shares_of_victory(sizes: tuple[int, ...], n: int, seed: int) -> Floats:
    """(draws, ballots): 1 for the most frequent ballot among n answers drawn, shared by those that tie. sizes: answers
    that cast each ballot. Kept, since many prompts split their votes alike."""
    shares = np.array(sizes) / sum(sizes)
    counts = np.random.default_rng([seed, n]).multinomial(n, shares, size=RESAMPLES)
    wins = counts == counts.max(axis=1, keepdims=True)
    return wins / wins.sum(axis=1, keepdims=True)


def _samples_of(metric: str) -> int:
    return int(metric.split("@")[1].split("/")[0])


def pass_at_k(right: int, count: int, k: int) -> float:
    """Probability that at least one of k answers, drawn without replacement from `count`, is right.

    1 - C(n-c, k) / C(n, k), exact in whole numbers before the one division.

    Args:
        right: right answers c of a prompt.
        k: 1 to count.
    Source: Chen et al. 2021 (Evaluating Large Language Models Trained on Code), equation 1.
    """
    if not 1 <= k <= count:
        raise ValueError(f"pass@{k} of {count} answers: k has to be 1 to {count}")
    whole = math.comb(count, k)
    return (whole - math.comb(count - right, k)) / whole


def half_width(per_prompt: Floats, is_share: bool) -> float | None:
    """Half the width of the 95% interval of the mean of `per_prompt` (P,); None for one prompt, which shows no spread.

    Student's t with P - 1 degrees of freedom times the standard error. is_share: the values are of 0/1 outcomes; where
    all prompts then agree on 0 or on 1, the spread says nothing, and the width is that of the exact one-sided bound,
    1 - 0.05^(1/P), about 3/P.
    """
    prompts = len(per_prompt)
    if prompts < 2:
        return None
    ordered = np.sort(per_prompt)  # sums of floats depend on their order, which must not
    if is_share and ordered[0] == ordered[-1] and ordered[0] in (0.0, 1.0):
        return 1 - (1 - LEVEL) ** (1 / prompts)
    return student_t(prompts - 1) * float(ordered.std(ddof=1)) / math.sqrt(prompts)


def student_t(degrees: int) -> float:
    """The two-sided 95% quantile of Student's t: Hill's expansion about the normal one (Abramowitz and Stegun 26.7.5),
    exact for 1 and 2 degrees of freedom, within 0.3% from 3 on."""
    if degrees == 1:
        return math.tan(math.pi * LEVEL / 2)
    if degrees == 2:
        return LEVEL * math.sqrt(2 / (1 - LEVEL**2))
    x, n = NormalDist().inv_cdf((1 + LEVEL) / 2), degrees
    return (
        x
        + (x**3 + x) / (4 * n)
        + (5 * x**5 + 16 * x**3 + 3 * x) / (96 * n**2)
        + (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / (384 * n**3)
        + (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / (92160 * n**4)
    )

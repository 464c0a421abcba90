"""Validation metrics by data source with verl's names: mean@N, best@n, worst@n and maj@n of N answers to each prompt,
plus the unbiased pass@k and 95% confidence intervals. EVALUATION.md lists the formulas.

verl estimates best@n, worst@n and maj@n by resampling n of the N answers with replacement. For best and worst, this
module uses the closed form of the expectation, which is exact, fast and independent of the order of rows. For maj@n, it
resamples with a fixed seed and the answers in a canonical order. An answer whose reward failed does not count as 0: it
is left out, and the metrics of its prompt use the other answers. val-aux/{source}/reward/error_rate and timeout_rate
count such answers.

The sampling unit is the prompt. Answers to one prompt are correlated, so an interval over answers would be too narrow.
Each prompt contributes one value (its mean over answers, its pass@k, ...), and the interval is that of the mean of
these values. For equal numbers of answers, this equals standard errors clustered by prompt (Miller, Adding Error Bars
to Evals, 2024).
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import TypeGuard

import numpy as np
from numpy.typing import NDArray

from trainer.validation.sample import PREDICTION, Sample, is_prediction

Floats = NDArray[np.float64]
LEVEL = 0.95
"""Confidence level of the intervals."""
INTERVAL = "/ci95"
"""Suffix of the metric with the half width of a mean's interval."""
RESAMPLES = 1000
"""Number of draws of maj@n, as in verl."""
SEED = 42
"""Seed of the draws of maj@n, as in verl."""


def validation_metrics(samples: Sequence[Sample], prefix: str = "") -> dict[str, float]:
    """Returns the metrics of a validation by their logged names.

    The headline metrics are val-core/{source}/{acc|reward}/{mean@N,best@N/...,maj@N/...} of the core variable, which is
    `acc` if the reward function returns it, else `reward`. All others are val-aux/{source}/{variable}/..., including
    the shares of answers whose reward failed, val-aux/{source}/reward/{error_rate,timeout_rate}.

    Args:
        samples: The N answers to each prompt, in any order.
        prefix: For example "greedy/". All names are then val-aux/{source}/{prefix}{variable}/...
    """
    sources = [sample.data_source for sample in samples]
    uids = [sample.uid for sample in samples]
    results = process_validation_metrics(sources, uids, _variables(samples))
    metrics = name_metrics(results, prefix)

    samples_by_source: dict[str, list[Sample]] = {}
    for sample in samples:
        samples_by_source.setdefault(sample.data_source, []).append(sample)
    for source, samples_of_source in samples_by_source.items():
        num_failed = 0
        num_timed_out = 0
        for sample in samples_of_source:
            num_failed += sample.score is None
            num_timed_out += sample.timed_out
        name = f"val-aux/{source}/{prefix}reward"
        metrics[f"{name}/error_rate"] = num_failed / len(samples_of_source)
        metrics[f"{name}/timeout_rate"] = num_timed_out / len(samples_of_source)
    return metrics


def _variables(samples: Sequence[Sample]) -> dict[str, Sequence[object]]:
    """Returns the score and the other entries of the reward by name, each with a value per sample.

    None means that the sample has no value.
    """
    variables: dict[str, Sequence[object]] = {}
    variables["reward"] = [sample.score for sample in samples]
    names: set[str] = set()
    for sample in samples:
        names.update(sample.extra)
    # sorted, so that the order of the metrics does not depend on that of the answers
    for name in sorted(names):
        entries = []
        for sample in samples:
            # if the reward failed, its other entries say nothing about the answer
            has_failed = sample.score is None
            entries.append(None if has_failed else sample.extra.get(name))
        variables[name] = entries
    return variables


def name_metrics(results: Mapping[str, Mapping[str, Mapping[str, float]]], prefix: str = "") -> dict[str, float]:
    """Flattens {source: {variable: {metric: value}}} to the logged names.

    val-core contains mean, best and maj of the core variable for the largest number of answers, val-aux all others.

    Args:
        results: The result of `process_validation_metrics`.
        prefix: See `validation_metrics`.
    """
    flat = {}
    for source, variables in results.items():
        core = "acc" if "acc" in variables else "reward"
        for variable, metrics in variables.items():
            headlines = set()
            # with a prefix, the answers are not those by which a run is judged
            if variable == core and not prefix:
                headlines = _headlines(metrics)
            name = f"{source}/{prefix}{variable}"
            for metric, value in metrics.items():
                section = "val-core" if metric in headlines else "val-aux"
                flat[f"{section}/{name}/{metric}"] = value
    return flat


def _headlines(metrics: Collection[str]) -> set[str]:
    """Returns the headlines among a variable's metrics: mean, best and maj of the largest number of answers."""
    largest = max(map(_number_of_answers, metrics), default=0)
    headlines = set()
    for metric in metrics:
        if metric.endswith(INTERVAL) or _number_of_answers(metric) < largest:
            continue
        if metric.startswith(("mean", "best", "maj")):
            headlines.add(metric)
    return headlines


def process_validation_metrics(
    data_sources: Sequence[str],
    sample_uids: Sequence[str],
    infos_dict: Mapping[str, Sequence[object]],
    seed: int = SEED,
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the means over prompts as {source: {variable: {metric: mean}}}.

    The metrics are mean@1 for N = 1. For N > 1, they are mean@N, std@N, and {best,worst,maj}@n/{mean,std} for n = N and
    the powers of two below N. For N > 1 and variables whose values in a source are all 0 or 1, there is also pass@k for
    k = 1, the powers of two below N, and N, over the prompts with at least k values. The half widths of 95% intervals
    are mean@N/ci95, {best,maj}@N/ci95 and pass@k/ci95. N counts all answers to a prompt, including those without value.

    Args:
        data_sources, sample_uids: (B,). Rows of one source with the same uid are the N answers to one prompt.
        infos_dict: Variables by name, each (B,) numbers or bools; None or NaN: the row has no value. The entry `pred`
            contains the votes of maj@n. It, those of parts of the reward (`PART.pred`), and entries that are not
            numbers are no variables.
        seed: Seed of the draws of maj@n.
    """
    prompts_by_source = rows_by_prompt(data_sources, sample_uids)
    votes = infos_dict.get(PREDICTION)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for variable, entries in infos_dict.items():
        if is_prediction(variable) or not _are_numbers(entries):
            continue
        # None becomes NaN: the row has no value
        values = np.array(entries, dtype=np.float64)
        for source, prompts in prompts_by_source.items():
            means = _source_metrics(values, prompts, votes, seed)
            if means:
                variables = results.setdefault(source, {})
                variables[variable] = means
    return results


def rows_by_prompt(sources: Sequence[str], uids: Sequence[str]) -> dict[str, list[list[int]]]:
    """Returns the rows of each prompt, by data source.

    A prompt is identified by its uid, never by its text. Data sources do not share prompts.
    """
    rows_of_prompt: dict[tuple[str, str], list[int]] = {}
    prompts = zip(sources, uids, strict=True)
    for row, prompt in enumerate(prompts):
        rows = rows_of_prompt.setdefault(prompt, [])
        rows.append(row)

    prompts_by_source: dict[str, list[list[int]]] = {}
    for (source, _), rows in rows_of_prompt.items():
        prompts_of_source = prompts_by_source.setdefault(source, [])
        prompts_of_source.append(rows)
    return prompts_by_source


def _are_numbers(entries: Sequence[object]) -> TypeGuard[Sequence[float | None]]:
    """Returns True if all entries that are not None are numbers or bools."""
    # numpy's types are no subclasses of Python's, except float64
    number_types = (bool, int, float, np.number, np.bool_)
    return all(entry is None or isinstance(entry, number_types) for entry in entries)


def _source_metrics(
    values: Floats, prompts: Sequence[Sequence[int]], votes: Sequence[object] | None, seed: int
) -> dict[str, float]:
    """Returns the means over the prompts of one source; nothing if no row has a value.

    Args:
        values: (B,) values of a variable; NaN: the row has no value.
        prompts: rows of each prompt of the source.
        votes: (B,) votes of maj@n, if there are any.
        seed: seed of the draws of maj@n.
    """
    largest = 0
    # decided for the whole source: a prompt whose values happen to be 0 and 1 must not be the only one with pass@k
    is_binary = True
    rows_with_value = []
    for all_rows in prompts:
        rows = [row for row in all_rows if not np.isnan(values[row])]
        rows_with_value.append(rows)
        largest = max(largest, len(all_rows))
        is_outcome = np.isin(values[rows], (0.0, 1.0))
        is_binary = is_binary and bool(is_outcome.all())

    values_by_metric: dict[str, list[float]] = defaultdict(list)
    for all_rows, rows in zip(prompts, rows_with_value, strict=True):
        # a prompt without any score is left out of all means
        if not rows:
            continue
        ballots = None
        if votes is not None:
            ballots = [votes[row] for row in rows]
        # the names contain the number of all answers, so that failed rewards do not spread a source over several names
        metrics = _prompt_metrics(values[rows], len(all_rows), is_binary, ballots, seed)
        for metric, value in metrics.items():
            values_by_metric[metric].append(value)
    return _means_over_prompts(values_by_metric, largest, is_binary)


def _prompt_metrics(
    values: Floats, size: int, is_binary: bool, ballots: Sequence[object] | None, seed: int
) -> dict[str, float]:
    """Returns the metrics of one prompt.

    Args:
        values: (count,) values of the answers that have a value.
        size: number of all answers.
        is_binary: True if all values of the source are 0 or 1.
        ballots: (count,) votes of the answers that have a value, if there are any.
        seed: seed of the draws of maj@n.
    """
    # sorted, because the sum of floats depends on their order
    ordered = np.sort(values)
    metrics = {f"mean@{size}": float(ordered.mean())}
    if size == 1:
        return metrics
    metrics[f"std@{size}"] = float(ordered.std())

    # verl's choice: the powers of two, and the number of all answers
    sizes = []
    power = 2
    while power < size:
        sizes.append(power)
        power *= 2
    sizes.append(size)
    for n in sizes:
        # exact, where verl draws 1000 times
        best_mean, best_std = best_of(ordered, n)
        metrics[f"best@{n}/mean"] = float(best_mean)
        metrics[f"best@{n}/std"] = float(best_std)
        # the smallest value is the largest of the negated ones
        negated_mean, worst_std = best_of(-ordered, n)
        metrics[f"worst@{n}/mean"] = -float(negated_mean)
        metrics[f"worst@{n}/std"] = float(worst_std)
        if ballots is not None:
            majority_mean, majority_std = majority_of(values, ballots, n, seed)
            metrics[f"maj@{n}/mean"] = majority_mean
            metrics[f"maj@{n}/std"] = majority_std

    if is_binary:
        count = len(values)
        right = int(values.sum())
        for k in [1, *sizes]:
            # fewer values than k, because some rewards failed
            if k <= count:
                metrics[f"pass@{k}"] = pass_at_k(right, count, k)
    return metrics


def _means_over_prompts(
    values_by_metric: Mapping[str, Sequence[float]], largest: int, is_binary: bool
) -> dict[str, float]:
    """Returns means over prompts, and half widths of intervals if there are several prompts.

    Args:
        values_by_metric: the values of the prompts, by metric.
        largest: largest number of answers to a prompt.
        is_binary: True if all values of the source are 0 or 1.
    """
    means: dict[str, float] = {}
    names_with_interval = (f"mean@{largest}", f"best@{largest}", f"maj@{largest}")
    for metric, values in values_by_metric.items():
        # sorted, because the sum of floats depends on their order
        per_prompt = np.sort(values)
        means[metric] = float(per_prompt.mean())
        name = metric.removesuffix("/mean")
        if name.startswith("pass@") or name in names_with_interval:
            half = half_width(per_prompt, is_binary)
            if half is not None:
                means[f"{name}{INTERVAL}"] = half
    return means


def best_of(sample: Floats, n: int) -> tuple[Floats, Floats]:
    """Returns mean and standard deviation of the largest of n values drawn with replacement from each row of `sample`.

    `sample` is (..., N). The largest draw is the i-th smallest value with probability (i/N)^n - ((i-1)/N)^n.
    """
    count = sample.shape[-1]
    ordered = np.sort(sample)
    shares_below = np.arange(count + 1) / count
    probability = np.diff(shares_below**n)

    mean = ordered @ probability
    squares = (ordered - mean[..., None]) ** 2
    return mean, np.sqrt(squares @ probability)


def majority_of(values: Floats, ballots: Sequence[object], n: int, seed: int = SEED) -> tuple[float, float]:
    """Returns mean and standard deviation of the value of the most frequent vote among n drawn with replacement.

    All tied votes, and all answers with the winning vote, are equally likely to provide the value. (verl uses the first
    of them in the draw, which is equivalent.)

    Args:
        values, ballots: (N,) values and votes of the answers to one prompt.
        n: Number of drawn answers.
        seed: Seed of the draws.
    """
    # sorted, because the sum of floats depends on their order; stable, so that equal values keep theirs
    ascending = np.argsort(values, kind="stable")
    values = values[ascending]
    # as text, because numpy cannot sort votes of several types
    ordered_ballots = [str(ballots[position]) for position in ascending]
    _, vote_of_answer = np.unique(ordered_ballots, return_inverse=True)
    answers_by_vote = np.bincount(vote_of_answer)
    sizes = tuple(answers_by_vote.tolist())
    winner_shares = _winner_shares(sizes, n, seed)  # (draws, votes)

    # only the winner is drawn; the value of a random answer with its vote is averaged exactly
    mean_by_vote = np.bincount(vote_of_answer, weights=values) / answers_by_vote
    mean_by_draw = winner_shares @ mean_by_vote
    mean = float(mean_by_draw.mean())

    squares = (values - mean) ** 2
    square_by_vote = np.bincount(vote_of_answer, weights=squares) / answers_by_vote
    variance = (winner_shares @ square_by_vote).mean()
    return mean, float(np.sqrt(variance))


@lru_cache(maxsize=256)
def _winner_shares(sizes: tuple[int, ...], n: int, seed: int) -> Floats:
    """Draws n answers RESAMPLES times and returns the winning vote of each draw.

    Returns a (draws, votes) array with 1 for the most frequent vote of a draw, divided among ties. The result is
    cached, because many prompts have the same sizes.

    Args:
        sizes: number of answers with each vote.
        n: number of drawn answers.
        seed: seed of the draws.
    """
    # n independent draws of answers have multinomial numbers of votes, so no single answer has to be drawn
    shares = np.array(sizes) / sum(sizes)
    # a generator for each call, so that no result depends on the order of prompts
    generator = np.random.default_rng([seed, n])
    counts = generator.multinomial(n, shares, size=RESAMPLES)

    largest = counts.max(axis=1, keepdims=True)
    most_frequent = counts == largest
    num_tied = most_frequent.sum(axis=1, keepdims=True)
    return most_frequent / num_tied


def _number_of_answers(metric: str) -> int:
    """Returns n of a metric NAME@n or NAME@n/..."""
    _, _, after_name = metric.partition("@")
    return int(after_name.partition("/")[0])


def pass_at_k(right: int, count: int, k: int) -> float:
    """Returns the probability that at least one of k answers, drawn without replacement from `count`, is right.

    Computes 1 - C(n-c, k) / C(n, k) with n = count and c = right, in integers up to a single division. Source: Chen et
    al. 2021 (Evaluating Large Language Models Trained on Code), equation 1.

    Args:
        right: Number of right answers to a prompt.
        count: Number of all answers to the prompt.
        k: Number of drawn answers, 1 to count.

    Raises:
        ValueError: If k is not between 1 and count.
    """
    if not 1 <= k <= count:
        raise ValueError(f"pass@{k} of {count} answers: expected k between 1 and {count}")
    num_draws = math.comb(count, k)
    num_all_wrong = math.comb(count - right, k)
    # two integers, because the numbers of many answers are too large for floats
    return (num_draws - num_all_wrong) / num_draws


def half_width(per_prompt: Floats, is_share: bool) -> float | None:
    """Returns half the width of the 95% interval of the mean of `per_prompt` (P,), or None for a single prompt.

    The half width is Student's t with P - 1 degrees of freedom times the standard error. If all values are shares with
    the value 0, or all have the value 1, the standard error is 0, so the half width is the exact one-sided bound
    1 - 0.05^(1/P), about 3/P, instead.

    Args:
        per_prompt: (P,) values of the prompts.
        is_share: True if the values are shares of 0/1 outcomes.
    """
    prompts = len(per_prompt)
    if prompts < 2:
        return None
    # sorted, because the sum of floats depends on their order
    ordered = np.sort(per_prompt)
    smallest = ordered[0]
    largest = ordered[-1]
    if is_share and smallest == largest and smallest in (0.0, 1.0):
        return 1 - (1 - LEVEL) ** (1 / prompts)
    deviation = float(ordered.std(ddof=1))
    return student_t(prompts - 1) * deviation / math.sqrt(prompts)


def student_t(degrees: int) -> float:
    """Returns the two-sided 95% quantile of Student's t.

    It is exact for 1 and 2 degrees of freedom. For more, Hill's expansion about the normal quantile (Abramowitz and
    Stegun 26.7.5) is within 0.3%.
    """
    # the closed forms, because the expansion is inaccurate for few degrees of freedom
    if degrees == 1:
        return math.tan(math.pi * LEVEL / 2)
    if degrees == 2:
        return LEVEL * math.sqrt(2 / (1 - LEVEL**2))
    x = NormalDist().inv_cdf((1 + LEVEL) / 2)
    term_1 = x**3 + x
    term_2 = 5 * x**5 + 16 * x**3 + 3 * x
    term_3 = 3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x
    term_4 = 79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x

    quantile = x
    quantile += term_1 / (4 * degrees)
    quantile += term_2 / (96 * degrees**2)
    quantile += term_3 / (384 * degrees**3)
    quantile += term_4 / (92160 * degrees**4)
    return quantile

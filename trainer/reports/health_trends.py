"""Findings that need a whole series, or several: reward that falls or does not rise, an entropy that goes in a few
steps, spikes of the gradient, a validation that cannot tell what was gained, a reward that is the same for everything.

Pure functions of (step, value) by metric name; each gives one `Finding`, None where it has nothing to go by.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

from trainer.final_report import ValidationMean, validation_means
from trainer.reports.findings import BAD, LOOK, OK, Finding, Points, Series, number
from trainer.reports.run_data import SCORES

SPIKE = 8.0  # times the median of the steps before
_BEFORE = 20  # steps that a spike is compared with
_ENOUGH = 20  # steps to speak of a trend
_LOSS = "train/loss"
_STILL = 1e-4  # nats that the policy moves in a step
_SOLVED = 0.95  # of the best score: there is nothing left to learn
_ERRORS = 4.0  # standard errors beyond which a fall is no chance


def trends(series: Series) -> list[Finding]:
    """Those that can be judged."""
    judges: tuple[Callable[[Series], Finding | None], ...] = (
        score_falls,
        score_stays,
        entropy_goes_fast,
        gradient_spikes,
        same_score,
        validation_gain,
    )
    return [finding for judge in judges if (finding := judge(series)) is not None]


def score_falls(series: Series) -> Finding | None:
    """Learning too fast: the score rose, then lost much of it. Running means of a tenth of the run; a fall counts if it
    is more than 4 standard errors and 0.3 of the rise."""
    name, points, sign = _score(series)
    if len(points) < _ENOUGH:
        return None
    width = max(3, len(points) // 10)
    smooth = _running([sign * value for _, value in points], width)
    error = _noise(points) * math.sqrt(2 / width)
    best = max(range(len(smooth)), key=smooth.__getitem__)
    fall, rise = smooth[best] - smooth[-1], max(smooth[best] - smooth[0], 0.0)
    if fall <= _ERRORS * error or fall <= 0.3 * rise:
        return Finding(OK, name, f"{name} does not fall back from its best")
    peak = points[best + width - 1][0]
    return Finding(
        BAD,
        name,
        f"{name} was best around step {peak} ({number(sign * smooth[best])}) and is {number(sign * smooth[-1])} at the "
        f"end, as means over {width} steps",
        tuple(step for step, _ in points if step > peak),
        "the policy learns too fast: updates went further than the samples could vouch for",
        "lower the learning rate, hold the policy to the reference, and go on from the checkpoint before the fall",
        ("actor.optim.lr", "actor.kl_loss_coef", "actor.ppo_epochs"),
    )


def score_stays(series: Series) -> Finding | None:
    """Learning too slowly: the score's first and last quarter differ by less than 2 standard errors, and it is not near
    its best. Whether the policy moves at all tells the cause."""
    name, points, sign = _score(series)
    if len(points) < _ENOUGH:
        return None
    quarter = len(points) // 4
    first, last = [v for _, v in points[:quarter]], [v for _, v in points[-quarter:]]
    gain = sign * (statistics.fmean(last) - statistics.fmean(first))
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / quarter)
    best = max((value for _, value in series.get("critic/score/max", [])), default=None)
    is_solved = best is not None and statistics.fmean(last) >= _SOLVED * best > 0
    begin, end = number(statistics.fmean(first)), number(statistics.fmean(last))
    if gain > 2 * error:
        return Finding(OK, name, f"{name} improves from {begin} to {end}, first against last quarter of the steps")
    if gain < -2 * error or is_solved:
        return None  # it falls, which another finding says, or there is nothing left
    cause, change, keys = _why_slow(series)
    return Finding(
        LOOK,
        name,
        f"{name} is {begin} in the first quarter of the steps and {end} in the last: a difference of "
        f"{number(abs(gain))}, less than chance explains ({number(2 * error)})",
        tuple(step for step, _ in points),
        cause,
        change,
        keys,
    )


def _why_slow(series: Series) -> tuple[str, str, tuple[str, ...]]:
    """Cause, change and keys of a score that stays."""
    moved = _median(series, "actor/approxkl") or 0.0
    clipped = _median(series, "actor/pg_clipfrac")
    empty = _median(series, "frac_reward_zero_std")
    if empty is not None and empty > 0.5:
        return (
            "most prompts teach nothing: all their answers are equally good",
            "choose prompts that the policy can just do, or sample more answers",
            ("data.train_files", "rollout.n", "algorithm.filter_groups.enable"),
        )
    if clipped is not None and not any(value for _, value in series.get("actor/approxkl", [])):
        return (
            "the updates are too small, or they move the model to something else than what is rewarded: with one "
            "optimizer step to a batch neither clip fraction nor KL can tell, both are always 0",
            "look at the samples: is any of them right? If so, raise the learning rate, threefold at a time",
            ("actor.optim.lr", "reward.custom_reward_function.path"),
        )
    if clipped is not None and clipped < 0.005 and moved < _STILL:
        return (
            "the policy learns too slowly: hardly a token is clipped, and the updates hardly move it",
            "raise the learning rate, threefold at a time",
            ("actor.optim.lr", "actor.optim.lr_warmup_steps"),
        )
    return (
        "the updates move the model, but not to what is rewarded; or the run is too short to see it",
        "look at the samples: does the score reward what you want, and is it seldom enough right to be learnt?",
        ("actor.optim.lr", "reward.custom_reward_function.path"),
    )


def entropy_goes_fast(series: Series) -> Finding | None:
    """More than half of the entropy gone in the first tenth of the run."""
    points = series.get("actor/entropy", [])
    if len(points) < _ENOUGH or points[0][1] <= 0:
        return None
    early = points[: max(3, len(points) // 10)]
    step, least = min(early, key=lambda point: point[1])
    if least >= 0.5 * points[0][1]:
        return None
    return Finding(
        LOOK,
        "actor/entropy",
        f"actor/entropy falls from {number(points[0][1])} to {number(least)} by step {step}",
        tuple(step for step, _ in early),
        "the policy settles on its first guesses within a few steps: it learns too fast",
        "lower the learning rate, or lengthen its warm-up",
        ("actor.optim.lr", "actor.optim.lr_warmup_steps"),
    )


def gradient_spikes(series: Series) -> Finding | None:
    """Steps whose gradient norm is 8 times the median of the up to 20 steps before, of which there are 5 or more."""
    name = next((x for x in ("actor/grad_norm", "train/grad_norm", "critic/grad_norm") if series.get(x)), None)
    if name is None or len(series[name]) <= 5:
        return None
    points = series[name]
    spikes = []
    for place in range(5, len(points)):
        usual = statistics.median(value for _, value in points[max(0, place - _BEFORE) : place])
        if usual > 0 and points[place][1] > SPIKE * usual:
            spikes.append((points[place], usual))
    if not spikes:
        return Finding(OK, name, f"{name} has no spikes")
    (step, value), usual = max(spikes, key=lambda spike: spike[0][1] / spike[1])
    return Finding(
        BAD if len(spikes) > 0.05 * len(points) else LOOK,
        name,
        f"{name} has {len(spikes)} spike{'s' * (len(spikes) > 1)} in {len(points)} steps: {number(value)} at step "
        f"{step}, where the steps before have {number(usual)}",
        tuple(point[0] for point, _ in spikes),
        "single batches pull far harder than others: a few very long or oddly rewarded answers, or an update that "
        "begins to diverge",
        "look at the samples of these steps; clip gradients lower, or lower the learning rate",
        ("actor.optim.clip_grad", "actor.optim.lr"),
    )


def same_score(series: Series) -> Finding | None:
    """Every answer of the run has one and the same score."""
    highest, lowest = series.get("critic/score/max", []), series.get("critic/score/min", [])
    if len(highest) < 3 or not lowest:
        return None
    values = {value for _, value in [*highest, *lowest]}
    if len(values) > 1:
        return None
    return Finding(
        BAD,
        "critic/score/mean",
        f"every answer of all {len(highest)} steps has the score {number(values.pop())}",
        tuple(step for step, _ in highest),
        "the reward does not tell answers apart: it may look for another format, or for another ground truth",
        "try it on saved answers: python -m trainer.score RUN",
        ("reward.custom_reward_function.path", "data.data_source"),
    )


# ------------------------------------------------------------------------------------------------------ validation


def validation_gain(series: Series) -> Finding | None:
    """The first validation against the last, with the 95% interval of the difference (as of independent prompts, which
    is wide where both asked the same)."""
    first, last = _validations(series)
    pairs = [(before, after) for before in first for after in last if _is_same(before, after)]
    pairs = [(b, a) for b, a in pairs if b.half_width is not None and a.half_width is not None]
    if not pairs:
        return None
    words: list[str] = []
    better: list[str] = []
    worse: list[str] = []
    for before, after in pairs:
        assert before.half_width is not None and after.half_width is not None
        gain, width = after.value - before.value, math.hypot(before.half_width, after.half_width)
        words.append(
            f"{before.source} {number(before.value)} to {number(after.value)} ({gain:+.3f}, interval +-{width:.3f})"
        )
        if abs(gain) > width:
            (better if gain > 0 else worse).append(before.source)
    text = f"validation before and after: {'; '.join(words)}"
    if worse:
        return Finding(
            LOOK if better else BAD,
            "val-core",
            f"{text}. Worse, beyond the interval: {', '.join(worse)}",
            cause="what the training rewards is not what this validation asks, or the update broke what was known",
            change="look at the changed samples of the validation; mix such prompts in, or take an earlier checkpoint",
            keys=("data.train_files", "actor.optim.lr", "actor.kl_loss_coef"),
        )
    if better:
        return Finding(OK, "val-core", f"{text}. Better, beyond the interval: {', '.join(better)}")
    return Finding(
        LOOK,
        "val-core",
        f"{text}. The interval is wider than the gain: this validation cannot tell whether anything was learnt",
        cause="too few prompts or answers are validated for a gain of this size",
        change="validate on more prompts, or with more answers to each",
        keys=("data.val_max_samples", "rollout.val_kwargs.n"),
    )


def _validations(series: Series) -> tuple[list[ValidationMean], list[ValidationMean]]:
    """The sampled means of the first and of the last validated step; nothing where there is one step only."""
    by_step: dict[int, dict[str, float]] = {}
    for name, points in series.items():
        if name.startswith("val-"):
            for step, value in points:
                by_step.setdefault(step, {})[name] = value
    found = {step: [x for x in validation_means(own) if not x.greedy] for step, own in sorted(by_step.items())}
    steps = [step for step, means in found.items() if means]
    return (found[steps[0]], found[steps[-1]]) if len(steps) > 1 else ([], [])


def _is_same(before: ValidationMean, after: ValidationMean) -> bool:
    return (before.source, before.name) == (after.source, after.name)


# ------------------------------------------------------------------------------------------------------ numbers


def _score(series: Series) -> tuple[str, Points, int]:
    """The metric that the run is after, its points, and 1 if more is better, else -1."""
    name = next((name for name in SCORES if series.get(name)), SCORES[0])
    return name, series.get(name, []), -1 if name == _LOSS else 1


def _running(values: list[float], width: int) -> list[float]:
    """Means of `width` values each: one fewer per place that the window does not reach."""
    return [statistics.fmean(values[place : place + width]) for place in range(len(values) - width + 1)]


def _noise(points: Points) -> float:
    """Standard deviation of one value about its trend, from the differences of neighbours."""
    steps = [second[1] - first[1] for first, second in zip(points, points[1:], strict=False)]
    return math.sqrt(statistics.fmean(step * step for step in steps) / 2)


def _median(series: Series, name: str) -> float | None:
    points = series.get(name, [])
    return statistics.median(value for _, value in points) if points else None

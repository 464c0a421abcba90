"""The checks of a run's health: each looks at metrics as series of (step, value) and returns a `Finding`.

`health.py` has the table of rules that says which metrics are checked, and what to change if a check fails.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trainer.observe.final_report import ValidationMean, validation_means

BAD, LOOK, OK = GRADES = ("bad", "look", "ok")
SCORES = ("critic/score/mean", "actor/face_score", "train/loss")
"""Metrics that a run optimizes; the first that it logs is used. A smaller train/loss is better."""

DIVERGED = "the run diverged"
LASTING = 0.1  # share of a run's steps; fewer steps outside a range count as stray steps
_EARLY = 0.75  # share of the steps; a problem that ended before is over
_TREND_STEPS = 20  # smallest number of steps for a trend

Points = Sequence[tuple[int, float]]
Series = Mapping[str, Points]


@dataclass(frozen=True)
class Finding:
    """One observation about a run.

    Attributes:
        grade: One of `GRADES`.
        metric: Name of the metric; empty for an error that ended the run.
        text: The observation with its numbers.
        cause: Likely cause, unless the grade is ok.
        advice: Options to change, with their values, unless the grade is ok.
        log: Printed traceback, if any.
    """

    grade: str
    metric: str
    text: str
    cause: str = ""
    advice: str = ""
    log: str = ""

    def __str__(self) -> str:
        """The finding as text, with its cause and its advice in lines of their own."""
        lines = [f"{self.grade}: {self.text}"]
        if self.cause:
            lines.append(f"  likely: {self.cause}")
        if self.advice:
            lines.append(f"  to do:  {self.advice}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Range:
    """A closed range of healthy values.

    Attributes:
        low, high: Bounds of the range.
        alarm_low, alarm_high: Bounds beyond which the run is likely wasted.
        of_start: True if the bounds are multiples of the run's first value, for metrics without an absolute scale.
    """

    low: float = -math.inf
    high: float = math.inf
    alarm_low: float = -math.inf
    alarm_high: float = math.inf
    of_start: bool = False

    def judge(self, value: float) -> str:
        """Returns the grade of one value, or of its ratio to the first value with `of_start`."""
        if not self.alarm_low <= value <= self.alarm_high:
            return BAD
        return OK if self.low <= value <= self.high else LOOK

    @property
    def shown(self) -> str:
        """The range as text, as in METRICS.md: `<= 0.5`, `>= 0.1 x first`."""
        text = f">= {self.low:g}" if math.isfinite(self.low) else f"<= {self.high:g}"
        return text + " x first" * self.of_start


def number(value: float) -> str:
    """Formats a number for a sentence: `0.013`, `1,250`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# ------------------------------------------------------------------------------------------------------ checks


def in_range(name: str, points: Points, healthy: Range) -> Finding:
    """Checks one metric against its healthy range.

    The grade is bad if the values are beyond an alarm bound in a tenth of the steps or at the end (median of the last
    tenth), unless this ended in the first 3/4 of the run. It is look if the same holds for the range itself, or if one
    step is beyond an alarm bound or outside a range with the bound 0.
    """
    scale = points[0][1] if healthy.of_start else 1.0
    if scale == 0:
        return Finding(OK, name, f"{name} started at 0, so it has no scale")
    grades = [healthy.judge(value / scale) for _, value in points]
    outside = [point for point, grade in zip(points, grades, strict=True) if grade != OK]
    if not outside:
        return Finding(OK, name, f"{name} stays {healthy.shown}")

    # the last tenth decides how the run ends, by its median, which a single step cannot change
    num_last = max(3, round(LASTING * len(points)))
    last_values = [value for _, value in points[-num_last:]]
    final_grade = healthy.judge(statistics.median(last_values) / scale)

    first_step = points[0][0]
    last_step = points[-1][0]
    first_outside = outside[0][0]
    last_outside = outside[-1][0]
    is_past = final_grade == OK and last_outside <= first_step + _EARLY * (last_step - first_step)

    lasting_steps = LASTING * len(points)
    alarms = grades.count(BAD)
    if not is_past and (alarms >= lasting_steps or final_grade == BAD):
        grade = BAD
    elif len(outside) >= lasting_steps or final_grade != OK or alarms or 0.0 in (healthy.low, healthy.high):
        grade = LOOK
    else:
        grade = OK

    if math.isfinite(healthy.low):
        side = "below"
        worst_step, worst = min(outside, key=lambda point: point[1] / scale)
    else:
        side = "above"
        worst_step, worst = max(outside, key=lambda point: point[1] / scale)
    bound = healthy.shown[3:]  # without the sign of comparison
    scale_text = f" ({number(scale)})" if healthy.of_start else ""
    text = (
        f"{name} is {side} {bound}{scale_text} in {len(outside)} of {len(points)} steps "
        f"({first_outside} to {last_outside}): {number(worst)} at step {worst_step}, "
        f"{number(points[-1][1])} at the end"
    )
    if is_past:
        text += f"; inside after step {last_outside}"
    return Finding(grade, name, text)


def diverged(series: Series) -> Finding | None:
    """Finds a run in which no mini-batch of the last step has a finite gradient, so that the weights do not change."""
    for role in ("actor", "train", "critic"):
        # from the end backwards: single steps without a finite gradient are skipped, and training recovers from them
        name = f"{role}/grad_norm_nonfinite"
        first_lost_step = None
        for step, share in reversed(series.get(name, ())):
            if share < 1:
                break
            first_lost_step = step
        if first_lost_step is not None:
            return Finding(BAD, name, f"{DIVERGED}: from step {first_lost_step} on, no gradient is finite")
    return None


def score_falls(series: Series) -> Finding | None:
    """Finds a score that fell back after its best value.

    The check compares running means over a tenth of the run. A fall counts if it is more than 4 standard errors, which
    are estimated from the differences of successive values, and more than 0.3 of the rise.
    """
    name, points, sign = _score(series)
    if len(points) < _TREND_STEPS:
        return None

    # with a loss, a larger value is worse: with the sign changed, the best value is always the largest
    values = sign * np.array([value for _, value in points])
    width = max(3, len(points) // 10)
    running_means = np.convolve(values, np.full(width, 1 / width), "valid")
    # differences of successive values, because a trend would enter the variance of the values
    standard_error = math.sqrt(np.mean(np.diff(values) ** 2) / width)

    best_index = int(running_means.argmax())
    best = running_means[best_index]
    last = running_means[-1]
    fall = best - last
    rise = max(best - running_means[0], 0.0)
    if fall <= 4 * standard_error or fall <= 0.3 * rise:
        return Finding(OK, name, f"{name} does not fall back from its best")

    best_step = points[best_index + width - 1][0]
    return Finding(
        BAD,
        name,
        f"{name} was best around step {best_step} ({number(sign * best)}) and is {number(sign * last)} at the end, "
        f"as means over {width} steps",
    )


def score_stays(series: Series) -> Finding | None:
    """Finds a score that does not rise: its first and last quarter differ by less than 2 standard errors, and it is not
    near its maximum."""
    name, points, sign = _score(series)
    if len(points) < _TREND_STEPS:
        return None

    values = np.array([value for _, value in points])
    quarter = len(points) // 4
    first_quarter = values[:quarter]
    last_quarter = values[-quarter:]
    begin = first_quarter.mean()
    end = last_quarter.mean()
    rise = sign * (end - begin)
    standard_error = math.sqrt((first_quarter.var(ddof=1) + last_quarter.var(ddof=1)) / quarter)

    text = f"{name} goes from {number(begin)} in the first quarter of the steps to {number(end)} in the last"
    if rise > 2 * standard_error:
        return Finding(OK, name, text)
    if rise < -2 * standard_error:
        return None  # `score_falls` reports it
    maximum = max((value for _, value in series.get("critic/score/max", [])), default=math.inf)
    if end >= 0.95 * maximum > 0:
        return None  # the score cannot rise further
    return Finding(LOOK, name, f"{text}, within random variation ({number(2 * standard_error)})")


def gradient_spikes(series: Series) -> Finding | None:
    """Finds steps whose gradient norm is above 8 times the median of the preceding 5 to 20 steps."""
    names = [name for name in ("actor/grad_norm", "train/grad_norm", "critic/grad_norm") if name in series]
    if not names:
        return None
    name = names[0]
    points = series[name]
    if len(points) <= 5:
        return None

    spikes = []
    for index in range(5, len(points)):
        usual = statistics.median(value for _, value in points[max(0, index - 20) : index])
        step, value = points[index]
        if value > 8 * usual > 0:
            spikes.append((value / usual, step, value))
    if not spikes:
        return Finding(OK, name, f"{name} has no spikes")

    ratio, step, value = max(spikes)
    grade = BAD if len(spikes) > 0.05 * len(points) else LOOK
    return Finding(
        grade,
        name,
        f"{name} has spikes in {len(spikes)} of {len(points)} steps: {number(value)} at step {step}, {ratio:.0f} "
        "times the median of earlier steps",
    )


def validation_gain(series: Series) -> Finding | None:
    """Compares the first and the last validation by the 95% interval of their difference.

    The interval assumes independent prompts, so it is too wide if both validations use the same prompts.
    """
    validations = _sampled_means_by_validation(series)
    if len(validations) < 2:
        return None

    texts: list[str] = []
    better = worse = 0
    for before in validations[0]:
        for after in validations[-1]:
            is_same = (before.source, before.name) == (after.source, after.name)
            if not is_same or not before.half_width or not after.half_width:
                continue
            gain = after.value - before.value
            half_width = math.hypot(before.half_width, after.half_width)
            text = f"{before.source} {number(before.value)} to {number(after.value)} "
            text += f"({gain:+.3f}, interval +-{half_width:.3f})"
            if gain > half_width:
                better += 1
                text += ", better"
            elif gain < -half_width:
                worse += 1
                text += ", worse"
            texts.append(text)
    if not texts:
        return None

    if worse and not better:
        grade = BAD
    elif better and not worse:
        grade = OK
    else:
        grade = LOOK
    text = f"validation before and after: {'; '.join(texts)}"
    if not better and not worse:
        text += "; it cannot tell whether the policy improved"
    return Finding(grade, "val-core", text)


def _sampled_means_by_validation(series: Series) -> list[list[ValidationMean]]:
    """Returns the means of the sampled answers in each validation, in order of steps. Greedy answers are left out."""
    metrics_by_step: dict[int, dict[str, float]] = {}
    for name, points in series.items():
        if name.startswith("val-"):
            for step, value in points:
                metrics_by_step.setdefault(step, {})[name] = value

    validations = []
    for step in sorted(metrics_by_step):
        means = [mean for mean in validation_means(metrics_by_step[step]) if not mean.greedy]
        if means:
            validations.append(means)
    return validations


def mismatch(series: Series) -> Finding | None:
    """Checks that sampler and trainer have the same probabilities. Returns None if samples are stale, because those
    differ by design."""
    name = "training/rollout_probs_diff_mean"
    has_stale_samples = any(value > 0 for _, value in series.get("async/staleness/mean", ()))
    if name not in series or has_stale_samples:
        return None
    return in_range(name, series[name], Range(high=0.005, alarm_high=0.01))


def cut_off(series: Series) -> Finding | None:
    """Checks the share of answers that reach the limit of tokens.

    A share that falls to half or less is no problem: the policy learns to end its answers in time, like a model that
    explains at first although the reward wants a number only.
    """
    name = "response_length/clip_ratio"
    points = series.get(name, ())
    if not points:
        return None
    finding = in_range(name, points, Range(high=0.1, alarm_high=0.5))
    if finding.grade == OK or len(points) < _TREND_STEPS:
        return finding

    quarter = len(points) // 4
    begin = statistics.fmean(value for _, value in points[:quarter])
    end = statistics.fmean(value for _, value in points[-quarter:])
    if end > begin / 2:
        return finding
    text = f"{name} falls from {number(begin)} in the first quarter of the steps to {number(end)} in the last"
    return Finding(OK, name, f"{text}: the policy learns to end its answers in time")


def waiting(series: Series) -> Finding | None:
    """Tells which side of an asynchronous run waits for the other, over the second half of the run."""
    trainer_metric = "async/trainer_idle_frac"
    engine_metric = "async/engine_idle_frac"
    if not series.get(trainer_metric) or not series.get(engine_metric):
        return None

    trainer_share = _mean_of_second_half(series[trainer_metric])
    engine_share = _mean_of_second_half(series[engine_metric])
    text = f"the trainer waits for samples {trainer_share:.0%} of the time, and the engines are idle "
    text += f"{engine_share:.0%} of it"
    if max(trainer_share, engine_share) < 0.2:
        return Finding(OK, trainer_metric, f"{text}: neither side limits the other")
    if trainer_share >= engine_share:
        return Finding(LOOK, trainer_metric, f"{text}: sampling limits the run")
    return Finding(
        OK,
        engine_metric,
        f"{text}: training limits the run, and a larger async_training.batches_ahead gains nothing",
    )


def _mean_of_second_half(points: Points) -> float:
    return statistics.fmean(value for _, value in points[len(points) // 2 :])


def _score(series: Series) -> tuple[str, Points, int]:
    """Returns the metric that the run optimizes, its points, and 1 if a larger value is better, else -1."""
    names = [name for name in SCORES if name in series]
    name = names[0] if names else SCORES[0]
    sign = -1 if name == "train/loss" else 1
    return name, series.get(name, []), sign

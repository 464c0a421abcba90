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
class HealthyRange:
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
        if not self.low <= value <= self.high:
            return LOOK
        return OK

    @property
    def shown(self) -> str:
        """The range as text, as in METRICS.md: `<= 0.5`, `>= 0.1 x first`."""
        # a range of the table of rules has one bound
        text = f">= {self.low:g}" if math.isfinite(self.low) else f"<= {self.high:g}"
        if self.of_start:
            text += " x first"
        return text


def number(value: float) -> str:
    """Formats a number for a sentence: `0.013`, `1,250`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


# ------------------------------------------------------------------------------------------------------ checks


def in_range(name: str, points: Points, healthy: HealthyRange) -> Finding:
    """Checks one metric against its healthy range.

    The grade is bad if the values are beyond an alarm bound in a tenth of the steps or at the end (median of the last
    tenth), unless this ended in the first 3/4 of the run. It is look if the same holds for the range itself, or if one
    step is beyond an alarm bound or outside a range with the bound 0.
    """
    first_step, first_value = points[0]
    last_step, last_value = points[-1]
    scale = first_value if healthy.of_start else 1.0
    if scale == 0:
        return Finding(OK, name, f"{name} started at 0, so it has no scale")

    alarms = 0
    outside = []
    for point in points:
        point_grade = healthy.judge(point[1] / scale)
        if point_grade == BAD:
            alarms += 1
        if point_grade != OK:
            outside.append(point)
    if not outside:
        return Finding(OK, name, f"{name} stays {healthy.shown}")

    # the last tenth decides how the run ends, by its median, which a single step cannot change
    num_last = max(3, round(LASTING * len(points)))
    last_points = points[-num_last:]
    final_value = statistics.median(value for _, value in last_points)
    final_grade = healthy.judge(final_value / scale)

    last_outside = outside[-1][0]
    ended_early = last_outside <= first_step + _EARLY * (last_step - first_step)
    is_past = final_grade == OK and ended_early

    tolerates_none = 0.0 in (healthy.low, healthy.high)
    lasting_steps = LASTING * len(points)
    if not is_past and (alarms >= lasting_steps or final_grade == BAD):
        grade = BAD
    elif len(outside) >= lasting_steps or final_grade != OK or alarms or tolerates_none:
        grade = LOOK
    else:
        grade = OK

    text = _text_outside(name, outside, healthy, scale, len(points))
    text += f", {number(last_value)} at the end"
    if is_past:
        text += f"; inside after step {last_outside}"
    return Finding(grade, name, text)


def _text_outside(name: str, outside: Points, healthy: HealthyRange, scale: float, total: int) -> str:
    """Describes the points outside the healthy range, with the worst of them.

    Args:
        name: Name of the metric.
        outside: The points outside the range.
        healthy: The range.
        scale: The run's first value if the bounds are multiples of it, else 1.
        total: Number of all points.
    """

    def ratio(point: tuple[int, float]) -> float:
        # a metric that starts below 0 has its smallest value at the largest ratio
        return point[1] / scale

    if math.isfinite(healthy.low):
        side = "below"
        worst_step, worst = min(outside, key=ratio)
    else:
        side = "above"
        worst_step, worst = max(outside, key=ratio)

    # without the sign of comparison
    bound = healthy.shown[3:]
    if healthy.of_start:
        bound += f" ({number(scale)})"
    steps = f"{len(outside)} of {total} steps ({outside[0][0]} to {outside[-1][0]})"
    return f"{name} is {side} {bound} in {steps}: {number(worst)} at step {worst_step}"


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
    weights = np.full(width, 1 / width)
    running_means = np.convolve(values, weights, "valid")
    # differences of successive values, because a trend would enter the variance of the values; their mean square is
    # twice that variance, which is right for a fall, the difference of two means
    squares = np.diff(values) ** 2
    standard_error = math.sqrt(np.mean(squares) / width)

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
    variance = first_quarter.var(ddof=1) + last_quarter.var(ddof=1)
    standard_error = math.sqrt(variance / quarter)

    text = f"{name} goes from {number(begin)} in the first quarter of the steps to {number(end)} in the last"
    if rise > 2 * standard_error:
        return Finding(OK, name, text)
    if rise < -2 * standard_error:
        # `score_falls` reports it
        return None

    # near the best score of any answer so far, the mean cannot rise further
    best_scores = [value for _, value in series.get("critic/score/max", [])]
    if best_scores and end >= 0.95 * max(best_scores) > 0:
        return None
    return Finding(LOOK, name, f"{text}, within random variation ({number(2 * standard_error)})")


def gradient_spikes(series: Series) -> Finding | None:
    """Finds steps whose gradient norm is above 8 times the median of the preceding 5 to 20 steps."""
    name = _first_logged(("actor/grad_norm", "train/grad_norm", "critic/grad_norm"), series)
    points = series.get(name, [])
    if len(points) <= 5:
        return None

    spikes = []
    for index in range(5, len(points)):
        preceding = points[max(0, index - 20) : index]
        usual = statistics.median(value for _, value in preceding)
        step, value = points[index]
        if value > 8 * usual > 0:
            spikes.append((value / usual, step, value))
    if not spikes:
        return Finding(OK, name, f"{name} has no spikes")

    ratio, step, value = max(spikes)
    grade = BAD if len(spikes) > 0.05 * len(points) else LOOK
    text = f"{name} has spikes in {len(spikes)} of {len(points)} steps: {number(value)} at step {step}, {ratio:.0f} "
    text += "times the median of earlier steps"
    return Finding(grade, name, text)


def _first_logged(names: Sequence[str], series: Series) -> str:
    """Returns the first of these metrics that the run logged, or the first name if it logged none."""
    for name in names:
        if name in series:
            return name
    return names[0]


def validation_gain(series: Series) -> Finding | None:
    """Compares the first and the last validation by the 95% interval of their difference.

    The interval assumes independent prompts, so it is too wide if both validations use the same prompts.
    """
    validations = _sampled_means_by_validation(series)
    if len(validations) < 2:
        return None

    last_means = {}
    for mean in validations[-1]:
        last_means[mean.source, mean.name] = mean
    texts: list[str] = []
    better = 0
    worse = 0
    for before in validations[0]:
        after = last_means.get((before.source, before.name))
        if after is None or not before.half_width or not after.half_width:
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

    # sources that disagree need a look, and so does a validation that cannot tell
    grade = LOOK
    if worse and not better:
        grade = BAD
    elif better and not worse:
        grade = OK
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
    for _, metrics in sorted(metrics_by_step.items()):
        means = [mean for mean in validation_means(metrics) if not mean.greedy]
        if means:
            validations.append(means)
    return validations


def mismatch(series: Series) -> Finding | None:
    """Checks that sampler and trainer have the same probabilities. Returns None if samples are stale, because those
    differ by design."""
    name = "training/rollout_probs_diff_mean"
    if name not in series:
        return None
    for _, staleness in series.get("async/staleness/mean", ()):
        if staleness > 0:
            return None
    healthy = HealthyRange(high=0.005, alarm_high=0.01)
    return in_range(name, series[name], healthy)


def cut_off(series: Series) -> Finding | None:
    """Checks the share of answers that reach the limit of tokens.

    A share that falls to half or less is no problem: the policy learns to end its answers in time, like a model that
    explains at first although the reward wants a number only.
    """
    name = "response_length/clip_ratio"
    points = series.get(name, ())
    if not points:
        return None
    healthy = HealthyRange(high=0.1, alarm_high=0.5)
    finding = in_range(name, points, healthy)
    if finding.grade == OK or len(points) < _TREND_STEPS:
        return finding

    quarter = len(points) // 4
    begin = _mean(points[:quarter])
    end = _mean(points[-quarter:])
    if end > begin / 2:
        return finding
    text = f"{name} falls from {number(begin)} in the first quarter of the steps to {number(end)} in the last"
    return Finding(OK, name, f"{text}: the policy learns to end its answers in time")


def waiting(series: Series) -> Finding | None:
    """Tells which side of an asynchronous run waits for the other, over the second half of the run."""
    trainer_metric = "async/trainer_idle_frac"
    engine_metric = "async/engine_idle_frac"
    trainer_points = series.get(trainer_metric)
    engine_points = series.get(engine_metric)
    if not trainer_points or not engine_points:
        return None

    trainer_share = _mean(trainer_points[len(trainer_points) // 2 :])
    engine_share = _mean(engine_points[len(engine_points) // 2 :])
    text = f"the trainer waits for samples {trainer_share:.0%} of the time, and the engines are idle "
    text += f"{engine_share:.0%} of it"
    if max(trainer_share, engine_share) < 0.2:
        return Finding(OK, trainer_metric, f"{text}: neither side limits the other")
    if trainer_share >= engine_share:
        return Finding(LOOK, trainer_metric, f"{text}: sampling limits the run")
    text += ": training limits the run, and a larger async_training.batches_ahead gains nothing"
    return Finding(OK, engine_metric, text)


def _mean(points: Points) -> float:
    return statistics.fmean(value for _, value in points)


def _score(series: Series) -> tuple[str, Points, int]:
    """Returns the metric that the run optimizes, its points, and 1 if a larger value is better, else -1."""
    name = _first_logged(SCORES, series)
    sign = -1 if name == "train/loss" else 1
    return name, series.get(name, []), sign

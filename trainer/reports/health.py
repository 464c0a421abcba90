"""What is wrong with a run, in sentences: one table of rules over its numbers, for `trainer.inspect` and
`trainer.report`.

Takes series, (step, value) by metric name; gives `Finding`s, graded `ok`, `look` (worth a look) or `bad`.
"""

from __future__ import annotations

import fnmatch
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.final_report import ValidationMean, validation_means

OK, LOOK, BAD = "ok", "look", "bad"
GRADES = (BAD, LOOK, OK)
SCORES = ("critic/score/mean", "actor/face_score", "train/loss")
"""What a run is after, the first that it logs; of a loss less is better."""

LASTING = 0.1  # of a run's steps: outside in so many it is no stray step
_EARLY = 0.75  # of the steps: what was mended before is past
_ENOUGH = 20  # steps to speak of a trend
_FEW = 3

Points = Sequence[tuple[int, float]]
Series = Mapping[str, Points]
Options = Mapping[str, str]


@dataclass(frozen=True)
class Finding:
    """One thing about a run.

    Args:
        grade: `ok`, `look` or `bad`.
        metric: the name it is about.
        text: what is seen, with numbers.
        steps: where.
        cause, advice: why it is likely so, and what to do, with the options and their values; empty where all is well.
    """

    grade: str
    metric: str
    text: str
    steps: tuple[int, ...] = ()
    cause: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Range:
    """Values that raise no question, both ends included; beyond an alarm the run is likely wasted. of_start: the bounds
    are multiples of the run's first value, for what has no scale of its own."""

    low: float | None = None
    high: float | None = None
    alarm_low: float | None = None
    alarm_high: float | None = None
    of_start: bool = False

    def judge(self, value: float) -> str:
        """The grade of one value, as a multiple of the first where `of_start`."""
        if _is_outside(value, self.alarm_low, self.alarm_high):
            return BAD
        return LOOK if _is_outside(value, self.low, self.high) else OK

    @property
    def shown(self) -> str:
        """`<= 0.5`, `>= 0.1 x first`, as in METRICS.md."""
        if self.low is not None and self.high is not None:
            text = f"{self.low:g} to {self.high:g}"
        else:
            text = f">= {self.low:g}" if self.low is not None else f"<= {self.high:g}"
        return text + " x first" * self.of_start


@dataclass(frozen=True)
class Rule:
    """A line of the table.

    Args:
        metrics: the names it judges, each by itself; `*` stands for anything.
        check: a range, or a function of all series that gives grade, metric, text and steps, None where it has nothing
            to go by.
        cause, change: why a run is outside, and what to do.
        keys: the options to change, shown with their present values; of `a|b` the first that the run sets.
    """

    metrics: tuple[str, ...]
    check: Range | Callable[[Series], Finding | None]
    cause: str
    change: str
    keys: tuple[str, ...] = ()

    def apply(self, series: Series) -> list[Finding]:
        """Its findings; metrics that fare alike are one."""
        if not isinstance(self.check, Range):
            found = self.check(series)
            return [] if found is None else [found]
        names = [name for name in series if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.metrics)]
        findings = [in_range(name, series[name], self.check) for name in names if series[name]]
        alike = [[finding for finding in findings if finding.grade == grade] for grade in GRADES]
        return [_joined(own) for own in alike if own]

    def advice(self, options: Options) -> str:
        """`lower the learning rate (now actor.optim.lr=1e-05)`."""
        shown = list(dict.fromkeys(filter(None, (_present(key, options) for key in self.keys))))
        return f"{self.change} (now {', '.join(shown)})" if shown else self.change


def judge(series: Series, options: Options | None = None) -> list[Finding]:
    """All findings of a run, the worst first.

    Args:
        series: (step, value) by metric name.
        options: the run's configuration by dotted key.
    """
    found = [(rule, finding) for rule in RULES for finding in rule.apply(series)]
    findings = [
        finding if finding.grade == OK else replace(finding, cause=rule.cause, advice=rule.advice(options or {}))
        for rule, finding in found
    ]
    return sorted(findings, key=lambda finding: GRADES.index(finding.grade))


def number(value: float) -> str:
    """A number for a sentence: `0.013`, `1,250`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _present(key: str, options: Options) -> str:
    """The first of the alternatives that the run has, as `key=value`. Rules name keys of `trainer.main_ppo`; other
    commands have some without the role in front."""
    for one in key.split("|"):
        for name in (one, one.partition(".")[2]):
            fitting = fnmatch.filter(options, name) if "*" in name else [name] * (name in options)
            chosen = [f"{each}={options[each]}" for each in fitting if "*" not in name or options[each] != "null"]
            if chosen:
                return ", ".join(chosen)
    return ""


# ------------------------------------------------------------------------------------------------------ ranges


def in_range(name: str, points: Points, healthy: Range) -> Finding:
    """One metric against its range.

    bad: beyond the alarm in a tenth of the steps, or at the end (median of the last tenth). look: the same for the
    range, one step beyond the alarm, or one step outside a range that ends at 0. What was outside only in the first
    three quarters of the run is never bad.
    """
    scale = points[0][1] if healthy.of_start else 1.0
    if scale == 0:
        return Finding(OK, name, f"{name} began at 0 and has no scale")
    grades = [healthy.judge(value / scale) for _, value in points]
    outside = [point for point, grade in zip(points, grades, strict=True) if grade != OK]
    words = f"{name} stays {healthy.shown.replace('x first', 'times its first value')}"
    if not outside:
        return Finding(OK, name, words)
    late = points[-max(_FEW, round(LASTING * len(points))) :]
    now = healthy.judge(statistics.median(value for _, value in late) / scale)
    is_past = outside[-1][0] <= points[0][0] + _EARLY * (points[-1][0] - points[0][0]) and now == OK
    alarms = grades.count(BAD)
    if not is_past and (alarms >= LASTING * len(points) or now == BAD):
        grade = BAD
    elif len(outside) >= LASTING * len(points) or now != OK or alarms or 0.0 in (healthy.low, healthy.high):
        grade = LOOK
    else:
        return Finding(OK, name, f"{words}, {len(outside)} stray of {len(points)} steps outside ({_where(outside)})")
    text = _outside_words(name, points, outside, healthy, scale)
    text += f"; not since step {outside[-1][0]}" if is_past else ""
    return Finding(grade, name, text, tuple(step for step, _ in outside))


def _outside_words(name: str, points: Points, outside: Points, healthy: Range, scale: float) -> str:
    bounds = [bound for bound in (healthy.low, healthy.high) if bound is not None]
    worst_step, extreme = max(outside, key=lambda point: min(abs(point[1] / scale - bound) for bound in bounds))
    is_low = healthy.low is not None and extreme / scale < healthy.low
    bound = bounds[0] if is_low else bounds[-1]
    limit = f"{number(bound)} times its first value {number(scale)}" if healthy.of_start else number(bound)
    text = f"{name} is {'below' if is_low else 'above'} {limit} in {len(outside)} of {len(points)} steps"
    text += f" ({_where(outside)}): {number(extreme)} at step {worst_step}"
    last_step, last = points[-1]
    return text if last_step == worst_step else f"{text}, {number(last)} at the end"


def _is_outside(value: float, low: float | None, high: float | None) -> bool:
    return (low is not None and value < low) or (high is not None and value > high)


def _where(points: Points) -> str:
    steps = [step for step, _ in points]
    if len(steps) <= _FEW:
        return f"step{'s' * (len(steps) > 1)} {', '.join(map(str, steps))}"
    return f"steps {steps[0]} to {steps[-1]}"


def _joined(findings: list[Finding]) -> Finding:
    """Several of one rule and grade as one: the first by the number of steps, with the names of the others."""
    first, *others = sorted(findings, key=lambda finding: -len(finding.steps))
    if not others:
        return first
    names = ", ".join(finding.metric for finding in others[:_FEW])
    more = f" and {len(others) - _FEW} more" if len(others) > _FEW else ""
    return replace(first, text=f"{first.text}; so {'does' if len(others) == 1 else 'do'} {names}{more}")


# ------------------------------------------------------------------------------------------------------ trends


def same_score(series: Series) -> Finding | None:
    """Every answer of the run has one and the same score."""
    highest, lowest = series.get("critic/score/max", []), series.get("critic/score/min", [])
    values = {value for _, value in [*highest, *lowest]}
    if len(highest) < _FEW or not lowest or len(values) > 1:
        return None
    text = f"every answer of all {len(highest)} steps has the score {number(values.pop())}"
    return Finding(BAD, "critic/score/mean", text, tuple(step for step, _ in highest))


def score_falls(series: Series) -> Finding | None:
    """The score rose, then lost much of it. Running means of a tenth of the run; a fall counts if it is more than 4
    standard errors (of one value about its trend, from the differences of neighbours) and 0.3 of the rise."""
    name, points, sign = _score(series)
    if len(points) < _ENOUGH:
        return None
    width = max(3, len(points) // 10)
    values = [sign * value for _, value in points]
    smooth = [statistics.fmean(values[place : place + width]) for place in range(len(values) - width + 1)]
    jumps = [second - first for first, second in zip(values, values[1:], strict=False)]
    error = math.sqrt(statistics.fmean(jump * jump for jump in jumps) / width)
    best = max(range(len(smooth)), key=smooth.__getitem__)
    fall, rise = smooth[best] - smooth[-1], max(smooth[best] - smooth[0], 0.0)
    if fall <= 4 * error or fall <= 0.3 * rise:
        return Finding(OK, name, f"{name} does not fall back from its best")
    peak = points[best + width - 1][0]
    text = f"{name} was best around step {peak} ({number(sign * smooth[best])}) and is {number(sign * smooth[-1])} at"
    text += f" the end, as means over {width} steps"
    return Finding(BAD, name, text, tuple(step for step, _ in points if step > peak))


def score_stays(series: Series) -> Finding | None:
    """The score's first and last quarter differ by less than 2 standard errors, and it is not near its best."""
    name, points, sign = _score(series)
    if len(points) < _ENOUGH:
        return None
    quarter = len(points) // 4
    first, last = [v for _, v in points[:quarter]], [v for _, v in points[-quarter:]]
    begin, end = statistics.fmean(first), statistics.fmean(last)
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / quarter)
    best = max((value for _, value in series.get("critic/score/max", [])), default=None)
    is_solved = best is not None and end >= 0.95 * best > 0
    gain = sign * (end - begin)
    if gain > 2 * error:
        told = f"{name} improves from {number(begin)} to {number(end)}, first against last quarter of the steps"
        return Finding(OK, name, told)
    if gain < -2 * error or is_solved:
        return None  # it falls, which another rule says, or there is nothing left
    text = f"{name} is {number(begin)} in the first quarter of the steps and {number(end)} in the last: a difference of"
    text += f" {number(abs(gain))}, less than chance explains ({number(2 * error)})"
    return Finding(LOOK, name, text, tuple(step for step, _ in points))


def gradient_spikes(series: Series) -> Finding | None:
    """Steps whose gradient norm is 8 times the median of the up to 20 steps before, of which there are 5 or more."""
    name = next((x for x in ("actor/grad_norm", "train/grad_norm", "critic/grad_norm") if series.get(x)), None)
    if name is None or len(series[name]) <= 5:
        return None
    points = series[name]
    spikes = []
    for place in range(5, len(points)):
        usual = statistics.median(value for _, value in points[max(0, place - 20) : place])
        if usual > 0 and points[place][1] > 8 * usual:
            spikes.append((points[place], usual))
    if not spikes:
        return Finding(OK, name, f"{name} has no spikes")
    (step, value), usual = max(spikes, key=lambda spike: spike[0][1] / spike[1])
    text = f"{name} has {len(spikes)} spike{'s' * (len(spikes) > 1)} in {len(points)} steps: {number(value)} at step"
    text += f" {step}, where the steps before have {number(usual)}"
    grade = BAD if len(spikes) > 0.05 * len(points) else LOOK
    return Finding(grade, name, text, tuple(point[0] for point, _ in spikes))


def validation_gain(series: Series) -> Finding | None:
    """The first validation against the last, with the 95% interval of the difference (as of independent prompts, which
    is wide where both asked the same)."""
    words: list[str] = []
    better: list[str] = []
    worse: list[str] = []
    for before, after in _validated_twice(series):
        assert before.half_width is not None and after.half_width is not None
        gain, width = after.value - before.value, math.hypot(before.half_width, after.half_width)
        source = before.source
        words.append(f"{source} {number(before.value)} to {number(after.value)} ({gain:+.3f}, interval +-{width:.3f})")
        if abs(gain) > width:
            (better if gain > 0 else worse).append(source)
    if not words:
        return None
    text = f"validation before and after: {'; '.join(words)}"
    if worse:
        grade = LOOK if better else BAD
        return Finding(grade, "val-core", f"{text}. Worse, beyond the interval: {', '.join(worse)}")
    if better:
        return Finding(OK, "val-core", f"{text}. Better, beyond the interval: {', '.join(better)}")
    return Finding(LOOK, "val-core", f"{text}. This validation cannot tell whether anything was learnt")


def _validated_twice(series: Series) -> Iterator[tuple[ValidationMean, ValidationMean]]:
    """The sampled means of the first and of the last validated step that have an interval, source by source."""
    by_step: dict[int, dict[str, float]] = {}
    for name, points in series.items():
        for step, value in points if name.startswith("val-") else ():
            by_step.setdefault(step, {})[name] = value
    found = [[x for x in validation_means(own) if not x.greedy] for _, own in sorted(by_step.items())]
    found = [means for means in found if means]
    for before in found[0] if len(found) > 1 else ():
        for after in found[-1]:
            alike = (before.source, before.name) == (after.source, after.name)
            if alike and before.half_width is not None and after.half_width is not None:
                yield before, after


def _score(series: Series) -> tuple[str, Points, int]:
    """The metric that the run is after, its points, and 1 if more is better, else -1."""
    name = next((name for name in SCORES if series.get(name)), SCORES[0])
    return name, series.get(name, []), -1 if name == "train/loss" else 1


# ------------------------------------------------------------------------------------------------------ the table

_REWARD = "reward.custom_reward_function.path"

RULES = (
    Rule(
        SCORES[:1],
        same_score,
        "the reward does not tell answers apart: it may look for another format, or for another ground truth",
        "try it on saved answers: python -m trainer.score RUN",
        (_REWARD, "data.data_source"),
    ),
    Rule(
        SCORES,
        score_falls,
        "the policy learns too fast: updates went further than the samples could vouch for",
        "lower the learning rate, hold the policy to the reference, and go on from the checkpoint before the fall",
        ("actor.optim.lr", "actor.kl_loss_coef", "actor.ppo_epochs"),
    ),
    Rule(
        SCORES,
        score_stays,
        "the updates are too small, or most prompts teach nothing, or what is rewarded hardly ever happens",
        "look at the samples: is any of them right? If so, raise the learning rate, threefold at a time; if not, take "
        "easier prompts, or a finer reward",
        ("actor.optim.lr", "rollout.n", "data.train_files", _REWARD),
    ),
    Rule(
        ("val-core",),
        validation_gain,
        "what the training rewards is not what this validation asks, or too few prompts are validated to see the gain",
        "look at the changed samples of the validation; validate on more prompts, or take an earlier checkpoint",
        ("data.val_max_samples", "rollout.val_kwargs.n", "data.train_files"),
    ),
    Rule(
        ("reward/error_rate", "reward/timeout_rate", "env/error_rate", "val-aux/*/reward/error_rate"),
        Range(high=0.0, alarm_high=0.05),
        "the reward function or the environment fails, or is too slow, for some answers; they are left out",
        "see reward_failures.jsonl or env_failures.jsonl in the run folder; python -m trainer.score RUN runs the "
        "reward again on saved answers",
        (_REWARD, "reward.timeout_s", "agentic.env_pool.timeout_s"),
    ),
    Rule(
        ("training/rollout_probs_diff_mean",),
        Range(high=0.005, alarm_high=0.01),  # verl's FAQ: below 0.005 is numerics, above 0.01 an error; fp32: 1e-6
        "the engine that samples gives other probabilities than the trainer: missed weights, a stale cache, another "
        "precision, or a top_p or top_k that only one of them applies",
        "sample in the trainer's precision without top_p and top_k, or correct for it",
        ("rollout.dtype", "rollout.top_p", "rollout.enable_prefix_caching", "algorithm.rollout_correction.rollout_is"),
    ),
    Rule(
        ("frac_reward_zero_std",),
        Range(high=0.5, alarm_high=0.9),  # at 0.5 half of the generation is for nothing
        "most prompts teach nothing, because all their answers are equally good: too easy, too hard, or n too small",
        "choose prompts that the policy can just do, sample more answers, or draw until groups differ",
        ("algorithm.filter_groups.enable", "rollout.n", "data.train_files"),
    ),
    Rule(
        ("response_length/clip_ratio",),
        Range(high=0.1, alarm_high=0.5),  # a few stragglers are normal; above that the limit shapes what is learnt
        "answers are cut off before they end, so they are judged by half a thought",
        "allow longer ones, or take off points for length",
        ("agentic.custom_envs.*.max_tokens_per_step|data.max_response_length", "reward.overlong_buffer.enable"),
    ),
    Rule(
        ("actor/entropy",),
        # DAPO (arXiv:2503.14476) sees exploration end where the entropy falls by an order of magnitude
        Range(low=0.1, alarm_low=0.02, of_start=True),
        "the policy hardly varies its answers any more (entropy collapse): there is nothing left to compare",
        "raise the upper clip range, give the entropy a bonus, sample hotter, or lower the learning rate",
        ("actor.clip_ratio_high", "actor.entropy_coeff", "rollout.temperature", "actor.optim.lr"),
    ),
    Rule(
        ("actor/kl_loss", "critic/kl"),
        Range(high=0.5, alarm_high=5.0),  # nats: the reference finds each token 1.6 times less likely
        "the policy is far from the reference model",
        "raise the coefficient or lower the learning rate, if staying near the reference is wanted",
        ("actor.kl_loss_coef", "algorithm.kl_ctrl.kl_coef", "actor.optim.lr"),
    ),
    Rule(
        ("actor/pg_clipfrac",),
        Range(high=0.3, alarm_high=0.6),  # runs that learn are mostly below 0.2; gspo clips whole answers, and more
        "many tokens are outside the clip range and give no gradient: the update goes too far in one step",
        "lower the learning rate, train fewer epochs or in fewer mini-batches on a batch, or widen the range",
        ("actor.optim.lr", "actor.ppo_epochs", "actor.ppo_mini_batch_size", "actor.clip_ratio_high"),
    ),
    Rule(
        ("critic/vf_explained_var",),
        Range(low=0.0, alarm_low=-1.0),  # 0 is a constant, 1 is perfect
        "the critic predicts worse than a constant would, and its advantages are noise",
        "train it alone first, or raise its learning rate",
        ("trainer.critic_warmup", "critic.optim.lr"),
    ),
    Rule(
        ("*/grad_norm",),
        gradient_spikes,
        "single batches pull far harder than others: a few very long or oddly rewarded answers, or an update that "
        "begins to diverge",
        "look at the samples of these steps; clip gradients lower, or lower the learning rate",
        ("actor.optim.clip_grad", "actor.optim.lr"),
    ),
    Rule(
        ("*/grad_norm_nonfinite", "*/empty_mini_batch_frac"),
        Range(high=0.0, alarm_high=0.1),
        "optimizer steps are left out: the gradient overflows, or the rewards of whole mini-batches failed or the "
        "correction rejected them",
        "lower the learning rate, or train in fp32; look at reward/error_rate and at the correction's rejection",
        ("actor.optim.lr", "actor.fsdp_config.mixed_precision.param_dtype", "actor.ppo_mini_batch_size"),
    ),
    Rule(
        ("actor/perf/host_rss_gb", "actor/perf/max_memory_allocated_gb", "actor/perf/max_memory_reserved_gb"),
        Range(high=1.5, alarm_high=3.0, of_start=True),  # after the first steps everything has its size
        "a worker's memory grows from step to step: a leak, or ever longer answers",
        "look at response_length/max first",
        ("data.max_response_length",),
    ),
)

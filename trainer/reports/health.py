"""What is wrong with a run, in sentences: one table of rules over its numbers, for `trainer.inspect`, `trainer.report`
and the end of a run. Takes series, (step, value) by metric name; gives `Finding`s."""

import fnmatch
import itertools
import math
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainer.final_report import validation_means
from trainer.reports.run_data import Run

_SCORE = "; python -m trainer.score RUN scores the saved answers again"
"""Part of an advice, for runs whose rewards a function gives."""

BAD, LOOK, OK = GRADES = ("bad", "look", "ok")
SCORES = ("critic/score/mean", "actor/face_score", "train/loss")
"""What a run is after, the first that it logs; of a loss less is better."""

DIVERGED = "the run diverged"
LASTING = 0.1  # of a run's steps: outside in so many it is no stray step
_EARLY = 0.75  # of the steps: what was mended before is past
_ENOUGH = 20  # steps to speak of a trend

Points = Sequence[tuple[int, float]]
Series = Mapping[str, Points]
Options = Mapping[str, str]


@dataclass(frozen=True)
class Finding:
    """One thing about a run: ok, worth a `look`, or `bad`; what is seen, and where it is not ok, the likely cause, and
    what to do, with the options and their values. log: what was printed of it."""

    grade: str
    metric: str
    text: str
    cause: str = ""
    advice: str = ""
    log: str = ""


@dataclass(frozen=True)
class Range:
    """Values that raise no question, both ends included; beyond an alarm the run is likely wasted. of_start: the bounds
    are multiples of the run's first value, for what has no scale of its own."""

    low: float = -math.inf
    high: float = math.inf
    alarm_low: float = -math.inf
    alarm_high: float = math.inf
    of_start: bool = False

    def judge(self, value: float) -> str:
        """The grade of one value, as a multiple of the first where `of_start`."""
        if not self.alarm_low <= value <= self.alarm_high:
            return BAD
        return OK if self.low <= value <= self.high else LOOK

    @property
    def shown(self) -> str:
        """`<= 0.5`, `>= 0.1 x first`, as in METRICS.md."""
        text = f">= {self.low:g}" if math.isfinite(self.low) else f"<= {self.high:g}"
        return text + " x first" * self.of_start


@dataclass(frozen=True)
class Rule:
    """A line of the table.

    Args:
        metrics: the names it judges, each by itself; `*` stands for anything.
        check: a range, or a function of all series, which gives None where it has nothing to go by.
        keys: the options to change, shown with their present values; of `a|b` the first that the run sets.
        cause, change: why a run is outside, and what to do.
    """

    metrics: tuple[str, ...]
    check: Range | Callable[[Series], Finding | None]
    keys: tuple[str, ...]
    cause: str
    change: str

    def apply(self, series: Series, options: Options | None = None) -> list[Finding]:
        """Its findings; metrics that fare alike are one."""
        found: list[Finding] = []
        if not isinstance(self.check, Range):
            found = list(filter(None, [self.check(series)]))
        else:
            names = [name for name in series if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.metrics)]
            judged = [in_range(name, series[name], self.check) for name in names]
            for grade in GRADES:
                alike = [finding for finding in judged if finding.grade == grade]
                more = ", ".join(other.metric for other in alike[1:4]) + " and more" * (len(alike) > 4)
                text = f"; so with {more}" if more else ""
                found += [replace(first, text=first.text + text) for first in alike[:1]]
        now = ", ".join(dict.fromkeys(filter(None, (_present(key, options or {}) for key in self.keys))))
        advice = f"{self.change} (now {now})" if now else self.change
        return [one if one.grade == OK else replace(one, cause=self.cause, advice=advice) for one in found]


def judge(series: Series, options: Options | None = None) -> list[Finding]:
    """All findings on these numbers, the worst first. options: the run's configuration by dotted key."""
    found = [finding for rule in RULES for finding in rule.apply(series, options)]
    return sorted(found, key=lambda finding: GRADES.index(finding.grade))


def findings_of(run: Run) -> list[Finding]:
    """The error that ended the run, as its crash dump tells it, if it has not gone on since; then `judge`."""
    options = {key: value.value for key, value in run.config.items()}
    acts = options.get("agentic.train_env_manager.tags", "[]") != "[]"
    score = "" if acts else _SCORE.replace("RUN", shlex.quote(str(run.folder)))
    found = [replace(one, advice=one.advice.replace(_SCORE, score)) for one in judge(run.series(), options)]
    dumps = sorted(run.folder.glob("crash/step_*/error.txt"), key=lambda file: file.stat().st_mtime)
    if not dumps or run.is_running or dumps[-1].stat().st_mtime < run.modified - 1.0:
        return found
    log = dumps[-1].read_text(encoding="utf-8", errors="replace").strip()
    told = re.findall(r"^[\w.]+(?:Error|Exception|Interrupt)\b.*", log, re.MULTILINE) or [log[-200:]]
    folder = dumps[-1].parent
    text = f"the run ended with an error in step {folder.name.removeprefix('step_')}: {told[-1]}"
    again = shlex.join(["python", "-m", "trainer.replay", str(folder)])
    return [Finding(BAD, "", text, advice=f"run that step again under a debugger: {again}", log=log[-3000:]), *found]


def number(value: float) -> str:
    """A number for a sentence: `0.013`, `1,250`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _present(key: str, options: Options) -> str:
    """The first of the alternatives that the run has, as `key=value`. Rules name keys of `trainer.main_ppo`; other
    commands have some without the role in front."""
    for name in (name for one in key.split("|") for name in (one, one.partition(".")[2])):
        chosen = [f"{x}={options[x]}" for x in fnmatch.filter(options, name) if "*" not in name or options[x] != "null"]
        if chosen:
            return ", ".join(chosen)
    return ""


# ------------------------------------------------------------------------------------------------------ checks


def in_range(name: str, points: Points, healthy: Range) -> Finding:
    """One metric against its range.

    bad: beyond the alarm in a tenth of the steps, or at the end (median of the last tenth). look: the same for the
    range, one step beyond the alarm, or one outside a range that ends at 0. Nothing is bad that ended in the first 3/4.
    """
    scale = points[0][1] if healthy.of_start else 1.0
    if scale == 0:
        return Finding(OK, name, f"{name} began at 0 and has no scale")
    grades = [healthy.judge(value / scale) for _, value in points]
    outside = [point for point, grade in zip(points, grades, strict=True) if grade != OK]
    if not outside:
        return Finding(OK, name, f"{name} stays {healthy.shown}")
    late = points[-max(3, round(LASTING * len(points))) :]
    now = healthy.judge(statistics.median(value for _, value in late) / scale)
    is_past = outside[-1][0] <= points[0][0] + _EARLY * (points[-1][0] - points[0][0]) and now == OK
    alarms = grades.count(BAD)
    if not is_past and (alarms >= LASTING * len(points) or now == BAD):
        grade = BAD
    elif len(outside) >= LASTING * len(points) or now != OK or alarms or 0.0 in (healthy.low, healthy.high):
        grade = LOOK
    else:
        grade = OK
    most, side = (min, "below") if math.isfinite(healthy.low) else (max, "above")
    step, worst = most(outside, key=lambda point: point[1] / scale)
    text = f"{name} is {side} {healthy.shown[3:]}{f' ({number(scale)})' * healthy.of_start} in {len(outside)} of "
    text += f"{len(points)} steps ({outside[0][0]} to {outside[-1][0]}): {number(worst)} at step {step}, "
    text += f"{number(points[-1][1])} at the end" + f"; not since step {outside[-1][0]}" * is_past
    return Finding(grade, name, text)


def diverged(series: Series) -> Finding | None:
    """No mini-batch of the last step has a gradient that is a finite number, so that nothing is learnt any more."""
    for role in ("actor", "train", "critic"):
        name = f"{role}/grad_norm_nonfinite"
        lost = [step for step, _ in itertools.takewhile(lambda point: point[1] >= 1, reversed(series.get(name, ())))]
        if lost:
            return Finding(BAD, name, f"{DIVERGED}: from step {lost[-1]} on no gradient is a finite number")
    return None


def score_falls(series: Series) -> Finding | None:
    """The score rose, then lost much of it. Running means of a tenth of the run; a fall counts if it is more than 4
    standard errors (of one value about its trend, from the differences of neighbours) and 0.3 of the rise."""
    name, points, sign = _score(series)
    if len(points) < _ENOUGH:
        return None
    width, values = max(3, len(points) // 10), sign * np.array([value for _, value in points])
    smooth = np.convolve(values, np.full(width, 1 / width), "valid")
    error, best = math.sqrt(np.mean(np.diff(values) ** 2) / width), int(smooth.argmax())
    fall, rise = smooth[best] - smooth[-1], max(smooth[best] - smooth[0], 0.0)
    if fall <= 4 * error or fall <= 0.3 * rise:
        return Finding(OK, name, f"{name} does not fall back from its best")
    text = f"{name} was best around step {points[best + width - 1][0]} ({number(sign * smooth[best])}) and is "
    return Finding(BAD, name, f"{text}{number(sign * smooth[-1])} at the end, as means over {width} steps")


def score_stays(series: Series) -> Finding | None:
    """The score's first and last quarter differ by less than 2 standard errors, and it is not near its best."""
    name, points, sign = _score(series)
    if len(points) < _ENOUGH:
        return None
    values, quarter = np.array([value for _, value in points]), len(points) // 4
    begin, end = values[:quarter].mean(), values[-quarter:].mean()
    error = math.sqrt((values[:quarter].var(ddof=1) + values[-quarter:].var(ddof=1)) / quarter)
    best = max((value for _, value in series.get("critic/score/max", [])), default=math.inf)
    text = f"{name} goes from {number(begin)} in the first quarter of the steps to {number(end)} in the last"
    if sign * (end - begin) > 2 * error:
        return Finding(OK, name, text)
    if sign * (end - begin) < -2 * error or end >= 0.95 * best > 0:
        return None  # it falls, which another rule says, or there is nothing left
    return Finding(LOOK, name, f"{text}, less than chance explains ({number(2 * error)})")


def gradient_spikes(series: Series) -> Finding | None:
    """Steps whose gradient norm is 8 times the median of the up to 20 steps before, of which there are 5 or more."""
    name = next((x for x in ("actor/grad_norm", "train/grad_norm", "critic/grad_norm") if x in series), "")
    points = series.get(name, [])
    if len(points) <= 5:
        return None
    usual = [statistics.median(value for _, value in points[max(0, x - 20) : x]) for x in range(5, len(points))]
    spikes = [(v / mean, step, v) for mean, (step, v) in zip(usual, points[5:], strict=True) if v > 8 * mean > 0]
    if not spikes:
        return Finding(OK, name, f"{name} has no spikes")
    times, step, value = max(spikes)
    text = f"{name} has spikes in {len(spikes)} of {len(points)} steps: {number(value)} at step {step}, {times:.0f} "
    return Finding(BAD if len(spikes) > 0.05 * len(points) else LOOK, name, text + "times what the steps before have")


def validation_gain(series: Series) -> Finding | None:
    """The first validation against the last, with the 95% interval of the difference (as of independent prompts, which
    is wide where both asked the same)."""
    by_step: dict[int, dict[str, float]] = {}
    for name in (name for name in series if name.startswith("val-")):
        for step, value in series[name]:
            by_step.setdefault(step, {})[name] = value
    means = [[mean for mean in validation_means(x) if not mean.greedy] for _, x in sorted(by_step.items())]
    validated = [found for found in means if found]
    words: list[str] = []
    signs: set[float] = set()
    for before, after in [(a, b) for a in validated[0] for b in validated[-1]] if len(validated) > 1 else ():
        if (before.source, before.name) == (after.source, after.name) and before.half_width and after.half_width:
            gain, width = after.value - before.value, math.hypot(before.half_width, after.half_width)
            signs.add(math.copysign(1.0, gain) if abs(gain) > width else 0.0)
            numbers = f"{number(before.value)} to {number(after.value)} ({gain:+.3f}, interval +-{width:.3f})"
            words.append(f"{before.source} {numbers}" + f", {'better' if gain > 0 else 'worse'}" * (abs(gain) > width))
    if not words:
        return None
    grade = (LOOK if 1.0 in signs else BAD) if -1.0 in signs else OK if 1.0 in signs else LOOK
    doubt = "; it cannot tell whether anything was learnt" * (signs == {0.0})
    return Finding(grade, "val-core", f"validation before and after: {'; '.join(words)}{doubt}")


def _score(series: Series) -> tuple[str, Points, int]:
    """The metric that the run is after, its points, and 1 if more is better, else -1."""
    name = next((name for name in SCORES if name in series), SCORES[0])
    return name, series.get(name, []), -1 if name == "train/loss" else 1


# ------------------------------------------------------------------------------------------------------ the table

_REWARD = "reward.custom_reward_function.path"

# metrics, range or function, keys; cause; what to change
RULES = (
    Rule(
        ("*/grad_norm_nonfinite",), diverged, ("actor.optim.lr", "actor.optim.clip_grad"),
        "an update was so large that the weights or their outputs overflow",
        "lower the learning rate, and start from the last checkpoint before that step",
    ),
    Rule(
        SCORES, score_falls, ("actor.optim.lr", "actor.kl_loss_coef", "actor.ppo_epochs"),
        "the policy learns too fast: updates went further than the samples could vouch for",
        "lower the learning rate, hold the policy to the reference, and go on from the checkpoint before the fall",
    ),
    Rule(
        SCORES, score_stays, ("actor.optim.lr", "rollout.n", "data.train_files", _REWARD),
        "the updates are too small, or most prompts teach nothing, or what is rewarded hardly ever happens",
        "look at the samples: if any is right, raise the learning rate threefold; if not, take easier prompts",
    ),
    Rule(
        ("val-core",), validation_gain, ("data.val_max_samples", "rollout.val_kwargs.n", "data.train_files"),
        "what the training rewards is not what this validation asks, or too few prompts are validated to see the gain",
        "look at the changed samples of the validation; validate on more prompts, or take an earlier checkpoint",
    ),
    Rule(
        ("reward/error_rate", "reward/timeout_rate", "env/error_rate", "val-aux/*/reward/error_rate"),
        Range(high=0.0, alarm_high=0.05), (_REWARD, "reward.timeout_s", "agentic.env_pool.timeout_s"),
        "the reward function or the environment fails, or is too slow, for some answers; they are left out",
        "see reward_failures.jsonl or env_failures.jsonl in the run folder" + _SCORE,
    ),
    Rule(  # verl's FAQ: below 0.005 is numerics, above 0.01 an error; fp32: 1e-6
        ("training/rollout_probs_diff_mean",), Range(high=0.005, alarm_high=0.01),
        ("rollout.dtype", "rollout.top_p", "rollout.enable_prefix_caching", "algorithm.rollout_correction.rollout_is"),
        "the engine samples by other probabilities than the trainer's: missed weights, a stale cache, precision, top_p",
        "sample in the trainer's precision without top_p and top_k, or correct for it",
    ),
    Rule(  # at 0.5 half of the generation is for nothing
        ("frac_reward_zero_std",), Range(high=0.5, alarm_high=0.9),
        ("algorithm.filter_groups.enable", "rollout.n", "data.train_files"),
        "most prompts teach nothing: too easy, too hard, n too small, or a reward that does not tell answers apart",
        "choose prompts that the policy can just do, sample more answers, draw until groups differ" + _SCORE,
    ),
    Rule(  # a few stragglers are normal; above that the limit shapes what is learnt
        ("response_length/clip_ratio",), Range(high=0.1, alarm_high=0.5),
        ("agentic.custom_envs.*.max_tokens_per_step|data.max_response_length", "reward.overlong_buffer.enable"),
        "answers are cut off before they end, so they are judged by half a thought",
        "allow longer ones, or take off points for length",
    ),
    Rule(  # DAPO (arXiv:2503.14476) sees exploration end where the entropy falls by an order of magnitude
        ("actor/entropy",), Range(low=0.1, alarm_low=0.02, of_start=True),
        ("actor.clip_ratio_high", "actor.entropy_coeff", "rollout.temperature", "actor.optim.lr"),
        "the policy hardly varies its answers any more (entropy collapse): there is nothing left to compare",
        "raise the upper clip range, give the entropy a bonus, sample hotter, or lower the learning rate",
    ),
    Rule(  # nats: the reference finds each token 1.6 times less likely
        ("actor/kl_loss", "critic/kl"), Range(high=0.5, alarm_high=5.0),
        ("actor.kl_loss_coef", "algorithm.kl_ctrl.kl_coef", "actor.optim.lr"),
        "the policy is far from the reference model",
        "raise the coefficient or lower the learning rate, if staying near the reference is wanted",
    ),
    Rule(  # runs that learn are mostly below 0.2; gspo clips whole answers, and more
        ("actor/pg_clipfrac",), Range(high=0.3, alarm_high=0.6),
        ("actor.optim.lr", "actor.ppo_epochs", "actor.ppo_mini_batch_size", "actor.clip_ratio_high"),
        "many tokens are outside the clip range and give no gradient: the update goes too far in one step",
        "lower the learning rate, train fewer epochs or in fewer mini-batches on a batch, or widen the range",
    ),
    Rule(  # 0 is a constant, 1 is perfect
        ("critic/vf_explained_var",), Range(low=0.0, alarm_low=-1.0), ("trainer.critic_warmup", "critic.optim.lr"),
        "the critic predicts worse than a constant would, and its advantages are noise",
        "train it alone first, or raise its learning rate",
    ),
    Rule(
        ("*/grad_norm",), gradient_spikes, ("actor.optim.clip_grad", "actor.optim.lr"),
        "single batches pull far harder than others (long or oddly rewarded answers), or an update begins to diverge",
        "look at the samples of these steps; clip gradients lower, or lower the learning rate",
    ),
    Rule(
        ("*/grad_norm_nonfinite", "*/empty_mini_batch_frac"), Range(high=0.0, alarm_high=0.1),
        ("actor.optim.lr", "actor.fsdp_config.mixed_precision.param_dtype", "actor.ppo_mini_batch_size"),
        "steps are left out: the gradient overflows, or rewards of whole mini-batches failed or were rejected",
        "lower the learning rate, or train in fp32; look at reward/error_rate and at the correction's rejection",
    ),
    Rule(  # after the first steps everything has its size
        ("actor/perf/host_rss_gb", "actor/perf/max_memory_allocated_gb", "actor/perf/max_memory_reserved_gb"),
        Range(high=1.5, alarm_high=3.0, of_start=True), ("data.max_response_length",),
        "a worker's memory grows from step to step: a leak, or ever longer answers",
        "look at response_length/max first",
    ),
)  # fmt: skip

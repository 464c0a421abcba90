"""Findings about the health of a run, from one table of rules over its metrics.

Input are the metrics as series of (step, value); output are `Finding`s for `trainer.inspect`, `trainer.report` and the
last lines of a run.
"""

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
"""Part of the advice of some rules, for runs whose rewards come from a function."""

BAD, LOOK, OK = GRADES = ("bad", "look", "ok")
SCORES = ("critic/score/mean", "actor/face_score", "train/loss")
"""Metrics that a run optimizes; the first that it logs is used. A smaller train/loss is better."""

MEMORY = ("host_rss", "max_memory_allocated", "max_memory_reserved")
DIVERGED = "the run diverged"
LASTING = 0.1  # share of a run's steps; fewer steps outside a range count as stray steps
_EARLY = 0.75  # share of the steps; a problem that ended before is over
_TREND_STEPS = 20  # smallest number of steps for a trend

Points = Sequence[tuple[int, float]]
Series = Mapping[str, Points]
Options = Mapping[str, str]


@dataclass(frozen=True)
class Finding:
    """One observation about a run.

    grade: one of `GRADES`. text: the observation with its numbers. cause, advice: likely cause, and options to change
    with their values, unless the grade is ok. log: printed traceback, if any.
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
    """A closed range of healthy values. Beyond an alarm bound, the run is likely wasted. of_start: True if the bounds
    are multiples of the run's first value, for metrics without an absolute scale."""

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


@dataclass(frozen=True)
class Rule:
    """A row of the table of rules.

    Attributes:
        metrics: Names of the checked metrics; `*` matches any text. Each metric is checked separately.
        check: A range, or a function of all series that returns None if the run lacks the data.
        keys: Options to change, shown with their values in the run. For `a|b`, the first option that the run sets.
        cause, change: Likely cause of a problem, and the recommended change.
    """

    metrics: tuple[str, ...]
    check: Range | Callable[[Series], Finding | None]
    keys: tuple[str, ...]
    cause: str
    change: str

    def apply(self, series: Series, options: Options | None = None) -> list[Finding]:
        """Returns the findings of the rule. Metrics with the same grade share one finding."""
        found: list[Finding] = []
        if not isinstance(self.check, Range):
            found = list(filter(None, [self.check(series)]))
        else:
            names = [name for name in series if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.metrics)]
            judged = [in_range(name, series[name], self.check) for name in names]
            for grade in GRADES:
                alike = [finding for finding in judged if finding.grade == grade]
                more = ", ".join(other.metric for other in alike[1:4]) + " and more" * (len(alike) > 4)
                text = f"; likewise {more}" if more else ""
                found += [replace(first, text=first.text + text) for first in alike[:1]]
        now = ", ".join(dict.fromkeys(filter(None, (_option_in_run(key, options or {}) for key in self.keys))))
        advice = f"{self.change} (now {now})" if now else self.change
        return [one if one.grade == OK else replace(one, cause=self.cause, advice=advice) for one in found]


def judge(series: Series, options: Options | None = None) -> list[Finding]:
    """Returns all findings about these metrics, the worst first. options: the run's configuration by dotted key."""
    found = [finding for rule in RULES for finding in rule.apply(series, options)]
    return sorted(found, key=lambda finding: GRADES.index(finding.grade))


def findings_of(run: Run) -> list[Finding]:
    """Returns the findings of `judge`, preceded by the error that ended the run, from its crash dump.

    A crash dump is ignored if the run continued afterwards.
    """
    options = {key: value.value for key, value in run.config.items()}
    agentic = {"agentic.train_env_manager.tags": "[]", "agentic.program": "null", "agentic.mcp_servers": "{}"}
    is_agentic = any(options.get(key, default) != default for key, default in agentic.items())
    score = "" if is_agentic else _SCORE.replace("RUN", shlex.quote(str(run.folder)))
    found = [replace(one, advice=one.advice.replace(_SCORE, score)) for one in judge(run.series(), options)]
    dumps = sorted(run.folder.glob("crash/step_*/error.txt"), key=lambda file: file.stat().st_mtime)
    if not dumps or run.is_running or dumps[-1].stat().st_mtime < run.modified - 1.0:
        return found
    log = dumps[-1].read_text(encoding="utf-8", errors="replace").strip()
    errors = re.findall(r"^[\w.]+(?:Error|Exception|Interrupt)\b.*", log, re.MULTILINE) or [log[-200:]]
    folder = dumps[-1].parent
    text = f"the run ended with an error in step {folder.name.removeprefix('step_')}: {errors[-1]}"
    replay = shlex.join(["python", "-m", "trainer.replay", str(folder)])
    return [Finding(BAD, "", text, advice=f"repeat that step in a debugger: {replay}", log=log[-3000:]), *found]


def number(value: float) -> str:
    """Formats a number for a sentence: `0.013`, `1,250`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _option_in_run(key: str, options: Options) -> str:
    """Returns the first of a rule's alternative keys that the run has, as `key=value`, or "" without one.

    Rules name keys of `trainer.main_ppo`. Other commands have some of these options without the prefix of the role.
    """
    for name in (name for one in key.split("|") for name in (one, one.partition(".")[2])):
        chosen = [f"{x}={options[x]}" for x in fnmatch.filter(options, name) if "*" not in name or options[x] != "null"]
        if chosen:
            return ", ".join(chosen)
    return ""


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
    text += f"{number(points[-1][1])} at the end" + f"; inside after step {outside[-1][0]}" * is_past
    return Finding(grade, name, text)


def diverged(series: Series) -> Finding | None:
    """Finds a run in which no mini-batch of the last step has a finite gradient, so that the weights do not change."""
    for role in ("actor", "train", "critic"):
        name = f"{role}/grad_norm_nonfinite"
        lost = [step for step, _ in itertools.takewhile(lambda point: point[1] >= 1, reversed(series.get(name, ())))]
        if lost:
            return Finding(BAD, name, f"{DIVERGED}: from step {lost[-1]} on, no gradient is finite")
    return None


def score_falls(series: Series) -> Finding | None:
    """Finds a score that fell back after its best value.

    The check compares running means over a tenth of the run. A fall counts if it is more than 4 standard errors, which
    are estimated from the differences of successive values, and more than 0.3 of the rise.
    """
    name, points, sign = _score(series)
    if len(points) < _TREND_STEPS:
        return None
    width = max(3, len(points) // 10)
    values = sign * np.array([value for _, value in points])
    smooth = np.convolve(values, np.full(width, 1 / width), "valid")
    error = math.sqrt(np.mean(np.diff(values) ** 2) / width)
    best = int(smooth.argmax())
    fall, rise = smooth[best] - smooth[-1], max(smooth[best] - smooth[0], 0.0)
    if fall <= 4 * error or fall <= 0.3 * rise:
        return Finding(OK, name, f"{name} does not fall back from its best")
    text = f"{name} was best around step {points[best + width - 1][0]} ({number(sign * smooth[best])}) and is "
    return Finding(BAD, name, f"{text}{number(sign * smooth[-1])} at the end, as means over {width} steps")


def score_stays(series: Series) -> Finding | None:
    """Finds a score that does not rise: its first and last quarter differ by less than 2 standard errors, and it is not
    near its maximum."""
    name, points, sign = _score(series)
    if len(points) < _TREND_STEPS:
        return None
    values = np.array([value for _, value in points])
    quarter = len(points) // 4
    begin, end = values[:quarter].mean(), values[-quarter:].mean()
    error = math.sqrt((values[:quarter].var(ddof=1) + values[-quarter:].var(ddof=1)) / quarter)
    best = max((value for _, value in series.get("critic/score/max", [])), default=math.inf)
    text = f"{name} goes from {number(begin)} in the first quarter of the steps to {number(end)} in the last"
    if sign * (end - begin) > 2 * error:
        return Finding(OK, name, text)
    if sign * (end - begin) < -2 * error or end >= 0.95 * best > 0:
        return None  # the score falls, which `score_falls` reports, or it cannot rise further
    return Finding(LOOK, name, f"{text}, within random variation ({number(2 * error)})")


def gradient_spikes(series: Series) -> Finding | None:
    """Finds steps whose gradient norm is above 8 times the median of the preceding 5 to 20 steps."""
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
    return Finding(BAD if len(spikes) > 0.05 * len(points) else LOOK, name, text + "times the median of earlier steps")


def validation_gain(series: Series) -> Finding | None:
    """Compares the first and the last validation by the 95% interval of their difference.

    The interval assumes independent prompts, so it is too wide if both validations use the same prompts.
    """
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
            gain = after.value - before.value
            width = math.hypot(before.half_width, after.half_width)
            signs.add(math.copysign(1.0, gain) if abs(gain) > width else 0.0)
            numbers = f"{number(before.value)} to {number(after.value)} ({gain:+.3f}, interval +-{width:.3f})"
            words.append(f"{before.source} {numbers}" + f", {'better' if gain > 0 else 'worse'}" * (abs(gain) > width))
    if not words:
        return None
    grade = (LOOK if 1.0 in signs else BAD) if -1.0 in signs else OK if 1.0 in signs else LOOK
    doubt = "; it cannot tell whether the policy improved" * (signs == {0.0})
    return Finding(grade, "val-core", f"validation before and after: {'; '.join(words)}{doubt}")


def mismatch(series: Series) -> Finding | None:
    """Whether sampler and trainer have the same probabilities. Stale samples differ by design."""
    name = "training/rollout_probs_diff_mean"
    if name not in series or any(value > 0 for _, value in series.get("async/staleness/mean", ())):
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
    """Which side of an asynchronous run waits for the other, over the second half of the run."""
    names = ("async/trainer_idle_frac", "async/engine_idle_frac")
    if not all(series.get(name) for name in names):
        return None
    trainer, engines = (
        statistics.fmean(value for _, value in series[name][len(series[name]) // 2 :]) for name in names
    )
    told = f"the trainer waits for samples {trainer:.0%} of the time, and the engines are idle {engines:.0%} of it"
    if max(trainer, engines) < 0.2:
        return Finding(OK, names[0], f"{told}: neither side limits the other")
    if trainer >= engines:
        return Finding(LOOK, names[0], f"{told}: sampling limits the run")
    return Finding(
        OK, names[1], f"{told}: training limits the run, and a larger async_training.batches_ahead gains nothing"
    )


def _score(series: Series) -> tuple[str, Points, int]:
    """Returns the metric that the run optimizes, its points, and 1 if a larger value is better, else -1."""
    name = next((name for name in SCORES if name in series), SCORES[0])
    return name, series.get(name, []), -1 if name == "train/loss" else 1


# ------------------------------------------------------------------------------------------------------ the table

_REWARD = "reward.custom_reward_function.path"

# metrics, range or function, keys; cause; change
RULES = (
    Rule(
        ("*/grad_norm_nonfinite",), diverged, ("actor.optim.lr", "actor.optim.clip_grad"),
        "an update was so large that the weights or activations overflow",
        "lower the learning rate, and resume from the last checkpoint before that step",
    ),
    Rule(
        SCORES, score_falls, ("actor.optim.lr", "actor.kl_loss_coef", "actor.ppo_epochs"),
        "the policy changes too fast: updates are larger than the samples justify",
        "lower the learning rate or raise the KL coefficient, and resume from the checkpoint before the fall",
    ),
    Rule(
        SCORES, score_stays, ("actor.optim.lr", "rollout.n", "data.train_files", _REWARD),
        "the updates are too small, or most prompts give no gradient, or rewarded answers are very rare",
        "look at the samples: if some are right, triple the learning rate; if none is, use easier prompts",
    ),
    Rule(
        ("val-core",), validation_gain, ("data.val_max_samples", "rollout.val_kwargs.n", "data.train_files"),
        "the training reward differs from what the validation measures, or too few prompts are validated to see a gain",
        "look at the changed samples of the validation; validate on more prompts, or use an earlier checkpoint",
    ),
    Rule(
        ("reward/error_rate", "reward/timeout_rate", "env/error_rate", "val-aux/*/reward/error_rate"),
        Range(high=0.0, alarm_high=0.05), (_REWARD, "reward.timeout_s", "agentic.env_pool.timeout_s"),
        "the reward function or the environment fails or times out for some answers, which are left out",
        "see reward_failures.jsonl or env_failures.jsonl in the run folder" + _SCORE,
    ),
    Rule(  # verl's FAQ: below 0.005 is rounding, above 0.01 an error; fp32: 1e-6
        ("training/rollout_probs_diff_mean",), mismatch,
        ("rollout.dtype", "rollout.enable_prefix_caching", "algorithm.rollout_correction.rollout_is"),
        "sampler and trainer have different probabilities: missing weight updates, a stale cache, or precision",
        "sample in the trainer's precision, or enable the rollout correction",
    ),
    Rule(  # at 0.5, half of the generated answers are useless
        ("frac_reward_zero_std",), Range(high=0.5, alarm_high=0.9),
        ("algorithm.filter_groups.enable", "rollout.n", "data.train_files"),
        "most prompts give no gradient: too easy, too hard, n too small, or a reward that is equal for all answers",
        "choose prompts of medium difficulty, sample more answers, or filter groups with equal scores" + _SCORE,
    ),
    Rule(  # a few long answers are normal; a larger share means that the limit affects what is learned
        ("response_length/clip_ratio",), cut_off,
        ("agentic.custom_envs.*.max_tokens_per_step|data.max_response_length", "reward.overlong_buffer.enable"),
        "answers reach the limit of tokens before they end, and are scored as far as they go",
        "if the samples that are cut off are right so far, allow longer answers; if the answers should be shorter, "
        "train longer or penalize long answers",
    ),
    Rule(
        ("program/prompt_length/clip_ratio",), Range(high=0.0, alarm_high=0.5),
        ("data.max_prompt_length", "data.max_response_length"),
        "first prompts of programs, tools included, are longer than data.max_prompt_length; the surplus is taken from "
        "the room of the answers, which may be one token or none",
        "raise data.max_prompt_length to program/prompt_length/max",
    ),
    Rule(  # DAPO (arXiv:2503.14476): exploration ends when the entropy falls by an order of magnitude
        ("actor/entropy",), Range(low=0.1, alarm_low=0.02, of_start=True),
        ("actor.clip_ratio_high", "actor.entropy_coeff", "rollout.temperature", "actor.optim.lr"),
        "the answers of the policy hardly vary (entropy collapse), so there are no different answers to compare",
        "raise the upper clip range, the entropy coefficient or the temperature, or lower the learning rate",
    ),
    Rule(  # 0.5 nats: each token is 1.6 times less likely under the reference
        ("actor/kl_loss", "critic/kl"), Range(high=0.5, alarm_high=5.0),
        ("actor.kl_loss_coef", "algorithm.kl_ctrl.kl_coef", "actor.optim.lr"),
        "the policy is far from the reference model",
        "raise the coefficient or lower the learning rate, if the policy should stay near the reference",
    ),
    Rule(  # mostly below 0.2 in successful runs; gspo clips whole answers, so its values are higher
        ("actor/pg_clipfrac",), Range(high=0.3, alarm_high=0.6),
        ("actor.optim.lr", "actor.ppo_epochs", "actor.ppo_mini_batch_size", "actor.clip_ratio_high"),
        "many tokens are outside the clip range and give no gradient: the policy changes too much in one step",
        "lower the learning rate, use fewer epochs or mini-batches per batch, or widen the clip range",
    ),
    Rule(  # 0: as good as a constant prediction; 1: perfect
        ("critic/vf_explained_var",), Range(low=0.0, alarm_low=-1.0), ("trainer.critic_warmup", "critic.optim.lr"),
        "the critic predicts worse than a constant, so the advantages are noise",
        "train the critic alone first, or raise its learning rate",
    ),
    Rule(
        ("*/grad_norm",), gradient_spikes, ("actor.optim.clip_grad", "actor.optim.lr"),
        "single batches have much larger gradients (long answers or unusual rewards), or the run begins to diverge",
        "look at the samples of these steps; lower the gradient clipping threshold or the learning rate",
    ),
    Rule(
        ("*/grad_norm_nonfinite", "*/empty_mini_batch_frac"), Range(high=0.0, alarm_high=0.1),
        ("actor.optim.lr", "actor.fsdp_config.mixed_precision.param_dtype", "actor.ppo_mini_batch_size"),
        "updates are skipped: the gradient overflows, or all samples of a mini-batch failed or were rejected",
        "lower the learning rate, or train in fp32; look at reward/error_rate and at rejected samples",
    ),
    Rule(
        ("async/trainer_idle_frac",), waiting,
        ("async_training.max_off_policy_threshold", "async_training.batches_ahead", "data.max_response_length"),
        "the engines do not produce samples as fast as the trainer uses them, or idle while the longest ones end",
        "set async_training.partial_rollout=true or raise max_off_policy_threshold to 2 or more, so that the engines "
        "have samples to work on while the longest ones end",
    ),
    Rule(  # all memory is allocated after the first steps
        tuple(f"{role}/perf/{x}_gb" for role in ("actor", "train") for x in MEMORY),
        Range(high=1.5, alarm_high=3.0, of_start=True), ("data.max_response_length",),
        "a worker's memory grows from step to step: a leak, or increasingly long answers",
        "look at response_length/max first",
    ),
)  # fmt: skip

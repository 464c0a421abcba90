"""Findings about the health of a run, from one table of rules over its metrics.

Input are the metrics as series of (step, value); output are `Finding`s for `trainer.inspect`, `trainer.report` and the
last lines of a run.
"""

import fnmatch
import math
import re
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainer.observe.final_report import ValidationMean, validation_means
from trainer.observe.run_data import Run

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

_AGENTIC_DEFAULTS = {"agentic.train_env_manager.tags": "[]", "agentic.program": "null", "agentic.mcp_servers": "{}"}
"""Options of which a run with agents sets at least one, and their defaults as text in a saved configuration."""

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
        if isinstance(self.check, Range):
            findings = self._findings_by_grade(series, self.check)
        else:
            finding = self.check(series)
            findings = [] if finding is None else [finding]

        # `actor.optim.lr` may appear twice, through two keys with alternatives
        options_in_run = dict.fromkeys(_option_in_run(key, options or {}) for key in self.keys)
        current_options = ", ".join(text for text in options_in_run if text)
        advice = f"{self.change} (now {current_options})" if current_options else self.change
        return [
            finding if finding.grade == OK else replace(finding, cause=self.cause, advice=advice)
            for finding in findings
        ]

    def _findings_by_grade(self, series: Series, healthy: Range) -> list[Finding]:
        """Returns one finding for each grade, about the first metric with this grade. It names three others."""
        findings = []
        for name, points in series.items():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.metrics):
                findings.append(in_range(name, points, healthy))

        shared_findings = []
        for grade in GRADES:
            of_grade = [finding for finding in findings if finding.grade == grade]
            if not of_grade:
                continue
            text = of_grade[0].text
            if len(of_grade) > 1:
                text += "; likewise " + ", ".join(finding.metric for finding in of_grade[1:4])
            if len(of_grade) > 4:
                text += " and more"
            shared_findings.append(replace(of_grade[0], text=text))
        return shared_findings


def judge(series: Series, options: Options | None = None) -> list[Finding]:
    """Returns all findings about these metrics, the worst first. options: the run's configuration by dotted key."""
    findings: list[Finding] = []
    for rule in RULES:
        findings += rule.apply(series, options)
    return sorted(findings, key=lambda finding: GRADES.index(finding.grade))


def findings_of(run: Run) -> list[Finding]:
    """Returns the findings of `judge`, preceded by the error that ended the run, from its crash dump.

    A crash dump is ignored if the run continued afterwards.
    """
    options = {key: option.value for key, option in run.config.items()}

    # `trainer.score` scores answers by a reward function; agents are scored by environments and programs
    is_agentic = any(options.get(key, default) != default for key, default in _AGENTIC_DEFAULTS.items())
    score_advice = "" if is_agentic else _SCORE.replace("RUN", shlex.quote(str(run.folder)))
    findings = []
    for finding in judge(run.series(), options):
        findings.append(replace(finding, advice=finding.advice.replace(_SCORE, score_advice)))

    error = _error_of(run)
    return findings if error is None else [error, *findings]


def _error_of(run: Run) -> Finding | None:
    """Returns the error that ended the run, or None if it is running or has continued since its last crash dump."""
    logs = sorted(run.folder.glob("crash/step_*/error.txt"), key=lambda file: file.stat().st_mtime)
    # a second of tolerance: the last metrics can be written while the dump is
    if not logs or run.is_running or logs[-1].stat().st_mtime < run.modified - 1.0:
        return None

    dump = logs[-1].parent
    step = dump.name.removeprefix("step_")
    log = logs[-1].read_text(encoding="utf-8", errors="replace").strip()
    # a traceback names the causes first, and the error that ended the run last
    error_lines = re.findall(r"^[\w.]+(?:Error|Exception|Interrupt)\b.*", log, re.MULTILINE)
    error_line = error_lines[-1] if error_lines else log[-200:]
    replay = shlex.join(["python", "-m", "trainer.replay", str(dump)])
    return Finding(
        BAD,
        "",
        f"the run ended with an error in step {step}: {error_line}",
        advice=f"repeat that step in a debugger: {replay}",
        log=log[-3000:],
    )


def number(value: float) -> str:
    """Formats a number for a sentence: `0.013`, `1,250`."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _option_in_run(key: str, options: Options) -> str:
    """Returns the first of a rule's alternative keys that the run has, as `key=value`, or "" without one.

    Rules name keys of `trainer.main_ppo`. Other commands have some of these options without the prefix of the role.
    """
    for alternative in key.split("|"):
        without_role = alternative.partition(".")[2]
        for pattern in (alternative, without_role):
            names = fnmatch.filter(options, pattern)
            if "*" in pattern:
                # a pattern matches the option of each environment, also of those that do not set it
                names = [name for name in names if options[name] != "null"]
            if names:
                return ", ".join(f"{name}={options[name]}" for name in names)
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

    first_step = points[0][0]
    last_step = points[-1][0]
    first_outside = outside[0][0]
    last_outside = outside[-1][0]
    last_values = [value for _, value in points[-max(3, round(LASTING * len(points))) :]]
    final_grade = healthy.judge(statistics.median(last_values) / scale)
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
        tuple(f"{role}/perf/{name}_gb" for role in ("actor", "train") for name in MEMORY),
        Range(high=1.5, alarm_high=3.0, of_start=True), ("data.max_response_length",),
        "a worker's memory grows from step to step: a leak, or increasingly long answers",
        "look at response_length/max first",
    ),
)  # fmt: skip

"""Findings about the health of a run, from one table of rules over its metrics.

Input are the metrics as series of (step, value); output are `Finding`s for `trainer.inspect`, `trainer.report` and the
last lines of a run. `health_checks.py` contains the functions that check a metric.
"""

import fnmatch
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from trainer.observe.health_checks import (
    BAD,
    GRADES,
    OK,
    SCORES,
    Finding,
    HealthyRange,
    Series,
    cut_off,
    diverged,
    gradient_spikes,
    in_range,
    mismatch,
    score_falls,
    score_stays,
    validation_gain,
    waiting,
)
from trainer.observe.run_data import RecordedRun

Options = Mapping[str, str]
MEMORY = ("host_rss", "max_memory_allocated", "max_memory_reserved")

_SCORE = "; python -m trainer.score RUN scores the saved answers again"
"""Part of the advice of some rules, for runs whose rewards come from a function."""

_AGENTIC_DEFAULTS = {"agentic.train_env_manager.tags": "[]", "agentic.program": "null", "agentic.mcp_servers": "{}"}
"""Options of which a run with agents sets at least one, and their defaults as text in a saved configuration."""


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
    check: HealthyRange | Callable[[Series], Finding | None]
    keys: tuple[str, ...]
    cause: str
    change: str

    def apply(self, series: Series, options: Options | None = None) -> list[Finding]:
        """Returns the findings of the rule. Metrics with the same grade share one finding."""
        if isinstance(self.check, HealthyRange):
            findings = self._findings_by_grade(series, self.check)
        else:
            finding = self.check(series)
            findings = [] if finding is None else [finding]

        advice = self.change
        current_options = self._current_options(options or {})
        if current_options:
            advice += f" (now {', '.join(current_options)})"

        explained = []
        for finding in findings:
            if finding.grade != OK:
                finding = replace(finding, cause=self.cause, advice=advice)
            explained.append(finding)
        return explained

    def _current_options(self, options: Options) -> list[str]:
        """Returns the options of the rule that the run has, as `key=value`."""
        texts: list[str] = []
        for key in self.keys:
            text = _option_in_run(key, options)
            # `actor.optim.lr` may appear twice, through two keys with alternatives
            if text and text not in texts:
                texts.append(text)
        return texts

    def _findings_by_grade(self, series: Series, healthy: HealthyRange) -> list[Finding]:
        """Returns one finding for each grade, about the first metric with this grade. It names three others."""
        findings_by_grade: dict[str, list[Finding]] = {grade: [] for grade in GRADES}
        for name, points in series.items():
            is_checked = any(fnmatch.fnmatchcase(name, pattern) for pattern in self.metrics)
            if is_checked:
                finding = in_range(name, points, healthy)
                findings_by_grade[finding.grade].append(finding)

        # a pattern such as val-aux/*/reward/error_rate can match many metrics, and a report has one line per problem
        shared_findings = []
        for findings in findings_by_grade.values():
            if not findings:
                continue
            first, *others = findings
            text = first.text
            if others:
                names = [finding.metric for finding in others[:3]]
                text += f"; likewise {', '.join(names)}"
            if len(others) > 3:
                text += " and more"
            shared_findings.append(replace(first, text=text))
        return shared_findings


def judge(series: Series, options: Options | None = None) -> list[Finding]:
    """Returns all findings about a run, the worst first.

    Args:
        series: Metrics of the run.
        options: Its configuration by dotted key. With it, an advice shows the current values.
    """
    findings: list[Finding] = []
    for rule in RULES:
        findings += rule.apply(series, options)
    findings.sort(key=lambda finding: GRADES.index(finding.grade))
    return findings


def findings_of(run: RecordedRun) -> list[Finding]:
    """Returns the findings of `judge`, preceded by the error that ended the run, from its crash dump.

    A crash dump is ignored if the run continued afterwards.
    """
    options = {}
    for key, option in run.config.items():
        options[key] = option.value
    score_advice = ""
    # `trainer.score` scores answers by a reward function; agents are scored by environments and programs
    if not _has_agents(options):
        folder = shlex.quote(str(run.folder))
        score_advice = _SCORE.replace("RUN", folder)

    findings = []
    error = _error_of(run)
    if error is not None:
        findings.append(error)
    for finding in judge(run.series(), options):
        advice = finding.advice.replace(_SCORE, score_advice)
        findings.append(replace(finding, advice=advice))
    return findings


def _has_agents(options: Options) -> bool:
    """Returns True if the configuration sets an option that turns a run into one with agents."""
    for key, default in _AGENTIC_DEFAULTS.items():
        if options.get(key, default) != default:
            return True
    return False


def _error_of(run: RecordedRun) -> Finding | None:
    """Returns the error that ended the run, or None if it is running or has continued since its last crash dump."""
    logs = list(run.folder.glob("crash/step_*/error.txt"))
    if not logs or run.is_running:
        return None
    newest_log = max(logs, key=lambda file: file.stat().st_mtime)
    # a second of tolerance: the last metrics can be written while the dump is
    if newest_log.stat().st_mtime < run.modified - 1.0:
        return None

    dump = newest_log.parent
    step = dump.name.removeprefix("step_")
    log = newest_log.read_text(encoding="utf-8", errors="replace").strip()
    # a traceback names the causes first, and the error that ended the run last
    error_lines = re.findall(r"^[\w.]+(?:Error|Exception|Interrupt)\b.*", log, re.MULTILINE)
    error_line = error_lines[-1] if error_lines else log[-200:]
    replay = f"python -m trainer.replay {shlex.quote(str(dump))}"
    return Finding(
        BAD,
        metric="",
        text=f"the run ended with an error in step {step}: {error_line}",
        advice=f"repeat that step in a debugger: {replay}",
        log=log[-3000:],
    )


def _option_in_run(key: str, options: Options) -> str:
    """Returns the first of a rule's alternative keys that the run has, as `key=value`, or "" without one.

    Rules name keys of `trainer.main_ppo`. Other commands have some of these options without the prefix of the role.
    """
    for alternative in key.split("|"):
        without_role = alternative.partition(".")[2]
        for pattern in (alternative, without_role):
            texts = []
            for name in fnmatch.filter(options, pattern):
                # a pattern matches the option of each environment, also of those that do not set it
                if "*" not in pattern or options[name] != "null":
                    texts.append(f"{name}={options[name]}")
            if texts:
                return ", ".join(texts)
    return ""


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
        HealthyRange(high=0.0, alarm_high=0.05), (_REWARD, "reward.timeout_s", "agentic.env_pool.timeout_s"),
        "the reward function or the environment fails or times out for some answers, which are left out",
        "see reward_failures.jsonl or env_failures.jsonl in the run folder" + _SCORE,
    ),
    # verl's FAQ: below 0.005 is rounding, above 0.01 an error; fp32: 1e-6
    Rule(
        ("training/rollout_probs_diff_mean",), mismatch,
        ("rollout.dtype", "rollout.enable_prefix_caching", "algorithm.rollout_correction.rollout_is"),
        "sampler and trainer have different probabilities: missing weight updates, a stale cache, or precision",
        "sample in the trainer's precision, or enable the rollout correction",
    ),
    # at 0.5, half of the generated answers are useless
    Rule(
        ("frac_reward_zero_std",), HealthyRange(high=0.5, alarm_high=0.9),
        ("algorithm.filter_groups.enable", "rollout.n", "data.train_files"),
        "most prompts give no gradient: too easy, too hard, n too small, or a reward that is equal for all answers",
        "choose prompts of medium difficulty, sample more answers, or filter groups with equal scores" + _SCORE,
    ),
    # a few long answers are normal; a larger share means that the limit affects what is learned
    Rule(
        ("response_length/clip_ratio",), cut_off,
        ("agentic.custom_envs.*.max_tokens_per_step|data.max_response_length", "reward.overlong_buffer.enable"),
        "answers reach the limit of tokens before they end, and are scored as far as they go",
        "if the samples that are cut off are right so far, allow longer answers; if the answers should be shorter, "
        "train longer or penalize long answers",
    ),
    Rule(
        ("program/prompt_length/clip_ratio",), HealthyRange(high=0.0, alarm_high=0.5),
        ("data.max_prompt_length", "data.max_response_length"),
        "first prompts of programs, tools included, are longer than data.max_prompt_length; the surplus is taken from "
        "the room of the answers, which may be one token or none",
        "raise data.max_prompt_length to program/prompt_length/max",
    ),
    # DAPO (arXiv:2503.14476): exploration ends when the entropy falls by an order of magnitude
    Rule(
        ("actor/entropy",), HealthyRange(low=0.1, alarm_low=0.02, of_start=True),
        ("actor.clip_ratio_high", "actor.entropy_coeff", "rollout.temperature", "actor.optim.lr"),
        "the answers of the policy hardly vary (entropy collapse), so there are no different answers to compare",
        "raise the upper clip range, the entropy coefficient or the temperature, or lower the learning rate",
    ),
    # 0.5 nats: each token is 1.6 times less likely under the reference
    Rule(
        ("actor/kl_loss", "critic/kl"), HealthyRange(high=0.5, alarm_high=5.0),
        ("actor.kl_loss_coef", "algorithm.kl_ctrl.kl_coef", "actor.optim.lr"),
        "the policy is far from the reference model",
        "raise the coefficient or lower the learning rate, if the policy should stay near the reference",
    ),
    # mostly below 0.2 in successful runs; gspo clips whole answers, so its values are higher
    Rule(
        ("actor/pg_clipfrac",), HealthyRange(high=0.3, alarm_high=0.6),
        ("actor.optim.lr", "actor.ppo_epochs", "actor.ppo_mini_batch_size", "actor.clip_ratio_high"),
        "many tokens are outside the clip range and give no gradient: the policy changes too much in one step",
        "lower the learning rate, use fewer epochs or mini-batches per batch, or widen the clip range",
    ),
    # 0: as good as a constant prediction; 1: perfect
    Rule(
        ("critic/vf_explained_var",), HealthyRange(low=0.0, alarm_low=-1.0),
        ("trainer.critic_warmup", "critic.optim.lr"),
        "the critic predicts worse than a constant, so the advantages are noise",
        "train the critic alone first, or raise its learning rate",
    ),
    Rule(
        ("*/grad_norm",), gradient_spikes, ("actor.optim.clip_grad", "actor.optim.lr"),
        "single batches have much larger gradients (long answers or unusual rewards), or the run begins to diverge",
        "look at the samples of these steps; lower the gradient clipping threshold or the learning rate",
    ),
    Rule(
        ("*/grad_norm_nonfinite", "*/empty_mini_batch_frac"), HealthyRange(high=0.0, alarm_high=0.1),
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
    # all memory is allocated after the first steps
    Rule(
        tuple(f"{role}/perf/{name}_gb" for role in ("actor", "train") for name in MEMORY),
        HealthyRange(high=1.5, alarm_high=3.0, of_start=True), ("data.max_response_length",),
        "a worker's memory grows from step to step: a leak, or increasingly long answers",
        "look at response_length/max first",
    ),
)  # fmt: skip

"""Findings on series made by hand: each rule where it is due and where it is not, its grade, cause and keys."""

from __future__ import annotations

import random

import pytest

from trainer.observe.health import RULES, judge
from trainer.observe.health_checks import BAD, LOOK, OK, Finding, HealthyRange, Series, in_range
from trainer.observe.metric_docs import metrics
from verl_lite.config import PPOConfig, schema_of


def steps(*values: float) -> list[tuple[int, float]]:
    return list(enumerate(values, start=1))


def noisy(*values: float) -> list[tuple[int, float]]:
    random.seed(1)
    return steps(*(value + random.gauss(0, 0.01) for value in values))


RISES = noisy(*(0.2 + 0.01 * i for i in range(60)))
FALLS = noisy(*(0.2 + 0.02 * i for i in range(30)), *(0.8 - 0.02 * i for i in range(30)))
FLAT = noisy(*[0.4] * 60)


def found_in(series: Series, options: dict[str, str] | None = None) -> list[Finding]:
    return [finding for finding in judge(series, options) if finding.grade != OK]


def test_the_table_is_short_and_names_options_and_metrics_that_there_are() -> None:
    assert len(RULES) <= 17
    keys = {one for rule in RULES for key in rule.keys for one in key.split("|") if "*" not in one}
    assert keys <= set(schema_of(PPOConfig).keys)
    healthy = {name: metric.healthy for metric in metrics() for name in metric.names}
    for rule in RULES:
        for name in (name for name in rule.metrics if isinstance(rule.check, HealthyRange) and "*" not in name):
            assert healthy[name] == rule.check.shown, f"METRICS.md says otherwise of {name}"


@pytest.mark.parametrize(
    ("metric", "fine", "sick", "grade", "key"),
    [
        ("actor/pg_clipfrac", 0.02, 0.4, LOOK, "actor.optim.lr"),
        ("actor/pg_clipfrac", 0.02, 0.7, BAD, "actor.ppo_epochs"),
        ("frac_reward_zero_std", 0.3, 0.95, BAD, "rollout.n"),
        ("response_length/clip_ratio", 0.0, 0.3, LOOK, "data.max_response_length"),
        ("program/prompt_length/clip_ratio", 0.0, 0.3, LOOK, "data.max_prompt_length"),
        ("program/prompt_length/clip_ratio", 0.0, 1.0, BAD, "data.max_prompt_length"),
        ("actor/kl_loss", 0.01, 6.0, BAD, "actor.kl_loss_coef"),
        ("training/rollout_probs_diff_mean", 1e-4, 0.02, BAD, "rollout.dtype"),
        ("reward/timeout_rate", 0.0, 0.2, BAD, "reward.timeout_s"),
        ("critic/vf_explained_var", 0.3, -0.5, LOOK, "critic.optim.lr"),
        ("actor/grad_norm_nonfinite", 0.0, 0.5, BAD, "actor.optim.lr"),
        ("val-aux/a/b/reward/error_rate", 0.0, 0.05, LOOK, "reward.timeout_s"),
        ("actor/perf/host_rss_gb", 4.0, 7.0, LOOK, "data.max_response_length"),
        ("actor/entropy", 2.0, 0.1, LOOK, "actor.entropy_coeff"),
    ],
)
def test_a_value_outside_its_range_is_found_with_numbers_steps_cause_and_key(
    metric: str, fine: float, sick: float, grade: str, key: str
) -> None:
    assert [finding.grade for finding in judge({metric: steps(*[fine] * 20)})] == [OK]
    (found,) = found_in({metric: steps(*[fine] * 15, *[sick] * 5)}, dict.fromkeys(schema_of(PPOConfig).keys, "7"))
    assert found.grade == grade and metric in found.text and f"{sick:.3g}" in found.text
    assert "5 of 20 steps (16 to 20)" in found.text and found.cause and f"{key}=7" in found.advice


@pytest.mark.parametrize(
    ("values", "grade"),
    [
        ([0.1] * 29 + [0.4], OK),  # a stray step
        ([0.4] + [0.1] * 29, OK),
        ([0.1] * 29 + [0.9], LOOK),  # a stray alarm
        ([0.1] * 26 + [0.4] * 4, LOOK),
        ([0.1] * 26 + [0.9] * 4, BAD),
        ([0.9] * 10 + [0.1] * 20, LOOK),  # an alarm that is past
        ([0.9], BAD),
        ([0.2], OK),
    ],
)
def test_how_long_and_how_late_make_the_grade(values: list[float], grade: str) -> None:
    assert in_range("x", steps(*values), HealthyRange(high=0.3, alarm_high=0.6)).grade == grade


def test_metrics_of_one_rule_are_one_finding_and_the_worst_comes_first() -> None:
    (found,) = found_in({f"val-aux/{name}/reward/error_rate": steps(0.0, 0.2) for name in "abcdef"})
    assert "likewise val-aux/b/reward/error_rate" in found.text and "and more" in found.text
    both = found_in({"actor/pg_clipfrac": steps(*[0.4] * 9), "reward/timeout_rate": steps(*[0.2] * 9)})
    assert [finding.grade for finding in both] == [BAD, LOOK]


def test_a_share_of_cut_off_answers_that_falls_by_half_is_no_problem() -> None:
    """A model that explains at first, although the reward wants a number only, learns to end in time."""
    shares = [0.9] * 10 + [0.5] * 20 + [0.45] * 10  # means of the quarters: 0.9 and 0.45
    (found,) = judge({"response_length/clip_ratio": steps(*shares)})
    assert found.grade == OK and "falls from 0.9 " in found.text and " to 0.45 in the last" in found.text
    (found,) = found_in({"response_length/clip_ratio": steps(*shares[:30], *[0.46] * 10)})
    assert found.grade == BAD and "above 0.1 in 40 of 40 steps" in found.text


CUT_OFF: Series = {"response_length/clip_ratio": steps(*[0.3] * 9)}
MAZE = "agentic.custom_envs.Maze.max_tokens_per_step"


@pytest.mark.parametrize(
    ("series", "options", "told"),
    [
        # main_sft calls actor.optim.lr so, and has no clip_grad here
        ({"train/grad_norm": steps(*[1.0] * 30, 12.0)}, {"optim.lr": "0.01", "data.seed": "1"}, "(now optim.lr=0.01)"),
        ({"train/grad_norm": steps(*[1.0] * 30, 12.0)}, {}, "threshold or the learning rate"),
        (CUT_OFF, {MAZE: "16", "data.max_response_length": "64"}, f"(now {MAZE}=16)"),
        (CUT_OFF, {MAZE: "null", "data.max_response_length": "64"}, "(now data.max_response_length=64)"),
    ],
)
def test_advice_ends_with_the_options_that_the_run_has_and_their_values(
    series: Series, options: dict[str, str], told: str
) -> None:
    (found,) = found_in(series, options)
    assert found.advice.endswith(told)


def validated(after: float) -> Series:
    name = "sums/acc/mean@1"  # the interval of the difference is 0.1
    return {f"val-core/{name}": [(0, 0.5), (10, after)], f"val-aux/{name}/ci95": [(0, 0.06), (10, 0.08)]}


def idle(trainer: float, engines: float) -> Series:
    """An asynchronous run with these idle shares in its second half, and others before."""
    shares = {"trainer": (1 - trainer, trainer), "engine": (1 - engines, engines)}
    return {f"async/{side}_idle_frac": steps(*[first] * 6, *[then] * 6) for side, (first, then) in shares.items()}


def loss(points: list[tuple[int, float]]) -> Series:
    return {"train/loss": [(step, 1 - value) for step, value in points]}


@pytest.mark.parametrize(
    ("series", "grades", "word"),
    [
        ({"critic/score/mean": FALLS}, [BAD, LOOK], "was best around step"),
        (loss(FALLS), [BAD, LOOK], "was best around step"),
        ({"critic/score/mean": FLAT}, [LOOK], "within random variation"),
        ({"critic/score/mean": RISES}, [], ""),
        (loss(RISES), [], ""),
        ({"critic/score/mean": FALLS[:10]}, [], ""),
        ({"critic/score/mean": noisy(*[0.98] * 60), "critic/score/max": steps(*[1.0] * 60)}, [], ""),  # at its best
        ({"actor/grad_norm": steps(*[1.0] * 30, 12.0, *[1.0] * 30)}, [LOOK], "12 at step 31"),
        ({"actor/grad_norm": steps(*[1.0] * 30, 3.0, *[1.0] * 30)}, [], ""),
        ({"actor/grad_norm": steps(1.0, 20.0)}, [], ""),
        ({"train/grad_norm_nonfinite": steps(0.0, 0.5, 1.0, 1.0)}, [BAD, BAD], "diverged: from step 3 on"),
        ({"train/grad_norm_nonfinite": steps(*[0.0] * 60, 1.0, 0.0)}, [LOOK], "in 1 of 62"),
        (validated(0.55), [LOOK], "cannot tell"),
        (validated(0.7), [], ""),
        (validated(0.3), [BAD], "interval +-0.100), worse"),
        ({name: points[:1] for name, points in validated(0.3).items()}, [], ""),
        (idle(0.6, 0.3), [LOOK], "waits for samples 60% of the time, and the engines are idle 30% of it: sampling"),
        (idle(0.1, 0.7), [], ""),
        (idle(0.1, 0.1), [], ""),
    ],
)
def test_what_needs_a_whole_series_is_found_where_it_is(series: Series, grades: list[str], word: str) -> None:
    found = found_in(series)
    assert [finding.grade for finding in found] == grades and word in "".join(finding.text for finding in found)


@pytest.mark.parametrize(
    ("trainer", "engines", "grade", "said"),
    [
        (0.6, 0.1, LOOK, "sampling limits the run"),
        (0.05, 0.7, OK, "training limits the run"),
        (0.1, 0.15, OK, "neither side limits the other"),
    ],
)
def test_which_side_of_an_asynchronous_run_waits(trainer: float, engines: float, grade: str, said: str) -> None:
    """By the second half of the run. Stale samples have other probabilities, which is no finding."""
    series = {
        "async/trainer_idle_frac": steps(*[0.3] * 10, *[trainer] * 10),
        "async/engine_idle_frac": steps(*[0.3] * 10, *[engines] * 10),
        "async/staleness/mean": steps(*[1.0] * 20),
        "training/rollout_probs_diff_mean": steps(*[0.05] * 20),
    }
    [found] = judge(series, {"async_training.max_off_policy_threshold": "1"})
    assert found.grade == grade and said in found.text and f"{trainer:.0%}" in found.text
    assert "async_training.max_off_policy_threshold=1" in found.advice or grade == OK

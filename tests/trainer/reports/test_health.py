"""Findings on series made by hand: each rule where it is due and where it is not, its grade, steps, cause and keys."""

from __future__ import annotations

import random

import pytest

from trainer.metric_docs import metrics
from trainer.reports.health import BAD, LOOK, OK, RULES, Finding, Range, Series, in_range, judge
from verl_lite.config import PPOConfig, schema_of

SHARE = Range(high=0.3, alarm_high=0.6)


def steps(*values: float) -> list[tuple[int, float]]:
    return list(enumerate(values, start=1))


def noisy(*values: float) -> list[tuple[int, float]]:
    random.seed(1)
    return steps(*(value + random.gauss(0, 0.01) for value in values))


RISES = noisy(*(0.2 + 0.01 * i for i in range(60)))
FALLS = noisy(*(0.2 + 0.02 * i for i in range(30)), *(0.8 - 0.02 * i for i in range(30)))
FLAT = noisy(*[0.4] * 60)


def found_in(series: Series, rule: int | None = None) -> list[Finding]:
    """What is not ok; rule: of this one only."""
    findings = judge(series) if rule is None else RULES[rule].apply(series)
    return [finding for finding in findings if finding.grade != OK]


def test_the_table_is_short_and_names_options_and_metrics_that_there_are() -> None:
    assert len(RULES) <= 15
    keys = {one for rule in RULES for key in rule.keys for one in key.split("|") if "*" not in one}
    assert keys <= set(schema_of(PPOConfig).keys)
    healthy = {name: metric.healthy for metric in metrics() for name in metric.names}
    for rule in RULES:
        for name in (name for name in rule.metrics if isinstance(rule.check, Range) and "*" not in name):
            assert healthy[name] == rule.check.shown, f"METRICS.md says otherwise of {name}"


@pytest.mark.parametrize(
    ("metric", "fine", "sick", "grade", "key"),
    [
        ("actor/pg_clipfrac", 0.02, 0.4, LOOK, "actor.optim.lr"),
        ("actor/pg_clipfrac", 0.02, 0.7, BAD, "actor.ppo_epochs"),
        ("frac_reward_zero_std", 0.3, 0.95, BAD, "rollout.n"),
        ("response_length/clip_ratio", 0.0, 0.3, LOOK, "data.max_response_length"),
        ("actor/kl_loss", 0.01, 6.0, BAD, "actor.kl_loss_coef"),
        ("training/rollout_probs_diff_mean", 1e-4, 0.02, BAD, "rollout.dtype"),
        ("reward/error_rate", 0.0, 0.01, LOOK, "reward.custom_reward_function.path"),
        ("reward/timeout_rate", 0.0, 0.2, BAD, "reward.timeout_s"),
        ("critic/vf_explained_var", 0.3, -0.5, LOOK, "critic.optim.lr"),
        ("actor/grad_norm_nonfinite", 0.0, 0.5, BAD, "actor.optim.lr"),
        ("val-aux/a/b/reward/error_rate", 0.0, 0.05, LOOK, "reward.timeout_s"),
        ("actor/perf/host_rss_gb", 4.0, 7.0, LOOK, "data.max_response_length"),
    ],
)
def test_a_value_outside_its_range_is_found_with_numbers_steps_cause_and_key(
    metric: str, fine: float, sick: float, grade: str, key: str
) -> None:
    assert [finding.grade for finding in judge({metric: steps(*[fine] * 20)})] == [OK]
    options = dict.fromkeys(schema_of(PPOConfig).keys, "7")
    (found,) = judge({metric: steps(*[fine] * 15, *[sick] * 5)}, options)
    assert found.grade == grade and found.steps == (16, 17, 18, 19, 20)
    assert metric in found.text and "5 of 20 steps (steps 16 to 20)" in found.text and f"{sick:.3g}" in found.text
    assert found.cause and f"{key}=7" in found.advice


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
    found = in_range("x", steps(*values), SHARE)
    assert found.grade == grade
    assert ("stray" in found.text) == (grade == OK and 0.4 in values)
    assert ("not since step 10" in found.text) == (values[:10] == [0.9] * 10)


def test_entropy_is_judged_by_its_first_value() -> None:
    (low,) = found_in({"actor/entropy": steps(2.0, *[0.5] * 5, *[0.1] * 5)})
    assert low.grade == LOOK and "below 0.1 times its first value 2" in low.text
    assert not found_in({"actor/entropy": steps(2.0, *[1.0] * 10)})
    assert not found_in({"actor/entropy": steps(0.0, *[1.0] * 10)}), "a first value of 0 has no multiples"


def test_metrics_of_one_rule_are_one_finding_and_the_worst_comes_first() -> None:
    series: Series = {f"val-aux/{name}/reward/error_rate": steps(0.0, 0.2) for name in "abcdef"}
    (found,) = found_in(series)
    assert "so do val-aux/b/reward/error_rate" in found.text and "and 2 more" in found.text
    both = found_in({"actor/pg_clipfrac": steps(*[0.4] * 9), "reward/timeout_rate": steps(*[0.2] * 9)})
    assert [finding.grade for finding in both] == [BAD, LOOK]


@pytest.mark.parametrize(
    ("series", "options", "told"),
    [
        # train_sft calls actor.optim.lr so, and has no clip_grad here
        ({"train/grad_norm": steps(*[1.0] * 30, 12.0)}, {"optim.lr": "0.01", "data.seed": "1"}, "(now optim.lr=0.01)"),
        ({"train/grad_norm": steps(*[1.0] * 30, 12.0)}, {}, "or lower the learning rate"),
        (
            {"response_length/clip_ratio": steps(*[0.3] * 9)},
            {"agentic.custom_envs.Maze.max_tokens_per_step": "16", "data.max_response_length": "64"},
            "(now agentic.custom_envs.Maze.max_tokens_per_step=16)",
        ),
        (
            {"response_length/clip_ratio": steps(*[0.3] * 9)},
            {"agentic.custom_envs.Maze.max_tokens_per_step": "null", "data.max_response_length": "64"},
            "(now data.max_response_length=64)",
        ),
    ],
)
def test_advice_ends_with_the_options_that_the_run_has_and_their_values(
    series: Series, options: dict[str, str], told: str
) -> None:
    (found,) = (finding for finding in judge(series, options) if finding.grade != OK)
    assert found.advice.endswith(told)


SAME, FALL, STAYS, VALIDATION, SPIKES = 0, 1, 2, 3, 12


@pytest.mark.parametrize(
    ("rule", "sick", "fine", "silent"),
    [
        (FALL, {"critic/score/mean": FALLS}, {"critic/score/mean": RISES}, {"critic/score/mean": FALLS[:10]}),
        (STAYS, {"critic/score/mean": FLAT}, {"critic/score/mean": RISES}, {"critic/score/mean": FLAT[:10]}),
        (
            SPIKES,
            {"actor/grad_norm": steps(*[1.0] * 30, 12.0, *[1.0] * 30)},
            {"actor/grad_norm": steps(*[1.0] * 30, 3.0, *[1.0] * 30)},
            {"actor/grad_norm": steps(1.0, 20.0)},
        ),
    ],
)
def test_trends_are_found_where_they_are(rule: int, sick: Series, fine: Series, silent: Series) -> None:
    (found,) = found_in(sick, rule)
    assert found.steps and [finding.grade for finding in RULES[rule].apply(fine)] == [OK]
    assert RULES[rule].apply(silent) == RULES[rule].apply({}) == []


def test_a_loss_that_rises_again_is_a_fall_and_one_that_sinks_is_not() -> None:
    (found,) = found_in({"train/loss": [(step, 1 - value) for step, value in FALLS]}, FALL)
    assert found.grade == BAD and "train/loss was best around step" in found.text
    assert not found_in({"train/loss": [(step, 1 - value) for step, value in RISES]})


def test_a_score_that_is_at_its_best_may_stay() -> None:
    assert not found_in({"critic/score/mean": noisy(*[0.98] * 60), "critic/score/max": steps(*[1.0] * 60)})


def test_one_score_for_every_answer() -> None:
    same: Series = {"critic/score/max": steps(0.0, 0.0, 0.0), "critic/score/min": steps(0.0, 0.0, 0.0)}
    (found,) = found_in(same)
    assert found.grade == BAD and "trainer.score" in found.advice
    assert not found_in({**same, "critic/score/max": steps(0.0, 1.0, 0.0)})


@pytest.mark.parametrize(
    ("after", "grade", "word"), [(0.55, LOOK, "cannot tell"), (0.7, OK, "Better"), (0.3, BAD, "Worse")]
)
def test_a_gain_of_the_validation_against_its_interval(after: float, grade: str, word: str) -> None:
    series: Series = {
        "val-core/sums/acc/mean@1": [(0, 0.5), (10, after)],
        "val-aux/sums/acc/mean@1/ci95": [(0, 0.06), (10, 0.08)],  # of the difference 0.1
    }
    (found,) = RULES[VALIDATION].apply(series)
    assert found.grade == grade and word in found.text and "interval +-0.100" in found.text
    once = {name: points[:1] for name, points in series.items()}
    assert RULES[VALIDATION].apply(once) == []

"""Findings on series made by hand: each one where it is due and where it is not, its grade, steps, cause and keys."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.metrics_reference import Reference
from trainer.reports import health_trends
from trainer.reports.findings import BAD, LOOK, OK, Finding, Series
from trainer.reports.health import in_range, judge, worst
from trainer.reports.health_trends import (
    entropy_goes_fast,
    gradient_spikes,
    same_score,
    score_falls,
    score_stays,
    validation_gain,
)
from verl_lite.config import PPOConfig, schema_of
from verl_lite.metric_docs import Health

REFERENCE = Reference.read()
SHARE = Health("too much", "do less", ("actor.optim.lr",), high=0.3, alarm_high=0.6)


def steps(*values: float) -> list[tuple[int, float]]:
    return list(enumerate(values, start=1))


def of(name: str, *values: float) -> list[Finding]:
    return [finding for finding in judge({name: steps(*values)}, reference=REFERENCE) if finding.metric == name]


# ---------------------------------------------------------------------------------------------- declared ranges


@pytest.mark.parametrize(
    ("metric", "fine", "sick", "grade", "key"),
    [
        ("actor/pg_clipfrac", 0.02, 0.4, LOOK, "actor.optim.lr"),
        ("actor/pg_clipfrac", 0.02, 0.7, BAD, "actor.ppo_epochs"),
        ("frac_reward_zero_std", 0.3, 0.95, BAD, "rollout.n"),
        ("response_length/clip_ratio", 0.0, 0.3, LOOK, "data.max_response_length"),
        ("actor/kl_loss", 0.01, 6.0, BAD, "actor.kl_loss_coef"),
        ("actor/ppo_kl", 0.0, -0.2, LOOK, "actor.optim.lr"),
        ("training/rollout_probs_diff_mean", 1e-4, 0.02, BAD, "rollout.dtype"),
        ("reward/error_rate", 0.0, 0.01, LOOK, "reward.custom_reward_function.path"),
        ("reward/timeout_rate", 0.0, 0.2, BAD, "reward.timeout_s"),
        ("rollout/idle_frac", 0.1, 0.5, LOOK, "rollout.max_num_seqs"),
        ("actor/grad_norm_nonfinite", 0.0, 0.5, BAD, "actor.optim.lr"),
        ("val-aux/a/b/reward/error_rate", 0.0, 0.05, LOOK, "reward.timeout_s"),
    ],
)
def test_a_value_outside_its_range_is_found_with_numbers_steps_cause_and_key(
    metric: str, fine: float, sick: float, grade: str, key: str
) -> None:
    assert [finding.grade for finding in of(metric, *[fine] * 20)] == [OK]
    (found,) = of(metric, *[fine] * 15, *[sick] * 5)
    assert found.grade == grade and found.steps == (16, 17, 18, 19, 20)
    assert metric in found.text and "5 of 20 steps (steps 16 to 20)" in found.text and f"{sick:.3g}" in found.text
    assert found.cause and key in found.keys and key in found.advice


def test_entropy_is_judged_by_its_first_value_from_below_and_from_above() -> None:
    below, above = of("actor/entropy", 2.0, *[0.5] * 5, *[0.1] * 5), of("actor/entropy", 1.0, *[4.0] * 10)
    assert sorted(finding.grade for finding in below) == [LOOK, OK] and "actor.entropy_coeff" in below[0].keys
    assert "below 0.1 times its first value 2" in below[0].text and "above 3 times" in above[0].text
    assert all(finding.grade == OK for finding in of("actor/entropy", 2.0, *[1.0] * 10))


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


def test_metrics_of_one_declaration_are_one_finding() -> None:
    series: Series = {f"val-aux/{name}/reward/error_rate": steps(0.0, 0.2) for name in "abcdef"}
    (found,) = worst(judge(series, reference=REFERENCE), 10)
    assert "so do val-aux/b/reward/error_rate" in found.text and "and 2 more" in found.text


def test_keys_come_with_the_values_of_the_run_and_only_where_it_has_them() -> None:
    series: Series = {"train/grad_norm": steps(1.0, *[20.0] * 9)}
    (found,) = worst(judge(series, {"optim.lr": "0.01", "data.seed": "1"}, REFERENCE), 1)
    assert found.keys == ("optim.lr=0.01",)  # train_sft calls actor.optim.lr so, and has no clip_grad here


def test_the_worst_comes_first() -> None:
    series: Series = {"rollout/idle_frac": steps(*[0.5] * 9), "reward/timeout_rate": steps(*[0.2] * 9)}
    assert [finding.grade for finding in worst(judge(series, reference=REFERENCE), 5)] == [BAD, LOOK]


def test_advice_shows_what_an_option_is_and_not_what_to_set() -> None:
    finding = Finding(LOOK, "grad_norm", "seen", change="lower the rate", keys=("actor.optim.lr",))
    assert finding.advice == "lower the rate (actor.optim.lr)"
    assert replace(finding, keys=("actor.optim.lr=0.1",)).advice == "lower the rate (now actor.optim.lr=0.1)"
    assert replace(finding, keys=()).advice == "lower the rate"


def test_advice_of_trends_names_options_that_there_are() -> None:
    """Each dotted word in the code of trends that is no metric is a key."""
    tree = ast.parse(Path(health_trends.__file__).read_text(encoding="utf-8"))
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    keys = {word for word in words if re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", word)}
    assert len(keys) >= 10 and keys <= set(schema_of(PPOConfig).keys)


# --------------------------------------------------------------------------------------------------------- trends


def noisy(*values: float, by: float = 0.01) -> list[tuple[int, float]]:
    random.seed(1)
    return steps(*(value + random.gauss(0, by) for value in values))


RISES = noisy(*(0.2 + 0.01 * i for i in range(60)))
FALLS = noisy(*(0.2 + 0.02 * i for i in range(30)), *(0.8 - 0.02 * i for i in range(30)))
FLAT = noisy(*[0.4] * 60)


@pytest.mark.parametrize(
    ("judge_it", "sick", "fine", "silent"),
    [
        (score_falls, {"critic/score/mean": FALLS}, {"critic/score/mean": RISES}, {"critic/score/mean": FALLS[:10]}),
        (score_stays, {"critic/score/mean": FLAT}, {"critic/score/mean": RISES}, {"critic/score/mean": FLAT[:10]}),
        (
            gradient_spikes,
            {"actor/grad_norm": steps(*[1.0] * 30, 12.0, *[1.0] * 30)},
            {"actor/grad_norm": steps(*[1.0] * 30, 3.0, *[1.0] * 30)},
            {"actor/grad_norm": steps(1.0, 20.0)},
        ),
    ],
)
def test_trends_are_found_where_they_are(
    judge_it: Callable[[Series], Finding | None], sick: Series, fine: Series, silent: Series
) -> None:
    found, well = judge_it(sick), judge_it(fine)
    assert found is not None and found.grade in (LOOK, BAD) and found.cause and found.keys and found.steps
    assert well is not None and well.grade == OK
    assert judge_it(silent) is None and judge_it({}) is None


def test_a_loss_that_rises_again_is_a_fall_and_one_that_sinks_is_not() -> None:
    sunk = [(step, 1 - value) for step, value in FALLS]
    found = score_falls({"train/loss": sunk})
    assert found is not None and found.grade == BAD and "train/loss was best around step" in found.text
    well = score_stays({"train/loss": [(step, 1 - value) for step, value in RISES]})
    assert well is not None and well.grade == OK


@pytest.mark.parametrize(
    ("others", "word", "key"),
    [
        ({"actor/pg_clipfrac": 0.0, "actor/approxkl": 1e-7}, "too slowly", "actor.optim.lr"),
        ({"actor/pg_clipfrac": 0.0, "actor/approxkl": 0.0}, "one optimizer step to a batch", "actor.optim.lr"),
        ({"frac_reward_zero_std": 0.8}, "teach nothing", "rollout.n"),
        ({"actor/pg_clipfrac": 0.1, "actor/approxkl": 0.01}, "not to what is rewarded", "actor.optim.lr"),
    ],
)
def test_why_a_score_stays_is_told_by_other_metrics(others: dict[str, float], word: str, key: str) -> None:
    series: Series = {"critic/score/mean": FLAT} | {name: steps(*[value] * 60) for name, value in others.items()}
    found = score_stays(series)
    assert found is not None and word in found.cause and key in found.keys


def test_a_score_that_is_at_its_best_may_stay() -> None:
    top = {"critic/score/mean": noisy(*[0.98] * 60), "critic/score/max": steps(*[1.0] * 60)}
    assert score_stays(top) is None


def test_an_entropy_that_goes_in_the_first_tenth() -> None:
    fast = entropy_goes_fast({"actor/entropy": steps(1.0, 0.6, 0.3, *[0.3] * 37)})
    assert fast is not None and fast.grade == LOOK and "from 1 to 0.3 by step 3" in fast.text
    assert entropy_goes_fast({"actor/entropy": steps(*(1 - 0.02 * i for i in range(40)))}) is None


def test_one_score_for_every_answer() -> None:
    same = {"critic/score/max": steps(0.0, 0.0, 0.0), "critic/score/min": steps(0.0, 0.0, 0.0)}
    found = same_score(same)
    assert found is not None and found.grade == BAD and "trainer.score" in found.advice
    assert same_score(same | {"critic/score/max": steps(0.0, 1.0, 0.0)}) is None


@pytest.mark.parametrize(
    ("after", "grade", "word"),
    [(0.55, LOOK, "cannot tell"), (0.7, OK, "Better"), (0.3, BAD, "Worse")],
)
def test_a_gain_of_the_validation_against_its_interval(after: float, grade: str, word: str) -> None:
    series: Series = {
        "val-core/sums/acc/mean@1": [(0, 0.5), (10, after)],
        "val-aux/sums/acc/mean@1/ci95": [(0, 0.06), (10, 0.08)],  # of the difference 0.1
    }
    found = validation_gain(series)
    assert found is not None and found.grade == grade and word in found.text and "interval +-0.100" in found.text


def test_a_single_validation_says_nothing() -> None:
    assert validation_gain({"val-core/sums/acc/mean@1": [(0, 0.5)], "val-aux/sums/acc/mean@1/ci95": [(0, 0.1)]}) is None

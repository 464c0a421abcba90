"""Validation metrics against enumeration of every resample, and against any order of the rows."""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from trainer.validation.metrics import best_of, majority_of, process_validation_metrics, validation_metrics
from trainer.validation.sample import Sample


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_best_of_equals_all_resamples(n):
    values = np.array([[0.0, 1.0, 1.0, 0.25], [3.0, -1.0, 2.0, 2.5]])
    mean, std = best_of(values, n)
    for row, found_mean, found_std in zip(values, mean, std, strict=True):
        draws = [max(draw) for draw in itertools.product(row, repeat=n)]
        assert found_mean == pytest.approx(np.mean(draws)) and found_std == pytest.approx(np.std(draws))


def test_majority_is_that_of_verl():
    """verl takes the first value of the ballot that most answers of a draw cast, the first of tied ones; here over all
    draws, there and in ours over 1,000."""
    values, ballots = np.array([1.0, 0.5, 1.0, 0.0, 0.25]), ["7", "7", "8", "9", None]
    outcomes = []
    for draw in itertools.product(range(5), repeat=4):
        cast: dict[str, list[float]] = {}
        for i in draw:
            cast.setdefault(str(ballots[i]), []).append(values[i])
        outcomes.append(max(cast.values(), key=len)[0])
    mean, std = majority_of(values, ballots, 4)
    assert mean == pytest.approx(np.mean(outcomes), abs=4 * np.std(outcomes) / 1000**0.5)
    assert std == pytest.approx(np.std(outcomes), abs=0.02)
    assert majority_of(values, ["x"] * 5, 4) == pytest.approx((np.mean(values), np.std(values))), "one ballot"
    assert majority_of(np.ones(5), ballots, 4) == pytest.approx((1.0, 0.0))


def test_names_and_means_by_hand():
    results = process_validation_metrics(
        ["s"] * 6, ["a", "a", "a", "b", "b", "b"], {"acc": [1, 0, 0, 1, 1, 1], "note": ["x"] * 6}
    )
    metrics = results["s"]["acc"]
    assert set(results["s"]) == {"acc"}
    assert set(metrics) == {"mean@3", "std@3", "mean@3/ci95", "best@3/ci95"} | {
        f"{kind}@{n}/{part}" for kind in ("best", "worst") for n in (2, 3) for part in ("mean", "std")
    } | {f"pass@{k}{part}" for k in (1, 2, 3) for part in ("", "/ci95")}
    assert metrics["mean@3"] == pytest.approx((1 / 3 + 1) / 2)
    assert metrics["std@3"] == pytest.approx((np.std([1, 0, 0]) + 0) / 2)
    assert metrics["best@2/mean"] == pytest.approx((5 / 9 + 1) / 2)
    assert metrics["worst@3/mean"] == pytest.approx((1 / 27 + 1) / 2)
    assert [metrics[f"pass@{k}"] for k in (1, 2, 3)] == pytest.approx([(1 / 3 + 1) / 2, (2 / 3 + 1) / 2, 1.0])
    # two prompts, 1/3 and 1: the mean's standard error is their distance over 2, and t with one degree is 12.706
    assert metrics["mean@3/ci95"] == pytest.approx(12.706 / 3, rel=1e-4)


def test_missing_values_are_left_out_and_names_keep_the_number_of_answers():
    results = process_validation_metrics(
        ["s"] * 5, ["a", "a", "b", "b", "b"], {"acc": [1.0, None, None, float("nan"), None]}
    )
    assert results == {"s": {"acc": results["s"]["acc"]}}
    assert results["s"]["acc"]["mean@2"] == 1.0  # prompt b has no value at all
    assert "mean@3" not in results["s"]["acc"]


SAMPLE = Sample(
    step=0, uid="a", data_source="s", input="", output="", gts="", score=1.0, response_length=1, finish_reason="stop",
    policy_version=0, extra={"acc": 1.0},
)  # fmt: skip


def samples(prompts: int = 6, answers: int = 4) -> list[Sample]:
    """Of two sources; the rewards of some have failed."""
    source, found = random.Random(1), []
    for p in (p for p in range(prompts) for _ in range(answers)):
        score, extra = source.random(), {"acc": source.random() < 0.5, "pred": source.choice("xyz")}
        score = None if source.random() < 0.1 else score
        found.append(replace(SAMPLE, uid=f"p{p}", data_source=f"source/{p % 2}", score=score, extra=extra))
    return found


def test_sections_and_prefix():
    metrics = validation_metrics(samples())
    core = {name.removeprefix("val-core/source/0/") for name in metrics if name.startswith("val-core/source/0/")}
    assert core == {"acc/mean@4", "acc/best@4/mean", "acc/best@4/std", "acc/maj@4/mean", "acc/maj@4/std"}
    for name in ("acc/best@2/mean", "acc/worst@4/mean", "acc/std@4", "reward/mean@4", "reward/best@4/mean"):
        assert f"val-aux/source/1/{name}" in metrics
    prefixed = validation_metrics(samples(), prefix="greedy/")
    starts = tuple(f"val-aux/{source}/greedy/" for source in ("source/0", "source/1"))
    assert all(name.startswith(starts) for name in prefixed)
    assert prefixed["val-aux/source/0/greedy/acc/mean@4"] == metrics["val-core/source/0/acc/mean@4"]


def test_failed_rewards_are_not_zeros():
    failed = replace(SAMPLE, score=None, extra={"acc": 0.0})
    metrics = validation_metrics([SAMPLE, failed, SAMPLE, replace(failed, timed_out=True)])
    assert metrics["val-core/s/acc/mean@4"] == 1.0 and metrics["val-aux/s/reward/mean@4"] == 1.0
    assert metrics["val-aux/s/reward/error_rate"] == 0.5 and metrics["val-aux/s/reward/timeout_rate"] == 0.25
    assert metrics["val-aux/s/acc/pass@2"] == 1.0
    assert "val-aux/s/acc/pass@4" not in metrics, "two answers are left to the only prompt"


def test_pass_at_k_is_only_of_outcomes_and_never_core():
    given = samples(prompts=6, answers=5)
    metrics = validation_metrics(given)
    names = [name for name in metrics if "pass@" in name]
    assert {name.split("/")[0] for name in names} == {"val-aux"}
    assert {name.split("/")[-1] for name in names} - {"ci95"} == {"pass@1", "pass@2", "pass@4", "pass@5"}
    assert all("/acc/" in name for name in names), "the score of these rows is no outcome"
    by_uid: dict[str, list[float]] = {}
    for row in given:
        if row.data_source == "source/0" and row.score is not None:
            by_uid.setdefault(row.uid, []).append(row.extra["acc"])
    drawn = [[any(pair) for pair in itertools.combinations(acc, 2)] for acc in by_uid.values()]
    assert metrics["val-aux/source/0/acc/pass@2"] == pytest.approx(np.mean([np.mean(pairs) for pairs in drawn]))


def test_the_order_of_rows_does_not_matter():
    given = samples(prompts=9, answers=5)
    straight = validation_metrics(given)
    for seed in range(3):
        shuffled = given.copy()
        random.Random(seed).shuffle(shuffled)
        assert validation_metrics(shuffled) == straight


def test_the_predictions_of_parts_of_the_reward_are_no_metric_either() -> None:
    entries = {"reward": [1.0, 0.0], "math.pred": [72.0, 71.0], "pred": [72.0, 71.0]}
    assert set(process_validation_metrics(["s", "s"], ["a", "b"], entries)["s"]) == {"reward"}

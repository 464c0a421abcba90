"""Rollout correction against plain loops: weights, every rejection, every metric; and what must never matter."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, pstdev, stdev

import pytest
import torch

from verl_lite.config import RolloutCorrectionConfig
from verl_lite.config.rollout_correction import REJECTION_OPTIONS, WEIGHT_LEVELS, Correction, Rejection, Weighting
from verl_lite.metrics import combine, values
from verl_lite.rollout_correction import correct_rollout, keep_rewards, mismatch_metrics

ROWS, WIDTH = 8, 9
Rows = list[list[float | None]]  # None where the mask is 0


def batch(seed: int = 0, spread: float = 0.4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of both and a ragged mask, in fp64: holes, an empty row, a row of one token; NaN under mask 0."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, WIDTH + 1, (ROWS,), generator=generator)
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    mask[0] = torch.tensor([1, 1, 0, 0, 1, 0, 1, 1, 1])
    mask[3] = 0
    mask[5] = torch.tensor([0, 0, 1, 0, 0, 0, 0, 0, 0])
    rollout = -torch.rand(ROWS, WIDTH, generator=generator, dtype=torch.float64) * 2 - 0.1
    old = rollout + spread * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    rollout[mask == 0], old[mask == 0] = math.nan, math.nan
    return old, rollout, mask


def ragged(tensor: torch.Tensor, mask: torch.Tensor) -> Rows:
    return [
        [float(v) if m else None for v, m in zip(*row, strict=True)]
        for row in zip(tensor.tolist(), mask.tolist(), strict=True)
    ]


def log_ratios(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor) -> Rows:
    return ragged((old - rollout).clamp(-20, 20), mask)


def filled(rows: Rows) -> list[list[float]]:
    """The numbers of each row that has any."""
    return [numbers for row in rows if (numbers := [value for value in row if value is not None])]


def of_rows(means: list[float], judged: list[float], low: float, high: float, centre: float) -> dict[str, float]:
    """The metrics of sequences. judged: of each, what the bounds are for."""
    return {
        "seq_mean": fmean(means),
        "seq_std": stdev(means),
        "seq_max": max(means),
        "seq_min": min(means),
        "seq_max_deviation": max(abs(mean - centre) for mean in means),
        "seq_fraction_high": fmean(one > high for one in judged),
        "seq_fraction_low": fmean(one < low for one in judged),
    }


def units(row: list[float | None], level: str) -> list[list[int]]:
    """What has one statistic: positions of each token, of each run, or of all tokens."""
    valid = [t for t, value in enumerate(row) if value is not None]
    if level == "token":
        return [[t] for t in valid]
    if level == "segment":
        starts = [place for place, t in enumerate(valid) if t - 1 not in valid]
        return [valid[start:end] for start, end in pairwise([*starts, len(valid)])]
    return [valid] if valid else []


def naive_over(rows: Rows, level: str) -> Rows:
    fold = {"seq_sum": sum, "seq_max": max}.get(level, fmean)
    result: Rows = [[None] * len(row) for row in rows]
    for row, out in zip(rows, result, strict=True):
        for unit in units(row, level):
            for t in unit:
                out[t] = fold([row[u] for u in unit])
    return result


def naive_weights(rows: Rows, level: str, upper: float, lower: float | None, normalize: bool) -> list[list[float]]:
    exponents = naive_over(rows, level)
    weights = [[0.0 if x is None else math.exp(min(20.0, max(-20.0, x))) for x in row] for row in exponents]
    for row in weights:
        for t, w in enumerate(row):
            row[t] = min(w, upper) if lower is None else (w if lower <= w <= upper else 0.0)
    if normalize:
        one_each = [out[unit[0]] for row, out in zip(rows, weights, strict=True) for unit in units(row, level)]
        weights = [[w / fmean(one_each) for w in row] for row in weights]
    return weights


MEASURES = {
    "k1": lambda x, d: -x,
    "ratio": lambda x, d: x,
    "k2": lambda x, d: x * x / 2,
    "k3": lambda x, d: math.exp(x) - 1 - x,
    "diff": lambda x, d: d,
}


def naive_statistic(old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor, option: str) -> Rows:
    level, _, measure = option.rpartition("_")
    ratios, differences = log_ratios(old, rollout, mask), ragged(old.exp() - rollout.exp(), mask)
    measured = [
        [None if x is None else MEASURES[measure](x, d) for x, d in zip(*pair, strict=True)]
        for pair in zip(ratios, differences, strict=True)
    ]
    return naive_over(measured, level)


# ---------------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("threshold", ["1.3", "0.7_1.3"])
@pytest.mark.parametrize("name", sorted(WEIGHT_LEVELS))
def test_weights_and_their_metrics_are_those_of_a_plain_loop(name: str, threshold: str) -> None:
    old, rollout, mask = batch(seed=5, spread=1.5)
    level = WEIGHT_LEVELS[name]
    lower = float(threshold.split("_")[0]) if "_" in threshold else None
    low = 1 / 1.3 if lower is None else lower
    x = log_ratios(old, rollout, mask)
    raw = naive_weights(x, level, math.inf, None, False)
    weights = naive_weights(x, level, 1.3, lower, False)
    valid = [(r, t) for r in range(ROWS) for t in range(WIDTH) if mask[r, t]]
    per_unit = [raw[r][unit[0]] for r in range(ROWS) for unit in units(x[r], level)]
    applied, before = [weights[r][t] for r, t in valid], [raw[r][t] for r, t in valid]
    by_row, raw_by_row = (
        [fmean(w[r][t] for t in range(WIDTH) if mask[r, t]) for r in range(ROWS) if mask[r].any()]
        for w in (weights, raw)
    )
    extremes = before if level in ("seq_sum", "seq_mean") else applied
    mean = fmean(applied)
    expected = {
        "mean": mean,
        "std": pstdev(applied),
        "max": max(extremes),
        "min": min(extremes),
        "eff_sample_size": 1 / fmean((w / mean) ** 2 for w in applied),
        "ratio_fraction_high": fmean(w > 1.3 for w in per_unit),
        "ratio_fraction_low": fmean(w < low for w in per_unit),
        **of_rows(by_row, raw_by_row, low, 1.3, centre=1),
    }
    if lower is not None:
        expected["oob_ratio"] = fmean(not lower <= w <= 1.3 for w in before)
    options = RolloutCorrectionConfig(rollout_is=name, rollout_is_threshold=threshold)
    found_weights, kept, metrics = correct_rollout(old, rollout, mask, options)
    assert found_weights is not None and torch.equal(kept, mask), "weights reject nothing"
    torch.testing.assert_close(found_weights, torch.tensor(weights, dtype=torch.float64), rtol=1e-9, atol=1e-12)
    normal = correct_rollout(old, rollout, mask, replace(options, rollout_is_batch_normalize=True))[0]
    expected_normal = torch.tensor(naive_weights(x, level, 1.3, lower, True), dtype=torch.float64)
    torch.testing.assert_close(normal, expected_normal, rtol=1e-9, atol=1e-12)
    found = values(metrics)
    prefix = "rollout_corr/rollout_is_"
    assert {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)} == pytest.approx(expected)
    assert found["actor/is_weight_clipfrac"] == pytest.approx(fmean(w > 1.3 for w in before))
    assert 0 < expected["ratio_fraction_high"] < 1 and 0 < expected["ratio_fraction_low"] < 1


def test_the_sum_over_a_row_is_held_below_20() -> None:
    """Three log-ratios of 15."""
    old = torch.zeros(1, 3, dtype=torch.float64)
    options = Correction(Weighting("seq_sum", upper=math.inf))
    weights, _, metrics = correct_rollout(old, old - 15, torch.ones(1, 3), options)
    assert weights is not None and weights.tolist() == [pytest.approx([math.exp(20)] * 3)]
    found = values(metrics)
    assert found["rollout_corr/chi2_seq"] == pytest.approx(math.expm1(40))
    assert found["actor/train_infer_ratio_sequence_mean"] == pytest.approx(math.exp(20))


# ---------------------------------------------------------------------------------------------------- rejection


@pytest.mark.parametrize("option", REJECTION_OPTIONS)
def test_each_rejection_and_its_metrics_are_those_of_a_plain_loop(option: str) -> None:
    old, rollout, mask = batch(seed=6)
    level, _, measure = option.rpartition("_")
    text = {"k1": "0.8_1.3", "ratio": "0.8_1.3", "diff": "-0.1_0.1"}.get(measure, "0.05")
    options = RolloutCorrectionConfig(rollout_rs=option, rollout_rs_threshold=text)
    low, high = {"0.8_1.3": (math.log(0.8), math.log(1.3)), "-0.1_0.1": (-0.1, 0.1)}.get(text, (-math.inf, 0.05))
    statistic = naive_statistic(old, rollout, mask, option.replace("batch", "token"))
    tokens = [s for row in filled(statistic) for s in row]
    by_row = [fmean(row) for row in filled(statistic)]
    per_unit = [
        statistic[r][unit[0]] for r in range(ROWS) for unit in units(statistic[r], level.replace("batch", "token"))
    ]
    largest = high
    if level == "batch":  # the largest token whose mean with all smaller ones is within the bound
        largest = max(s for s in tokens if fmean(other for other in tokens if other <= s) <= high)
    lost = [not low <= s <= largest for s in tokens]
    lost_rows = [any(not low <= s <= largest for s in row) for row in filled(statistic)]
    expected = {
        "mean": fmean(tokens),
        "std": pstdev([min(max(s, low), high) for s in tokens]),
        "max": max(tokens),
        "min": min(tokens),
        "fraction_high": fmean(s > high for s in per_unit),
        "fraction_low": fmean(s < low for s in per_unit),
        **of_rows(by_row, by_row, low, high, centre=0),
        "masked_fraction": fmean(lost),
        "seq_masked_fraction": fmean(lost_rows),
    }
    weights, kept, metrics = correct_rollout(old, rollout, mask, options)
    assert kept.tolist() == [[int(s is not None and low <= s <= largest) for s in row] for row in statistic]
    assert weights is None and kept.dtype == mask.dtype
    assert 0 < kept.sum() < mask.sum(), "the case says something: some pass and some do not"
    found = values(metrics)
    prefix = f"rollout_corr/rollout_rs_{option}_"
    assert {k.removeprefix(prefix): v for k, v in found.items() if k.startswith(prefix)} == pytest.approx(expected)
    assert found["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(fmean(lost))
    assert found["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(fmean(lost_rows))
    assert found["actor/train_infer_final_mask_mean"] == pytest.approx(1 - fmean(lost))
    roll = f"actor/train_infer_{ {v: k for k, v in WEIGHT_LEVELS.items()}.get(level) }_{measure}_mask_mean"
    assert found.get(roll) == (pytest.approx(1 - fmean(lost)) if measure in ("ratio", "diff") else None)


def test_rejection_by_hand() -> None:
    """k1 bounds pi_rollout / pi_trainer, as in verl; ratio bounds pi_trainer / pi_rollout, as in ROLL."""
    old = torch.tensor([[0.0, math.log(0.4), math.log(2.5)], [0.0, math.log(1.2), math.log(0.9)]])
    rollout, mask = torch.zeros(2, 3), torch.ones(2, 3)

    def kept(name: str, text: str) -> list[list[int]]:
        options = RolloutCorrectionConfig(rollout_rs=name, rollout_rs_threshold=text)
        return correct_rollout(old, rollout, mask, options)[1].int().tolist()

    assert kept("token_k1", "2.0") == [[1, 0, 0], [1, 1, 1]], "a single number is (1/2, 2)"
    assert kept("token_k1", "0.3_2.0") == [[1, 0, 1], [1, 1, 1]]
    assert kept("token_ratio", "0.3_2.0") == [[1, 1, 0], [1, 1, 1]]
    assert kept("seq_sum_k1", "1.01") == [[1, 1, 1], [0, 0, 0]], "0.4 * 2.5 = 1; 1.2 * 0.9 = 1.08"
    assert kept("seq_mean_k1", "1.03") == [[1, 1, 1], [1, 1, 1]], "1.08^(1/3) = 1.026"
    assert kept("token_k2", "0.42") == [[1, 1, 1], [1, 1, 1]], "log(2.5)^2 / 2 = 0.4198"
    assert kept("token_k3", "0.5") == [[1, 1, 0], [1, 1, 1]], "0.4 - 1 - log 0.4 = 0.316; 2.5 - 1 - log 2.5 = 0.584"
    assert kept("seq_max_k3", "0.5") == [[0, 0, 0], [1, 1, 1]]
    assert kept("token_diff", "0.6") == [[1, 1, 0], [1, 1, 1]], "0.4 - 1 = -0.6 is in"


def test_m2po_rejects_the_largest_tokens_of_the_batch() -> None:
    """x^2 = 1, 0.16, 0.04, 0.01 in two rows, and 4 under mask 0. The means without the largest tokens are 0.3025, 0.07,
    0.025 and 0.01; the first below tau = 0.04 leaves the last two tokens, as AReaL's m2_threshold=0.04 does. tau of x^2
    is 0.02 of k2 = x^2 / 2."""
    log_ratio = torch.tensor([[1.0, -0.2, 2.0], [0.1, -0.4, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])

    def kept(threshold: str) -> list[list[int]]:
        options = RolloutCorrectionConfig(rollout_rs="batch_k2", rollout_rs_threshold=threshold)
        return correct_rollout(log_ratio, torch.zeros_like(log_ratio), mask, options)[1].tolist()

    assert kept("0.02") == [[0, 1, 0], [1, 0, 0]]
    assert kept("0.036") == [[0, 1, 0], [1, 1, 0]]
    assert kept("0.16") == [[1, 1, 0], [1, 1, 0]]
    assert kept("0.001") == [[0, 0, 0], [0, 0, 0]]


def test_bounds_are_included() -> None:
    half = Correction(rejections=(Rejection("token", "k2", -math.inf, 0.5), Rejection("token", "ratio", -1.0, 1.0)))
    log_ratio = torch.tensor([[1.0, -1.0, 1.0001, -1.0001]], dtype=torch.float64)
    kept = correct_rollout(log_ratio, torch.zeros_like(log_ratio), torch.ones(1, 4), half)[1]
    assert kept.tolist() == [[1, 1, 0, 0]]
    edge = Correction(Weighting("token", upper=math.e, lower=1 / math.e))
    weights = correct_rollout(log_ratio, torch.zeros_like(log_ratio), torch.ones(1, 4), edge)[0]
    assert weights is not None and (weights != 0).tolist() == [[True, True, False, False]]


# ---------------------------------------------------------------------------------------------------- never matter

EVERYTHING = [
    RolloutCorrectionConfig(
        rollout_is=name,
        rollout_is_threshold="0.5_1.5",
        rollout_is_batch_normalize=True,
        rollout_rs="token_k1,seq_mean_k3,segment_diff",
        rollout_rs_threshold="1.5,0.1,0.2",
    )
    for name in sorted(WEIGHT_LEVELS)
]


@pytest.mark.parametrize("options", EVERYTHING, ids=lambda options: options.rollout_is)
def test_order_padding_and_empty_rows_do_not_matter(options: RolloutCorrectionConfig) -> None:
    old, rollout, mask = batch()
    weights, kept, metrics = correct_rollout(old, rollout, mask, options)
    assert weights is not None
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3))

    def widened(tensor: torch.Tensor, filler: float) -> torch.Tensor:
        """Rows in another order, two columns before and one after, three rows more."""
        padded = torch.full((ROWS + 3, WIDTH + 3), filler, dtype=tensor.dtype)
        padded[:ROWS, 2:-1] = tensor[order]
        return padded

    nan = math.nan
    again = correct_rollout(widened(old, nan), widened(rollout, nan), widened(mask, 0), options)
    assert again[0] is not None
    torch.testing.assert_close(again[0], widened(weights, 0.0), rtol=1e-12, atol=0)
    assert torch.equal(again[1], widened(kept, 0))
    assert values(again[2]) == pytest.approx(values(metrics), rel=1e-9, abs=1e-12)
    assert all(map(math.isfinite, values(metrics).values()))


@pytest.mark.parametrize("options", EVERYTHING, ids=lambda options: options.rollout_is)
def test_a_batch_without_a_token_has_no_weight_no_metric_and_no_nan(options: RolloutCorrectionConfig) -> None:
    nothing = torch.full((3, 4), math.nan)
    weights, kept, metrics = correct_rollout(nothing, nothing, torch.zeros(3, 4, dtype=torch.long), options)
    assert weights is not None and not weights.any() and not kept.any()
    assert values(metrics) == {"rollout_corr/rollout_is_batch_norm_factor": 1.0}


def test_a_sum_over_parts_is_the_whole() -> None:
    """What is not `last` may be computed in parts: bypass_mode does."""
    old, rollout, mask = batch()
    for options in EVERYTHING:
        options = replace(options, rollout_is_batch_normalize=False)
        weights, kept, metrics = correct_rollout(old, rollout, mask, options)
        parts = [correct_rollout(old[r], rollout[r], mask[r], options) for r in (slice(0, 3), slice(3, 4), slice(4, 8))]
        assert weights is not None
        assert torch.equal(torch.cat([part[0] for part in parts]), weights)  # type: ignore[misc]
        assert torch.equal(torch.cat([part[1] for part in parts]), kept)
        whole = {name: metric for name, metric in metrics.items() if metric.reduction != "last"}
        merged = combine(part[2] for part in parts)
        assert values({name: merged[name] for name in whole}) == pytest.approx(values(whole), rel=1e-9, abs=1e-12)
        assert {name.removeprefix("rollout_corr/") for name in set(metrics) - set(whole)} == {
            "rollout_is_std", "rollout_is_seq_std", "rollout_is_eff_sample_size",
            *(f"rollout_rs_{option}_{kind}" for option in options.rollout_rs.split(",") for kind in ("std", "seq_std")),
        }  # fmt: skip


# ---------------------------------------------------------------------------------------------------- metrics


def test_mismatch_metrics_are_those_of_a_plain_loop() -> None:
    old, rollout, mask = batch(seed=4)
    x = log_ratios(old, rollout, mask)
    tokens = [value for row in filled(x) for value in row]
    new_rows, roll_rows = ([fmean(row) for row in filled(ragged(t, mask))] for t in (old, rollout))
    change = [b - a for a, b in zip(new_rows, roll_rows, strict=True)]
    expected = {
        "kl": -fmean(tokens),
        "k3_kl": fmean(math.exp(v) - 1 - v for v in tokens),
        "chi2_token": fmean(math.exp(2 * v) for v in tokens) - 1,
        "chi2_seq": fmean(math.exp(2 * sum(row)) for row in filled(x)) - 1,
        "training_ppl": fmean(math.exp(-v) for v in new_rows),
        "training_log_ppl": -fmean(new_rows),
        "rollout_ppl": fmean(math.exp(-v) for v in roll_rows),
        "rollout_log_ppl": -fmean(roll_rows),
        "log_ppl_diff": fmean(change),
        "log_ppl_abs_diff": fmean(map(abs, change)),
        "log_ppl_diff_max": max(change),
        "log_ppl_diff_min": min(change),
        "ppl_ratio": fmean(map(math.exp, change)),
    }
    assert len(new_rows) == ROWS - 1
    found = values(mismatch_metrics(old, rollout, mask))
    assert found == pytest.approx({f"rollout_corr/{name}": value for name, value in expected.items()})
    alone = {f"rollout_corr/{name}": expected[name] for name in ("training_ppl", "training_log_ppl")}
    assert values(mismatch_metrics(old, None, mask)) == pytest.approx(alone), "what needs no rollout"


# ---------------------------------------------------------------------------------------------------- ROLL


def test_rolls_statistics_are_those_of_a_plain_loop() -> None:
    old, rollout, mask = batch(seed=7)
    found = values(correct_rollout(old, rollout, mask, RolloutCorrectionConfig())[2])
    x, d = log_ratios(old, rollout, mask), ragged(old.exp() - rollout.exp(), mask)
    for name, level in WEIGHT_LEVELS.items():
        ratio = [[None if v is None else math.exp(v) for v in row] for row in naive_over(x, level)]
        for kind, rows in (("ratio", ratio), ("diff", naive_over(d, level))):
            by_row = [fmean(row) for row in filled(rows)]
            assert found[f"actor/train_infer_{kind}_{name}_mean"] == pytest.approx(fmean(by_row)), (kind, name)


# ---------------------------------------------------------------------------------------------------- rewards


def test_rewards_of_rejected_tokens_reach_the_tokens_before() -> None:
    nan = math.nan
    rewards = torch.tensor([[0.5, 0.0, 3.0, nan], [1.0, 2.0, 4.0, 0.0], [0.0, 7.0, 0.0, 5.0], [1.0, 1.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 0, 0]])
    kept = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]])
    expected = torch.tensor([[0.5, 3.0, 0.0, nan], [1.0, 6.0, 0.0, 0.0], [0.0, 7.0, 0.0, 5.0], [1.0, 1.0, 0.0, 0.0]])
    torch.testing.assert_close(keep_rewards(rewards, mask, kept), expected, equal_nan=True)

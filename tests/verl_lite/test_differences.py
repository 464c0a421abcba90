"""Where we differ from verl and ROLL on purpose: one test for each number of the list in verl_lite/README.md."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.test_fit import Parts, make
from trainer.ppo.advantage import estimate_advantages
from verl_lite.algos.covariance_losses import select_clip_cov, select_kl_cov
from verl_lite.config import ActorConfig, AlgorithmConfig, PolicyLossConfig
from verl_lite.contracts import check_policy_loss, estimator_batch, hide, loss_batch
from verl_lite.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    AdaptiveKLController,
    agg_loss,
    apply_kl_penalty,
    clip_range,
    compute_gae_advantage_return,
    compute_value_loss,
    get_policy_loss_fn,
    masked_whiten,
)
from verl_lite.protocol import DataProto, as_column

LOSS_ARGUMENTS = ("old_log_prob", "log_prob", "advantages", "response_mask")


def estimate(name: str, rewards: Any, mask: Any, **more: Any) -> torch.Tensor:
    rewards, mask = torch.tensor(rewards, dtype=torch.float64), torch.tensor(mask)
    return ADV_ESTIMATOR_REGISTRY[name](token_level_rewards=rewards, response_mask=mask, **more)[0]


def loss_of(name: str, columns: dict[str, Any], config: Any, **more: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    return get_policy_loss_fn(name)(*(columns[key] for key in LOSS_ARGUMENTS), "token-mean", config, **more)


def one_token(log_ratio: float, advantage: float) -> dict[str, torch.Tensor]:
    return dict(zip(LOSS_ARGUMENTS, torch.tensor([-1.0, log_ratio - 1, advantage, 1.0]).view(4, 1, 1), strict=True))


def test_1_rows_without_a_token_count_nowhere() -> None:
    rewards, index = [[4.0], [0.0], [9.0]], ["a", "a", "a"]
    # mean of 4 and 0, of two rows; gpg: alpha = 2 rows / 1 row with a score
    given = {"mask": [[1], [1], [0]], "index": index, "norm_adv_by_std_in_grpo": False}
    assert estimate("grpo", rewards, **given).flatten().tolist() == [2.0, -2.0, 0.0]
    assert estimate("gpg", rewards, **given).flatten().tolist() == [4.0, -4.0, 0.0]
    losses, mask = torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([[1], [1], [0]])
    for mode in ("seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"):
        assert agg_loss(losses, mask, mode).item() == 2.0


def test_2_values_under_the_mask_are_not_read_and_results_are_0_there() -> None:
    columns = estimator_batch()
    names = ("token_level_rewards", "values", "response_mask")
    clean, poisoned = ({name: given[name] for name in names} for given in (columns, hide(columns, math.nan)))
    for found, expected in zip(
        compute_gae_advantage_return(**poisoned), compute_gae_advantage_return(**clean), strict=True
    ):
        assert torch.equal(found, expected) and not found[columns["response_mask"] == 0].any()


def test_3_all_losses_divide_by_counts_of_the_whole_mini_batch() -> None:
    check_policy_loss(POLICY_LOSS_REGISTRY["geo_mean"])
    rows = torch.tensor([[1.0, 3.0], [5.0, 0.0]])
    mask, zeros = torch.tensor([[1, 1], [1, 0]]), torch.zeros(2, 2)
    counts = {"batch_num_tokens": 3, "global_batch_size": 2}
    whole, _ = compute_value_loss(rows, zeros, rows, mask, 9.0, **counts)
    parts = [compute_value_loss(*(x[i : i + 1] for x in (rows, zeros, rows, mask)), 9.0, **counts)[0] for i in (0, 1)]
    assert whole.item() == pytest.approx((1 + 9 + 25) / 2 / 3) == sum(part.item() for part in parts)
    # seq-mean-token-sum-norm divides by sequences too; token-mean applies the mask
    assert agg_loss(rows, mask, "seq-mean-token-sum-norm").item() == pytest.approx((4 + 5) / 2 / 2)
    assert agg_loss(rows + 100 * (1 - mask), mask, "token-mean").item() == pytest.approx(9 / 3)


def test_4_clip_ratio_applies_by_itself() -> None:
    assert clip_range(ActorConfig(clip_ratio=0.05)) == (0.05, 0.05)
    loss, _ = loss_of("vanilla", one_token(math.log(1.5), 1.0), ActorConfig(clip_ratio=0.05))
    assert loss.item() == pytest.approx(-1.05)
    loss, _ = loss_of("vanilla", one_token(math.log(1.5), 1.0), ActorConfig(clip_ratio=0.05, clip_ratio_high=0.3))
    assert loss.item() == pytest.approx(-1.3)


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_5_fewer_than_two_tokens_are_left_unwhitened(name: str) -> None:
    values = torch.zeros(1, 2, dtype=torch.float64)
    found = estimate(name, [[0.0, 3.0]], [[0, 1]], values=values, index=["a"])
    assert found.tolist() == [[0.0, 3.0]]
    with pytest.raises(ValueError, match="needs at least 2"):
        masked_whiten(torch.ones(2), torch.tensor([0, 1]))


def test_6_grpo_vectorized_heeds_its_option() -> None:
    given = {"index": ["a", "a"], "norm_adv_by_std_in_grpo": False}
    assert estimate("grpo_vectorized", [[4.0], [0.0]], [[1], [1]], **given).flatten().tolist() == [2.0, -2.0]


def test_7_a_failed_reward_does_not_stop_pass_at_k() -> None:
    assert estimate("grpo_passk", [[4.0], [0.0]], [[1], [0]], index=["a", "a"]).tolist() == [[0.0], [0.0]]
    with pytest.raises(ValueError, match="a group of one row"):
        estimate("grpo_passk", [[4.0]], [[1]], index=["a"])


def test_8_a_reward_that_is_no_number_stops_gdpo() -> None:
    config = SimpleNamespace(gdpo_reward_keys=["format"])
    with pytest.raises(ValueError, match="'format' is no finite number in 1 rows"):
        columns = {"format": np.array([1.0, math.nan])}
        estimate("gdpo", [[0.0], [0.0]], [[1], [1]], index=["a", "a"], config=config, non_tensor_batch=columns)


def test_9_weights_of_the_token_baseline_are_not_negative() -> None:
    """w = -1/2 (impossible but for rounding) counts 0, so that B = (0 * 3 + 1 * 1) / 1."""
    probabilities = torch.tensor([[1.0], [0.5]], dtype=torch.float64)
    given = {"old_log_probs": probabilities.log(), "sum_pi_squared": torch.tensor([[0.5], [1.0]], dtype=torch.float64)}
    found = estimate("optimal_token_baseline", [[3.0], [1.0]], [[1], [1]], index=["a", "a"], **given)
    assert found.flatten().tolist() == pytest.approx([2.0, 0.0], abs=1e-6)


def test_10_reinforce_has_returns_of_0_under_the_mask() -> None:
    rewards, mask = torch.tensor([[0.0, 0.0, 2.0]]), torch.tensor([[1, 0, 1]])
    advantages, returns = ADV_ESTIMATOR_REGISTRY["reinforce"](rewards, mask)
    assert advantages.tolist() == returns.tolist() == [[2.0, 0.0, 2.0]]


@pytest.mark.parametrize("scores", [[[3.0], [0.0]], [[2.0], [2.0]]])
def test_11_without_a_standard_deviation_the_result_is_0(scores: list[list[float]]) -> None:
    """A group of one (the second row's score is of another group), and a group of equal scores."""
    groups = ["a", "b"] if scores[0] != scores[1] else ["a", "a"]
    given = {"index": groups, "traj_id": [0, 1], "step": [0, 0], "norm_mean_type": "group", "norm_std_type": "group"}
    assert estimate("step_reinforce", scores, [[1], [1]], **given).flatten().tolist() == [0.0, 0.0]


def test_12_gigpo_compares_states_within_a_task() -> None:
    """All four rows start in state s, but of two tasks: each is compared with the one of its own task."""
    given = {"index": ["a", "a", "b", "b"], "traj_id": [0, 1, 2, 3], "step": [0] * 4, "state_hash": ["s"] * 4}
    weights = {"episode_reward_weight": 0.0}
    found = estimate("gigpo", [[1.0], [0.0], [101.0], [100.0]], [[1]] * 4, **given, **weights)
    half = 0.5**0.5
    assert found.flatten().tolist() == pytest.approx([half, -half, half, -half], abs=1e-5)


@pytest.mark.parametrize("name", ["gspo", "geo_mean", "clip_cov", "kl_cov"])
def test_13_log_ratios_are_bounded_everywhere(name: str) -> None:
    options = PolicyLossConfig(clip_cov_lb=-1.0)
    loss, _ = loss_of(name, one_token(700.0, -1.0), ActorConfig(policy_loss=options))
    assert math.isfinite(loss.item()) and loss.item() <= math.exp(20) * 1.001
    assert name != "gspo" or loss.item() == pytest.approx(math.exp(10)), "log s is held below 10, as in verl"


def test_14_a_clip_fraction_that_there_is_not_is_not_reported() -> None:
    reported = {name: set(loss_of(name, one_token(0.1, 1.0), ActorConfig())[1]) for name in ("gspo", "sapo", "vanilla")}
    assert reported == {
        "gspo": {"ppo_kl", "pg_clipfrac"},
        "sapo": {"ppo_kl"},
        "vanilla": {"ppo_kl", "pg_clipfrac", "pg_clipfrac_lower"},
    }


def test_15_topr_without_scores_takes_the_sign_of_the_advantage() -> None:
    """Ratio 1/2: a bad answer's weight. l = -1 - log 2."""
    for advantage, weight in ((1.0, 1.0), (-1.0, 0.5)):
        loss, _ = loss_of("topr", one_token(-math.log(2), advantage), ActorConfig())
        assert loss.item() == pytest.approx(weight * advantage * (1 + math.log(2)), rel=1e-5)


@pytest.mark.parametrize(("name", "select"), [("clip_cov", select_clip_cov), ("kl_cov", select_kl_cov)])
def test_16_tokens_are_chosen_once_over_the_whole_batch(name: str, select: Any) -> None:
    columns = loss_batch()
    config = ActorConfig(policy_loss=PolicyLossConfig(clip_cov_ratio=0.2, clip_cov_lb=0.0, kl_cov_ratio=0.2))
    names = ("old_log_prob", "advantages", "response_mask")
    chosen = select(*(columns[key] for key in names), config)  # the log-probs of now are not asked for
    assert chosen.any()
    tokens = int(columns["response_mask"].sum())
    half = {key: value[:12] for key, value in columns.items()}
    with pytest.raises(ValueError, match="the choice of tokens would depend on how it was cut"):
        loss_of(name, half, config, batch_num_tokens=tokens)
    loss, _ = loss_of(name, half, config, batch_num_tokens=tokens, selected=chosen[:12])
    assert math.isfinite(loss.item())


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_17_a_mean_asks_for_its_count(mode: str) -> None:
    losses, mask = torch.ones(2, 2), torch.ones(2, 2)
    with pytest.raises(ValueError, match="dp_size=2 needs"):
        agg_loss(losses, mask, mode, dp_size=2)
    with pytest.raises(ValueError, match="loss_mask keeps no token"):
        agg_loss(losses, torch.zeros(2, 2), mode)


def test_18_the_controller_counts_rows_with_a_token_and_is_saved(tmp_path: Path) -> None:
    mask, ones = torch.tensor([[1], [0]]), torch.ones(2, 1)
    _, mean_kl = apply_kl_penalty(ones, ones * 0.4, ones * 0, mask, kl_coef=0.1)
    assert mean_kl == pytest.approx(0.4), "not 0.2"
    quiet = {"trainer__val_before_train": False, "trainer__test_freq": 0, "trainer__save_freq": -1}
    kl = {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"}
    first = make(tmp_path, Parts(on_policy=False), ref=True, **quiet, **kl)
    assert isinstance(first.kl_ctrl, AdaptiveKLController)
    first.fit()
    assert first.kl_ctrl.value != first.config.algorithm.kl_ctrl.kl_coef
    again = make(tmp_path, Parts(on_policy=False), ref=True, trainer__resume_mode="auto", **quiet, **kl)
    again.resume()
    assert again.kl_ctrl.value == first.kl_ctrl.value


def test_19_bf16_columns_are_computed_in_fp32() -> None:
    """600 tokens of reward 1: bf16 would stop counting at 256."""
    rewards, mask = torch.ones(1, 600, dtype=torch.bfloat16), torch.ones(1, 600)
    found, _ = ADV_ESTIMATOR_REGISTRY["reinforce"](rewards, mask)
    assert found.dtype == torch.float32 and found[0, 0].item() == 600.0
    assert agg_loss(rewards, mask, "token-sum").item() == 600.0


def test_20_gspo_is_a_mean_over_sequences_whatever_the_mode() -> None:
    columns, config = loss_batch(), ActorConfig()
    arguments = [columns[key] for key in LOSS_ARGUMENTS]
    gspo = get_policy_loss_fn("gspo")
    by_mode = [gspo(*arguments, mode, config)[0] for mode in ("token-mean", "token-sum")]
    assert by_mode[0] == by_mode[1]


def test_21_the_tail_of_the_token_baseline_goes_by_position() -> None:
    """Two tokens each; only the first row has one at the third place, which so has no baseline."""
    rewards, mask = [[0.0, 0.0, 5.0], [0.0, 1.0, 0.0]], [[1, 0, 1], [1, 1, 0]]
    pi = {"old_log_probs": torch.full((2, 3), math.log(0.5)), "sum_pi_squared": torch.full((2, 3), 0.5)}
    found = estimate("optimal_token_baseline", rewards, mask, index=["a", "a"], **pi)
    assert found[0].tolist() == pytest.approx([2.0, 0.0, 5.0]) and found[1, 0].item() == pytest.approx(-2.0)


def test_22_one_valid_score_of_a_larger_group_has_no_advantage() -> None:
    data = DataProto.from_dict(
        tensors={
            "token_level_rewards": torch.tensor([[37.0], [0.0], [2.0], [0.0]]),
            "response_mask": torch.tensor([[1], [0], [1], [1]]),
        },
        non_tensors={"uid": as_column(["a", "a", "b", "b"])},
    )
    config = AlgorithmConfig(norm_adv_by_std_in_grpo=False)
    result, _ = estimate_advantages(data, config, "grpo")
    assert result.batch["advantages"].flatten().tolist() == [0.0, 0.0, 1.0, -1.0]
    # the function keeps verl's formula for a group of one
    alone = estimate("grpo", [[37.0]], [[1]], index=["a"], norm_adv_by_std_in_grpo=False)
    assert alone.item() == 37.0


def test_23_maxrl_divides_by_no_mean_that_is_0() -> None:
    index = ["a", "a", "a", "a", "b", "c", "c"]  # one success of four, a group of one, no success
    found = estimate("maxrl", [[1.0], [0.0], [0.0], [0.0], [1.0], [0.0], [-1.0]], [[1]] * 7, index=index).flatten()
    assert found.tolist() == pytest.approx([3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0], abs=2e-5)

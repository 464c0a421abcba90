"""Rewards and advantages on the driver, by hand and against loops; ROLL's functions: `tests.seeds`."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trainer.ppo.advantage import ESTIMATOR_COLUMNS, compute_token_reward, estimate_advantages, reward_postprocess
from verl_lite.config import AlgorithmConfig
from verl_lite.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    AdaptiveKLController,
    FixedKLController,
    RunningMoments,
    register_adv_est,
)
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto, as_column
from verl_lite.registry import takes

NEEDED = {
    "values": torch.tensor([[0.1, 0.2], [0.3, 0.1], [0.0, 0.0], [0.0, 0.0]]),
    "reward_baselines": torch.tensor([0.5, 0.5, 1.0, 1.0]),
    "old_log_probs": torch.full((4, 2), -1.0),
    "sum_pi_squared": torch.full((4, 2), 0.3),
}


def batch(**more: torch.Tensor) -> DataProto:
    """Two prompts of two answers; the last one failed."""
    return DataProto.from_dict(
        tensors={
            "token_level_rewards": torch.tensor([[0.0, 1.0], [0.0, 0.0], [2.0, 0.0], [0.0, 0.0]]),
            "response_mask": torch.tensor([[1, 1], [1, 1], [1, 0], [0, 0]]),
            **more,
        },
        non_tensors={
            "uid": np.array(["a", "a", "b", "b"], dtype=object),
            "reward/correct": np.array([1.0, 0.0, 2.0, None], dtype=object),
        },
    )


def scored(scores: list[float], lengths: list[int], uids: list[str], width: int = 4, **more: torch.Tensor) -> DataProto:
    """A batch as the trainer has it: the score on the last valid token; length 0 = a failed reward."""
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    token_level_scores = torch.zeros(len(scores), width)
    for row, (score, length) in enumerate(zip(scores, lengths, strict=True)):
        token_level_scores[row, max(0, length - 1)] = score
    return DataProto.from_dict(
        tensors={"token_level_scores": token_level_scores, "response_mask": mask, **more},
        non_tensors={"uid": np.array(uids, dtype=object), "data_source": np.array(["maths"] * len(uids), dtype=object)},
    )


def advantages_of(data: DataProto, name: str, config: AlgorithmConfig | None = None) -> torch.Tensor:
    return estimate_advantages(data, config or AlgorithmConfig(), name)[0].batch["advantages"]


def test_groups_are_told_by_uid_and_failed_rows_count_nowhere() -> None:
    data = scored([1.0, 10.0, 3.0, 777.0, 20.0], [2, 1, 4, 0, 3], ["a", "b", "a", "a", "b"])
    config = AlgorithmConfig(norm_mean_type="group", norm_std_type="group")
    result, _ = reward_postprocess(data, config)
    by_two = math.sqrt(0.5)  # (1 - 2) / sqrt(2), whatever the spread
    expected = [-by_two, -by_two, by_two, 0.0, by_two]
    assert result.batch["response_level_rewards"].tolist() == pytest.approx(expected, abs=1e-5)
    result, _ = compute_token_reward(result, config)
    placed = result.batch["token_level_rewards"]
    assert placed[2].tolist() == pytest.approx([0, 0, 0, by_two], abs=1e-5)
    assert placed[4].tolist() == pytest.approx([0, 0, by_two, 0], abs=1e-5)
    assert placed[3].tolist() == [777.0, 0, 0, 0], "under an empty mask, where nobody reads it"


def test_clips_and_their_fractions_are_over_rows_and_tokens_that_count() -> None:
    data = scored([5.0, -5.0, 1.0, 9.0], [2, 4, 1, 0], ["a", "a", "b", "b"])
    result, metrics = reward_postprocess(data, AlgorithmConfig(reward_clip=2.0))
    assert result.batch["response_level_rewards"].tolist() == [2.0, -2.0, 1.0, 0.0]
    assert metrics == {"critic/reward_clip_frac": pytest.approx(2 / 3)}
    # the rewards of tokens are clipped too: the penalty takes 3 off every token of the second row
    result.batch["old_log_probs"] = torch.tensor([[0.0] * 4, [3.0] * 4, [0.0] * 4, [0.0] * 4])
    result.batch["ref_log_prob"] = torch.zeros(4, 4)
    config = AlgorithmConfig(reward_clip=2.0, use_kl_in_reward=True, kl_penalty="k1")
    result, metrics = compute_token_reward(result, config, FixedKLController(1.0))
    assert result.batch["token_level_rewards"][:3].tolist() == [[0, 2, 0, 0], [-2, -2, -2, -2], [1, 0, 0, 0]]
    assert metrics["critic/token_reward_clip_frac"] == pytest.approx(4 / 7)


def test_scores_of_several_tokens_stay_where_they_are_unless_their_sum_changes() -> None:
    data = scored([1.0, 4.0], [4, 4], ["a", "b"])
    data.batch["token_level_scores"][0] = torch.tensor([0.25, 0.0, 0.5, 0.25])
    for config in (AlgorithmConfig(), AlgorithmConfig(reward_clip=3.0)):
        result, _ = reward_postprocess(data, config)
        rewards = compute_token_reward(result, config)[0].batch["token_level_rewards"]
        assert rewards[0].tolist() == [0.25, 0.0, 0.5, 0.25]
        assert rewards[1].tolist() == [0, 0, 0, min(4.0, config.reward_clip or 4.0)]


def test_running_statistics_by_domain() -> None:
    data = scored([1.0, 3.0, 10.0, 30.0], [2, 2, 2, 2], ["a", "a", "b", "b"])
    data.non_tensor_batch["data_source"] = np.array(["maths", "maths", "code", "code"], dtype=object)
    config = AlgorithmConfig(norm_mean_type="running", norm_std_type=None)
    moments: dict[str, RunningMoments] = {}
    first = reward_postprocess(data, config, moments)[0].batch["response_level_rewards"]
    assert first.tolist() == [-1.0, 1.0, -10.0, 10.0]
    assert set(moments) == {"maths", "code"} and moments["maths"].count == 2
    second = reward_postprocess(scored([9.0, 7.0], [2, 0], ["a", "a"]), config, moments)[0]
    assert second.batch["response_level_rewards"].tolist() == pytest.approx([9 - 13 / 3, 0.0]), "1, 3 and 9 so far"
    with pytest.raises(ValueError, match="running_ctrl is None"):
        reward_postprocess(data, config)


def kl_batch() -> DataProto:
    """KL of the rows: (0.1 + 0.3) / 2 = 0.2, 0.4, and a failed one."""
    old = torch.tensor([[-1.0, -1.0, 9.0, 9.0], [-1.0, 9.0, 9.0, 9.0], [math.nan] * 4])
    ref = torch.tensor([[-1.1, -1.3, -7.0, -7.0], [-1.4, -7.0, -7.0, -7.0], [-1.0] * 4])
    return scored([1.0, 0.0, 5.0], [2, 1, 0], ["a", "a", "b"], old_log_probs=old, ref_log_prob=ref)


def test_the_penalty_of_a_step_uses_the_coefficient_of_before() -> None:
    config, controller = AlgorithmConfig(use_kl_in_reward=True), AdaptiveKLController(0.5, target_kl=0.25, horizon=100)
    result, metrics = compute_token_reward(kl_batch(), config, controller)
    rewards = result.batch["token_level_rewards"]
    assert rewards[0].tolist() == pytest.approx([-0.05, 1 - 0.15, 0, 0])
    assert rewards[1].tolist() == pytest.approx([-0.2, 0, 0, 0])
    assert metrics["critic/kl"] == metrics["actor/reward_kl_penalty"] == pytest.approx(0.3)
    assert metrics["critic/kl_coef"] == metrics["actor/reward_kl_penalty_coeff"] == 0.5
    # 0.3 / 0.25 - 1 = 0.2, over the two rows that count
    assert controller.value == pytest.approx(0.5 * (1 + 0.2 * 2 / 100))


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATOR_REGISTRY))
def test_a_missing_column_is_named_with_who_needs_and_who_writes_it(name: str) -> None:
    """Every column that an estimator names, taken away by itself."""
    everything = batch(**NEEDED)
    everything.non_tensor_batch |= {
        "traj_id": np.array(["t", "t", "u", "u"], dtype=object),
        "step": np.array([0, 1, 0, 1]),
        "state_hash": np.array(["s"] * 4, dtype=object),
    }
    config = AlgorithmConfig(gdpo_reward_keys=["correct"])
    assert bool(torch.isfinite(advantages_of(everything, name, config)).all())
    named = [argument for argument in ESTIMATOR_COLUMNS if takes(ADV_ESTIMATOR_REGISTRY[name], argument)]
    for column in [ESTIMATOR_COLUMNS[argument] for argument in named if argument != "rollout_is_weights"]:
        is_tensor = column in everything.batch.keys()
        data = everything.select()
        data.pop([column] if is_tensor else [], [] if is_tensor else [column])
        message = f"compute_advantage with adv_estimator={name}: column '{column}' is missing .*\\.py writes it"
        with pytest.raises(ValueError, match=message):
            advantages_of(data, name, config)


def test_an_estimator_gets_what_it_names_and_no_more() -> None:
    seen: dict[str, Any] = {}

    def mine(token_level_rewards, response_mask, index, config, old_log_probs, rollout_is_weights=None):  # type: ignore[no-untyped-def]
        seen.update(index=index, config=config, old_log_probs=old_log_probs, weights=rollout_is_weights)
        return token_level_rewards, token_level_rewards

    register_adv_est("mine")(mine)
    try:
        config = AlgorithmConfig(gamma=0.5)
        advantages_of(batch(**NEEDED), "mine", config)
        assert list(seen["index"]) == ["a", "a", "b", "b"] and seen["config"] is config and seen["weights"] is None
        advantages_of(batch(**NEEDED, rollout_is_weights=torch.ones(4, 2)), "mine", config)
        assert seen["weights"] is not None
        with pytest.raises(ValueError, match="column 'old_log_probs' is missing"):
            advantages_of(batch(), "mine")
    finally:
        del ADV_ESTIMATOR_REGISTRY["mine"]
    with pytest.raises(ValueError, match="Unknown advantage estimator: mine"):
        advantages_of(batch(), "mine")


def test_an_estimator_of_a_user_that_returns_no_tensor_is_named() -> None:
    @register_adv_est("halved")
    def halved(token_level_rewards, response_mask):  # type: ignore[no-untyped-def]
        return token_level_rewards, None

    try:
        with pytest.raises(UserError, match=r"adv_estimator=halved: .* found \[\(4, 2\), 'NoneType'\]"):
            advantages_of(batch(), "halved")
    finally:
        del ADV_ESTIMATOR_REGISTRY["halved"]


def test_neither_batch_nor_configuration_is_changed() -> None:
    data = kl_batch()
    before, keys = copy.deepcopy(data), set(data.batch.keys())
    config = AlgorithmConfig(
        norm_mean_type="group", norm_std_type="batch", reward_clip=0.5, use_kl_in_reward=True, kl_penalty="k3",
        adv_estimator="grpo", advantage_clip=0.1, whiten_advantages=True, whiten_rewards=True,
    )  # fmt: skip
    given = copy.deepcopy(vars(config))
    result, _ = reward_postprocess(data, config)
    result, _ = compute_token_reward(result, config, FixedKLController(0.1))
    rewards = result.batch["token_level_rewards"].clone()
    estimate_advantages(result, config, "grpo")
    torch.testing.assert_close(result.batch["token_level_rewards"], rewards, equal_nan=True, rtol=0, atol=0)
    assert vars(config) == given
    assert set(data.batch.keys()) == keys and data.meta_info == before.meta_info
    for name in keys:
        torch.testing.assert_close(data.batch[name], before.batch[name], equal_nan=True, rtol=0, atol=0)


# ------------------------------------------------------------------------------- groups that failures leave incomplete

COMPARE_ROWS = {
    *("grpo", "grpo_vectorized", "grpo_passk", "gdpo", "maxrl", "rloo", "rloo_vectorized", "opo", "gpg"),
    *("reinforce_plus_plus_baseline", "optimal_token_baseline", "tir_optimal_token_baseline", "gigpo"),
}
"""The estimators whose formula contains a mean, a standard deviation or a baseline of the group."""


def with_labels(data: DataProto) -> DataProto:
    data.non_tensor_batch |= {
        "traj_id": as_column([f"episode {row}" for row in range(len(data))]),
        "step": np.zeros(len(data), dtype=int),
        "state_hash": as_column(["start"] * len(data)),
    }
    return data


def column(rewards: list[float], width: int = 2) -> torch.Tensor:
    """Rewards at the last token."""
    return torch.nn.functional.pad(torch.tensor(rewards)[:, None], (width - 1, 0))


def failed_reward_batch() -> DataProto:
    """The prompt a with two scores, b with the score 37 and a failed reward, c without a valid score."""
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [0, 0], [0, 0], [0, 0]])
    rewards = [1.0, 4.0, 37.0, 0.0, 0.0, 0.0]
    data = DataProto.from_dict(
        tensors={
            "token_level_rewards": column(rewards),
            "response_mask": mask,
            "values": torch.full((6, 2), 0.5),
            "reward_baselines": torch.full((6,), 0.5),
            "old_log_probs": torch.full((6, 2), -1.0),
            "sum_pi_squared": torch.full((6, 2), 0.3),
        },
        non_tensors={"uid": as_column(list("aabbcc")), "reward/correct": as_column(rewards)},
    )
    return with_labels(data)


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATOR_REGISTRY))
def test_a_group_with_one_valid_score_has_no_advantage(name: str) -> None:
    """The prompt a has the advantages that it has without the others, also if the batch is whitened."""
    data = failed_reward_batch()
    config = AlgorithmConfig(gdpo_reward_keys=["correct"])
    result, metrics = estimate_advantages(data, config, name)
    advantages = result.batch["advantages"]
    if name not in COMPARE_ROWS:
        assert advantages[2].abs().max() > 0, "there is nothing to compare with, so one score is enough"
        assert metrics == {}
        return

    assert metrics == {"groups/incomparable": 2.0}
    alone, _ = estimate_advantages(data.select_idxs([0, 1]), config, name)
    for column_name in ("raw_advantages", "advantages", "returns"):
        assert result.batch[column_name][2:].abs().max() == 0
        assert result.batch[column_name][:2].abs().max() > 0
        torch.testing.assert_close(result.batch[column_name][:2], alone.batch[column_name])
    assert result.batch["response_mask"].tolist() == data.batch["response_mask"].tolist()

    whitened = advantages_of(data, name, replace(config, whiten_advantages=True))
    assert whitened[2:].abs().max() == 0


def test_the_advantages_beside_an_incomparable_group_by_hand() -> None:
    """Scores 1 and 4: mean 2.5, standard deviation sqrt(4.5). alpha of gpg is 1, because both scores are not 0."""
    expected = {
        "grpo": [-1.5 / math.sqrt(4.5), 1.5 / math.sqrt(4.5), 0.0],
        "rloo": [-3.0, 3.0, 0.0],
        "opo": [-1.5, 1.5, 0.0],
        "gpg": [-1.5, 1.5, 0.0],
        "reinforce_plus_plus_baseline": [-1.5 / math.sqrt(3), 1.5 / math.sqrt(3), 0.0],  # 4 tokens: variance 9 / 3
    }
    for name, values in expected.items():
        advantages = advantages_of(failed_reward_batch(), name, AlgorithmConfig())
        assert advantages[:3, 0].tolist() == pytest.approx(values, abs=1e-5), name


def test_a_prompt_that_is_sampled_once_keeps_verls_formula() -> None:
    """rollout.n=1 with reinforce_plus_plus_baseline: the mean of a group of one is 0. Padding adds no member."""
    data = DataProto.from_dict(
        tensors={
            "token_level_rewards": column([1.0, 5.0, 9.0]),
            "response_mask": torch.tensor([[0, 1], [0, 1], [0, 0]]),
            "is_padding": torch.tensor([False, False, True]),
        },
        non_tensors={"uid": as_column(["a", "b", "b"])},
    )
    result, metrics = estimate_advantages(data, AlgorithmConfig(), "reinforce_plus_plus_baseline")
    # scores 1 and 5: mean 3, variance (4 + 4) / 1
    assert result.batch["advantages"][:, 1].tolist() == pytest.approx([-2 / math.sqrt(8), 2 / math.sqrt(8), 0.0])
    assert metrics == {"groups/incomparable": 0.0}


@pytest.mark.parametrize(
    ("declared", "expected"), [(None, [1.0, 4.0, 0.0]), (True, [1.0, 4.0, 0.0]), (False, [1.0, 4.0, 37.0])]
)
def test_an_estimator_of_a_user_that_does_not_mask(declared: bool | None, expected: list[float]) -> None:
    def careless(token_level_rewards, response_mask, index):  # type: ignore[no-untyped-def]
        rewards = token_level_rewards.clone()
        return rewards, rewards

    register_adv_est("careless", groups=declared)(careless)
    try:
        result, _ = estimate_advantages(failed_reward_batch(), AlgorithmConfig(), "careless")
    finally:
        del ADV_ESTIMATOR_REGISTRY["careless"]
        del ADV_ESTIMATOR_REGISTRY.facts["careless"]
    assert result.batch["advantages"][:3, 1].tolist() == expected
    assert result.batch["returns"][:3, 1].tolist() == expected

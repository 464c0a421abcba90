"""Rewards of episodes, normalised, against loops that a reader can follow; and from rows to advantages."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.workers.rollout.scripted import play, rows, spec
from tests.workers.rollout.test_trajectories import worded, world
from trainer.advantage import compute_advantage, compute_token_reward
from trainer.agentic.advantage import (
    compute_response_level_rewards,
    normalize_rewards,
    token_estimator,
)
from verl_lite.algos.agentic_rewards import agentic_reward_norm, normalization
from verl_lite.config import AgenticConfig, AlgorithmConfig, EnvManagerConfig, PPOConfig, RewardNormalizationConfig
from verl_lite.protocol import DataProto, as_column

Scores = list[float]


def steps_of_episodes(seed: int = 0) -> DataProto:
    """Step rows of three tasks with three episodes each, shuffled; two rows failed. Scores on the last valid token."""
    draw = random.Random(seed)
    found = []
    for task in range(3):
        for member in range(3):
            for step in range(draw.randint(1, 4)):
                found.append(
                    (f"t{task}", f"t{task}_{member}", step, f"s{draw.randint(0, 2)}", draw.choice([0.0, 1.0, -0.5]))
                )
    draw.shuffle(found)
    width = 4
    lengths = [draw.randint(1, width) for _ in found]
    lengths[1] = lengths[5] = 0
    mask = torch.tensor([[int(t < length) for t in range(width)] for length in lengths])
    scores = torch.zeros(len(found), width)
    for row, (length, one) in enumerate(zip(lengths, found, strict=True)):
        scores[row, length - 1] = one[4]
    names = {
        "uid": [one[0] for one in found],
        "traj_id": [one[1] for one in found],
        "state_hash": [one[3] for one in found],
        "tags": ["even" if one[0] == "t1" else "odd" for one in found],
    }
    return DataProto.from_dict(
        tensors={"response_mask": mask, "token_level_scores": scores, "step": torch.tensor([one[2] for one in found])},
        non_tensors={name: as_column(values) for name, values in names.items()},
    )


def naive(data: DataProto, scores: Scores, kinds: tuple[str | None, str | None], label: Callable[[int], Any]) -> Scores:
    alive = [row for row in range(len(data)) if data.batch["response_mask"][row].any()]
    result = [0.0] * len(data)
    for row in alive:
        sets = {"batch": alive, "group": [other for other in alive if label(other) == label(row)]}
        mean_kind, std_kind = kinds
        value = scores[row] - (statistics.fmean(scores[i] for i in sets[mean_kind]) if mean_kind else 0.0)
        if std_kind:
            own = [scores[i] for i in sets[std_kind]]
            spread = statistics.stdev(own) if len(own) > 1 else 0.0
            value = value / (spread + 1e-6) if spread > 1e-6 else 0.0
        result[row] = value
    return result


def naive_returns(data: DataProto, gamma: float) -> Scores:
    alive = [bool(mask.any()) for mask in data.batch["response_mask"]]
    steps, episodes = data.batch["step"].tolist(), data.non_tensor_batch["traj_id"]
    scores = data.batch["token_level_scores"].sum(-1).tolist()
    result = [0.0] * len(data)
    for row in range(len(data)):
        later = [i for i in range(len(data)) if alive[i] and episodes[i] == episodes[row] and steps[i] >= steps[row]]
        if alive[row]:
            result[row] = sum(gamma**place * scores[i] for place, i in enumerate(sorted(later, key=lambda i: steps[i])))
    return result


def config(estimator: str = "grpo", **options: Any) -> PPOConfig:
    normalisation = {name: options.pop(name) for name in list(options) if name in RewardNormalizationConfig().__dict__}
    agentic = AgenticConfig(
        train_env_manager=EnvManagerConfig(tags=["a"]),
        reward_normalization=RewardNormalizationConfig(**normalisation),
        **options,
    )
    return PPOConfig(algorithm=AlgorithmConfig(adv_estimator=estimator), agentic=agentic)


LABELS: dict[str, Callable[[DataProto], Callable[[int], Any]]] = {
    "batch": lambda data: lambda row: 0,
    "traj_group_id": lambda data: lambda row: data.non_tensor_batch["uid"][row],
    "tags": lambda data: lambda row: data.non_tensor_batch["tags"][row],
    "state_group_id": lambda data: (
        lambda row: (data.non_tensor_batch["uid"][row], data.non_tensor_batch["state_hash"][row])
    ),
}
KINDS = {"identity": (None, None), "mean": ("group", None), "mean_std": ("group", "group")}


def rewards_of(data: DataProto, estimator: str, **options: Any) -> Scores:
    whole = config(estimator, **options)
    return compute_response_level_rewards(data, whole.agentic, estimator)[0].batch["response_level_rewards"].tolist()


@pytest.mark.parametrize("grouping", LABELS)
@pytest.mark.parametrize("method", KINDS)
def test_scores_are_normalised_within_the_chosen_groups(grouping: str, method: str) -> None:
    data = steps_of_episodes()
    scores = data.batch["token_level_scores"].sum(-1).tolist()
    expected = naive(data, scores, KINDS[method], LABELS[grouping](data))
    assert rewards_of(data, "grpo", grouping=grouping, method=method) == pytest.approx(expected, abs=1e-5)
    returns = naive(data, naive_returns(data, 0.5), KINDS[method], LABELS[grouping](data))
    found = rewards_of(data, "step_reinforce", grouping=grouping, method=method, step_reward_gamma=0.5)
    assert found == pytest.approx(returns, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "kinds", "label"),
    [
        ({}, ("group", "group"), "traj_group_id"),  # null everywhere: the paper's
        ({"method": "identity"}, (None, None), "batch"),
        ({"method": "mean", "grouping": "tags"}, ("group", None), "tags"),
        ({"method": "mean_std", "grouping": "batch"}, ("group", "group"), "batch"),
        ({"norm_mean_type": "group"}, ("group", None), "traj_group_id"),
    ],
)
def test_gigpo_weighs_episodes_and_steps(
    options: dict[str, Any], kinds: tuple[str | None, str | None], label: str
) -> None:
    data = steps_of_episodes(2)
    alive = [bool(mask.any()) for mask in data.batch["response_mask"]]
    scores = data.batch["token_level_scores"].sum(-1).tolist()
    names = data.non_tensor_batch["traj_id"]
    episodes = [sum(s for s, n, a in zip(scores, names, alive, strict=True) if a and n == name) for name in names]
    by_episode = naive(data, episodes, kinds, LABELS[label](data))
    by_step = naive(data, naive_returns(data, 0.9), kinds, LABELS["state_group_id"](data))
    expected = [0.3 * e + 2.0 * s for e, s in zip(by_episode, by_step, strict=True)]
    weights = {"episode_reward_weight": 0.3, "step_reward_weight": 2.0, "step_reward_gamma": 0.9}
    whole = config("gigpo", **options, **weights)
    found, metrics = compute_response_level_rewards(data, whole.agentic, "gigpo")
    assert found.batch["response_level_rewards"].tolist() == pytest.approx(expected, abs=1e-5)
    lively = [e for e, counts in zip(by_episode, alive, strict=True) if counts]
    assert metrics["critic/episode_rewards_norm/max"] == pytest.approx(max(lively), abs=1e-5)
    assert metrics["critic/step_rewards_norm/mean"] == pytest.approx(
        statistics.fmean(s for s, counts in zip(by_step, alive, strict=True) if counts), abs=1e-5
    )


@pytest.mark.parametrize("estimator", ["gigpo", "step_reinforce"])
def test_the_stages_of_a_run_are_the_registered_estimator(estimator: str) -> None:
    """One formula: in a run rewards come first and REINFORCE after; the estimator does both."""
    data, gamma = steps_of_episodes(3), 0.9
    whole = config(estimator, **({} if estimator == "gigpo" else {"method": "mean_std", "grouping": "traj_group_id"}))
    assert token_estimator(whole) == "reinforce"
    staged, _ = normalize_rewards(data, whole)
    staged, _ = compute_token_reward(staged, whole.algorithm)
    by_stages = compute_advantage(staged, gamma, 1.0, token_estimator(whole)).batch["advantages"]
    plain = data.select()
    plain.batch["token_level_rewards"] = data.batch["token_level_scores"]
    if estimator == "gigpo":
        at_once = compute_advantage(plain, gamma, 1.0, estimator).batch["advantages"]
    else:
        from verl_lite.algos.agentic_advantages import compute_step_reinforce_advantage

        at_once, _ = compute_step_reinforce_advantage(
            plain.batch["token_level_rewards"],
            plain.batch["response_mask"],
            index=plain.non_tensor_batch["uid"],
            traj_id=plain.non_tensor_batch["traj_id"],
            step=plain.batch["step"],
            norm_mean_type="group",
            norm_std_type="group",
            gamma=gamma,
        )
    torch.testing.assert_close(by_stages, at_once)


def test_older_names_of_normalisations() -> None:
    scores = torch.tensor([0.0, 0.0, 0.0, 4.0])  # mean 1, std 2
    expected = {
        "identity": [0.0, 0.0, 0.0, 4.0],
        "mean": [-1.0, -1.0, -1.0, 3.0],
        "mean_std": [-0.5, -0.5, -0.5, 1.5],
        "asym_clip": [-0.5, -0.5, -0.5, 1.5],
    }
    for method, numbers in expected.items():
        found = agentic_reward_norm(scores, normalization(method))
        assert found.tolist() == pytest.approx(numbers, abs=1e-5)
    clip = normalization("asym_clip")
    assert agentic_reward_norm(torch.tensor([0.0] * 99 + [100.0]), clip).max() == 3.0
    assert agentic_reward_norm(torch.tensor([0.0] + [100.0] * 99), clip).min() == -1.0
    assert agentic_reward_norm(torch.tensor([2.0]), normalization("mean_std")).tolist() == [0.0]
    with pytest.raises(ValueError, match="method='median': expected one of identity, mean"):
        normalization("median")


def test_missing_columns_and_wrong_words_are_named() -> None:
    data = steps_of_episodes()
    with pytest.raises(ValueError, match="grouping='task': expected one of batch, traj_group_id"):
        rewards_of(data, "grpo", grouping="task")
    del data.non_tensor_batch["state_hash"]
    with pytest.raises(ValueError, match="(?s)gigpo.*state_hash"):
        rewards_of(data, "gigpo")


def test_single_turn_runs_are_not_touched() -> None:
    data = steps_of_episodes()
    whole = PPOConfig()
    assert token_estimator(whole) == whole.algorithm.adv_estimator
    rewards = normalize_rewards(data, whole)[0].batch["response_level_rewards"]
    assert rewards.tolist() == data.batch["token_level_scores"].sum(-1).tolist()


# ------------------------------------------------------------------------------------------------------- from real rows


def advantages_of(data: DataProto, whole: PPOConfig, gamma: float = 1.0) -> torch.Tensor:
    data, _ = normalize_rewards(data, whole)
    data, _ = compute_token_reward(data, whole.algorithm)
    algorithm = whole.algorithm
    estimator = token_estimator(whole)
    return compute_advantage(data, gamma, 1.0, estimator, pipeline_config=algorithm).batch["advantages"]


@pytest.mark.parametrize("estimator", ["gigpo", "step_reinforce", "grpo"])
def test_step_rows_of_real_episodes_give_advantages(estimator: str) -> None:
    options = {"env_manager_cls": "step", "agent_template": "{observation}{step_count}"}
    good, _, _ = play(world(("d", 1.0), ("x", 2.0)), worded("b!", "c!"), [spec("g_0")], **options)
    bad, _, _ = play(world(("d", 0.0), ("x", 0.0)), worded("b!", "c!"), [spec("g_1")], **options)
    data = rows([*good, *bad])
    data.non_tensor_batch["uid"][:] = "g"
    found = advantages_of(data, config(estimator, **({"step_reward_gamma": 0.5} if estimator != "grpo" else {})))
    ends = [found[row][data.batch["response_mask"][row].bool()][-1].item() for row in range(4)]
    half = math.sqrt(0.5)
    if estimator == "gigpo":  # episodes 3 3 0 0: mean 1.5, std sqrt 3; steps 2 | 0 and 2 | 0, each pair +-sqrt(1/2)
        each = 1.5 / math.sqrt(3) + half
        assert ends == pytest.approx([each, each, -each, -each], abs=1e-5)
    elif estimator == "step_reinforce":
        assert ends == [2.0, 2.0, 0.0, 0.0]
    else:  # rewards of steps 1 2 0 0, mean 0.75
        spread = statistics.stdev([1.0, 2.0, 0.0, 0.0])
        assert ends == pytest.approx([(r - 0.75) / spread for r in (1.0, 2.0, 0.0, 0.0)], abs=1e-5)

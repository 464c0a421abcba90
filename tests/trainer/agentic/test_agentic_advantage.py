"""Rewards of episodes, normalised, against plain loops; the stages of a run against the registered estimator."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest
import torch

from tests.verl_lite.naive_estimators import Given, normalised, step_returns
from trainer.agentic.agentic_advantage import compute_response_level_rewards
from trainer.agentic.agentic_pipeline import AgenticPipeline
from trainer.ppo.advantage import compute_token_reward, estimate_advantages
from verl_lite.algos.agentic_rewards import agentic_reward_norm, normalization
from verl_lite.config import AgenticConfig, AlgorithmConfig, EnvManagerConfig, PPOConfig, RewardNormalizationConfig
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY
from verl_lite.protocol import DataProto, as_column


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


def given(data: DataProto, **options: Any) -> Given:
    """The batch as the plain loops take it."""
    columns = {"traj_id": data.non_tensor_batch["traj_id"], "step": data.batch["step"], **options}
    mask = data.batch["response_mask"].bool().tolist()
    return Given(columns, data.batch["token_level_scores"].double().tolist(), mask)


def config(estimator: str = "grpo", **options: Any) -> PPOConfig:
    normalisation = {name: options.pop(name) for name in list(options) if name in RewardNormalizationConfig().__dict__}
    agentic = AgenticConfig(
        train_env_manager=EnvManagerConfig(tags=["a"]),
        reward_normalization=RewardNormalizationConfig(**normalisation),
        **options,
    )
    return PPOConfig(algorithm=AlgorithmConfig(adv_estimator=estimator), agentic=agentic)


def labels(data: DataProto, grouping: str) -> list[Any]:
    names, nothing = data.non_tensor_batch, [0] * len(data)
    tasks, states = names["uid"].tolist(), list(zip(names["uid"], names["state_hash"], strict=True))
    return {"traj_group_id": tasks, "tags": names["tags"].tolist(), "batch": nothing, "state_group_id": states}[
        grouping
    ]


GROUPINGS = ("batch", "traj_group_id", "tags", "state_group_id")
KINDS = {"identity": (None, None), "mean": ("group", None), "mean_std": ("group", "group")}


def rewards_of(data: DataProto, estimator: str, **options: Any) -> list[float]:
    whole = config(estimator, **options)
    return compute_response_level_rewards(data, whole.agentic, estimator)[0].batch["response_level_rewards"].tolist()


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("method", KINDS)
def test_scores_are_normalised_within_the_chosen_groups(grouping: str, method: str) -> None:
    data, options = steps_of_episodes(), {"grouping": grouping, "method": method}
    loops, groups = given(data, step_reward_gamma=0.5), labels(steps_of_episodes(), grouping)
    expected = normalised(loops, loops.scores(), groups, KINDS[method])
    assert rewards_of(data, "grpo", **options) == pytest.approx(expected, abs=1e-5)
    returns = normalised(loops, step_returns(loops, loops.scores()), groups, KINDS[method])
    assert rewards_of(data, "step_reinforce", **options, step_reward_gamma=0.5) == pytest.approx(returns, abs=1e-5)


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
    loops = given(data, step_reward_gamma=0.9)
    alive, scores, names = loops.alive(), loops.scores(), data.non_tensor_batch["traj_id"]
    episodes = [sum(scores[i] for i in alive if names[i] == name) for name in names]
    by_episode = normalised(loops, episodes, labels(data, label), kinds)
    by_step = normalised(loops, step_returns(loops, scores), labels(data, "state_group_id"), kinds)
    expected = [0.3 * e + 2.0 * s for e, s in zip(by_episode, by_step, strict=True)]
    weights = {"episode_reward_weight": 0.3, "step_reward_weight": 2.0, "step_reward_gamma": 0.9}
    whole = config("gigpo", **options, **weights)
    found, metrics = compute_response_level_rewards(data, whole.agentic, "gigpo")
    assert found.batch["response_level_rewards"].tolist() == pytest.approx(expected, abs=1e-5)
    assert metrics["critic/episode_rewards_norm/max"] == pytest.approx(max(by_episode[i] for i in alive), abs=1e-5)
    mean = statistics.fmean(by_step[i] for i in alive)
    assert metrics["critic/step_rewards_norm/mean"] == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize("estimator", ["gigpo", "step_reinforce"])
def test_the_stages_of_a_run_are_the_registered_estimator(estimator: str) -> None:
    """One formula: in a run rewards come first and REINFORCE after; the estimator does both."""
    data, gamma = steps_of_episodes(3), 0.9
    whole = config(estimator, **({} if estimator == "gigpo" else {"method": "mean_std", "grouping": "traj_group_id"}))
    run: Any = object.__new__(AgenticPipeline)
    run.config, run.running_moments = whole, {}
    assert run.token_estimator == "reinforce"
    staged, _ = compute_token_reward(run.normalize_rewards(data)[0], whole.algorithm)
    whole.algorithm.gamma = gamma
    by_stages = estimate_advantages(staged, whole.algorithm, run.token_estimator)[0].batch["advantages"]
    plain = data.select()
    plain.batch["token_level_rewards"] = data.batch["token_level_scores"]
    names = {name: plain.non_tensor_batch[name] for name in ("traj_id", "state_hash")}
    at_once, _ = ADV_ESTIMATOR_REGISTRY[estimator](
        plain.batch["token_level_rewards"],
        plain.batch["response_mask"],
        index=plain.non_tensor_batch["uid"],
        **names,
        step=plain.batch["step"],
        norm_mean_type="group",
        norm_std_type="group",
        gamma=gamma,
    )
    torch.testing.assert_close(by_stages, at_once)


def test_the_lower_clip_missing_columns_and_wrong_words() -> None:
    assert agentic_reward_norm(torch.tensor([0.0] + [100.0] * 99), normalization("asym_clip")).min() == -1.0
    with pytest.raises(ValueError, match="method='median': expected one of identity, mean"):
        normalization("median")
    data = steps_of_episodes()
    with pytest.raises(ValueError, match="grouping='task': expected one of batch, traj_group_id"):
        rewards_of(data, "grpo", grouping="task")
    del data.non_tensor_batch["state_hash"]
    with pytest.raises(ValueError, match="(?s)gigpo.*state_hash"):
        rewards_of(data, "gigpo")

"""The seed on rewards and advantages: its example as it stands, and its contract against plain loops."""

from __future__ import annotations

import inspect
import math
import statistics
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.agentic.roll import compute_advantage, compute_token_reward, reward_postprocess
from trainer.ppo.advantage import estimate_advantages
from verl_lite.config import AlgorithmConfig
from verl_lite.core_algos import AdaptiveKLController, RunningMoments
from verl_lite.protocol import DataProto
from workers.roll_loss import batch_of_roll

ESTIMATORS = ("gae", "reinforce", "grpo", "gigpo", "step_reinforce")
SEED_COLUMNS = {"response_level_rewards", "old_log_probs", "ref_log_probs", "response_mask"}
WRITTEN = {"token_level_rewards", "advantages", "returns", "raw_advantages"}
N, ROWS, WIDTH = 3, 6, 5
Rows = list[list[float]]


def batch(*, values: bool = False) -> DataProto:
    """What the seed lists and nothing else: two prompts, three answers each; the mask is over prompt and answer."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([4, 2, 3, 1, 4, 3])[:, None]
    mask = ((torch.arange(WIDTH + 1) > 1) & (torch.arange(WIDTH + 1) <= 1 + lengths)).long()  # a prompt of two tokens
    random = [torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(3)]
    columns = {
        "response_level_rewards": torch.tensor([1.0, 0.0, 0.5, -2.0, 3.0, 0.0], dtype=torch.float64),
        "old_log_probs": random[0] * mask[:, 1:],
        "ref_log_probs": random[1] * mask[:, 1:],
        "response_mask": mask,
    }
    return DataProto.from_dict(columns | ({"values": random[2]} if values else {}))


def options(**given: Any) -> SimpleNamespace:
    """A configuration with ROLL's names and defaults."""
    arguments = SimpleNamespace(num_return_sequences=N)
    known = {"norm_mean_type": None, "norm_std_type": None, "reward_clip": None, "kl_penalty": "kl"}
    actor_infer = SimpleNamespace(generating_args=arguments)
    return SimpleNamespace(**known | {"add_token_level_kl": False, "actor_infer": actor_infer} | given)


def normalised(rewards: list[float], size: int | None) -> list[float]:
    """(R - mean) / std of each `size` neighbours; None = as they are."""
    result = []
    for start in range(0, len(rewards), size or 1):
        group = rewards[start : start + (size or 1)]
        result += [(one - statistics.mean(group)) / statistics.stdev(group) for one in group] if size else group
    return result


def returns_of(rewards: list[float], gamma: float) -> list[float]:
    result = [0.0]
    for reward in reversed(rewards):
        result.insert(0, reward + gamma * result[0])
    return result[:-1]


def gae_of(rewards: list[float], values: list[float], gamma: float, lambd: float) -> list[float]:
    deltas = [r + gamma * after - v for r, (v, after) in zip(rewards, pairwise([*values, 0.0]), strict=True)]
    return returns_of(deltas, gamma * lambd)


def whitened(rows: Rows) -> Rows:
    every = [one for row in rows for one in row]
    mean, std = statistics.mean(every), statistics.stdev(every)
    return [[(one - mean) / std for one in row] for row in rows]


def valid_of(column: torch.Tensor, data: DataProto) -> Rows:
    """The values of the answers' tokens, row by row; what lies elsewhere is 0."""
    mask = data.batch["response_mask"][:, 1:].bool()
    assert column.shape == mask.shape and not column[~mask].any()
    return [row[keep].tolist() for row, keep in zip(column, mask, strict=True)]


def close(rows: Rows) -> list[Any]:
    return [pytest.approx(row, rel=1e-5, abs=1e-5) for row in rows]


# ---------------------------------------------------------------------------------------------------- the example


def test_the_example_of_the_seed_runs_as_it_stands() -> None:
    data = before = batch()
    data.meta_info["metrics"] = {"kept": 1.0}
    pipeline_config = options(adv_estimator="grpo", add_token_level_kl=True)
    kl_ctrl, running_ctrl = AdaptiveKLController(0.1, target_kl=0.1, horizon=100), {"domain": RunningMoments()}

    # Step 1: Post-process response-level rewards
    data, reward_metrics = reward_postprocess(data, pipeline_config, running_ctrl)

    # Step 2: Add token-level KL penalty
    data, kl_metrics = compute_token_reward(data, pipeline_config, kl_ctrl)

    # Step 3: Compute advantages
    data = compute_advantage(
        data=data,
        gamma=1.0,
        lambd=1.0,
        adv_estimator="grpo",
        advantage_clip=5.0,
        whiten_advantages=True,
    )

    # Access results
    advantages = data.batch["advantages"]
    returns = data.batch["returns"]

    rewards, kl_means = [], []
    old, ref = (valid_of(before.batch[name], before) for name in ("old_log_probs", "ref_log_probs"))
    scores = normalised(before.batch["response_level_rewards"].tolist(), N)
    for score, olds, refs in zip(scores, old, ref, strict=True):
        kl = [a - b for a, b in zip(olds, refs, strict=True)]
        kl_means.append(statistics.mean(kl))
        rewards.append([-0.1 * one for one in kl])
        rewards[-1][-1] += score
    expected = [returns_of(row, 1.0) for row in rewards]
    assert valid_of(data.batch["token_level_rewards"], data) == close(rewards)
    assert valid_of(returns, data) == valid_of(data.batch["raw_advantages"], data) == close(expected)
    bounded = [[min(5.0, max(-5.0, one)) for one in row] for row in whitened(expected)]
    assert valid_of(advantages, data) == close(bounded)
    assert set(data.batch.keys()) == SEED_COLUMNS | WRITTEN
    assert data.meta_info["metrics"] == {"kept": 1.0, "critic/advantage_clip_frac": 0.0}, "none is overwritten"
    assert reward_metrics == {"critic/reward_clip_frac": 0.0}
    assert kl_metrics["critic/kl"] == pytest.approx(mean_kl := statistics.mean(kl_means))
    assert kl_metrics["critic/kl_coef"] == 0.1 and all(type(one) is float for one in kl_metrics.values())
    error = min(0.2, max(-0.2, mean_kl / 0.1 - 1))
    assert kl_ctrl.value == pytest.approx(0.1 * (1 + error * ROWS / 100)) != 0.1


def test_the_signatures_are_the_seeds() -> None:
    names = [list(inspect.signature(one).parameters) for one in (compute_token_reward, reward_postprocess)]
    assert names == [["data", "pipeline_config", "kl_ctrl"], ["data", "pipeline_config", "running_ctrl"]]
    shown = inspect.signature(compute_advantage).parameters
    assert list(shown)[:4] == ["data", "gamma", "lambd", "adv_estimator"]
    defaults = {"advantage_clip": None, "whiten_advantages": False, "whiten_rewards": False, "response_mask": None}
    assert {name: shown[name].default for name in list(shown)[4:8]} == defaults


# ---------------------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_three_in_sequence_on_the_columns_of_the_seed(name: str, whiten: bool) -> None:
    gamma, lambd, clip = 0.9, 0.7, 0.5
    before = batch(values=name == "gae")
    config = options(adv_estimator=name, reward_clip=2.5)
    data, reward_metrics = reward_postprocess(before, config, RunningMoments())
    data, token_metrics = compute_token_reward(data, config, AdaptiveKLController(0.2, 6.0, 10000))
    data = compute_advantage(data, gamma, lambd, name, clip, whiten_advantages=whiten)

    scores = normalised(before.batch["response_level_rewards"].tolist(), N if name == "grpo" else None)
    assert reward_metrics == {"critic/reward_clip_frac": sum(abs(one) > 2.5 for one in scores) / ROWS}
    assert token_metrics["critic/token_reward_clip_frac"] == token_metrics["critic/kl_coef"] == 0.0
    lengths = before.batch["response_mask"].sum(-1).tolist()
    rewards = [[0.0] * (n - 1) + [min(2.5, max(-2.5, one))] for one, n in zip(scores, lengths, strict=True)]
    if name == "gae":
        mask = before.batch["response_mask"][:, 1:]
        values = valid_of(before.batch["values"] * mask, before)
        raw = [gae_of(*row, gamma, lambd) for row in zip(rewards, values, strict=True)]
        returns = [[a + v for a, v in zip(*row, strict=True)] for row in zip(raw, values, strict=True)]
    else:
        raw = returns = [returns_of(row, gamma) for row in rewards]
    unbounded = whitened(raw) if whiten else raw
    beyond = [abs(one) > clip for row in unbounded for one in row]
    assert valid_of(data.batch["token_level_rewards"], data) == close(rewards)
    assert valid_of(data.batch["raw_advantages"], data) == close(raw), "neither whitened nor clipped"
    assert valid_of(data.batch["returns"], data) == close(returns)
    bounded = [[min(clip, max(-clip, one)) for one in row] for row in unbounded]
    assert valid_of(data.batch["advantages"], data) == close(bounded)
    share = data.meta_info["metrics"]["critic/advantage_clip_frac"]
    assert share == pytest.approx(sum(beyond) / len(beyond)) and 0 < share < 1
    assert set(data.batch.keys()) == SEED_COLUMNS | WRITTEN | ({"values"} if name == "gae" else set())


@pytest.mark.parametrize("whiten_rewards", [False, True])
def test_rewards_are_whitened_and_a_mask_is_taken_as_asked(whiten_rewards: bool) -> None:
    data = compute_token_reward(batch(), options(), AdaptiveKLController(0.2, 6.0, 10000))[0]
    mask = data.batch["response_mask"][:, 1:].clone()
    mask[4] = 0  # the answer of a sample that is left out
    found = compute_advantage(data, 1.0, 1.0, "reinforce", whiten_rewards=whiten_rewards, response_mask=mask).batch[
        "advantages"
    ]
    kept = [row for row in range(ROWS) if row != 4]
    rewards = [valid_of(data.batch["token_level_rewards"], data)[row] for row in kept]
    expected = [returns_of(row, 1.0) for row in (whitened(rewards) if whiten_rewards else rewards)]
    assert not found[4].any() and [valid_of(found, data)[row] for row in kept] == close(expected)


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (("group", "group"), normalised([1.0, 0.0, 0.5, -2.0, 3.0, 0.0], 3)),
        (("batch", "batch"), normalised([1.0, 0.0, 0.5, -2.0, 3.0, 0.0], 6)),
        (("group", None), [0.5, -0.5, 0.0, -7 / 3, 8 / 3, -1 / 3]),
        (("running", None), [one - 2.5 / 6 for one in (1.0, 0.0, 0.5, -2.0, 3.0, 0.0)]),
    ],
)
def test_rewards_are_normalised_without_a_column_of_groups_or_domains(types: Any, expected: list[float]) -> None:
    """A group is num_return_sequences neighbours; the one controller of a dict is everyone's."""
    config = options(norm_mean_type=types[0], norm_std_type=types[1])
    running = {"maths": RunningMoments()}
    data, _ = reward_postprocess(batch(), config, running)
    assert {name: one.count for name, one in running.items()} == {
        "maths": pytest.approx(ROWS if "running" in types else 0)
    }
    assert data.batch["response_level_rewards"].tolist() == pytest.approx(expected, abs=1e-5)
    config.actor_infer.generating_args.num_return_sequences = 4
    with pytest.raises(ValueError, match="num_return_sequences=4 does not divide the batch of 6 rows"):
        reward_postprocess(batch(), config, RunningMoments())


@pytest.mark.parametrize("name", ["grpo", "gigpo", "step_reinforce"])
def test_a_training_run_and_a_batch_that_is_half_labelled_still_refuse(name: str) -> None:
    """A run hands its configuration on; what compares rows then needs to know which."""
    data = compute_token_reward(batch(), options(), AdaptiveKLController(0.2, 6.0, 10000))[0]
    with pytest.raises(ValueError, match="column 'uid' is missing"):
        estimate_advantages(batch_of_roll(data), AlgorithmConfig(), name)
    data.non_tensor_batch["traj_id"] = torch.arange(ROWS).numpy()
    with pytest.raises(ValueError, match="column 'uid' is missing"):
        compute_advantage(data, 1.0, 1.0, name)


def test_with_the_column_of_groups_grpo_compares_them_itself() -> None:
    data = compute_token_reward(batch(), options(), AdaptiveKLController(0.2, 6.0, 10000))[0]
    data.non_tensor_batch["uid"] = torch.tensor([0, 1, 0, 1, 0, 1]).numpy()
    by_group = [[1.0, 0.5, 3.0], [0.0, -2.0, 0.0]]
    expected = [normalised(group, 3)[row] for row in range(3) for group in by_group]
    found = valid_of(compute_advantage(data, 1.0, 1.0, "grpo").batch["advantages"], data)
    assert [row[0] for row in found] == pytest.approx(expected, abs=1e-4) and not math.isclose(found[0][0], 1.0)

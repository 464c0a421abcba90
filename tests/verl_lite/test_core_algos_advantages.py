"""Every advantage estimator against a hand-worked case and a naive loop; one contract for all that are registered."""

from __future__ import annotations

import math
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verl_lite import core_algos
from verl_lite.agentic_algos import agentic_reward_norm, compute_discounted_returns
from verl_lite.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    RunningMoments,
    compute_agentic_reinforce_return,
    compute_gae_advantage_return,
    compute_reinforce_return,
    compute_segment_masked_mean,
    get_adv_estimator_fn,
)

ROWS, WIDTH = 30, 7
KEYS = ("correct", "short")
CONFIG = SimpleNamespace(
    gamma=0.9, norm_adv_by_std_in_grpo=True, gdpo_reward_keys=list(KEYS), gdpo_reward_weights=[1.0, 0.5]
)


def batch(seed: int = 0, holes: bool = True, alone: bool = True) -> dict[str, Any]:
    """All columns that an estimator may ask for: ragged rows with holes, 3 and 17 empty; 29 a group by itself."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, WIDTH + 1, (ROWS,), generator=generator)
    mask = (torch.arange(WIDTH) < lengths[:, None]).long()
    if holes:
        mask = mask * (torch.rand(ROWS, WIDTH, generator=generator) > 0.25)
    mask[3] = mask[17] = 0
    mask[29] = 1
    names = ("token_level_rewards", "values", "old_log_probs", "sum_pi_squared")
    columns: dict[str, Any] = {
        name: torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for name in names
    }
    columns["old_log_probs"] = -columns["old_log_probs"].abs()
    columns["sum_pi_squared"] = columns["sum_pi_squared"].sigmoid()
    columns["token_level_rewards"] *= mask
    index = np.array([f"task-{i % 5 if i < 29 or not alone else 'alone'}" for i in range(ROWS)], dtype=object)
    return {
        **columns,
        "response_mask": mask,
        "index": index,
        "reward_baselines": torch.randn(ROWS, generator=generator, dtype=torch.float64),
        "traj_id": np.array([f"{index[i]}/{i % 2}" for i in range(ROWS)], dtype=object),
        "step": np.arange(ROWS)[::-1].copy(),
        "state_hash": np.array([f"s{i % 3}" for i in range(ROWS)], dtype=object),
        "non_tensor_batch": {key: torch.randn(ROWS, generator=generator).numpy() for key in KEYS},
        "gamma": 0.9,
        "lam": 0.8,
        "config": CONFIG,
    }


def estimate(name: str, columns: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return ADV_ESTIMATOR_REGISTRY[name](**columns)


# ---------------------------------------------------------------------------------------------------- the contract

NAMES = sorted(ADV_ESTIMATOR_REGISTRY)


def test_the_names_of_verl_and_roll_are_there() -> None:
    assert set(NAMES) >= {
        *("gae", "grpo", "grpo_vectorized", "grpo_passk", "reinforce_plus_plus", "reinforce_plus_plus_baseline"),
        *("rloo", "rloo_vectorized", "remax", "opo", "gpg", "optimal_token_baseline", "tir_optimal_token_baseline"),
        *("gdpo", "reinforce", "step_reinforce", "gigpo", "agentic_reinforce"),
    }


@pytest.mark.parametrize("name", NAMES)
def test_values_under_mask_0_never_matter(name: str) -> None:
    columns = batch(alone=name != "grpo_passk")
    clean = estimate(name, columns)
    hidden = columns["response_mask"] == 0
    for column in ("token_level_rewards", "values", "old_log_probs", "sum_pi_squared"):
        columns[column] = torch.where(hidden, math.nan, columns[column])
    for found, expected in zip(estimate(name, columns), clean, strict=True):
        assert found.shape == (ROWS, WIDTH) and found.dtype == torch.float64
        assert torch.equal(found, expected) and bool((found[hidden] == 0).all())
        assert found.abs().max() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_empty_rows_have_no_weight(name: str) -> None:
    """The rows without a token may as well not be there; gpg's alpha and whitening count them nowhere either."""
    columns = batch(alone=name != "grpo_passk")
    everyone = estimate(name, columns)
    kept = np.flatnonzero((columns["response_mask"] != 0).any(dim=1).numpy())
    fewer = {
        key: value[kept] if isinstance(value, np.ndarray | torch.Tensor) else value for key, value in columns.items()
    }
    fewer["non_tensor_batch"] = {key: value[kept] for key, value in columns["non_tensor_batch"].items()}
    for found, expected in zip(everyone, estimate(name, fewer), strict=True):
        torch.testing.assert_close(found[kept], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_row_order_does_not_matter(name: str) -> None:
    columns = batch(alone=name != "grpo_passk")
    straight = estimate(name, columns)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    mixed = {
        key: value[order.numpy() if isinstance(value, np.ndarray) else order]
        if isinstance(value, np.ndarray | torch.Tensor)
        else value
        for key, value in columns.items()
    }
    mixed["non_tensor_batch"] = {key: value[order.numpy()] for key, value in columns["non_tensor_batch"].items()}
    for found, expected in zip(estimate(name, mixed), straight, strict=True):
        torch.testing.assert_close(found, expected[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_with_hardly_a_token_is_finite(name: str, kept: int) -> None:
    columns = batch(alone=name != "grpo_passk")
    columns["response_mask"] = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
    columns["response_mask"][0, :kept] = 1
    for found in estimate(name, columns):
        assert bool(torch.isfinite(found).all())


@pytest.mark.parametrize("name", NAMES)
def test_a_mask_of_another_shape_is_named(name: str) -> None:
    columns = batch(alone=name != "grpo_passk")
    columns["response_mask"] = columns["response_mask"][:, :-1]
    with pytest.raises(ValueError, match=rf"mask has shape \({ROWS}, {WIDTH - 1}\), expected .*\({ROWS}, {WIDTH}\)"):
        estimate(name, columns)


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("gae", "values"),
        ("remax", "reward_baselines"),
        ("optimal_token_baseline", "sum_pi_squared"),
        ("tir_optimal_token_baseline", "old_log_probs"),
        ("step_reinforce", "traj_id"),
        ("gigpo", "state_hash"),
        ("grpo_passk", "index"),
        *((name, "index") for name in ("grpo", "rloo", "opo", "gpg", "gdpo", "gigpo", "reinforce_plus_plus_baseline")),
    ],
)
def test_what_is_missing_is_named(name: str, missing: str) -> None:
    columns = batch(alone=name != "grpo_passk")
    del columns[missing]
    with pytest.raises(ValueError, match=f"{missing} is missing"):
        estimate(name, columns)


# ---------------------------------------------------------------------------------------------------- naive references


def whitened(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    kept = values[mask != 0]
    return torch.where(mask != 0, (values - kept.mean()) / (kept.var() + 1e-8).sqrt(), 0)


def members(columns: dict[str, Any], row: int) -> list[int]:
    """Rows with a token that share the row's group."""
    mask, index = columns["response_mask"], columns["index"]
    return [i for i in range(ROWS) if index[i] == index[row] and mask[i].any()]


def naive_gae(columns: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    rewards, values, mask = (columns[name] for name in ("token_level_rewards", "values", "response_mask"))
    advantages = torch.zeros_like(rewards)
    for row in range(ROWS):
        next_value = next_advantage = 0.0
        for t in reversed(range(WIDTH)):
            if mask[row, t]:
                delta = rewards[row, t] + 0.9 * next_value - values[row, t]
                next_advantage = advantages[row, t] = delta + 0.9 * 0.8 * next_advantage
                next_value = values[row, t]
    return whitened(advantages, mask), (advantages + values) * mask


def naive_returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float, gaps: bool) -> torch.Tensor:
    returns = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        running = 0.0
        for t in reversed(range(rewards.shape[1])):
            if mask[row, t]:
                returns[row, t] = running = rewards[row, t] + gamma * running
            elif gaps:
                running = gamma * running
    return returns


def naive_outcome(name: str, columns: dict[str, Any]) -> torch.Tensor:
    """Estimators that give a row one number, by the formula of each."""
    mask = columns["response_mask"]
    scores = columns["token_level_rewards"].sum(dim=1)
    alive = [i for i in range(ROWS) if mask[i].any()]
    result = torch.zeros(ROWS, dtype=torch.float64)
    for row in alive:
        group = members(columns, row)
        others = torch.stack([scores[i] for i in group if i != row]) if len(group) > 1 else None
        mean = torch.stack([scores[i] for i in group]).mean() if others is not None else 0.0
        match name:
            case "rloo":
                result[row] = scores[row] if others is None else scores[row] - others.mean()
            case "rloo_vectorized":
                result[row] = 0 if others is None else scores[row] - others.mean()
            case "opo":
                lengths = mask[group].sum(dim=1)
                result[row] = scores[row] - (0 if others is None else (lengths * scores[group]).sum() / lengths.sum())
            case "gpg":
                result[row] = len(alive) / sum(float(scores[i]) != 0 for i in alive) * (scores[row] - mean)
            case "reinforce_plus_plus_baseline":
                result[row] = scores[row] - mean
            case "grpo_passk":
                std = scores[group].std() if others is not None else 1.0
                is_best = others is not None and scores[row] > others.max()
                result[row] = (scores[row] - others.max()) / (std + 1e-6) if is_best else 0
            case "gdpo":
                for key, weight in zip(KEYS, CONFIG.gdpo_reward_weights, strict=True):
                    kind = torch.as_tensor(columns["non_tensor_batch"][key]).double()
                    centre, std = (kind[group].mean(), kind[group].std()) if others is not None else (0.0, 1.0)
                    result[row] += weight * (kind[row] - centre) / (std + 1e-6)
    return result[:, None] * mask


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_gae_equals_a_naive_loop(seed: int) -> None:
    columns = batch(seed)
    for found, expected in zip(estimate("gae", columns), naive_gae(columns), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    "name", ["rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline", "grpo_passk", "gdpo"]
)
def test_outcome_estimators_equal_naive_loops(name: str, seed: int) -> None:
    columns = batch(seed, alone=name != "grpo_passk")
    expected = naive_outcome(name, columns)
    if name in ("reinforce_plus_plus_baseline", "gdpo"):
        expected = whitened(expected, columns["response_mask"])
    advantages, returns = estimate(name, columns)
    torch.testing.assert_close(advantages, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(returns, advantages)


def test_estimators_of_returns_equal_naive_loops() -> None:
    columns = batch()
    rewards, mask = columns["token_level_rewards"], columns["response_mask"]
    advantages, returns = estimate("reinforce_plus_plus", columns)
    expected = naive_returns(rewards, mask, 0.9, gaps=False)
    torch.testing.assert_close(returns, expected)
    torch.testing.assert_close(advantages, whitened(expected, mask), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(estimate("reinforce", columns)[0], naive_returns(rewards, mask, 0.9, gaps=True))
    advantages, returns = estimate("remax", columns)
    torch.testing.assert_close(returns, naive_returns(rewards, mask, 1.0, gaps=False))
    torch.testing.assert_close(advantages, (returns - columns["reward_baselines"][:, None]) * mask)


def naive_token_baseline(columns: dict[str, Any], zero_tail: bool = True) -> torch.Tensor:
    """By rows and time steps; a row's time goes on under mask 0, so it suits rows without holes, or moved together."""
    mask, returns = (
        columns["response_mask"],
        naive_returns(columns["token_level_rewards"], columns["response_mask"], 1.0, gaps=False),
    )
    weights = (1 - 2 * columns["old_log_probs"].exp() + columns["sum_pi_squared"]) * mask
    energy = weights.cumsum(dim=1) * mask
    lengths = [max([t + 1 for t in range(WIDTH) if mask[i, t]], default=0) for i in range(ROWS)]
    advantages = returns.clone()
    for row in range(ROWS):
        group = members(columns, row)
        if len(group) < 2:
            continue
        second = sorted(lengths[i] for i in group)[-2]
        for t in range(WIDTH):
            in_tail = zero_tail and lengths[row] > second and t >= second
            if mask[row, t] and not in_tail:
                total = sum(energy[i, t] for i in group)
                advantages[row, t] -= sum(returns[i, t] * energy[i, t] for i in group) / (total + 1e-8)
    return advantages * mask


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("holes", [True, False])
def test_the_optimal_token_baseline_equals_a_naive_loop(holes: bool, zero_tail: bool) -> None:
    columns = batch(5, holes)
    advantages, _ = estimate("optimal_token_baseline", {**columns, "handle_zero_tail": zero_tail})
    torch.testing.assert_close(advantages, naive_token_baseline(columns, zero_tail), rtol=1e-9, atol=1e-9)


def test_the_multi_turn_baseline_counts_the_policys_own_tokens() -> None:
    columns = batch(6)
    moved = dict(columns)
    for name in ("token_level_rewards", "response_mask", "old_log_probs", "sum_pi_squared"):
        moved[name] = torch.zeros_like(columns[name])
        for row, mask in enumerate(columns["response_mask"] != 0):
            moved[name][row, : int(mask.sum())] = columns[name][row, mask]
    found, _ = estimate("tir_optimal_token_baseline", columns)
    expected = naive_token_baseline(moved)
    assert not torch.allclose(found, estimate("optimal_token_baseline", columns)[0])
    for row, mask in enumerate(columns["response_mask"] != 0):
        torch.testing.assert_close(found[row, mask], expected[row, : int(mask.sum())], rtol=1e-9, atol=1e-9)


def test_importance_weights_enter_the_token_baseline_squared() -> None:
    columns = batch(7)
    weights = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.5
    found, _ = estimate("optimal_token_baseline", {**columns, "rollout_is_weights": weights})
    proxy = (1 - 2 * columns["old_log_probs"].exp() + columns["sum_pi_squared"]) * weights**2
    columns["sum_pi_squared"] = proxy - 1 + 2 * columns["old_log_probs"].exp()
    torch.testing.assert_close(found, naive_token_baseline(columns), rtol=1e-9, atol=1e-9)


def naive_turns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    result = torch.zeros_like(rewards)
    for row in range(len(rewards)):
        running, inside = 0.0, False
        for t in reversed(range(rewards.shape[1])):
            if mask[row, t] and not inside:
                running = rewards[row, t] + gamma * running
            inside = bool(mask[row, t])
            result[row, t] = running if inside else 0.0
    return result


def test_reinforce_by_turns_equals_a_naive_loop() -> None:
    columns = batch()
    expected = naive_turns(columns["token_level_rewards"], columns["response_mask"], 0.9)
    torch.testing.assert_close(estimate("agentic_reinforce", columns)[0], expected)


def naive_steps(scores: torch.Tensor, columns: dict[str, Any], rows: Iterable[int]) -> torch.Tensor:
    result = torch.zeros(ROWS, dtype=torch.float64)
    for row in rows:
        later = [i for i in rows if columns["traj_id"][i] == columns["traj_id"][row]]
        later = sorted(
            (i for i in later if columns["step"][i] >= columns["step"][row]), key=lambda i: columns["step"][i]
        )
        result[row] = sum(0.95**k * scores[i] for k, i in enumerate(later))
    return result


def naive_norm(values: torch.Tensor, groups: list[Any], alive: torch.Tensor) -> torch.Tensor:
    result = torch.zeros(ROWS, dtype=torch.float64)
    for row in range(ROWS):
        group = [i for i in range(ROWS) if groups[i] == groups[row] and alive[i]]
        if alive[row] and len(group) > 1:
            result[row] = (values[row] - values[group].mean()) / (values[group].std() + 1e-6)
    return result


def test_step_estimators_equal_naive_loops() -> None:
    columns = batch()
    mask, scores = columns["response_mask"], columns["token_level_rewards"].sum(dim=1)
    alive = mask.any(dim=1)
    everyone = naive_steps(scores, columns, range(ROWS))
    steps = naive_steps(scores, columns, [i for i in range(ROWS) if alive[i]])
    torch.testing.assert_close(compute_discounted_returns(scores, columns["traj_id"], columns["step"], 0.95), everyone)

    def along_the_row(rewards: torch.Tensor) -> torch.Tensor:
        placed = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
        for row in range(ROWS):
            if alive[row]:
                placed[row, int(mask[row].nonzero().max())] = rewards[row]
        return naive_returns(placed, mask, 0.9, gaps=True)

    torch.testing.assert_close(estimate("step_reinforce", columns)[0], along_the_row(torch.where(alive, steps, 0)))
    trajectories = columns["traj_id"].tolist()
    episodes = torch.stack(
        [
            sum((scores[i] for i in range(ROWS) if trajectories[i] == trajectories[row]), scores[0] * 0)
            for row in range(ROWS)
        ]
    )
    states = list(zip(columns["index"], columns["state_hash"], strict=True))
    rewards = naive_norm(episodes, columns["index"].tolist(), alive) + 0.5 * naive_norm(steps, states, alive)
    found, _ = estimate("gigpo", {**columns, "step_reward_weight": 0.5})
    torch.testing.assert_close(found, along_the_row(rewards), rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------------------------------------------- by hand


def test_gae_by_hand_passes_an_observation_unchanged() -> None:
    rewards, mask = torch.tensor([[0.0, 9.0, 1.0, 0.0]]), torch.tensor([[1, 0, 1, 0]])
    values = torch.tensor([[0.5, 7.0, 0.25, 3.0]])
    advantages, returns = compute_gae_advantage_return(rewards, values, mask, gamma=0.5, lam=0.5)
    last = 1.0 - 0.25
    first = 0.5 * 0.25 - 0.5 + 0.25 * last
    assert returns.tolist() == [[first + 0.5, 0.0, last + 0.25, 0.0]]
    half = math.sqrt(0.5)  # two values whitened: +-1/sqrt(2)
    assert advantages.tolist()[0] == pytest.approx([-half, 0.0, half, 0.0], abs=1e-4)


def test_gae_takes_rolls_arguments() -> None:
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    _, returns = compute_gae_advantage_return(token_level_rewards=rewards, values=values, gamma=1.0, lambd=1.0)
    assert returns.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rloo", [2.0, -2.0, 5.0]),
        ("rloo_vectorized", [2.0, -2.0, 0.0]),
        ("opo", [3.0 - 5 / 3, 1.0 - 5 / 3, 5.0]),  # (1 * 3 + 2 * 1) / 3
        ("gpg", [1.0, -1.0, 5.0]),
        ("grpo", [1 / math.sqrt(2), -1 / math.sqrt(2), 5.0]),
    ],
)
def test_groups_by_hand(name: str, expected: list[float]) -> None:
    rewards = torch.tensor([[3.0, 0.0], [0.0, 1.0], [0.0, 5.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 0], [1, 1], [1, 1]])
    advantages, _ = get_adv_estimator_fn(name)(token_level_rewards=rewards, response_mask=mask, index=["a", "a", "b"])
    assert advantages[:, 0].tolist() == pytest.approx(expected, abs=1e-5)
    assert advantages[0, 1] == 0


def test_pass_at_k_by_hand() -> None:
    rewards = torch.tensor([[1.0], [4.0], [2.0], [5.0], [5.0], [0.0]])
    index, mask = ["a", "a", "a", "b", "b", "b"], torch.ones(6, 1)
    passk = get_adv_estimator_fn("grpo_passk")
    raw, _ = passk(rewards, mask, index, config=SimpleNamespace(norm_adv_by_std_in_grpo=False))
    assert raw.flatten().tolist() == [0.0, 2.0, 0.0, 0.0, 0.0, 0.0]
    scaled, _ = passk(rewards, mask, index)
    assert scaled[1].item() == pytest.approx(2.0 / np.std([1, 4, 2], ddof=1), rel=1e-5)
    with pytest.raises(ValueError, match="grpo_passk: a group of one row"):
        passk(rewards, mask, ["a", "a", "a", "b", "b", "c"])


def test_returns_by_hand() -> None:
    rewards, mask = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1, 0, 1]])
    _, returns = get_adv_estimator_fn("reinforce_plus_plus")(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[2.0, 0.0, 2.0]]
    returns, _ = get_adv_estimator_fn("reinforce")(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[1.5, 0.0, 2.0]]
    assert compute_reinforce_return(torch.tensor([[1.0, 4.0, 2.0]]), 0.5, 1.0)[0].tolist() == [[3.5, 5.0, 2.0]]
    advantages, returns = get_adv_estimator_fn("remax")(rewards, torch.tensor([0.5]), mask)
    assert (advantages.tolist(), returns.tolist()) == ([[2.5, 0.0, 1.5]], [[3.0, 0.0, 2.0]])


def test_turns_by_hand() -> None:
    mask = torch.tensor([[1, 1, 0, 1, 1, 0]])
    rewards = torch.tensor([[9.0, 1.0, 5.0, 9.0, 2.0, 9.0]])
    returns, _ = compute_agentic_reinforce_return(rewards, 0.5, 1.0, mask)
    assert returns.tolist() == [[2.0, 2.0, 0.0, 2.0, 2.0, 0.0]]


def test_gdpo_by_hand_and_its_options() -> None:
    gdpo, mask = get_adv_estimator_fn("gdpo"), torch.ones(2, 1)
    columns = {"a": np.array([1.0, 3.0]), "b": np.array([5.0, 1.0])}
    config = SimpleNamespace(gdpo_reward_keys=["a", "b"], gdpo_reward_weights=[3.0, 1.0])
    advantages, _ = gdpo(torch.zeros(2, 1), mask, [0, 0], config=config, non_tensor_batch=columns)
    assert advantages.flatten().tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], abs=1e-5)
    masked, _ = gdpo(
        torch.zeros(3, 1),
        torch.tensor([[1], [1], [0]]),
        [0, 0, 0],
        config=config,
        non_tensor_batch={"a": np.array([1.0, 3.0, None], dtype=object), "b": np.array([5.0, 1.0, 9.0])},
    )
    assert torch.equal(masked[:2], advantages) and masked[2] == 0
    with pytest.raises(ValueError, match="reward 'a' is no finite number in 1 rows"):
        gdpo(torch.zeros(2, 1), mask, [0, 0], config=config, non_tensor_batch={**columns, "a": np.array([1.0, None])})
    config.gdpo_reward_weights = [1.0]
    with pytest.raises(ValueError, match=r"gdpo_reward_weights=\[1.0\]: one for each"):
        gdpo(torch.zeros(2, 1), mask, [0, 0], config=config, non_tensor_batch=columns)
    config.gdpo_reward_keys = ["c"]
    with pytest.raises(ValueError, match=r"gdpo_reward_keys=\['c'\].*\['a', 'b'\]"):
        gdpo(torch.zeros(2, 1), mask, [0, 0], config=config, non_tensor_batch=columns)


# ---------------------------------------------------------------------------------------------------- parts


def test_reward_norm_by_hand() -> None:
    scores = torch.tensor([1.0, 3.0, 5.0])
    groups = ["a", "a", "b"]
    assert agentic_reward_norm(scores, groups).tolist() == [1.0, 3.0, 5.0]
    assert agentic_reward_norm(scores, groups, "group").tolist() == [-1.0, 1.0, 0.0]
    assert agentic_reward_norm(scores, groups, "batch", "batch").tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-5)
    by_group = agentic_reward_norm(scores, groups, "group", "group").tolist()
    assert by_group == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5), 0.0], abs=1e-5)
    with pytest.raises(ValueError, match="norm_std_type='running'"):
        agentic_reward_norm(scores, groups, "group", "running")


def test_segment_means_by_hand_and_gradient() -> None:
    values = torch.tensor([[1.0, 3.0, math.nan, 5.0, math.nan], [math.nan] * 5], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 0, 1, 0], [0] * 5])
    assert compute_segment_masked_mean(values, mask).tolist() == [[2.0, 2.0, 0.0, 5.0, 0.0], [0.0] * 5]
    values.requires_grad_()
    (compute_segment_masked_mean(values, mask) * torch.tensor([2.0, 4.0, 8.0, 16.0, 32.0])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [[3.0, 3.0, 0.0, 16.0, 0.0], [0.0] * 5]


def test_running_moments_equal_those_of_everything_seen() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(size, generator=generator, dtype=torch.float64) * 3 + 1e4 for size in (1, 7, 0, 50)]
    moments = RunningMoments()
    for part in parts:
        batch_mean, batch_std = moments.update(part)
    seen = torch.cat(parts)
    assert (moments.mean, moments.std) == (pytest.approx(float(seen.mean())), pytest.approx(float(seen.std())))
    assert (batch_mean, batch_std) == (pytest.approx(float(parts[-1].mean())), pytest.approx(float(parts[-1].std())))
    assert moments.count == 58
    restored = RunningMoments()
    restored.load_state_dict(moments.state_dict())
    assert restored.state_dict() == moments.state_dict()
    assert RunningMoments().update(torch.tensor([4.0])) == (4.0, 1.0)


def test_core_algos_offers_the_names_that_users_import() -> None:
    names = """compute_gae_advantage_return compute_grpo_outcome_advantage compute_reinforce_return RunningMoments
    compute_agentic_reinforce_return compute_segment_masked_mean compute_rloo_outcome_advantage masked_mean masked_var
    compute_remax_outcome_advantage compute_opo_outcome_advantage compute_gpg_outcome_advantage masked_whiten agg_loss
    compute_optimal_token_baseline_advantage compute_reinforce_plus_plus_outcome_advantage kl_penalty"""
    assert all(hasattr(core_algos, name) for name in names.split())

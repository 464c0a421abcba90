"""Every advantage estimator as plain loops over lists of floats, written from the formulas and nothing else.

`naive_estimate(name, columns)` takes the keyword arguments of the estimator of that name and gives (advantages,
returns) as lists of rows. The reference of the tests and of `python -m tests.bench algos`: slow on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

Row = list[float]
Pair = tuple[list[Row], list[Row]]


@dataclass
class Given:
    """The columns as lists. rewards, values, ... are by row, then by token; a mask entry is true where it counts."""

    columns: dict[str, Any]
    rewards: list[Row]
    mask: list[list[bool]]

    @property
    def rows(self) -> range:
        return range(len(self.mask))

    @property
    def width(self) -> int:
        return len(self.mask[0])

    def listed(self, name: str) -> list[Any]:
        """A column as a list; of tokens, by rows."""
        column = self.columns[name]
        return column.tolist() if isinstance(column, np.ndarray | torch.Tensor) else list(column)

    def option(self, name: str, default: Any) -> Any:
        """A number given by keyword, or its default."""
        return self.columns.get(name, default)

    def alive(self) -> list[int]:
        """Rows with a valid token."""
        return [row for row in self.rows if any(self.mask[row])]

    def scores(self) -> Row:
        """Sum of the rewards of a row's valid tokens."""
        rows = zip(self.rewards, self.mask, strict=True)
        return [sum(r for r, m in zip(rewards, mask, strict=True) if m) for rewards, mask in rows]

    def groups(self, labels: list[Any] | None = None) -> dict[Any, list[int]]:
        """Rows with a valid token by group label (default: index)."""
        labels = self.listed("index") if labels is None else labels
        result: dict[Any, list[int]] = {}
        for row in self.alive():
            result.setdefault(labels[row], []).append(row)
        return result

    def spread(self, numbers: Row) -> list[Row]:
        """A number per row at each of its valid tokens."""
        return [[number if m else 0.0 for m in mask] for number, mask in zip(numbers, self.mask, strict=True)]

    def whitened(self, rows: list[Row]) -> list[Row]:
        """(x - mean) / sqrt(var + 1e-8) over valid tokens, var with n - 1; as it is if there are fewer than two."""
        kept = [x for row, mask in zip(rows, self.mask, strict=True) for x, m in zip(row, mask, strict=True) if m]
        if len(kept) < 2:
            return rows
        mean = math.fsum(kept) / len(kept)
        scale = math.sqrt(math.fsum((x - mean) ** 2 for x in kept) / (len(kept) - 1) + 1e-8)
        return [
            [(x - mean) / scale if m else 0.0 for x, m in zip(row, mask, strict=True)]
            for row, mask in zip(rows, self.mask, strict=True)
        ]


def mean(numbers: Row) -> float:
    return math.fsum(numbers) / len(numbers)


def std(numbers: Row) -> float:
    centre = mean(numbers)
    return math.sqrt(math.fsum((x - centre) ** 2 for x in numbers) / (len(numbers) - 1))


def gae(given: Given) -> Pair:
    values, gamma, lam = given.listed("values"), given.option("gamma", 1.0), given.option("lam", 1.0)
    advantages, returns = [], []
    for rewards, mask, value in zip(given.rewards, given.mask, values, strict=True):
        advantage_row, return_row = [0.0] * given.width, [0.0] * given.width
        next_value = next_advantage = 0.0
        for t in reversed(range(given.width)):
            if mask[t]:
                delta = rewards[t] + gamma * next_value - value[t]
                next_advantage = delta + gamma * lam * next_advantage
                next_value = value[t]
                advantage_row[t], return_row[t] = next_advantage, next_advantage + value[t]
        advantages.append(advantage_row)
        returns.append(return_row)
    return given.whitened(advantages), returns


def discounted(given: Given, rewards: list[Row], gamma: float, gaps: bool) -> list[Row]:
    """G_t = r_t + gamma G_next over valid tokens; `gaps`: tokens between them take time too."""
    returns = []
    for row, mask in zip(rewards, given.mask, strict=True):
        result, running = [0.0] * given.width, 0.0
        for t in reversed(range(given.width)):
            if mask[t]:
                result[t] = running = row[t] + gamma * running
            elif gaps:
                running = gamma * running
        returns.append(result)
    return returns


def reinforce_plus_plus(given: Given) -> Pair:
    returns = discounted(given, given.rewards, given.option("gamma", 1.0), gaps=False)
    return given.whitened(returns), returns


def reinforce(given: Given) -> Pair:
    returns = discounted(given, given.rewards, given.option("gamma", 1.0), gaps=True)
    return returns, returns


def remax(given: Given) -> Pair:
    returns = discounted(given, given.rewards, 1.0, gaps=False)
    greedy = given.spread(given.listed("reward_baselines"))
    return [[g - b for g, b in zip(*rows, strict=True)] for rows in zip(returns, greedy, strict=True)], returns


def agentic_reinforce(given: Given) -> Pair:
    """Turn by turn, from the last: the reward of a turn's last token, plus gamma times the next turn's."""
    gamma, returns = given.option("gamma", 1.0), []
    for rewards, mask in zip(given.rewards, given.mask, strict=True):
        result, running, inside = [0.0] * given.width, 0.0, False
        for t in reversed(range(given.width)):
            if mask[t] and not inside:
                running = rewards[t] + gamma * running
            inside = mask[t]
            result[t] = running if inside else 0.0
        returns.append(result)
    return returns, returns


def outcome(function: Callable[[Given, Row, list[int], int], float]) -> Callable[[Given], Pair]:
    """An estimator that gives a row one number, from (all scores, the rows of its group, the row)."""

    def estimator(given: Given) -> Pair:
        scores, numbers = given.scores(), [0.0] * len(given.mask)
        for group in given.groups().values():
            for row in group:
                numbers[row] = function(given, scores, group, row)
        advantages = given.spread(numbers)
        return advantages, advantages

    return estimator


def centre_and_scale(scores: Row, group: list[int]) -> tuple[float, float]:
    """Mean and standard deviation of a group; (0, 1) for a group of one."""
    own = [scores[row] for row in group]
    return (mean(own), std(own)) if len(own) > 1 else (0.0, 1.0)


def grpo(given: Given, scores: Row, group: list[int], row: int) -> float:
    centre, scale = centre_and_scale(scores, group)
    return (scores[row] - centre) / (scale + 1e-6 if given.option("norm_adv_by_std_in_grpo", True) else 1.0)


def maxrl(given: Given, scores: Row, group: list[int], row: int) -> float:
    centre, _ = centre_and_scale(scores, group)
    return (scores[row] - centre) / (centre + 1e-6) if centre > 0 else 0.0


def grpo_passk(given: Given, scores: Row, group: list[int], row: int) -> float:
    others = [scores[other] for other in group if other != row]
    if not others or scores[row] <= max(others):
        return 0.0
    return (scores[row] - max(others)) / (centre_and_scale(scores, group)[1] + 1e-6)


def rloo(given: Given, scores: Row, group: list[int], row: int) -> float:
    others = [scores[other] for other in group if other != row]
    return scores[row] - (mean(others) if others else 0.0)


def rloo_vectorized(given: Given, scores: Row, group: list[int], row: int) -> float:
    return rloo(given, scores, group, row) if len(group) > 1 else 0.0


def opo(given: Given, scores: Row, group: list[int], row: int) -> float:
    if len(group) == 1:
        return scores[row]
    lengths = {other: sum(given.mask[other]) for other in group}
    return scores[row] - math.fsum(lengths[i] * scores[i] for i in group) / sum(lengths.values())


def gpg(given: Given) -> Pair:
    alive, scores = given.alive(), given.scores()
    alpha = len(alive) / max(1, sum(scores[row] != 0 for row in alive))

    def formula(_: Given, scores: Row, group: list[int], row: int) -> float:
        return alpha * (scores[row] - centre_and_scale(scores, group)[0])

    return outcome(formula)(given)


def reinforce_plus_plus_baseline(given: Given) -> Pair:
    def formula(_: Given, scores: Row, group: list[int], row: int) -> float:
        return scores[row] - centre_and_scale(scores, group)[0]

    advantages = given.whitened(outcome(formula)(given)[0])
    return advantages, advantages


def gdpo(given: Given) -> Pair:
    config, columns = given.columns["config"], given.columns["non_tensor_batch"]
    totals = [0.0] * len(given.mask)
    for key, weight in zip(config.gdpo_reward_keys, config.gdpo_reward_weights, strict=True):
        rewards = [float(x) for x in columns[key]]
        for group in given.groups().values():
            centre, scale = centre_and_scale(rewards, group)
            for row in group:
                totals[row] += weight * (rewards[row] - centre) / (scale + 1e-6)
    advantages = given.whitened(given.spread(totals))
    return advantages, advantages


def optimal_token_baseline(given: Given) -> Pair:
    """By group and time step. A row's time goes on under mask 0."""
    returns = discounted(given, given.rewards, 1.0, gaps=False)
    log_probs, squares = given.listed("old_log_probs"), given.listed("sum_pi_squared")
    is_weights = given.listed("rollout_is_weights") if given.option("rollout_is_weights", None) is not None else None
    energy = [[0.0] * given.width for _ in given.rows]
    for row in given.rows:
        total = 0.0
        for t in range(given.width):
            if given.mask[row][t]:
                weight = max(0.0, 1 - 2 * math.exp(log_probs[row][t]) + squares[row][t])
                total += weight * (is_weights[row][t] ** 2 if is_weights else 1.0)
                energy[row][t] = total
    ends = [max((t + 1 for t in range(given.width) if mask[t]), default=0) for mask in given.mask]
    advantages = [list(row) for row in returns]
    for group in given.groups().values():
        if len(group) > 1:
            second = sorted(ends[row] for row in group)[-2]
            for t in range(given.width):
                if given.option("handle_zero_tail", True) and t >= second:
                    continue  # only the one longest row is left: it would be its own baseline
                top = math.fsum(returns[row][t] * energy[row][t] for row in group)
                baseline = top / (math.fsum(energy[row][t] for row in group) + 1e-8)
                for row in group:
                    advantages[row][t] -= baseline if given.mask[row][t] else 0.0
    return advantages, returns


def tir_optimal_token_baseline(given: Given) -> Pair:
    """The same where time counts valid tokens only: rows moved together, estimated, moved back."""
    places = [[t for t in range(given.width) if mask[t]] for mask in given.mask]

    def together(rows: list[list[Any]], filler: Any) -> list[list[Any]]:
        return [
            [row[t] for t in own] + [filler] * (given.width - len(own)) for row, own in zip(rows, places, strict=True)
        ]

    names = [name for name in ("old_log_probs", "sum_pi_squared", "rollout_is_weights") if name in given.columns]
    columns = given.columns | {name: together(given.listed(name), 0.0) for name in names}
    moved = Given(columns, together(given.rewards, 0.0), together(given.mask, False))
    results = []
    for rows in optimal_token_baseline(moved):
        result = [[0.0] * given.width for _ in given.rows]
        for row, own in enumerate(places):
            for k, t in enumerate(own):
                result[row][t] = rows[row][k]
        results.append(result)
    return results[0], results[1]


def step_returns(given: Given, scores: Row) -> Row:
    """Of each row, its score plus gamma times the return of its episode's next step."""
    gamma, steps, result = given.option("step_reward_gamma", 0.95), given.listed("step"), [0.0] * len(given.mask)
    for episode in given.groups(given.listed("traj_id")).values():
        running = 0.0
        for row in sorted(episode, key=lambda row: -steps[row]):
            result[row] = running = scores[row] + gamma * running
    return result


def normalised(given: Given, scores: Row, labels: list[Any], kinds: tuple[Any, Any]) -> Row:
    """(score - mean) / (std + 1e-6), each of the batch, the group or left out; 0 where a std is asked for in vain."""
    alive, groups, result = given.alive(), given.groups(labels), [0.0] * len(given.mask)
    for row in alive:
        members = {"batch": alive, "group": groups[labels[row]]}
        result[row] = scores[row] - (mean([scores[i] for i in members[kinds[0]]]) if kinds[0] else 0.0)
        if kinds[1]:
            own = [scores[i] for i in members[kinds[1]]]
            scale = std(own) if len(own) > 1 else 0.0
            result[row] = result[row] / (scale + 1e-6) if scale > 1e-6 else 0.0
    return result


def along_the_row(given: Given, numbers: Row) -> Pair:
    """REINFORCE with each row's number as the reward of its last valid token."""
    rewards = [[0.0] * given.width for _ in given.rows]
    for row in given.alive():
        rewards[row][max(t for t in range(given.width) if given.mask[row][t])] = numbers[row]
    returns = discounted(given, rewards, given.option("gamma", 1.0), gaps=True)
    return returns, returns


def step_reinforce(given: Given) -> Pair:
    kinds = (given.option("norm_mean_type", None), given.option("norm_std_type", None))
    returns = step_returns(given, given.scores())
    return along_the_row(given, normalised(given, returns, given.listed("index"), kinds))


def gigpo(given: Given) -> Pair:
    kinds = (given.option("norm_mean_type", "group"), given.option("norm_std_type", "group"))
    scores, tasks = given.scores(), given.listed("index")
    episodes = [0.0] * len(given.mask)
    for episode in given.groups(given.listed("traj_id")).values():
        for row in episode:
            episodes[row] = math.fsum(scores[i] for i in episode)
    states = list(zip(tasks, given.listed("state_hash"), strict=True))
    by_episode = normalised(given, episodes, tasks, kinds)
    by_step = normalised(given, step_returns(given, scores), states, kinds)
    weights = (given.option("episode_reward_weight", 1.0), given.option("step_reward_weight", 1.0))
    return along_the_row(given, [weights[0] * e + weights[1] * s for e, s in zip(by_episode, by_step, strict=True)])


NAIVE_ESTIMATORS: dict[str, Callable[[Given], Pair]] = {
    **{formula.__name__: outcome(formula) for formula in (grpo, maxrl, grpo_passk, rloo, rloo_vectorized, opo)},
    "grpo_vectorized": outcome(grpo),
    **{
        estimator.__name__: estimator
        for estimator in (gae, gdpo, gpg, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, reinforce)
        + (optimal_token_baseline, tir_optimal_token_baseline, agentic_reinforce, step_reinforce, gigpo)
    },
}


def naive_estimate(name: str, columns: dict[str, Any]) -> Pair:
    """(advantages, returns) as lists of rows, from the keyword arguments of the estimator `name`."""
    mask = [[m != 0 for m in row] for row in columns["response_mask"].tolist()]
    return NAIVE_ESTIMATORS[name](Given(columns, columns["token_level_rewards"].tolist(), mask))

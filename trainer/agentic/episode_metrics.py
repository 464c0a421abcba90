"""Metrics of a batch of episodes: scores by episode and by environment, lengths, and turns.

A batch has one row per episode or one row per step of an episode; rows of one episode share their `traj_id`. The metric
names are ROLL's, in addition to verl's names in `trainer.ppo.step_metrics`. Rows of failed episodes are left out of all
metrics; `env/error_rate` is the share of failed episodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainer.agentic.episode_log import column_of, rows_by_episode
from trainer.ppo import step_metrics
from trainer.ppo.step_metrics import summary
from trainer.validation.metrics import name_metrics, process_validation_metrics, rows_by_prompt
from verl_lite.algos.agentic_rewards import build_state_groups
from verl_lite.protocol import DataProto

OWN = "own/"
"""Prefix of the names that a program chooses, so that none of them is the name of a metric of the trainer."""

SUCCESS = "success"
"""The environment metric that is true if the task was solved; validation metrics report it as `acc`."""


@dataclass(frozen=True)
class EpisodeTable:
    """The episodes of a batch that did not fail; each list has one entry per episode.

    Attributes:
        tags, groups: environment tag and group of the episode.
        scores: score of the episode.
        metrics: metrics that its environment or program reported.
        rows: indices of its rows in the batch, in the order of its steps.
        prefix: text that the trainer puts before the names of `metrics`, OWN for programs.
    """

    tags: list[str]
    groups: list[str]
    scores: NDArray[np.float64]
    metrics: list[Mapping[str, float]]
    rows: list[NDArray[np.int64]]
    prefix: str = ""

    def __len__(self) -> int:
        return len(self.tags)

    @classmethod
    def of(cls, batch: DataProto) -> EpisodeTable:
        """Reads traj_id, uid, tags and episode_scores, and also env_metrics, step, reward_failed and requests if
        present; only episodes of programs have requests."""
        columns = batch.non_tensor_batch
        num_rows = len(batch)
        failed = column_of(batch, "reward_failed", np.zeros(num_rows)).astype(bool)
        counted_rows = np.flatnonzero(~failed)
        rows = [np.array(numbers) for numbers in rows_by_episode(batch, counted_rows)]
        first_rows = [numbers[0] for numbers in rows]
        last_rows = [numbers[-1] for numbers in rows]

        scores = np.asarray(column_of(batch, "episode_scores"), dtype=np.float64)
        # the last row has the metrics of the whole episode
        metrics_of_row = column_of(batch, "env_metrics", np.full(num_rows, None))
        prefix = ""
        if "requests" in columns:
            prefix = OWN
        return cls(
            tags=[str(columns["tags"][row]) for row in first_rows],
            groups=[str(columns["uid"][row]) for row in first_rows],
            scores=scores[first_rows],
            metrics=[metrics_of_row[row] or {} for row in last_rows],
            rows=rows,
            prefix=prefix,
        )


def compute_data_metrics(batch: DataProto, use_critic: bool = False) -> dict[str, float]:
    """Returns the metrics of `trainer.ppo.step_metrics.compute_data_metrics` and the metrics of episodes: scores,
    turns, tokens, environment metrics per tag and over all tags, and sizes of groups of equal states.
    trainer/METRICS.md explains each of them."""
    table = EpisodeTable.of(batch)
    metrics = step_metrics.compute_data_metrics(batch, use_critic)
    # an episode counts once in the scores, whatever its number of rows
    metrics |= summary("critic/score", table.scores)
    if len(table):
        groups = np.array(table.groups, dtype=object)
        metrics |= step_metrics.frac_reward_zero_std(torch.from_numpy(table.scores), groups)
    # the same numbers under ROLL's name
    metrics |= summary("rollout/score", table.scores)

    for name, sizes in _sizes_of_episodes(batch, table).items():
        metrics |= summary(f"rollout/{name}", np.array(sizes))
    metrics |= environment_metrics(table)

    columns = batch.non_tensor_batch
    # only steps are compared with others that start from the same state
    rows_are_steps = any(len(numbers) != 1 for numbers in table.rows)
    if "state_hash" in columns and rows_are_steps:
        rows = np.concatenate(table.rows)
        states = build_state_groups(columns["uid"][rows], columns["state_hash"][rows])
        group_sizes = list(Counter(states).values())
        metrics |= summary("system/state_batch_size", np.array(group_sizes))
    return metrics


def _sizes_of_episodes(batch: DataProto, table: EpisodeTable) -> dict[str, list[float]]:
    """Returns the numbers of tokens and turns of each episode, by the name of the metric."""
    tensors = batch.batch
    width = tensors["responses"].shape[-1]
    is_sampled = tensors["response_mask"] != 0
    num_sampled = is_sampled.sum(-1).numpy()
    is_token = tensors["attention_mask"]
    num_prompt = is_token[:, :-width].sum(-1).numpy()
    num_after_prompt = is_token[:, -width:].sum(-1).numpy()
    return {
        "response_length": [num_sampled[rows].sum() for rows in table.rows],
        # with one row per step, the prompts of later rows contain the earlier turns
        "prompt_length": [num_prompt[rows[0]] for rows in table.rows],
        "non_prompt_length": [num_after_prompt[rows].sum() for rows in table.rows],
        "num_turns": _turns_of_episodes(batch, table),
    }


def _turns_of_episodes(batch: DataProto, table: EpisodeTable) -> list[float]:
    """Returns the number of turns of each episode, which each of its rows has."""
    num_turns = column_of(batch, "num_turns", np.ones(len(batch)))
    first_rows = [rows[0] for rows in table.rows]
    return [float(num_turns[row]) for row in first_rows]


def environment_metrics(table: EpisodeTable, prefix: str = "") -> dict[str, float]:
    """Returns {prefix}env/{tag}/{metric}, the mean over the episodes of a tag that report the metric, and
    {prefix}env/{metric}, the mean over all tags. Names of programs begin with OWN.

    The metrics of an episode are already aggregated over its steps according to its `metrics_agg_mode`.
    """
    values: dict[str, list[float]] = {}
    for tag, metrics in zip(table.tags, table.metrics, strict=True):
        for name, value in metrics.items():
            own_name = f"{table.prefix}{name}"
            for metric_name in (f"{prefix}env/{tag}/{own_name}", f"{prefix}env/{own_name}"):
                values.setdefault(metric_name, []).append(float(value))
    means = {}
    for name in sorted(values):
        means[name] = float(np.mean(values[name]))
    return means


def validation_metrics(batch: DataProto, prefix: str = "") -> dict[str, float]:
    """Returns the metrics of a validation: over episodes, over the groups of each tag, and the validation metrics of
    answers to prompts with each group taken as a prompt. trainer/METRICS.md explains each of them.

    acc is the environment's `success`; a tag has it if all of its episodes report `success`.

    Args:
        batch: the rows of the validation episodes.
        prefix: text that follows val/ or the tag in metric names, such as "greedy/".
    """
    table = EpisodeTable.of(batch)
    metrics = summary(f"val/{prefix}score", table.scores)
    num_turns = _turns_of_episodes(batch, table)
    metrics |= summary(f"val-aux/{prefix}num_turns", np.array(num_turns))
    groups_of_tag = rows_by_prompt(table.tags, table.groups)
    for tag in sorted(groups_of_tag):
        means = [table.scores[episodes].mean() for episodes in groups_of_tag[tag]]
        metrics |= summary(f"val/{prefix}{tag}/score", np.array(means))
    metrics |= environment_metrics(table, f"val/{prefix}")

    variables: dict[str, Sequence[float | None]] = {"reward": table.scores.tolist()}
    accuracies = _accuracies(table)
    if any(accuracy is not None for accuracy in accuracies):
        variables["acc"] = accuracies
    results = process_validation_metrics(table.tags, table.groups, variables)
    return metrics | name_metrics(results, prefix)


def _accuracies(table: EpisodeTable) -> list[float | None]:
    """Returns the `success` of each episode; None for a tag of which some episodes do not report it."""
    without_success = set()
    for tag, metrics in zip(table.tags, table.metrics, strict=True):
        if SUCCESS not in metrics:
            without_success.add(tag)

    accuracies: list[float | None] = []
    for tag, metrics in zip(table.tags, table.metrics, strict=True):
        accuracy = None
        if tag not in without_success:
            accuracy = float(metrics[SUCCESS])
        accuracies.append(accuracy)
    return accuracies

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
from trainer.validation.metrics import name_metrics, process_validation_metrics
from verl_lite.algos.agentic_rewards import build_state_groups
from verl_lite.protocol import DataProto

OWN = "own/"
"""Prefix of the names that a program chooses, so that none of them is the name of a metric of the trainer."""

SUCCESS = "success"
"""The environment metric that is true if the task was solved; validation metrics report it as `acc`."""


@dataclass(frozen=True)
class EpisodeTable:
    """The episodes of a batch that did not fail; each list has one entry per episode.

    tags, groups: environment tag and group of the episode. scores: score of the episode. metrics: metrics that its
    environment or program reported. rows: indices of its rows in the batch, in the order of its steps. prefix: text
    before the names of `metrics` in those of the trainer, OWN for programs.
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
        failed = np.asarray(columns.get("reward_failed", np.zeros(len(batch))), dtype=bool)
        rows = [np.array(found) for found in rows_by_episode(batch, np.flatnonzero(~failed))]
        first = [found[0] for found in rows]
        metrics = columns.get("env_metrics")
        return cls(
            tags=[str(columns["tags"][row]) for row in first],
            groups=[str(columns["uid"][row]) for row in first],
            scores=np.asarray(column_of(batch, "episode_scores"), dtype=np.float64)[first],
            metrics=[{} if metrics is None else metrics[found[-1]] or {} for found in rows],
            rows=rows,
            prefix=OWN if "requests" in columns else "",
        )


def compute_data_metrics(batch: DataProto, use_critic: bool = False) -> dict[str, float]:
    """Returns the metrics of `trainer.ppo.step_metrics.compute_data_metrics` and the metrics of episodes: scores,
    turns, tokens, environment metrics per tag and over all tags, and sizes of groups of equal states.
    trainer/METRICS.md explains each of them."""
    table = EpisodeTable.of(batch)
    metrics = step_metrics.compute_data_metrics(batch, use_critic)
    metrics |= summary("critic/score", table.scores)
    groups = np.array(table.groups, dtype=object)
    metrics |= step_metrics.frac_reward_zero_std(torch.from_numpy(table.scores), groups) if len(table) else {}
    metrics |= summary("rollout/score", table.scores)
    tensors = batch.batch
    width = tensors["responses"].shape[-1]
    written = (tensors["response_mask"] != 0).sum(-1).numpy()
    first = tensors["attention_mask"][:, :-width].sum(-1).numpy()
    later = tensors["attention_mask"][:, -width:].sum(-1).numpy()
    turns = column_of(batch, "num_turns", np.ones(len(batch)))
    for name, of_episode in {
        "response_length": [written[rows].sum() for rows in table.rows],
        "prompt_length": [first[rows[0]] for rows in table.rows],
        "non_prompt_length": [later[rows].sum() for rows in table.rows],
        "num_turns": [float(turns[rows[0]]) for rows in table.rows],
    }.items():
        metrics |= summary(f"rollout/{name}", np.array(of_episode))
    metrics |= environment_metrics(table)
    columns = batch.non_tensor_batch
    if "state_hash" in columns and any(len(found) != 1 for found in table.rows):  # rows are steps
        rows = np.concatenate(table.rows)
        sizes = Counter(build_state_groups(columns["uid"][rows], columns["state_hash"][rows])).values()
        metrics |= summary("system/state_batch_size", np.array(list(sizes)))
    return metrics


def environment_metrics(table: EpisodeTable, prefix: str = "") -> dict[str, float]:
    """Returns {prefix}env/{tag}/{metric}, the mean over the episodes of a tag that report the metric, and
    {prefix}env/{metric}, the mean over all tags. Names of programs begin with OWN.

    The metrics of an episode are already aggregated over its steps according to its `metrics_agg_mode`.
    """
    found: dict[str, list[float]] = {}
    for tag, numbers in zip(table.tags, table.metrics, strict=True):
        for name, value in numbers.items():
            own_name = f"{table.prefix}{name}"
            for key in (f"{prefix}env/{tag}/{own_name}", f"{prefix}env/{own_name}"):
                found.setdefault(key, []).append(float(value))
    return {key: float(np.mean(entries)) for key, entries in sorted(found.items())}


def validation_metrics(batch: DataProto, prefix: str = "") -> dict[str, float]:
    """Returns the metrics of a validation: over episodes, over the groups of each tag, and the validation metrics of
    answers to prompts with each group taken as a prompt. trainer/METRICS.md explains each of them.

    acc is the environment's `success`; a tag has it if all of its episodes report `success`. prefix: text that follows
    val/ or the tag in metric names, such as "greedy/".
    """
    table = EpisodeTable.of(batch)
    turns = column_of(batch, "num_turns", np.ones(len(batch)))
    metrics = summary(f"val/{prefix}score", table.scores)
    metrics |= summary(f"val-aux/{prefix}num_turns", np.array([float(turns[found[0]]) for found in table.rows]))
    for tag in sorted(set(table.tags)):
        by_group: dict[str, list[float]] = {}
        for name, group, score in zip(table.tags, table.groups, table.scores, strict=True):
            if name == tag:
                by_group.setdefault(group, []).append(score)
        means = np.array([np.mean(scores) for scores in by_group.values()])
        metrics |= summary(f"val/{prefix}{tag}/score", means)
    variables: dict[str, Sequence[float | None]] = {"reward": table.scores.tolist()}
    without_success = {tag for tag, numbers in zip(table.tags, table.metrics, strict=True) if SUCCESS not in numbers}
    if set(table.tags) - without_success:
        episodes = zip(table.tags, table.metrics, strict=True)
        variables["acc"] = [None if tag in without_success else float(found[SUCCESS]) for tag, found in episodes]
    results = process_validation_metrics(table.tags, table.groups, variables)
    return metrics | environment_metrics(table, f"val/{prefix}") | name_metrics(results, prefix)

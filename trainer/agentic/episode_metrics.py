"""What a step of episodes looked like: scores by episode and by environment, lengths, turns, throughput.

A batch has one row for each episode, or one for each step of it (`traj_id` says which rows are one episode). Names
are ROLL's, beside verl's of `trainer.step_metrics`. Rows whose episode failed are in none of the numbers; how many
failed is `env/error_rate`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from trainer import step_metrics
from trainer.agentic.episode_log import column_of, rows_by_episode
from trainer.evaluate.validation_metrics import name_metrics, process_validation_metrics
from trainer.step_metrics import summary
from verl_lite.algos.agentic_rewards import build_state_groups
from verl_lite.protocol import DataProto

SUCCESS = "success"
"""The metric of an environment that says whether its task was solved; it is `acc` among validation metrics."""


@dataclass(frozen=True)
class EpisodeTable:
    """The episodes of a batch that did not fail, one entry each.

    rows: of the batch that belong to the episode, in the order of its steps. metrics: those of the environment.
    """

    tags: list[str]
    groups: list[str]
    scores: NDArray[np.float64]
    metrics: list[Mapping[str, float]]
    rows: list[NDArray[np.int64]]

    def __len__(self) -> int:
        return len(self.tags)

    @classmethod
    def of(cls, batch: DataProto) -> EpisodeTable:
        """Reads traj_id, uid, tags, episode_scores; env_metrics, step and reward_failed where present."""
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
        )


def compute_data_metrics(batch: DataProto, use_critic: bool = False) -> dict[str, float]:
    """`trainer.step_metrics.compute_data_metrics`, and for episodes: scores, turns, tokens, what environments report by
    tag and over all, sizes of groups of equal states. Each is explained in trainer/METRICS.md."""
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
    """{prefix}env/{tag}/{metric}: the mean over a tag's episodes that report it; {prefix}env/{metric}: over all tags.

    Each episode's numbers are aggregated over its steps already, as its `metrics_agg_mode` says.
    """
    found: dict[str, list[float]] = {}
    for tag, numbers in zip(table.tags, table.metrics, strict=True):
        for name, value in numbers.items():
            for key in (f"{prefix}env/{tag}/{name}", f"{prefix}env/{name}"):
                found.setdefault(key, []).append(float(value))
    return {key: float(np.mean(entries)) for key, entries in sorted(found.items())}


def validation_metrics(batch: DataProto, prefix: str = "") -> dict[str, float]:
    """Numbers of a validation, each explained in trainer/METRICS.md: of episodes, of a tag's groups, and as for
    answers to prompts, where a group is a prompt; acc is the environment's `success`, if all of a tag's episodes report
    that. prefix: such as "greedy/", after val/ or the tag."""
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
    silent = {tag for tag, numbers in zip(table.tags, table.metrics, strict=True) if SUCCESS not in numbers}
    if set(table.tags) - silent:
        told = zip(table.tags, table.metrics, strict=True)
        variables["acc"] = [None if tag in silent else float(numbers[SUCCESS]) for tag, numbers in told]
    results = process_validation_metrics(table.tags, table.groups, variables)
    return metrics | environment_metrics(table, f"val/{prefix}") | name_metrics(results, prefix)

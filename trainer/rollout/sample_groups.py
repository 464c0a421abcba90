"""A group of samples, and what draws, samples, filters and scores groups.

`trainer.rollout.scheduler` decides which groups run. It knows the parts around it by the protocols of this file.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch

from verl_lite.config.algorithm import FilterGroupsConfig
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from workers.engines.base import SamplingParams
from workers.rollout.specs import EpisodeCounts, GroupPlan, GroupResults

SourceState: TypeAlias = dict[str, Any]
"""What a source saves in a checkpoint. Only the source reads it: numbers, batches, and the state of its data loader."""


SavedRows: TypeAlias = tuple[dict[str, torch.Tensor], dict[str, np.ndarray]]
"""Rows in a checkpoint: the tensors, and the other columns."""


class Rows(NamedTuple):
    """Consecutive rows of a batch."""

    batch: DataProto
    start: int
    stop: int

    def copied(self) -> DataProto:
        """Returns the rows as a batch that shares no memory with the other rows of `batch`."""
        return self.batch.select_idxs(np.arange(self.start, self.stop))


# two groups are never the same, and a set may hold them
@dataclass(eq=False)
class Group:
    """A group that was drawn and is not resolved yet, that is, neither trained on nor dropped.

    Attributes:
        plan: what the engines sample; without samples if the group was complete when a checkpoint was written.
        columns: the columns that the source knows. None if the engines return all columns, or if the group was complete
            when a checkpoint was written.
        version: weights with which the group was started.
        step: batch for which it was started.
        sampled: its rows once it is complete, with all columns: those of the source, those of the engines, and the
            scores if the filter needed them. A complete group therefore needs nothing else, whether its rows were
            sampled by this process or read from a checkpoint.
        counts: counts of its episodes.
        kind: None until the group is complete; then "kept", or the reason why the filter drops the group.
    """

    plan: GroupPlan
    columns: Rows | None = None
    version: int = 0
    step: int = 0
    sampled: Rows | None = None
    counts: EpisodeCounts | None = None
    kind: str | None = None

    @property
    def rows(self) -> DataProto:
        """The rows of a complete group."""
        assert self.sampled is not None
        return self.sampled.copied()

    @property
    def is_kept(self) -> bool:
        """True if the group is complete and can be trained on."""
        return self.kind == "kept"

    @property
    def is_dropped(self) -> bool:
        """True if the filter dropped the group."""
        return self.kind not in ("kept", None)


class Engines(Protocol):
    """Runs groups on the rollout engines, as `trainer.ppo.roles.ActorRole` does."""

    @property
    def num_engines(self) -> int: ...

    def begin_groups(self, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None: ...

    def run_groups(self, keys: Sequence[str], seconds: float | None = None) -> list[GroupResults]: ...

    def snapshot_groups(self) -> list[GroupPlan]: ...

    def abort_groups(self, keys: Sequence[str]) -> int: ...


class GroupSource(Protocol):
    """Draws groups in a fixed order; see `trainer.rollout.group_sources`."""

    epoch: int
    """Epoch of the last group, from 0."""

    def draw_batch(self, step: int, start_step: int) -> list[Group]:
        """Returns the groups of the batch of `step`, which are started in `start_step`."""

    def draw(self, number: int, step: int) -> list[Group]:
        """Returns up to `number` groups that replace dropped ones in this step; none if there are no more."""

    def update(self, batch: DataProto) -> dict[str, float]:
        """Receives a finished training batch, in the order of the steps. Returns metrics."""

    def state_dict(self) -> SourceState: ...

    def load_state_dict(self, state: SourceState) -> None: ...


@runtime_checkable
class AnswerRewards(Protocol):
    """Rewards that are computed while groups are sampled, as those of `trainer.rewards.scores.RewardManager`."""

    def are_ready(self, batch: DataProto) -> np.ndarray:
        """Returns (B,) bool: True for rows whose reward is available without waiting."""

    def submit(self, batch: DataProto) -> None:
        """Starts the computation of the rewards of these rows."""

    def cancel(self, sample_ids: Sequence[str]) -> None:
        """Ends the computation of rewards that are not needed."""


class GroupFilter:
    """Base class of filters, which decide which complete groups are trained on."""

    drops = True
    """False if this filter, with its options, never drops a group. The driver need not check the groups during
    sampling then."""
    adds_scores = False
    """True if the filter adds the scores to the rows of the groups."""

    def judge(self, groups: Sequence[Group]) -> None:
        """Sets `kind` of complete groups whose rewards are available, or may be waited for."""
        raise NotImplementedError

    def max_groups(self, wanted: int) -> float:
        """Returns the maximum number of groups that may be drawn for a batch of `wanted` groups."""
        raise NotImplementedError

    def fill_batch(self, step: int, groups: Sequence[Group], missing: int) -> None:
        """Keeps `missing` of the dropped groups, or raises. Called if no more groups may be drawn to replace them."""
        raise NotImplementedError

    def metrics(self, step: int, chosen: Sequence[Group], dropped: Sequence[Group]) -> dict[str, Metric]:
        """Returns metrics of the batch of this step.

        Args:
            step: the step.
            chosen: the groups of its batch.
            dropped: groups that were dropped since the last batch.
        """
        return {}


def filter_groups_limit(options: FilterGroupsConfig, wanted: int) -> float:
    """Returns the maximum number of groups that algorithm.filter_groups lets a batch of `wanted` groups draw."""
    # 0 = no limit
    if not options.max_num_gen_batches:
        return math.inf
    return options.max_num_gen_batches * wanted


def assembled(groups: Sequence[Group]) -> DataProto:
    """Returns the rows of complete groups, ordered by group."""
    return gathered([group.sampled for group in groups if group.sampled is not None])


def saved_rows(rows: DataProto) -> SavedRows:
    """Returns rows as a checkpoint has them: the arguments of `DataProto.from_dict`, which restores them."""
    tensors = {str(name): rows.batch[name] for name in rows.batch.keys()}
    return tensors, rows.non_tensor_batch


def with_columns(columns: Rows | None, sampled: Rows) -> Rows:
    """Adds the columns of the source, if there are any, to the rows that an engine returned."""
    if columns is None:
        return sampled
    source_rows = columns.batch.slice(columns.start, columns.stop)
    engine_rows = sampled.batch.slice(sampled.start, sampled.stop)
    rows = source_rows | engine_rows
    return Rows(rows, 0, len(rows))


def gathered(parts: Sequence[Rows]) -> DataProto:
    """Concatenates the parts. An object column that some batches lack is None in their rows; all batches need the same
    tensors."""
    # many groups share a batch, which is concatenated once
    batch_of_id = {id(part.batch): part.batch for part in parts}
    # a dict, because it keeps the order of their first occurrence
    names: dict[str, None] = {}
    for batch in batch_of_id.values():
        names |= dict.fromkeys(batch.non_tensor_batch)

    complete_batches = []
    first_row: dict[int, int] = {}
    num_rows = 0
    for batch_id, batch in batch_of_id.items():
        columns = batch.non_tensor_batch
        complete = batch.select(meta_info_keys=[])
        missing = np.full(len(batch), None)
        complete.non_tensor_batch = {name: columns.get(name, missing) for name in names}
        complete_batches.append(complete)
        first_row[batch_id] = num_rows
        num_rows += len(batch)

    rows_of_parts = []
    for part in parts:
        rows_in_batch = np.arange(part.start, part.stop)
        rows_of_parts.append(first_row[id(part.batch)] + rows_in_batch)
    rows = np.concatenate(rows_of_parts).astype(np.int64)
    return DataProto.concat(complete_batches).select_idxs(rows)


def version_metrics(batch: DataProto) -> dict[str, Metric]:
    """Returns mean and maximum of the number of versions of the weights that sampled a row."""
    if "rollout_versions" not in batch:
        return {}
    counts = []
    for versions in batch.batch["rollout_versions"].tolist():
        # -1 stands for padding, and for tokens that were not sampled
        versions_of_row = set(versions) - {-1}
        counts.append(len(versions_of_row))
    return {
        "async/versions_per_sample/mean": Metric.mean(sum(counts), len(counts)),
        "async/versions_per_sample/max": Metric.max(max(counts)),
    }


def add_counts(batch: DataProto, groups: Sequence[Group]) -> None:
    """Adds meta_info `episodes`, the sum of the counts, if the groups consist of episodes."""
    counts = [group.counts for group in groups if group.counts is not None]
    if counts:
        batch.meta_info["episodes"] = sum(counts, start=EpisodeCounts())


def sample_ids(groups: Sequence[Group]) -> list[str]:
    """Returns the ids of the samples of groups of answers, running or complete."""
    ids: list[str] = []
    for group in groups:
        # a group that was complete in a checkpoint has no columns of the source
        rows = group.columns or group.sampled
        if rows is not None:
            ids_of_batch = rows.batch.non_tensor_batch["sample_id"]
            ids += map(str, ids_of_batch[rows.start : rows.stop])
    return ids

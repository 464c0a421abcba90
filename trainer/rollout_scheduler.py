"""Schedules the episodes of agentic runs: groups, seeds, replacements, and how far ahead of training they start.

The scheduler returns the batch of a step. The seed and the step determine all groups and trajectories, for any number
of ranks and any timing. The exception is group_size_redundancy, which keeps the episodes of a group that end first.

Steps count from 0. The batch of step s starts in step max(0, s - async_generation_ratio), which is the column
start_step, and ends before the next weight update, so each trajectory is sampled by one version of the policy. Groups
that replace dropped ones run with the same weights and have the start_step of their batch. If the filter drops more
groups than max_replaced_groups, dropped groups complete the batch and are counted. verl's filter_groups ends the run in
this case (max_num_gen_batches), which would end the training of a policy that has mastered its environments.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from verl_lite.config import EnvManagerConfig, PPOConfig
from verl_lite.metrics import Metric, combine
from verl_lite.protocol import DataProto
from workers.rollout.base import SamplingParams, derive_seed
from workers.rollout.episodes import EpisodeSpec
from workers.rollout.group_run import EpisodeCounts, GroupPlan, GroupReport, GroupResults

REPLACEMENTS_FROM = 1_000_003
"""Difference between the episode_ids of a group and its next replacement. It is prime, because seeds follow the ids and
an environment that takes them modulo the size of a dataset would otherwise repeat the dropped task."""

SEEDS = 2**31

torch.serialization.add_safe_globals([Metric, EpisodeCounts])  # a finished batch is part of a checkpoint


class GroupRunner(Protocol):
    """Starts groups of episodes on the ranks and waits for them, as `trainer.roles.AgentRole` does."""

    def begin_groups(self, key: str, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None: ...

    def finish_groups(self, key: str) -> list[GroupResults]: ...


@dataclass(frozen=True)
class EnvGroup:
    """Environments that share configuration and seed."""

    group_id: int
    tag: str
    seed: int


@dataclass
class _Slot:
    """One slot of a batch: its group number, the number of groups that ran for it, the report of the last one, and its
    row range in the concatenated parts."""

    number: int
    attempts: int = 0
    report: GroupReport | None = None
    rows: range = range(0)


@dataclass
class _Batch:
    """A batch whose groups are still running. budget: remaining replacements. keys: keys of the running rounds."""

    step: int
    start_step: int
    budget: int = 0
    places: list[_Slot] = field(default_factory=list)
    keys: deque[str] = field(default_factory=deque)
    parts: list[GroupResults] = field(default_factory=list)
    num_dropped: int = 0
    num_rows: int = 0


class RolloutScheduler:
    """Schedules the batches of one environment manager.

    runner: runs the groups. sampling: sampling parameters of the actions. purpose: "train", or "val", whose batches all
    have the same episodes.
    """

    def __init__(
        self,
        config: PPOConfig,
        manager: EnvManagerConfig,
        runner: GroupRunner,
        sampling: SamplingParams,
        *,
        purpose: str = "train",
    ) -> None:
        self.manager, self.runner, self.sampling, self.purpose = manager, runner, sampling, purpose
        self.infer_cluster = runner  # ROLL's name
        self.ratio = config.agentic.async_generation_ratio if purpose == "train" else 0
        self.groups = env_groups(manager, config.trainer.seed, purpose)
        self.next_group = 0  # group number n is episode n // len(groups) of the environments of groups[n % len(groups)]
        self.flying: dict[int, _Batch] = {}  # running batches by step
        self.ready: dict[int, DataProto] = {}
        self._num_rounds = 0

    def get_batch(self, data: DataProto, batch_size: int) -> DataProto:
        """Returns the rows of `batch_size` episodes, ordered by group and by start within a group.

        data: a batch with meta_info global_step, counted from 0. The result has meta_info `metrics` (scheduler,
        environments and engine), `episodes` (an EpisodeCounts) and global_step.
        """
        step, started = int(data.meta_info["global_step"]), time.perf_counter()
        if self.purpose != "train":
            self.next_group = 0
        if step not in self.ready:
            start_step = step if self.purpose == "train" else 0  # the random numbers depend on it
            self.finish(self.flying.get(step) or self._begin(step, start_step, batch_size))
        batch = self.ready.pop(step)
        seconds = Metric.last(time.perf_counter() - started)
        batch.meta_info["metrics"] |= {f"time/get_batch_cost_{self.purpose}": seconds}
        return batch

    def begin_ahead(self, data: DataProto, batch_size: int) -> None:
        """Starts the batches of the next steps up to the ratio. Call it after the weight update of the step.

        They run between micro-batches of training, and `get_batch` or `finish` completes them. data: as in `get_batch`.
        Does nothing if the ratio is 0.
        """
        step = int(data.meta_info["global_step"])
        for later in range(step + 1, step + self.ratio + 1):
            if later not in self.flying and later not in self.ready:
                self._begin(later, step, batch_size)

    def finish(self, *batches: _Batch) -> None:
        """Waits for these batches, by default for all running ones. Call it before the weights change."""
        for batch in batches or tuple(self.flying.values()):
            self._finish_round(batch)
            while dropped := [place for place in batch.places if place.report is not None and place.report.is_dropped]:
                granted = zip(dropped, self._attempts_per_slot(batch, dropped), strict=True)
                if not (places := [place for place, count in granted if count]):
                    break  # the budget is used up, so dropped groups remain in the batch
                self._begin_round(batch, places)
                self._finish_round(batch)
            self.ready[batch.step] = self._rows(batch)
            self.flying.pop(batch.step)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the scheduler. Finishes the running batches first and includes them."""
        self.finish()
        ready = {step: (dict(b.batch.items()), b.non_tensor_batch, b.meta_info) for step, b in self.ready.items()}
        return {"next_group": self.next_group, "ready": ready}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of `state_dict`."""
        self.next_group = state["next_group"]
        self.ready = {step: DataProto.from_dict(*parts) for step, parts in state["ready"].items()}

    def _begin(self, step: int, start_step: int, batch_size: int) -> _Batch:
        size, rest = divmod(batch_size, self.manager.group_size)
        if rest:
            raise ValueError(f"a batch of {batch_size} episodes cannot be cut into groups of {self.manager.group_size}")
        places = [_Slot(number) for number in range(self.next_group, self.next_group + size)]
        self.next_group += size
        most, manager = self.manager.max_replaced_groups, self.manager
        budget = 4 * manager.num_env_groups if most < 0 else most  # groups that the batch may replace
        batch = _Batch(step, start_step, budget if manager.group_filter_cls is not None else 0, places)
        self._begin_round(batch, places)
        self.flying[step] = batch
        return batch

    def _begin_round(self, batch: _Batch, places: Sequence[_Slot]) -> None:
        """Starts a group for each of these slots and plans its replacements, so that ranks replace dropped groups
        without the driver, as far as the budget suffices in the worst case."""
        slots = {id(place): slot for slot, place in enumerate(batch.places)}
        plans = []
        for place, count in zip(places, self._attempts_per_slot(batch, places), strict=True):
            attempts = range(place.attempts, place.attempts + count)
            specs = tuple(self._members(place.number, attempt, batch.start_step) for attempt in attempts)
            plans.append(GroupPlan(slots[id(place)], specs))
        self._num_rounds += 1
        key = f"{self.purpose}/{batch.step}/{self._num_rounds}"
        self.runner.begin_groups(key, plans, self.sampling)
        batch.keys.append(key)

    def _attempts_per_slot(self, batch: _Batch, places: Sequence[_Slot]) -> list[int]:
        """Returns the number of groups that each slot may run in this round: one if none ran yet, plus an equal share
        of the budget, as far as max_traj_per_env allows."""
        share, rest = divmod(batch.budget, len(places))
        wishes = [share + (place.attempts == 0 or not share and index < rest) for index, place in enumerate(places)]
        most = self.manager.max_traj_per_env
        begun: Counter[EnvGroup] = Counter()
        groups = {place.number: self.groups[place.number % len(self.groups)] for place in batch.places}
        for place in batch.places:
            begun[groups[place.number]] += place.attempts
        granted = [0] * len(places)
        for turn in range(max(wishes)):
            for index, place in enumerate(places):
                group, is_first = groups[place.number], place.attempts + turn == 0
                if granted[index] == turn < wishes[index] and (is_first or most < 0 or begun[group] < most):
                    granted[index] += 1
                    begun[group] += 1
        return granted

    def _members(self, number: int, attempt: int, start_step: int) -> tuple[EpisodeSpec, ...]:
        """Returns the episodes of a group (attempt 0) or of its n-th replacement."""
        episode, place = divmod(number, len(self.groups))
        group, manager = self.groups[place], self.manager
        episode_id = episode + attempt * REPLACEMENTS_FROM
        name = f"{group.tag}_{group.group_id}_{episode_id}_{group.seed}"
        members = manager.group_size + manager.group_size_redundancy
        env_ids = range(group.group_id * members, (group.group_id + 1) * members)
        return tuple(
            EpisodeSpec(
                traj_id=f"{name}_{env_id}",
                traj_group_id=name,
                tag=group.tag,
                env_id=env_id,
                group_id=group.group_id,
                episode_id=episode_id,
                seed=(group.seed + episode_id) % SEEDS,
                group_size=manager.group_size,
                start_step=start_step,
                purpose=self.purpose,
            )
            for env_id in env_ids
        )

    def _finish_round(self, batch: _Batch) -> None:
        """Waits for the oldest round and stores its results."""
        for part in self.runner.finish_groups(batch.keys.popleft()):
            batch.parts.append(part)
            for report in part.reports:
                place = batch.places[report.slot]
                batch.budget -= report.attempts - (place.attempts == 0)
                batch.num_dropped += report.attempts - 1 + report.is_dropped
                place.attempts += report.attempts
                place.report = report
                place.rows = range(batch.num_rows, batch.num_rows + report.num_rows)
                batch.num_rows += report.num_rows

    def _rows(self, batch: _Batch) -> DataProto:
        """Returns the rows of the batch in the order of its slots."""
        parts = [part.rows.select(meta_info_keys=[]) for part in batch.parts if part.rows is not None]
        order = [row for place in batch.places for row in place.rows]
        result = DataProto.concat(parts).select_idxs(np.array(order, dtype=np.int64))
        kept = sum(place.report is not None and place.report.is_dropped for place in batch.places)
        metrics = combine(part.metrics for part in batch.parts)
        slowest, mean = (metrics.get(f"rollout/{name}_rank_seconds") for name in ("slowest", "mean"))
        if slowest is not None and mean is not None and slowest.value > 0:
            metrics["rollout/idle_frac"] = Metric.last(1 - mean.value / slowest.value)
        result.meta_info["metrics"] = metrics | {
            "scheduler/group_filter_count": Metric.last(batch.num_dropped),
            "scheduler/groups_kept_though_dropped": Metric.last(kept),
            "scheduler/off_policy_ratio": Metric.last(batch.step - batch.start_step),
        }
        result.meta_info["global_step"] = batch.step
        result.meta_info["episodes"] = sum((part.counts for part in batch.parts), start=EpisodeCounts())
        return result


def env_groups(manager: EnvManagerConfig, seed: int, purpose: str) -> list[EnvGroup]:
    """Returns the groups of environments in the order of use, which interleaves the tags in the proportions of
    num_groups_partition. The ids are ROLL's: groups of the same tag have consecutive ids."""
    share, rest = divmod(manager.num_env_groups, len(manager.tags))
    counts = manager.num_groups_partition or [share + (index < rest) for index in range(len(manager.tags))]
    groups: list[tuple[float, EnvGroup]] = []
    for tag, count in zip(manager.tags, counts, strict=True):
        for rank in range(count):
            group_id = len(groups)
            group_seed = derive_seed(seed, 0, f"{purpose}/{group_id}", 0) % SEEDS
            groups.append(((rank + 0.5) / count, EnvGroup(group_id, tag, group_seed)))
    return [group for _, group in sorted(groups, key=lambda entry: (entry[0], entry[1].group_id))]

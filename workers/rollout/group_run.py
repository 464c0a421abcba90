"""The groups of episodes of one rank. Groups that the filter drops are replaced.

The driver (`trainer.rollout_scheduler`) makes a `GroupPlan` for each slot of a batch. `GroupRun` starts the plans under
a key (`begin`), runs them in slices of time (`advance`, `run_slice`), and returns `GroupResults` when all groups of the
key have ended (`finish`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from verl_lite.group_filters import GroupFilter
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from workers.rollout.base import SamplingParams
from workers.rollout.episodes import EpisodeRunner, EpisodeSpec, Trajectory

MOST_SLICE_S = 1.0
WAIT_S = 0.05


@dataclass(frozen=True)
class GroupPlan:
    """One slot of a batch: a group of episodes, and the groups that replace it one after the other if dropped."""

    slot: int
    attempts: tuple[tuple[EpisodeSpec, ...], ...]


@dataclass(frozen=True)
class GroupReport:
    """The result of one slot.

    attempts: number of groups that ran for the slot. is_dropped: True if the filter also dropped the last one, whose
    rows are returned nevertheless. num_rows: number of rows of the last one.
    """

    slot: int
    attempts: int
    is_dropped: bool
    num_rows: int


@dataclass(frozen=True)
class EpisodeCounts:
    """Numbers of episodes that ended in a batch, including dropped ones; of failed ones; of those that exceeded a
    deadline; and the text of the first failure."""

    episodes: int = 0
    failed: int = 0
    timeouts: int = 0
    first_failure: str | None = None

    def __add__(self, other: EpisodeCounts) -> EpisodeCounts:
        return EpisodeCounts(
            self.episodes + other.episodes,
            self.failed + other.failed,
            self.timeouts + other.timeouts,
            self.first_failure or other.first_failure,
        )

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> EpisodeCounts:
        """Counts the episodes that were not ended as surplus."""
        ended = [one for one in trajectories if one.stop != "surplus"]
        failed = [one for one in ended if one.stop == "failed"]
        told = (f"episode {one.spec.traj_id} of the environment {one.spec.tag!r}:\n{one.error}" for one in failed)
        return cls(len(ended), len(failed), sum(bool(one.is_timeout) for one in failed), next(told, None))


@dataclass(frozen=True)
class GroupResults:
    """The part of a batch that one rank ran. reports: one per slot, in order. rows: rows of the slots in the same
    order; None if the rank had no slot."""

    reports: list[GroupReport]
    rows: DataProto | None
    counts: EpisodeCounts = EpisodeCounts()
    metrics: dict[str, Metric] = field(default_factory=dict)


@dataclass
class _Slot:
    """A running slot. batch: the runner's number of its current group. kept: trajectories of its last group."""

    plan: GroupPlan
    sampling: SamplingParams
    group_filter: GroupFilter | None
    batch: int = 0
    attempts: int = 0
    is_dropped: bool = False
    kept: list[Trajectory] = field(default_factory=list)
    counts: EpisodeCounts = EpisodeCounts()


class GroupRun:
    """Runs groups on one rank.

    runner: runs their episodes. rows: function that turns kept trajectories into a batch.
    """

    def __init__(self, runner: EpisodeRunner, rows: Callable[[list[Trajectory]], DataProto]) -> None:
        self._runner, self._to_rows = runner, rows
        self._numbers = itertools.count(1)
        self._keys: dict[str, list[_Slot]] = {}
        self._open: list[_Slot] = []
        self._pumped_at = time.perf_counter()
        self._active_s = self._pumped_s = 0.0

    @property
    def is_idle(self) -> bool:
        """True if no group is running."""
        return not self._open

    def begin(
        self, key: str, plans: Sequence[GroupPlan], sampling: SamplingParams, group_filter: GroupFilter | None
    ) -> None:
        """Starts these groups by resetting their environments. key: a key that no running group has."""
        places, started = [_Slot(plan, sampling, group_filter) for plan in plans], time.perf_counter()
        self._keys[key] = places
        for place in places:
            self._begin_group(place)
        self.advance()
        self._active_s += time.perf_counter() - started

    def finish(self, key: str) -> GroupResults:
        """Runs until all groups of the key have ended, and returns their results."""
        places, started = self._keys[key], time.perf_counter()
        while any(place in self._open for place in places):
            self.advance(WAIT_S)
        self._active_s += time.perf_counter() - started
        del self._keys[key]
        rows = [self._to_rows(place.kept) for place in places]
        reports = [
            GroupReport(place.plan.slot, place.attempts, place.is_dropped, len(part))
            for place, part in zip(places, rows, strict=True)
        ]
        counts = sum((place.counts for place in places), start=EpisodeCounts())
        active, pumped = self._active_s, self._pumped_s  # since the last results
        self._active_s = self._pumped_s = 0.0
        metrics = {
            "rollout/slowest_rank_seconds": Metric.max(active),
            "rollout/mean_rank_seconds": Metric.mean(active, 1),
            **({"rollout/seconds_beside_training": Metric.mean(pumped, 1)} if pumped else {}),
            **self._runner.take_metrics(active + pumped),
        }
        return GroupResults(reports, DataProto.concat(rows) if rows else None, counts, metrics)

    def run_slice(self) -> None:
        """Runs the groups between two parts of other work of the process: at most as long as that work took since the
        last slice, and only while there is something to decode."""
        if self.is_idle:
            return
        started = time.perf_counter()
        until = started + min(started - self._pumped_at, MOST_SLICE_S)
        self.advance()
        while self._open and self._runner.is_decoding and time.perf_counter() < until:
            self.advance()
        self._pumped_at = time.perf_counter()
        self._pumped_s += self._pumped_at - started

    def advance(self, wait_s: float = 0.0) -> None:
        """Makes at most one engine step. Filters the groups that have ended and starts their replacements."""
        self._runner.advance(wait_s)
        for place in [place for place in self._open if not self._runner.unfinished(place.batch)]:
            self._open.remove(place)
            trajectories = self._runner.take(place.batch)
            place.counts += EpisodeCounts.of(trajectories)
            place.kept = [one for one in trajectories if one.is_kept]
            if place.group_filter is not None:
                spec, group = place.plan.attempts[place.attempts][0], [self._to_rows([one]) for one in place.kept]
                place.is_dropped = bool(place.group_filter.filter(spec.group_id, spec.episode_id, group))
            place.attempts += 1
            if place.is_dropped and place.attempts < len(place.plan.attempts):
                self._begin_group(place)

    def _begin_group(self, place: _Slot) -> None:
        place.batch = next(self._numbers)
        members = place.plan.attempts[place.attempts]
        self._runner.begin([replace(spec, batch=place.batch) for spec in members], place.sampling)
        self._open.append(place)

"""What driver and ranks tell each other about groups of episodes: which to run, and what became of them.

The driver (`trainer.rollout_scheduler`) makes a `GroupPlan` for each place in a batch; a rank runs it
(`workers.rollout.group_run`) and gives its `GroupResults`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto


@dataclass(frozen=True)
class EpisodeSpec:
    """One episode that is to be run.

    traj_id, traj_group_id: names of the episode and of its group, unlike all others of the run. tag: of the
    environment's template. env_id, group_id: which environment, and which group of them. episode_id: which episode of
    its group. seed: of the environment. group_size: episodes of its group that are kept: the first to end.
    start_step: the step, from 0, in which it was begun; with traj_id it names the random numbers. batch: a number of
    the rank's own. render: whether frames are kept.
    """

    traj_id: str
    traj_group_id: str
    tag: str
    env_id: int
    group_id: int
    episode_id: int
    seed: int
    group_size: int
    start_step: int
    batch: int = 0
    purpose: str = "train"
    render: bool = False


@dataclass(frozen=True)
class GroupPlan:
    """One place in a batch: a group of episodes, and the groups that replace it in turn where the filter drops one."""

    slot: int
    attempts: tuple[tuple[EpisodeSpec, ...], ...]


@dataclass(frozen=True)
class GroupReport:
    """What became of one place.

    attempts: groups that were run for it. is_dropped: the filter dropped the last of them too, whose rows are given all
    the same. is_exhausted: the environment has no more episodes; then there are no rows. num_rows: rows of the last.
    """

    slot: int
    attempts: int
    is_dropped: bool
    is_exhausted: bool
    num_rows: int


@dataclass(frozen=True)
class EpisodeCounts:
    """Episodes that ended in a batch, dropped ones too; of these failed, and of these by a deadline; the first
    failure, as text."""

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
    def total(cls, parts: Iterable[EpisodeCounts]) -> EpisodeCounts:
        return sum(parts, start=cls())


@dataclass(frozen=True)
class GroupResults:
    """A rank's part of a batch. reports: in the order of slots; rows: theirs, in that order, None where there are
    none."""

    reports: list[GroupReport]
    rows: DataProto | None
    counts: EpisodeCounts = EpisodeCounts()
    metrics: dict[str, Metric] = field(default_factory=dict)

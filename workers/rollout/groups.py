"""What driver and ranks tell each other about groups of episodes: which to run, and what became of them.

The driver (`trainer.rollout_scheduler`) makes a `GroupPlan` for each place in a batch; a rank runs it
(`workers.rollout.group_run`) and gives its `GroupResults`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from workers.rollout.episodes import EpisodeSpec


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

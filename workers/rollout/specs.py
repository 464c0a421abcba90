"""What the driver and the rollout engines exchange: the samples of a group, and the results of complete groups.

A run has one kind of samples: single answers (`AnswerSpec`), episodes in environments (`EpisodeSpec`) or episodes of a
program (`ProgramSpec`). The driver (`trainer.rollout.group_sources`) writes their specifications, which determine the
samples: names, prompts or tasks, and random numbers. `workers.roles.sampling_worker` has a runner for each kind.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import torch

from verl_lite.json_types import DatasetRow
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.rewards import RewardItem
from workers.engines.base import FinishReason, Sampled

if TYPE_CHECKING:
    from workers.policy.vision import ImageInputs


@dataclass(frozen=True)
class AnswerSpec:
    """The specification of a single answer to a prompt.

    Args:
        prompt_ids: Tokens of the prompt.
        prompt_length: Width P of the columns of its row.
        seed: Seed of the answer; see `workers.engines.base.derive_seed`.
        is_greedy: True to decode greedily instead of as the sampling parameters say.
        is_padding: True for a row that is not sampled.
        item: Arguments of the reward function, without the answer; None if no reward function is called.
        sampled: Tokens that were sampled before, for example before the checkpoint from which a run resumes.
        finish_reason: The reason for the end of the answer if `sampled` is the whole answer; otherwise None.
        images: Images of the prompt.
    """

    prompt_ids: tuple[int, ...]
    prompt_length: int
    seed: int
    is_greedy: bool = False
    is_padding: bool = False
    item: RewardItem | None = None
    sampled: Sampled = Sampled()
    finish_reason: FinishReason | None = None
    images: "ImageInputs | None" = None


@dataclass(frozen=True)
class EpisodeSpec:
    """The specification of an episode in an environment. The numbers of environments, groups and episodes are ROLL's.

    Args:
        traj_id: Name of the episode, unique among the episodes of a runner that were not taken yet.
        traj_group_id: Name of the group, whose members also share the seed.
        tag: Entry of agentic.custom_envs that configures the environment.
        env_id: Number of the environment.
        group_id: Number of the group of environments.
        episode_id: Number of the episode of this group of environments.
        seed: Seed of the environment.
        group_size: Number of members that are kept, the first ones to end.
        start_step: Step in which the episode starts, from 1; the random numbers of its turns depend on it.
        purpose: "train" or "val".
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
    purpose: str = "train"


@dataclass(frozen=True)
class ProgramSpec:
    """The specification of an episode of a program.

    Args:
        traj_id: Name of the episode, unique among the episodes of a runner that were not taken yet.
        traj_group_id: Name of the group, whose members have the same task.
        tag: Name of the task's dataset, which takes the place of an environment's tag.
        start_step: Step in which the episode starts, from 1; the random numbers of its answers depend on it.
        row: The task: a row of the dataset, which the program receives.
    """

    traj_id: str
    traj_group_id: str
    tag: str
    start_step: int
    # specifications are hashable, and a dictionary is not
    row: DatasetRow = field(hash=False)


SampleSpec = AnswerSpec | EpisodeSpec | ProgramSpec
Spec = TypeVar("Spec", AnswerSpec, EpisodeSpec, ProgramSpec)


@dataclass(frozen=True)
class GroupPlan:
    """A group to sample.

    Args:
        key: Name of the group, which no running group has.
        samples: Specifications of its members, all of the same kind. Empty for a complete group of a checkpoint.
    """

    key: str
    samples: tuple[SampleSpec, ...]

    def samples_of(self, kind: type[Spec]) -> tuple[Spec, ...]:
        """Returns the samples. Raises TypeError if one of them is of another kind."""
        samples = tuple(spec for spec in self.samples if isinstance(spec, kind))
        if len(samples) != len(self.samples):
            raise TypeError(f"group {self.key!r}: this run samples {kind.__name__}s, found {self.samples}")
        return samples


@dataclass(frozen=True)
class EpisodeCounts:
    """Counts the episodes of a group or batch.

    Args:
        episodes: Number of episodes that ended by themselves, not as surplus of their group.
        failed: Number of those that failed.
        timeouts: Number of those that failed because they exceeded a deadline.
        first_failure: Text of the first failure.
        first_prompts: Number of tokens of each first prompt of a program's conversations.
    """

    episodes: int = 0
    failed: int = 0
    timeouts: int = 0
    first_failure: str | None = None
    first_prompts: tuple[int, ...] = ()

    def __add__(self, other: "EpisodeCounts") -> "EpisodeCounts":
        return EpisodeCounts(
            self.episodes + other.episodes,
            self.failed + other.failed,
            self.timeouts + other.timeouts,
            self.first_failure or other.first_failure,
            (*self.first_prompts, *other.first_prompts),
        )


@dataclass(frozen=True)
class GroupReport:
    """Describes a complete group.

    Args:
        key: Name of the group.
        num_rows: Number of its rows.
        counts: Counts of its episodes; None for a group of answers.
    """

    key: str
    num_rows: int
    counts: EpisodeCounts | None = None


@dataclass(frozen=True)
class GroupResults:
    """The groups that one engine completed.

    Args:
        reports: The complete groups.
        rows: Rows of the groups in the order of the reports; None if there is no group.
        metrics: Metrics of the engine since the last call that returned any; empty if the call had a time limit.
    """

    reports: list[GroupReport]
    rows: DataProto | None
    metrics: dict[str, Metric] = field(default_factory=dict)


# groups are part of checkpoints, running ones as plans and complete ones with their counts; checkpoints of earlier
# versions name the modules that defined these classes then
torch.serialization.add_safe_globals(
    [
        AnswerSpec,
        EpisodeCounts,
        GroupPlan,
        RewardItem,
        Sampled,
        (AnswerSpec, "workers.rollout.answers.AnswerSpec"),
        (EpisodeCounts, "workers.agents.episodes.EpisodeCounts"),
        (GroupPlan, "workers.rollout.group_run.GroupPlan"),
    ]
)

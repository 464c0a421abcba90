"""The sources of the groups that `trainer.rollout.scheduler` runs: prompts, environments, and tasks of a program.

A source draws groups in an order that depends only on the seed. It names each group and determines the seeds of its
samples, so the samples depend neither on time nor on the number of ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np

from trainer.data.order import build_order, build_train_loader
from trainer.data.prompts import PromptDataset
from trainer.ppo.requirements import needs_greedy_baseline
from trainer.rollout.sample_groups import Group, Rows, SavedRows, SourceState, saved_rows
from trainer.validation.sample import plain_value
from verl_lite.config import EnvManagerConfig, PPOConfig
from verl_lite.json_types import JsonObject
from verl_lite.protocol import DataProto, chunk_bounds
from workers.engines.base import derive_seed
from workers.rollout.answers import answer_plans
from workers.rollout.specs import EpisodeSpec, GroupPlan, ProgramSpec

ANSWERS = "answers_per_prompt"
"""Column with the number of answers to each prompt, if the dataset states it."""
SEEDS = 2**31
"""Seeds of environments are less than this number."""


def prompt_groups(
    prompts: DataProto, n: int | np.ndarray, name: str, seed: int, step: int, greedy_too: bool = False
) -> list[Group]:
    """Returns a group for each prompt.

    Args:
        prompts: the prompts.
        n: number of answers to a prompt; n[i] for prompt i.
        name: prefix of the names of groups and samples, such as train/3.
        seed, step: determine the random numbers, together with uid and sample.
        greedy_too: True to add a greedy answer per prompt, marked in the column is_greedy.

    Returns:
        The groups. Their rows have the columns of the prompts, sample and sample_id.
    """
    num_answers = np.broadcast_to(n, len(prompts))
    sizes = num_answers + greedy_too
    rows = prompts.sample_level_repeat(sizes)
    columns = rows.non_tensor_batch
    sample = np.concatenate([np.arange(size) for size in sizes])
    sample_ids = [f"{name}/{uid}/{number}" for uid, number in zip(columns["uid"], sample, strict=True)]
    columns["sample"] = sample
    columns["sample_id"] = np.array(sample_ids, dtype=object)
    if greedy_too:
        # the last answer of each prompt
        columns["is_greedy"] = sample == num_answers.repeat(sizes)

    # the engines return the token columns, so the group keeps the others
    kept_tensors = []
    if ANSWERS in rows:
        kept_tensors.append(ANSWERS)
    group_columns = rows.select(batch_keys=kept_tensors, meta_info_keys=[])
    keys = [f"{name}/{uid}" for uid in prompts.non_tensor_batch["uid"]]
    groups = []
    start = 0
    for plan in answer_plans(rows, sizes.tolist(), keys, seed, step):
        stop = start + len(plan.samples)
        groups.append(Group(plan, Rows(group_columns, start, stop)))
        start = stop
    return groups


class PromptState(TypedDict):
    """The state of a `PromptSource`.

    Attributes:
        epoch, loader: its position in the data.
        waiting: the prompts that were drawn and not used.
        asked: `PromptSource._drawn`. `waiting` and `asked` exist only if the source cuts batches.
    """

    epoch: int
    loader: JsonObject
    waiting: NotRequired[SavedRows | None]
    asked: NotRequired[dict[int, dict[str, int]]]


class PromptSource:
    """Draws the training prompts, epoch after epoch.

    A batch is a batch of the data loader, the last of which may be short in an epoch. With algorithm.filter_groups or
    rollout.oversample every batch has data.train_batch_size prompts, even if an epoch ends among them, and no prompt
    twice; the unused rest of a drawn batch is kept for the next prompts and saved in checkpoints.
    """

    def __init__(self, config: PPOConfig, data: PromptDataset) -> None:
        self.config = config
        self.epoch = 0  # of the prompts that were drawn last
        self.order = build_order(data, config)
        self.loader = build_train_loader(data, config, self.order)
        self._num_prompts = len(data)
        self._greedy_too = needs_greedy_baseline(config)
        self._cuts_batches = config.algorithm.filter_groups.enable or config.rollout.oversample > 1
        self._batches = self._epochs()
        self._waiting: DataProto | None = None  # prompts that were drawn and not used
        # by step, the prompts of a batch that is being filled: uid -> row of the dataset
        self._drawn: dict[int, dict[str, int]] = {}

    def draw_batch(self, step: int, start_step: int) -> list[Group]:
        if not self._cuts_batches:
            return self._groups(next(self._batches), step)
        # the batches of earlier steps are complete, so that no prompt is drawn for them any more
        oldest = step - self.config.async_training.depth
        for batch_step in list(self._drawn):
            if batch_step < oldest:
                del self._drawn[batch_step]
        return self.draw(self.config.data.train_batch_size, step)

    def draw(self, number: int, step: int) -> list[Group]:
        drawn = self._drawn.setdefault(step, {})
        groups: list[Group] = []
        # No prompt is drawn twice for a batch. So the loop ends when all are drawn, or after an epoch without a new
        # one, because a sampler may leave out prompts.
        batches_without_new = 0
        while number and batches_without_new <= len(self.loader):
            # a row that the sampler repeats has several uids
            rows_drawn = set(drawn.values())
            if len(rows_drawn) >= self._num_prompts:
                break
            batch = self._waiting or next(self._batches)
            uids = batch.non_tensor_batch["uid"]
            rows = batch.non_tensor_batch["index"]
            is_new = [uid not in drawn for uid in uids]
            new = np.flatnonzero(is_new)[:number]
            drawn |= dict(zip(uids[new], rows[new].tolist(), strict=True))

            self._waiting = None
            if len(new) == number:
                # the prompts after the last one that is needed wait for the next draw
                rest = np.arange(new[-1] + 1, len(batch))
                if len(rest):
                    self._waiting = batch.select_idxs(rest)

            number -= len(new)
            batches_without_new += 1
            if len(new):
                groups += self._groups(batch.select_idxs(new), step)
                batches_without_new = 0
        return groups

    def update(self, batch: DataProto) -> dict[str, float]:
        """Passes a finished training batch to the data sampler. Returns the sampler's metrics."""
        return self.order.update(batch)

    def state_dict(self) -> SourceState:
        state: PromptState = {"epoch": self.epoch, "loader": self.loader.state_dict()}
        if self._cuts_batches:
            state["waiting"] = None
            if self._waiting is not None:
                state["waiting"] = saved_rows(self._waiting)
            state["asked"] = _copied(self._drawn)
        return dict(state)

    def load_state_dict(self, state: SourceState) -> None:
        self.epoch = state["epoch"]
        self._batches = self._epochs()
        self.loader.load_state_dict(state["loader"])
        waiting = state.get("waiting")
        self._waiting = None
        if waiting is not None:
            self._waiting = DataProto.from_dict(*waiting)
        self._drawn = _copied(state.get("asked", {}))

    def _groups(self, prompts: DataProto, step: int) -> list[Group]:
        """Returns the groups of these prompts for the batch of this step."""
        n = self._answers_to(prompts)
        seed = self.config.trainer.seed
        groups = prompt_groups(prompts, n, f"train/{step}", seed, step, self._greedy_too)
        # Rows with the same uid are one group. Groups of several batches can be judged together or trained on in one
        # step; if two of these batches have the same prompt, its answers must remain two groups.
        mixes_batches = self.config.spans_updates or self.config.async_training.depth > 1
        if mixes_batches and groups[0].columns is not None:
            # all groups of a call share their columns
            columns = groups[0].columns.batch.non_tensor_batch
            uids = [f"{uid}@{step}" for uid in columns["uid"]]
            columns["uid"] = np.array(uids, dtype=object)
        return groups

    def _answers_to(self, prompts: DataProto) -> int | np.ndarray:
        """Returns the number of answers to a prompt: rollout.n, or each prompt's own number if the data states it."""
        if ANSWERS in prompts:
            return prompts.batch[ANSWERS].numpy()
        return self.config.rollout.n

    def _epochs(self) -> Iterator[DataProto]:
        """Yields the batches of the loader, epoch after epoch."""
        while True:
            yield from self.loader
            self.epoch += 1


def _copied(drawn: dict[int, dict[str, int]]) -> dict[int, dict[str, int]]:
    """Returns a copy of `PromptSource._drawn`, whose inner dictionaries the source changes with each draw."""
    return {step: dict(rows) for step, rows in drawn.items()}


class ProgramSource(PromptSource):
    """Draws the training prompts as tasks of a program: a group is rollout.n episodes of one row."""

    def _groups(self, prompts: DataProto, step: int) -> list[Group]:
        n = self._answers_to(prompts)
        return program_groups(prompts, n, f"train/{step}", step)


class ProgramValidation:
    """The validation prompts as tasks of a program."""

    def __init__(self, data: PromptDataset) -> None:
        self.data = data

    def draw_validation(self, n: int) -> list[Group]:
        """Returns all prompts, each with `n` episodes."""
        return program_groups(next(self.data.batches()), n, "val", 1)


def program_groups(prompts: DataProto, n: int | np.ndarray, name: str, step: int) -> list[Group]:
    """Returns a group for each prompt.

    Args:
        prompts: the prompts, which are the tasks of the program.
        n: number of episodes of a task; n[i] for prompt i.
        name: prefix of the names of groups and episodes.
        step: step in which they start.
    """
    columns = prompts.non_tensor_batch
    sizes = np.broadcast_to(n, len(prompts)).tolist()
    groups = []
    for row, size in enumerate(sizes):
        # plain Python values, because the program may run in another process and write the task as json
        task = {"prompt": plain_value(columns["raw_prompt"][row]), "index": int(columns["index"][row])}
        for key in ("data_source", "reward_model", "extra_info"):
            task[key] = plain_value(columns[key][row])
        tag = str(task["data_source"])

        uid = f"{name}/{columns['uid'][row]}"
        specs = []
        for number in range(size):
            spec = ProgramSpec(f"{uid}/{number}", uid, tag=tag, start_step=step, row=task)
            specs.append(spec)
        plan = GroupPlan(uid, tuple(specs))
        groups.append(Group(plan))
    return groups


@dataclass(frozen=True)
class EnvGroup:
    """Environments that share configuration and seed."""

    group_id: int
    tag: str
    seed: int


class EnvSource:
    """Draws groups of episodes: one of each group of environments in turn.

    Args:
        manager: section agentic.train_env_manager or agentic.val_env_manager.
        seed: seed of the run.
        batch_size: number of episodes of a batch.
        purpose: "train", or "val", whose batches all have the same episodes.

    Attributes:
        next_group: number of the next group; number n is episode n // G of the environments of group n % G.
    """

    epoch = 0

    def __init__(self, manager: EnvManagerConfig, seed: int, batch_size: int, purpose: str = "train") -> None:
        self.manager = manager
        self.batch_size = batch_size
        self.purpose = purpose
        self.envs = env_groups(manager, seed, purpose)
        self.next_group = 0

    def draw_batch(self, step: int, start_step: int) -> list[Group]:
        size = self.manager.group_size
        number, rest = divmod(self.batch_size, size)
        if rest:
            raise ValueError(f"a batch of {self.batch_size} episodes cannot be cut into groups of {size}")
        if self.purpose != "train":
            # always the same episodes: the random numbers depend on the number of the group and on the step
            self.next_group = 0
            start_step = 1
        return self.draw(number, start_step)

    def draw(self, number: int, step: int) -> list[Group]:
        groups = []
        for _ in range(number):
            plan = self._plan(self.next_group, step)
            groups.append(Group(plan))
            self.next_group += 1
        return groups

    def draw_validation(self, n: int) -> list[Group]:
        """Returns the groups of a validation. Their sizes are those of the environment manager, whatever `n` is."""
        return self.draw_batch(1, 1)

    def _plan(self, number: int, start_step: int) -> GroupPlan:
        """Returns the plan of group `number`. The names of its episodes are ROLL's."""
        episode_id, env_number = divmod(number, len(self.envs))
        env = self.envs[env_number]
        manager = self.manager
        name = f"{env.tag}_{env.group_id}_{episode_id}_{env.seed}"
        # redundant episodes start with the others, and the first `group_size` complete ones are used
        num_envs = manager.group_size + manager.group_size_redundancy
        first_env_id = env.group_id * num_envs
        specs = []
        for env_id in range(first_env_id, first_env_id + num_envs):
            specs.append(
                EpisodeSpec(
                    traj_id=f"{name}_{env_id}",
                    traj_group_id=name,
                    tag=env.tag,
                    env_id=env_id,
                    group_id=env.group_id,
                    episode_id=episode_id,
                    # equal in all episodes of the group, which start from the same state
                    seed=(env.seed + episode_id) % SEEDS,
                    group_size=manager.group_size,
                    start_step=start_step,
                    purpose=self.purpose,
                )
            )
        return GroupPlan(f"{self.purpose}/{name}", tuple(specs))

    def update(self, batch: DataProto) -> dict[str, float]:
        """Returns no metrics: environments do not choose their episodes by the results."""
        return {}

    def state_dict(self) -> SourceState:
        return {"next_group": self.next_group}

    def load_state_dict(self, state: SourceState) -> None:
        self.next_group = state["next_group"]


def env_groups(manager: EnvManagerConfig, seed: int, purpose: str) -> list[EnvGroup]:
    """Returns the groups of environments in the order of use, which interleaves the tags in the proportions of
    num_groups_partition. The ids are ROLL's: groups of the same tag have consecutive ids."""
    counts: Sequence[int] = manager.num_groups_partition
    if not counts:
        # equal counts; the first tags get the rest
        bounds = chunk_bounds(manager.num_env_groups, len(manager.tags))
        counts = [stop - start for start, stop in bounds]

    groups: list[EnvGroup] = []
    positions: list[float] = []
    for tag, count in zip(manager.tags, counts, strict=True):
        for number in range(count):
            group_id = len(groups)
            # depends on the purpose, so that training and validation have different worlds
            group_seed = derive_seed(seed, 0, f"{purpose}/{group_id}", 0) % SEEDS
            groups.append(EnvGroup(group_id, tag, group_seed))
            # the groups of each tag are spread evenly over the interval from 0 to 1
            positions.append((number + 0.5) / count)
    # the sort is stable: groups at equal positions are in the order of their ids
    return sorted(groups, key=lambda group: positions[group.group_id])

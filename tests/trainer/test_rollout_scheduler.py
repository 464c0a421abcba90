"""Which episodes a batch is made of: sizes, seeds, staleness, filters and their budget, exact resume.

The runner ends episodes without a model.
"""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from trainer.rollout_scheduler import REPLACEMENTS_FROM, RolloutScheduler, env_groups
from verl_lite.config import EnvManagerConfig, PPOConfig
from verl_lite.metrics import values
from verl_lite.protocol import DataProto
from workers.rollout.base import SamplingParams
from workers.rollout.episodes import EpisodeSpec
from workers.rollout.group_run import EpisodeCounts, GroupPlan, GroupReport, GroupResults

Filter = Callable[[EpisodeSpec], bool]


class ScriptedRunner:
    """Episodes end as they are asked for; each gives one to three rows, by its seed.

    drops: whether a group is dropped, by its first episode.
    """

    def __init__(self, ranks: int = 2, drops: Filter | None = None) -> None:
        self.ranks, self.drops = ranks, drops or (lambda spec: False)
        self.flying: dict[str, list[GroupPlan]] = {}
        self.begun: list[EpisodeSpec] = []
        self.version = 0
        self.versions: dict[str, int] = {}

    def begin_groups(self, key: str, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
        assert key not in self.flying and all(plan.attempts for plan in plans)
        self.flying[key] = list(plans)
        self.versions[key] = self.version

    def update_weights(self) -> None:
        assert not self.flying, "weights may not change under episodes that are on their way"
        self.version += 1

    def finish_groups(self, key: str) -> list[GroupResults]:
        plans = self.flying.pop(key)
        assert self.versions[key] == self.version
        return [self._rank(plans[rank :: self.ranks]) for rank in range(self.ranks)]

    def _rank(self, plans: list[GroupPlan]) -> GroupResults:
        reports, rows, episodes = [], [], 0
        for plan in plans:
            tried = 0
            for members in plan.attempts:
                tried += 1
                self.begun += members
                episodes += len(members)
                is_dropped = self.drops(members[0])
                if not is_dropped:
                    break
            kept = [spec for spec in members[: members[0].group_size] for _ in range(1 + spec.seed % 3)]
            reports.append(GroupReport(plan.slot, tried, is_dropped, len(kept)))
            rows += kept
        return GroupResults(reports, table(rows) if rows else None, EpisodeCounts(episodes))


def table(specs: list[EpisodeSpec]) -> DataProto:
    columns = {name: [getattr(spec, name) for spec in specs] for name in ("traj_id", "traj_group_id", "tag")}
    numbers = {name: [getattr(spec, name) for spec in specs] for name in ("seed", "start_step", "episode_id")}
    return DataProto.from_dict(
        {"seed": torch.tensor(numbers["seed"])},
        {name: np.array(column, dtype=object) for name, column in (columns | numbers).items() if name != "seed"},
    )


def settings(ratio: int = 0, seed: int = 1) -> PPOConfig:
    config = PPOConfig()
    config.agentic.async_generation_ratio, config.trainer.seed = ratio, seed
    return config


def manager(**options: object) -> EnvManagerConfig:
    return EnvManagerConfig(**({"tags": ["lake"], "num_env_groups": 4, "group_size": 2} | options))  # type: ignore[arg-type]


def scheduler(
    runner: ScriptedRunner, envs: EnvManagerConfig, ratio: int = 0, purpose: str = "train", seed: int = 1
) -> RolloutScheduler:
    return RolloutScheduler(settings(ratio, seed), envs, runner, SamplingParams(), purpose=purpose)


def at(step: int) -> DataProto:
    return DataProto(meta_info={"global_step": step})


def train(subject: RolloutScheduler, runner: ScriptedRunner, size: int, steps: Sequence[int]) -> list[DataProto]:
    """The order of calls of an asynchronous step."""
    batches = []
    for step in steps:
        batches.append(subject.get_batch(at(step), size))
        subject.finish()
        runner.update_weights()
        subject.begin_ahead(at(step), size)
    return batches


def trajectories(batch: DataProto) -> list[str]:
    return list(dict.fromkeys(batch.non_tensor_batch["traj_id"]))


def contents(batch: DataProto) -> list[object]:
    return [batch.batch["seed"].tolist(), *(list(column) for column in batch.non_tensor_batch.values())]


# --------------------------------------------------------------------------------- sizes and staleness (ROLL's test)


@pytest.mark.parametrize("ratio", [0, 1, 2, 7])
@pytest.mark.parametrize("size", [8, 24, 64])
def test_the_batch_is_exact_and_begins_ratio_steps_before(size: int, ratio: int) -> None:
    """With a filter that drops every third episode and with redundant members: the number of episodes is exact, and all
    of step s were begun in max(0, s - ratio)."""
    runner = ScriptedRunner(drops=lambda spec: spec.episode_id % 3 == 0)
    envs = manager(num_env_groups=8, group_size=8, group_size_redundancy=4, group_filter_cls="any")
    for step, batch in enumerate(train(scheduler(runner, envs, ratio), runner, size, range(10))):
        assert len(trajectories(batch)) == size
        assert set(batch.non_tensor_batch["start_step"]) == {max(0, step - ratio)}
        assert all(episode % 3 for episode in batch.non_tensor_batch["episode_id"])
        groups = Counter(name.rpartition("_")[0] for name in trajectories(batch))
        assert set(groups.values()) == {8}
    assert not {spec.env_id for spec in runner.begun} - set(range(8 * 12))


# --------------------------------------------------------------------------------------------------- groups and seeds


def test_names_and_seeds_are_as_in_roll() -> None:
    runner = ScriptedRunner()
    subject = scheduler(runner, manager(num_env_groups=2, group_size=2, group_size_redundancy=1))
    for step in range(2):
        subject.get_batch(at(step), 4)
    by_name = {spec.traj_id: spec for spec in runner.begun}
    group_seeds = {group.group_id: group.seed for group in subject.groups}
    expected = {
        f"lake_{group}_{episode}_{group_seeds[group]}_{group * 3 + member}": (group_seeds[group] + episode) % 2**31
        for group in (0, 1)
        for episode in (0, 1)
        for member in (0, 1, 2)
    }
    assert {name: spec.seed for name, spec in by_name.items()} == expected
    assert all(spec.traj_id == f"{spec.traj_group_id}_{spec.env_id}" for spec in runner.begun)


def test_tags_are_mixed_in_their_proportion() -> None:
    groups = env_groups(manager(tags=["a", "b"], num_env_groups=8, num_groups_partition=[6, 2]), 1, "train")
    assert sorted(group.group_id for group in groups if group.tag == "a") == [0, 1, 2, 3, 4, 5]
    assert Counter(group.tag for group in groups[:4]) == {"a": 3, "b": 1}
    equal = env_groups(manager(tags=["a", "b", "c"], num_env_groups=8), 1, "train")
    assert Counter(group.tag for group in equal) == {"a": 3, "b": 3, "c": 2}


def test_training_and_validation_have_different_episodes_and_each_validation_the_same() -> None:
    runner = ScriptedRunner()
    train_seeds = set(scheduler(runner, manager()).get_batch(at(0), 8).batch["seed"].tolist())
    subject = scheduler(runner, manager(), purpose="val")
    first, second = (subject.get_batch(at(step), 16) for step in (0, 5))
    assert contents(first) == contents(second)
    assert not train_seeds & set(first.batch["seed"].tolist())
    assert set(second.non_tensor_batch["start_step"]) == {0}


@pytest.mark.parametrize("ratio", [0, 1])
def test_the_same_seed_gives_the_same_batches_on_any_number_of_ranks(ratio: int) -> None:
    def run(ranks: int, seed: int) -> list[object]:
        runner = ScriptedRunner(ranks, drops=lambda spec: spec.seed % 5 < 2)
        envs = manager(num_env_groups=6, group_filter_cls="any", max_replaced_groups=4)
        return [contents(batch) for batch in train(scheduler(runner, envs, ratio, seed=seed), runner, 16, range(5))]

    assert run(1, 1) == run(2, 1) == run(3, 1)
    assert run(1, 1) != run(1, 2)


# ------------------------------------------------------------------------------------------------------------- filters


def first_attempt(spec: EpisodeSpec) -> bool:
    return spec.episode_id < REPLACEMENTS_FROM


def test_dropped_groups_are_replaced_within_the_budget_and_stay_beyond_it() -> None:
    """4 groups a step, all dropped at first: with 3 replacements one stays, and with none all."""
    for budget, kept in ((0, 4), (3, 1), (4, 0), (-1, 0)):
        runner = ScriptedRunner(drops=first_attempt)
        envs = manager(group_filter_cls="any", max_replaced_groups=budget)
        batch = scheduler(runner, envs).get_batch(at(0), 8)
        assert len(trajectories(batch)) == 8
        numbers = values(batch.meta_info["metrics"])
        assert numbers["scheduler/groups_kept_though_dropped"] == kept
        assert numbers["scheduler/group_filter_count"] == 4
        assert len(runner.begun) == 2 * (4 + (4 - kept))
        stayed = [episode < REPLACEMENTS_FROM for episode in batch.non_tensor_batch["episode_id"]]
        assert len({g for g, s in zip(batch.non_tensor_batch["traj_group_id"], stayed, strict=True) if s}) == kept
        assert batch.meta_info["episodes"].episodes == len(runner.begun)


def test_the_budget_is_for_the_whole_step() -> None:
    """One place of four needs all 10 replacements: the others' shares are given to it in later rounds."""
    runner = ScriptedRunner(drops=lambda spec: spec.group_id == 1 and spec.episode_id < 10 * REPLACEMENTS_FROM)
    envs = manager(group_filter_cls="any", max_replaced_groups=10)
    batch = scheduler(runner, envs).get_batch(at(0), 8)
    assert values(batch.meta_info["metrics"])["scheduler/groups_kept_though_dropped"] == 0
    assert len(runner.begun) == 2 * (3 + 11)

    runner = ScriptedRunner(drops=lambda spec: spec.group_id == 1)
    batch = scheduler(runner, envs).get_batch(at(0), 8)
    assert values(batch.meta_info["metrics"])["scheduler/groups_kept_though_dropped"] == 1
    assert len(runner.begun) == 2 * (4 + 10)


def test_max_traj_per_env_counts_replacements() -> None:
    runner = ScriptedRunner(drops=lambda spec: True)
    envs = manager(group_filter_cls="any", max_traj_per_env=3, max_replaced_groups=100)
    batch = scheduler(runner, envs).get_batch(at(0), 8)
    assert Counter(spec.env_id for spec in runner.begun) == dict.fromkeys(range(8), 3)
    assert values(batch.meta_info["metrics"])["scheduler/groups_kept_though_dropped"] == 4


# -------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize(("ratio", "stop"), itertools.product([0, 1, 2], [1, 3]))
def test_a_resumed_scheduler_goes_on_exactly(ratio: int, stop: int) -> None:
    """State and runner are made anew from a pickle after step `stop`; batches begun ahead are part of it."""

    def make() -> tuple[RolloutScheduler, ScriptedRunner]:
        runner = ScriptedRunner(drops=lambda spec: spec.seed % 5 < 2)
        return scheduler(runner, manager(num_env_groups=3, group_filter_cls="any"), ratio), runner

    subject, runner = make()
    whole = [contents(batch) for batch in train(subject, runner, 8, range(6))]
    subject, runner = make()
    before = [contents(batch) for batch in train(subject, runner, 8, range(stop))]
    state = pickle.dumps(subject.state_dict())
    assert not runner.flying
    subject, runner = make()
    subject.load_state_dict(pickle.loads(state))
    assert before + [contents(batch) for batch in train(subject, runner, 8, range(stop, 6))] == whole


def test_a_batch_that_groups_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="9 episodes cannot be cut into groups of 2"):
        scheduler(ScriptedRunner(), manager()).get_batch(at(0), 9)

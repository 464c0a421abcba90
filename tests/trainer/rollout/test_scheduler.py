"""The groups of each batch: sizes, seeds, filters and their budget, staleness, overtaking, failures and resume.

The engines have no model. They complete a group after a given number of calls.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from trainer.agentic.agent_trainer import EpisodeFilter
from trainer.rollout.group_sources import EnvSource, env_groups
from trainer.rollout.sample_groups import Group, GroupFilter, Rows, assembled
from trainer.rollout.scheduler import RolloutScheduler
from verl_lite.config import EnvManagerConfig, PPOConfig
from verl_lite.metrics import Metric, values
from verl_lite.protocol import DataProto
from workers.engines.base import SamplingParams
from workers.rollout.specs import EpisodeCounts, GroupPlan, GroupReport, GroupResults


class Continued(NamedTuple):
    """The first sample of a group that was saved in a checkpoint."""

    sample: Any
    version: int
    calls_left: int


class Engines:
    """Complete each group after calls_of(key) calls of `run_groups`. A call without a time limit counts as many as its
    groups need. An episode has one to three rows, depending on its seed. continues: True if a group in a checkpoint
    continues after a resume, as answers do and episodes do not."""

    continues = True

    def __init__(self, calls_of: Callable[[str], int] = lambda key: 1, ranks: int = 2) -> None:
        self.num_engines = ranks
        self.calls_of, self.ranks, self.version, self.calls, self.most_calls = calls_of, ranks, 0, 0, 10**9
        self.running: dict[str, tuple[GroupPlan, int]] = {}
        self.left: Counter[str] = Counter()
        self.begun: list[Any] = []  # samples, in the order of their start
        self.aborted: list[str] = []

    def begin_groups(self, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
        for plan in plans:
            assert plan.key not in self.running and plan.samples
            if isinstance(saved := plan.samples[0], Continued):
                whole = GroupPlan(plan.key, (saved.sample, *plan.samples[1:]))
                self.running[plan.key], self.left[plan.key] = (whole, saved.version), saved.calls_left
                continue
            self.running[plan.key], self.left[plan.key] = (plan, self.version), self.calls_of(plan.key)
            self.begun += plan.samples

    def snapshot_groups(self) -> list[GroupPlan]:
        return [
            GroupPlan(key, (Continued(plan.samples[0], version, self.left[key]), *plan.samples[1:]))
            for key, (plan, version) in self.running.items() if self.continues
        ]  # fmt: skip

    def abort_groups(self, keys: Sequence[str]) -> int:
        self.aborted += keys
        return sum(self.calls_of(key) - self.left[key] for key in keys if self.running.pop(key))

    def run_groups(self, keys: Sequence[str], seconds: float | None = None) -> list[GroupResults]:
        if self.calls >= self.most_calls:
            raise ConnectionError("the process of the engine has died")
        calls = 1 if seconds is not None else max([1, *(self.left[key] for key in keys)])
        self.calls += calls
        self.left.subtract(dict.fromkeys(self.running, calls))
        ended = [self.running.pop(key) for key in reversed(list(self.running)) if self.left[key] <= 0]
        return [self.results(ended[rank :: self.ranks]) for rank in range(self.ranks)]

    def results(self, groups: Sequence[tuple[GroupPlan, int]]) -> GroupResults:
        """The rows of these groups, which were started with these versions. A row has a token for each call."""
        reports, rows = [], list[tuple[Any, int]]()
        for plan, version in groups:
            kept = plan.samples[: getattr(plan.samples[0], "group_size", None)]
            of_group = [(sample, version) for sample in kept for _ in range(1 + getattr(sample, "seed", 0) % 3)]
            reports.append(GroupReport(plan.key, len(of_group), EpisodeCounts(len(plan.samples))))
            rows += of_group
        samples, names = (np.empty(len(rows), dtype=object) for _ in range(2))
        samples[:] = [sample for sample, _ in rows]
        names[:] = [getattr(sample, "traj_id", None) for sample in samples]
        versions = torch.tensor([version for _, version in rows])
        counts = {plan.key: max(1, self.calls_of(plan.key)) for plan, _ in groups}
        lengths = [counts[report.key] for report in reports for _ in range(report.num_rows)]
        tensors = {"version": versions, "response_mask": torch.tensor(lengths)[:, None]}
        batch = DataProto.from_dict(tensors, {"sample": samples, "traj_id": names}) if rows else None
        return GroupResults(reports, batch)


def at_random(random: np.random.Generator, ranks: int = 2) -> Engines:
    """Engines that complete groups in a random order, a few of them very late."""
    return Engines(lambda key: int(random.lognormal(1, 1.2)), ranks)


class Numbers:
    """Draws groups of one sample: 0, 1, 2, ..., up to `end`. Each has the columns `number` and `drawn_number`."""

    epoch = 0

    def __init__(self, batch_size: int, end: int = 10**6) -> None:
        self.batch_size, self.end, self.next = batch_size, end, 0

    def draw_batch(self, step: int, start_step: int) -> list[Group]:
        return self.draw(self.batch_size, step)

    def draw(self, number: int, step: int) -> list[Group]:
        first, self.next = self.next, min(self.next + number, self.end)
        drawn = range(first, self.next)
        columns = self.columns(drawn)
        return [Group(GroupPlan(str(n), (n,)), Rows(columns, row, row + 1)) for row, n in enumerate(drawn)]

    def columns(self, drawn: Sequence[int]) -> DataProto:
        """The columns of these groups that the engines do not return."""
        names = np.array([f"number {n}" for n in drawn], dtype=object)
        ids = np.array([f"id of {n}" for n in drawn], dtype=object)
        number = torch.tensor(list(drawn), dtype=torch.long)
        return DataProto.from_dict({"number": number}, {"drawn_number": names, "sample_id": ids})

    def update(self, batch: DataProto) -> dict[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


class Sieve(GroupFilter):
    """Drops the groups of these numbers and replaces any number of them."""

    def __init__(self, dropped: Container[int]) -> None:
        self.dropped = dropped

    def judge(self, groups: Sequence[Group]) -> None:
        for group in groups:
            group.kind = "dropped" if int(group.plan.key) in self.dropped else "kept"

    def max_groups(self, wanted: int) -> float:
        return float("inf")

    def fill_batch(self, step: int, groups: Sequence[Group], missing: int) -> None:
        raise ArithmeticError(f"{missing} groups are missing in step {step}")


def numbers(engines: Engines, threshold: int, ahead: int | None = None, size: int = 2, *,
            sieve: Sieve | None = None, end: int = 10**6, last_step: int = 100, partial: bool | None = None,
            oversample: float = 1.0, rewards: LateRewards | None = None) -> RolloutScheduler:  # fmt: skip
    """A scheduler of `Numbers` in batches of this size."""
    config, source = PPOConfig(), Numbers(size, end)
    config.async_training.partial_rollout, config.rollout.oversample = partial, oversample
    config.async_training.max_off_policy_threshold, config.async_training.batches_ahead = threshold, ahead
    return RolloutScheduler(config, source, engines, SamplingParams(), sieve, last_step, rewards)


def manager(**options: object) -> EnvManagerConfig:
    return EnvManagerConfig(**({"tags": ["lake"], "num_env_groups": 4, "group_size": 2} | options))  # type: ignore[arg-type]


def episodes(engines: Engines, envs: EnvManagerConfig, size: int, threshold: int = 0,
             drops: Callable[[int, int], bool] | None = None, seed: int = 1) -> RolloutScheduler:  # fmt: skip
    """A scheduler of episodes, `threshold` batches ahead. drops: the filter, of group_id and episode_id."""
    config = PPOConfig()
    config.async_training.max_off_policy_threshold = config.async_training.batches_ahead = threshold
    config.agentic.train_env_manager = envs
    chosen = EpisodeFilter(config)
    if drops is not None:
        chosen._filter = SimpleNamespace(filter=lambda group_id, episode_id, rows: drops(group_id, episode_id))
        chosen.drops = True
    return RolloutScheduler(config, EnvSource(envs, seed, size), engines, SamplingParams(), chosen, 100)


def give(subject: RolloutScheduler, version: int) -> None:
    """Updates the weights of the engines."""
    engines: Any = subject.engines
    if not subject.spans_updates:
        subject.finish()
        assert not engines.running, "the weights may not change under running groups"
    subject.version = engines.version = version


def save(subject: RolloutScheduler, step: int) -> bytes:
    """A checkpoint after this step. The engines then have the weights that those of a resumed run have."""
    state = pickle.dumps(subject.state_dict())
    if not subject.spans_updates:
        give(subject, step)
    return state


def train(subject: RolloutScheduler, steps: Sequence[int], every: int = 1) -> Iterator[DataProto]:
    """The batches of these steps, with the calls of `RayPPOTrainer`. every: agentic.model_update_frequency."""
    if subject.version is None:
        give(subject, steps[0] - 1)
    for step in steps:
        batch = subject.get_batch(step)
        if subject.batches_ahead and not subject.spans_updates:
            give(subject, step - 1)
        subject.begin_ahead(step)
        yield batch
        if (subject.spans_updates or not subject.batches_ahead) and step % every == 0:
            give(subject, step)


def samples(batch: DataProto) -> list[Any]:
    """The episodes or numbers of a batch."""
    return list(dict.fromkeys(batch.non_tensor_batch["sample"]))


def contents(batch: DataProto) -> list[object]:
    return [list(batch.non_tensor_batch["sample"]), batch.batch["version"].tolist()]


def check_columns(batch: DataProto) -> None:
    """Checks that the rows of `Numbers` have the columns of their own group."""
    assert batch.batch["number"].tolist() == list(batch.non_tensor_batch["sample"])
    assert list(batch.non_tensor_batch["drawn_number"]) == [f"number {n}" for n in samples(batch)]


def logged(batch: DataProto, name: str) -> float:
    return values(batch.meta_info["metrics"])[name]


@pytest.mark.parametrize("ahead", [0, 1, 2, 7])
@pytest.mark.parametrize("size", [8, 24, 64])
def test_the_batch_is_exact_and_its_groups_begin_as_many_steps_before(size: int, ahead: int) -> None:
    """With a filter that drops every third episode, and with redundant members."""
    engines = Engines()
    envs = manager(num_env_groups=8, group_size=8, group_size_redundancy=4)
    subject = episodes(engines, envs, size, ahead, lambda group_id, episode_id: episode_id % 3 == 0)
    for step, batch in enumerate(train(subject, range(1, 11)), start=1):
        specs = samples(batch)
        assert len(specs) == size and all(spec.episode_id % 3 for spec in specs)
        assert set(Counter(spec.traj_group_id for spec in specs).values()) == {8}
        assert {spec.start_step for spec in specs} <= set(range(max(1, step - ahead), step + 1))
    assert not {spec.env_id for spec in engines.begun} - set(range(8 * 12))
    for step, batch in enumerate(train(episodes(Engines(), envs, size, ahead), range(1, 11)), start=1):
        assert {spec.start_step for spec in samples(batch)} == {max(1, step - ahead)}


def test_names_and_seeds_are_as_in_roll() -> None:
    engines, envs = Engines(), manager(num_env_groups=2, group_size_redundancy=1)
    list(train(episodes(engines, envs, 4), [1, 2]))
    seeds = {group.group_id: group.seed for group in env_groups(envs, 1, "train")}
    expected = {
        f"lake_{group}_{episode}_{seeds[group]}_{group * 3 + member}": (seeds[group] + episode) % 2**31
        for group, episode, member in itertools.product(range(2), range(2), range(3))
    }
    assert {spec.traj_id: spec.seed for spec in engines.begun} == expected
    assert all(spec.traj_id == f"{spec.traj_group_id}_{spec.env_id}" for spec in engines.begun)


def test_tags_are_mixed_in_their_proportion() -> None:
    groups = env_groups(manager(tags=["a", "b"], num_env_groups=8, num_groups_partition=[6, 2]), 1, "train")
    assert sorted(group.group_id for group in groups if group.tag == "a") == [0, 1, 2, 3, 4, 5]
    assert Counter(group.tag for group in groups[:4]) == {"a": 3, "b": 1}
    equal = env_groups(manager(tags=["a", "b", "c"], num_env_groups=8), 1, "train")
    assert Counter(group.tag for group in equal) == {"a": 3, "b": 3, "c": 2}


def test_each_validation_has_the_same_episodes_which_are_not_those_of_training() -> None:
    subject, val = episodes(Engines(lambda key: 3), manager(), 8, threshold=2), EnvSource(manager(), 1, 16, "val")
    trained, validated = [], []
    for batch in train(subject, range(1, 5)):
        trained += samples(batch)
        validated.append(samples(subject.run(val.draw_batch(1, 1), SamplingParams())))
    assert all(specs == validated[0] and len(specs) == 16 for specs in validated)
    assert not {spec.seed for spec in trained} & {spec.seed for spec in validated[0]}
    assert len({spec.traj_id for spec in trained}) == 4 * 8, "training groups continue beside a validation"


@pytest.mark.parametrize("threshold", [0, 1])
def test_the_batches_depend_on_the_seed_and_neither_on_ranks_nor_on_time(threshold: int) -> None:
    def run(ranks: int, seed: int, order: int) -> list[object]:
        engines, envs = at_random(np.random.default_rng(order), ranks), manager(num_env_groups=6, max_replaced_groups=4)
        subject = episodes(engines, envs, 16, threshold, lambda group, episode: (group + episode) % 5 < 2, seed)
        return [contents(batch) for batch in train(subject, range(1, 6))]

    expected = run(1, 1, 0)
    assert all(run(ranks, 1, order) == expected for ranks, order in itertools.product([1, 2, 3], range(5)))
    assert run(1, 2, 0) != expected


def test_a_batch_that_groups_do_not_divide_is_refused() -> None:
    with pytest.raises(ValueError, match="9 episodes cannot be cut into groups of 2"):
        episodes(Engines(), manager(), 9).get_batch(1)


@pytest.mark.parametrize(("budget", "kept"), [(0, 4), (3, 1), (4, 0), (-1, 0)])
def test_dropped_groups_are_replaced_within_the_budget_and_stay_beyond_it(budget: int, kept: int) -> None:
    """The first episodes of the 4 groups of a batch are dropped. With 3 replacements one of them stays."""
    engines = Engines(lambda key: 1 + len(key) % 3)
    subject = episodes(engines, manager(max_replaced_groups=budget), 8, 0, lambda group, episode: episode == 0)
    batch = subject.get_batch(1)
    assert len(samples(batch)) == 8 and len(engines.begun) == 2 * (4 + (4 - kept))
    assert logged(batch, "scheduler/groups_kept_though_dropped") == kept
    assert logged(batch, "scheduler/group_filter_count") == 4
    assert sum(spec.episode_id == 0 for spec in samples(batch)) == 2 * kept
    assert batch.meta_info["episodes"].episodes == len(engines.begun)


def test_max_traj_per_env_counts_replacements() -> None:
    engines = Engines()
    envs = manager(max_traj_per_env=3, max_replaced_groups=100)
    batch = episodes(engines, envs, 8, 0, lambda group, episode: True).get_batch(1)
    assert Counter(spec.env_id for spec in engines.begun) == dict.fromkeys(range(8), 3)
    assert logged(batch, "scheduler/groups_kept_though_dropped") == 4


@pytest.mark.parametrize("threshold", [2, 3])
def test_groups_of_later_batches_that_were_dropped_without_replacement_do_not_block(threshold: int) -> None:
    """Without a budget a step replaces none of the groups that it drops, also not those of later batches."""
    engines = Engines(lambda key: 1 + sum(key.encode()) % 7)
    envs = manager(max_replaced_groups=0, num_env_groups=2)
    subject = episodes(engines, envs, 8, threshold, lambda group, episode: episode % 2 == group)
    subject.last_step = 8
    assert [len(samples(batch)) for batch in train(subject, range(1, 9))] == [8] * 8


@pytest.mark.parametrize("threshold", [0, 1])
def test_a_batch_has_the_first_groups_in_source_order_that_pass(threshold: int) -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        dropped = set(np.flatnonzero(random.random(1000) < 0.4).tolist())
        subject = numbers(at_random(random), threshold, size=5, sieve=Sieve(dropped))
        expected = iter(number for number in range(1000) if number not in dropped)
        for batch in train(subject, range(1, 8)):
            assert samples(batch) == list(itertools.islice(expected, 5))


@pytest.mark.parametrize(("threshold", "stop", "filtered"), itertools.product([0, 1], [1, 3], [False, True]))
def test_a_resumed_scheduler_continues_exactly(threshold: int, stop: int, filtered: bool) -> None:
    """Scheduler and engines are created again from a pickle after step `stop`, which contains groups of later steps."""

    def make(order: int) -> RolloutScheduler:
        drops = (lambda group, episode: (2 * group + episode) % 5 < 2) if filtered else None
        return episodes(at_random(np.random.default_rng(order)), manager(num_env_groups=3), 8, threshold, drops)

    subject = make(1)
    whole = [contents(batch) for batch in train(subject, range(1, stop + 1))]
    state = save(subject, stop)
    whole += [contents(batch) for batch in train(subject, range(stop + 1, 7))]
    resumed = make(2)
    resumed.load_state_dict(pickle.loads(state))
    assert [contents(batch) for batch in train(resumed, range(stop + 1, 7))] == whole[stop:]


def check_run_with_crashes(threshold: int, filtered: bool, random: np.random.Generator) -> None:
    """A run that saves and crashes after random steps, with random settings."""
    ahead, size, last_step = int(random.integers(0, threshold + 1)), int(random.integers(1, 6)), 24
    partial, oversample = bool(random.random() < 0.7), 1.0
    if ahead < threshold and random.random() < 0.5:
        oversample = 1 + random.random() * (threshold - ahead)
    elif ahead == 0:
        ahead = 1
    spare = threshold - ahead - (oversample > 1) * partial * math.ceil(oversample - 1)
    every = int(random.integers(1, spare + 2)) if partial else 1
    aborts = oversample > 1 and not partial
    sieve = Sieve(set(np.flatnonzero(random.random(2000) < 0.3).tolist())) if filtered else None
    trained, saved = dict[int, list[int]](), (0, b"")
    while True:
        engines = at_random(random, int(random.integers(1, 4)))
        subject = numbers(engines, threshold, ahead, size, sieve=sieve, last_step=last_step, partial=partial,
                          oversample=oversample)  # fmt: skip
        if saved[0]:
            subject.load_state_dict(pickle.loads(saved[1]))
        for step, batch in enumerate(train(subject, range(saved[0] + 1, last_step + 1), every), start=saved[0] + 1):
            trained[step], staleness = samples(batch), step - 1 - batch.batch["version"]
            assert len(trained[step]) == size and 0 <= staleness.min() and staleness.max() <= threshold
            check_columns(batch)
            if ahead or partial:
                assert logged(batch, "async/staleness/oldest") == staleness.max()
            if random.random() < 0.3:
                saved = step, save(subject, step)
            if step < last_step and random.random() < 0.1:
                break
        else:
            break
    source: Any = subject.source
    expected = [number for number in range(source.next) if sieve is None or number not in sieve.dropped]
    found = sorted(itertools.chain(*trained.values()))
    left = [number for group in subject.groups if (number := int(group.plan.key)) in expected]
    assert len(set(found)) == len(found) and len(left) <= math.ceil(size * (oversample - 1))  # of the last batch
    if aborts:
        assert set(found) <= set(expected) and not left
    else:
        assert sorted([*found, *left]) == expected


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("threshold", [1, 2, 4])
def test_after_resumes_no_group_is_too_old_lost_or_repeated(threshold: int, filtered: bool) -> None:
    for seed in range(40):
        check_run_with_crashes(threshold, filtered, np.random.default_rng([threshold, seed]))


@pytest.mark.parametrize("filtered", [False, True])
def test_complete_and_running_groups_of_one_checkpoint_form_one_batch(filtered: bool) -> None:
    """The checkpoint after step 1 holds 1 complete group and 3 running ones. Its form is that of earlier versions."""
    source, empty = Numbers(2), np.array([None], dtype=object)
    engine_columns = {"version": torch.tensor([0]), "response_mask": torch.tensor([[1]])}
    complete = source.columns([2])
    complete.non_tensor_batch |= {"sample": np.array([2], dtype=object), "traj_id": empty}
    groups = [(GroupPlan("2", ()), 0, 2, None, "kept" if filtered else None,
               (dict(complete.batch.items()) | engine_columns, complete.non_tensor_batch))]  # fmt: skip
    for number, step in ((1, 1), (3, 2), (4, 3)):
        running = source.columns([number])
        plan = GroupPlan(str(number), (Continued(number, 0, 2),))
        groups.append((plan, 0, step, None, None, (dict(running.batch.items()), running.non_tensor_batch)))
    state = {
        "source": {"next": 5}, "groups": groups, "sizes": {2: 2, 3: 2}, "metrics": [],
        "counts": {"started": 5, "trained": 1},
    }  # fmt: skip

    resumed = numbers(Engines(), 2, 1, sieve=Sieve({99}) if filtered else None)
    resumed.load_state_dict(pickle.loads(pickle.dumps(state)))
    batches = list(train(resumed, [2, 3]))
    assert sorted(samples(batches[0]) + samples(batches[1])) == [1, 2, 3, 4]
    assert 2 in samples(batches[0])
    for batch in batches:
        check_columns(batch)


@pytest.mark.parametrize("threshold", [0, 1, 2])
def test_a_dropped_group_does_not_hold_the_data_cursor(threshold: int) -> None:
    """Group 0 is dropped in the first step. The run resumes after every step."""
    subject, trained = numbers(Engines(), threshold, sieve=Sieve({0})), list[int]()
    for step in range(1, 7):
        trained += samples(next(train(subject, [step])))
        state = save(subject, step)
        subject = numbers(Engines(), threshold, sieve=Sieve({0}))
        subject.load_state_dict(pickle.loads(state))
    assert trained == list(range(1, 13))


def test_a_batch_that_was_started_ahead_is_not_reported_as_on_policy() -> None:
    """Two batches ahead a step has groups that were started two updates before it."""
    for threshold in (1, 2):
        subject = episodes(Engines(), manager(), 8, threshold)
        for step, batch in enumerate(train(subject, range(1, 6)), start=1):
            oldest = step - 1 - int(batch.batch["version"].min())
            assert oldest == min(step - 1, threshold)
            assert logged(batch, "scheduler/off_policy_ratio") == logged(batch, "async/staleness/oldest") == oldest


def test_complete_groups_that_wait_for_their_step_age() -> None:
    """All groups are complete after the first call. Those of batch 4 are three updates old in step 4."""
    subject = numbers(Engines(), 3, 3)
    batches = list(train(subject, range(1, 7)))
    for name in ("newest", "oldest", "mean"):
        assert [logged(batch, f"async/staleness/{name}") for batch in batches] == [0, 1, 2, 3, 3, 3]


def test_the_oldest_complete_groups_overtake_running_ones() -> None:
    calls = {"0": 4, "1": 1, "2": 3, "3": 1}
    subject = numbers(Engines(lambda key: calls.get(key, 50)), 2)
    assert [samples(batch) for batch in train(subject, [1, 2])] == [[1, 3], [0, 2]]


@pytest.mark.parametrize("ahead", [0, 1])
def test_partial_rollouts_with_a_threshold_of_1_continue_once(ahead: int) -> None:
    """Group 1 is long. Step 2 waits for it, because its first tokens would be two updates old in step 3."""
    engines = Engines(lambda key: 40 if key == "1" else 1)
    subject = numbers(engines, 1, ahead, partial=True, oversample=1.0 if ahead else 1.5)
    assert [samples(batch) for batch in train(subject, [1, 2, 3])] == [[0, 2], [1, 3], [4, 5]]
    assert engines.calls < 50


def lengths(engines: Engines, subject: RolloutScheduler, steps: int) -> tuple[float, float]:
    """Mean number of calls of the groups that were trained on, and of all that were started."""
    trained = [engines.calls_of(str(one)) for batch in train(subject, range(1, steps + 1)) for one in samples(batch)]
    started = [engines.calls_of(str(one)) for one in engines.begun]
    return float(np.mean(trained)), float(np.mean(started))


def test_oversampling_prefers_short_groups_unless_the_others_are_carried_over() -> None:
    calls = np.random.default_rng(0).lognormal(2, 1, 10_000).astype(int) + 1
    engines = Engines(lambda key: int(calls[int(key)]))
    subject = numbers(engines, 0, size=8, oversample=1.5, last_step=30)
    trained, started = lengths(engines, subject, 30)
    assert trained < 0.7 * started and len(engines.aborted) <= subject.counts["aborted"] == 30 * 4
    assert not engines.running and subject.counts["trained"] == 30 * 8

    engines = Engines(engines.calls_of)
    subject = numbers(engines, 1, 0, size=8, oversample=1.5, partial=True, last_step=30)
    trained, started = lengths(engines, subject, 30)
    waiting = [engines.calls_of(group.plan.key) for group in subject.groups]
    assert not engines.aborted and len(waiting) <= 4
    assert trained * 240 + sum(waiting) == pytest.approx(started * (240 + len(waiting)))  # no other group is missing


def test_the_bias_of_an_aborted_surplus_is_logged() -> None:
    """Of the groups 0, 1 and 2, with 1, 50 and 3 tokens, group 1 is aborted when it has 4."""
    engines = Engines(lambda key: {"0": 1, "1": 50, "2": 3}[key])
    batch = numbers(engines, 0, oversample=1.5).get_batch(1)
    assert samples(batch) == [0, 2] and engines.aborted == ["1"]
    assert logged(batch, "rollout/oversample/aborted_groups") == 1
    assert logged(batch, "rollout/oversample/length_bias") == pytest.approx(2 / (8 / 3) - 1)


class AddsScores(Sieve):
    """Adds the scores to the groups that it judges."""

    def judge(self, groups: Sequence[Group]) -> None:
        super().judge(groups)
        for group in groups:
            rows = assembled([group])
            rows.batch["token_level_scores"] = torch.ones(len(rows), 1)
            group.sampled = Rows(rows, 0, len(rows))


class LateRewards:
    """No reward is available before group 2 is complete, and then all except that of group 3."""

    def __init__(self) -> None:
        self.submitted: list[str] = []
        self.canceled: list[str] = []

    def are_ready(self, batch: DataProto) -> np.ndarray:
        drawn = batch.batch["number"].numpy()
        return (drawn != 3) & (2 in drawn)

    def submit(self, batch: DataProto) -> None:
        self.submitted += batch.non_tensor_batch["sample_id"].tolist()

    def cancel(self, sample_ids: Sequence[str]) -> None:
        self.canceled += sample_ids


def test_a_surplus_of_judged_and_unjudged_groups_is_aborted_with_its_rewards() -> None:
    """Groups 0 and 1 with 1 and 2 tokens are the batch. The surplus is group 2 with 3 tokens and a score, and group 3
    with 2 tokens and none."""
    engines = Engines(lambda key: {"0": 1, "1": 2, "2": 3, "3": 2, "4": 50}[key])
    rewards = LateRewards()
    subject = numbers(engines, 0, oversample=2.0, sieve=AddsScores(()), rewards=rewards)
    batch = subject.get_batch(1)
    assert samples(batch) == [0, 1] and not subject.groups
    assert rewards.canceled == ["id of 2", "id of 3"]
    assert logged(batch, "rollout/oversample/aborted_groups") == 2
    assert logged(batch, "rollout/oversample/length_bias") == pytest.approx((3 / 2) / (8 / 4) - 1)


@pytest.mark.parametrize(("partial", "last_step", "started"), [(False, 1, [3]), (True, 1, [2]), (True, 2, [3, 2])])
def test_the_last_step_starts_no_surplus_unless_it_is_aborted(
    partial: bool, last_step: int, started: list[int]
) -> None:
    """Batches of 2 groups with a surplus of 1. One that is carried over after the last step would be for no step."""
    engines = Engines()
    subject = numbers(engines, int(partial), 0, oversample=1.5, partial=partial, last_step=last_step)
    counts = []
    for _ in train(subject, range(1, last_step + 1)):
        counts.append(len(engines.begun) - sum(counts))
    assert counts == started


@pytest.mark.parametrize("threshold", [1, 2, 3])
def test_after_a_barrier_every_group_is_started_again(threshold: int) -> None:
    """A checkpoint and a resume interrupt all running groups; the next step starts whole batches, not one group."""
    subject = numbers(Engines(lambda key: 5), threshold, threshold, size=6)
    next(train(subject, [1]))
    subject.finish()
    state = save(subject, 1)
    resumed = numbers(engines := Engines(lambda key: 5), threshold, threshold, size=6)
    resumed.load_state_dict(pickle.loads(state))
    next(train(resumed, [2]))
    assert len(engines.begun) == 6  # the batch that is now the last ahead
    resumed = numbers(engines := Engines(lambda key: 5), threshold, threshold, size=6)
    resumed.restore(pickle.loads(pickle.dumps(subject.snapshot())))
    for group in resumed.groups:
        group.sampled = group.kind = None
    resumed.groups = [
        replace(group, plan=GroupPlan(group.plan.key, (int(group.plan.key),))) for group in resumed.groups
    ]
    next(train(resumed, [2]))
    assert len(engines.begun) == 6 * (threshold + 1)


def stuck() -> Engines:
    """Engines in which group 0 ends at its deadline, after 500 calls, and every other group after one."""
    return Engines(lambda key: 500 if key == "0" else 1)


def test_a_stuck_group_is_overtaken_until_it_would_become_too_old_and_then_waited_for() -> None:
    engines = stuck()
    run = train(numbers(engines, 2), range(1, 6))
    assert [samples(next(run)) for _ in range(2)] == [[1, 2], [3, 4]] and engines.calls < 10
    batch = next(run)
    assert samples(batch) == [0, 5] and engines.calls >= 500
    assert logged(batch, "async/staleness/oldest") == 2
    assert [samples(batch) for batch in run] == [[6, 7], [8, 9]] and engines.calls < 510


def test_after_a_resume_a_stuck_group_blocks_no_step() -> None:
    """A checkpoint has the group as far as it was sampled, and does not wait for it. Episodes cannot be continued, so
    that a checkpoint waits until their deadline. A step that is repeated from a snapshot starts the group again."""
    for continues in (True, False):
        engines = stuck()
        engines.continues = continues
        subject = numbers(engines, 2)
        run = train(subject, range(1, 3))
        next(run)
        snapshot = pickle.dumps(subject.snapshot())
        next(run)
        state, calls = save(subject, 2), engines.calls
        assert (calls < 10) == continues
        resumed = numbers(engines := stuck(), 2)
        resumed.load_state_dict(pickle.loads(state))
        assert [samples(batch) for batch in train(resumed, [3, 4])] == [[0, 5], [6, 7]]
        assert engines.begun == [6, 7, 8, 9] and (engines.calls + calls < 510 if continues else engines.calls < 10)
    repeated = numbers(engines := stuck(), 2)
    repeated.restore(pickle.loads(snapshot))
    assert samples(next(train(repeated, [2]))) == [3, 4] and engines.begun == [0, 4, 5] and engines.calls < 10


def test_weights_do_not_age_during_critic_warmup() -> None:
    """The policy is first trained in step 4. Step 6 waits for group 0; without warmup, step 3 would."""
    subject, batches = numbers(engines := stuck(), 2), list[DataProto]()
    subject.warmup, subject.version = 3, 0
    for step in range(1, 7):
        batches.append(subject.get_batch(step))
        assert (engines.calls >= 500) == (0 in samples(batches[-1])) == (step == 6)
        if step > 3:
            give(subject, step)
    assert [logged(batch, "async/staleness/oldest") for batch in batches] == [0, 0, 0, 0, 1, 2]


@pytest.mark.parametrize("threshold", [0, 1, 2])
def test_a_failure_of_the_engines_reaches_the_waiting_step(threshold: int) -> None:
    engines = Engines(lambda key: 10)
    engines.most_calls = 3
    with pytest.raises(ConnectionError, match="has died"):
        next(train(numbers(engines, threshold, sieve=Sieve(())), [1]))
    assert engines.calls == 3


@pytest.mark.parametrize("threshold", [0, 1, 2])
def test_a_source_without_more_groups_ends_the_step_with_the_filters_error(threshold: int) -> None:
    engines = Engines(lambda key: 3)
    subject = numbers(engines, threshold, sieve=Sieve({1, 3, 5, 7}), end=9, last_step=3)
    with pytest.raises(ArithmeticError, match="1 groups are missing in step 3"):
        list(train(subject, range(1, 4)))
    assert engines.calls < 40


@pytest.mark.parametrize("threshold", [1, 2])
def test_a_group_that_is_lost_or_repeated_or_too_old_is_an_error(threshold: int) -> None:
    changes: dict[str, Callable[[list[Group]], Any]] = {
        r"\d+ groups started, \d+ resolved": lambda groups: groups.pop(),
        r"step 4: \d+ groups started": lambda groups: groups.append(replace(groups[0])),
        rf"staleness 3, and {threshold} is allowed": lambda groups: setattr(groups[0], "version", 0),
    }
    for message, change in changes.items():
        subject = numbers(Engines(), threshold, sieve=Sieve(()))
        list(train(subject, range(1, 4)))
        subject.begin_ahead(3)
        subject.finish()
        change(subject.groups)
        with pytest.raises(RuntimeError, match=message):
            subject.get_batch(4)


def test_a_validation_does_not_take_the_metrics_of_training_groups() -> None:
    subject, val = episodes(Engines(lambda key: 3), manager(), 8, threshold=1), EnvSource(manager(), 1, 16, "val")
    subject._metrics = [{"env/processes_replaced": Metric.sum(2)}]
    batch = subject.run(val.draw_batch(1, 1), SamplingParams())
    assert "env/processes_replaced" not in values(batch.meta_info["metrics"])
    assert values(subject.get_batch(1).meta_info["metrics"])["env/processes_replaced"] == 2

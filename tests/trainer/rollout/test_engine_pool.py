"""Engines in a separate pool, over scripted engines: who runs which group, what a death costs, when the run ends."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest

from trainer.rollout.engine_pool import EnginePool, SeparateActorRole
from verl_lite.config import PPOConfig
from verl_lite.errors import StalledError, TransferError, WorkerDiedError
from verl_lite.metrics import Metric
from verl_lite.rewards import RewardItem
from verl_lite.single_controller.resource_pool import LocalService
from workers.engines.base import SamplingParams
from workers.engines.weight_transfer import ChannelEnd
from workers.rollout.group_queue import GroupQueue
from workers.rollout.specs import AnswerSpec, GroupPlan, GroupReport, GroupResults

SAMPLING = SamplingParams()


class Future:
    def __init__(self, call: Callable[[], Any]) -> None:
        self.get = call


class Engine:
    """An engine that completes, in each call, the groups that it holds. dies: methods whose next call ends it."""

    def __init__(self, queue: Any, index: int, log: list[str]) -> None:
        self.queue, self.index, self.log = queue, index, log
        self.dies: set[str] = set()
        self.room, self.is_alive, self.version = 1, True, -1
        self.held: list[str] = []

    def __getattr__(self, method: str) -> Callable[..., Future]:
        def call(*args: Any, blocking: bool = True, **kwargs: Any) -> Future:
            return Future(lambda: [self._answer(method, *args)])

        return call

    def _answer(self, method: str, *args: Any) -> Any:
        if method in self.dies or not self.is_alive:
            self.is_alive = False
            raise WorkerDiedError(f"engine_{self.index} died in {method}")
        return getattr(self, f"on_{method}")(*args)

    def on_take_groups(self, seconds: float, with_metrics: bool) -> GroupResults:
        done, self.held = self.held, []
        taken = [pickle.loads(data)[0] for data in self.queue.call("take", self.index, self.room)]
        self.held = [plan.key for plan in taken]
        self.log += [f"{self.index} runs {key} with version {self.version}" for key in self.held]
        metrics = {"rollout/mean_rank_seconds": Metric.mean(1.0, 1)} if with_metrics else {}
        return GroupResults([GroupReport(key, 1) for key in done], None, metrics)

    def on_receive_weights(self, version: int, end: ChannelEnd) -> None:
        if self.held:
            raise RuntimeError("groups are running, and new weights would change the policy within them")
        self.version = version
        self.log.append(f"{self.index} as {end.names[end.rank]} gets version {version}")

    def on_snapshot_groups(self) -> list[GroupPlan]:
        return [GroupPlan(key, ("continued",)) for key in self.held]

    def on_abort_groups(self, keys: list[str]) -> int:
        aborted = [key for key in self.held if key in keys]
        self.held = [key for key in self.held if key not in keys]
        return 10 * len(aborted)

    def on_close(self) -> None: ...

    def shutdown(self) -> None:
        self.is_alive = False


class Trainer:
    """The worker group that trains. late: number of updates that fail without a death."""

    world_size = 1

    def __init__(self) -> None:
        self.channels, self.late = 0, 0

    def open_channel(self) -> tuple[str, int]:
        self.channels += 1
        return "127.0.0.1", self.channels

    def send_weights(self, end: ChannelEnd, blocking: bool) -> Future:
        if self.late:
            self.late -= 1
            return Future(lambda: [TransferError("weight update: engine 1 did not answer")])
        return Future(lambda: [{"weight_sync/seconds": Metric.max(1.0)}])


class Rewards:
    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def call(self, method: str, keys: list[str]) -> None:
        assert method == "cancel"
        self.cancelled += keys


class World:
    """A role over so many engines."""

    def __init__(self, engines: int = 2, threshold: int = 0, **config: Any) -> None:
        self.queue, self.log, self.told = LocalService(GroupQueue), list[str](), list[str]()
        self.started: list[Engine] = []
        options = PPOConfig(**config)
        options.async_training.max_off_policy_threshold = threshold
        self.rewards, self.trainer = Rewards(), Trainer()
        self.next_dies: set[str] = set()
        self.pool = EnginePool(self.start, engines, self.told.append)
        group: Any = self.trainer
        self.role = SeparateActorRole(group, options, self.pool, self.queue, self.rewards)

    def start(self, index: int) -> Any:
        self.started.append(engine := Engine(self.queue, index, self.log))
        engine.dies = self.next_dies
        return engine

    def engine(self, index: int) -> Any:
        return self.pool.groups[index]

    def begin(self, *keys: str) -> None:
        plans = [GroupPlan(key, (AnswerSpec((1,), 4, 0), AnswerSpec((1,), 4, 1, item=reward_of(key)))) for key in keys]
        self.role.begin_groups(plans, SAMPLING)


def reward_of(key: str) -> RewardItem:
    return RewardItem(f"reward of {key}", "sums", "", "", None, None)


def reports(results: list[GroupResults]) -> list[str]:
    return sorted(report.key for result in results for report in result.reports)


def test_on_policy_groups_run_where_they_would_run_on_the_trainers_devices() -> None:
    world = World(engines=2)
    world.role.update_weights(0)
    world.begin(*"abcde")
    assert reports(world.role.run_groups(list("abcde"))) == list("abcde")
    ran = [line for line in world.log if "runs" in line]
    assert ran == [
        *(f"0 runs {key} with version 0" for key in "abc"),
        *(f"1 runs {key} with version 0" for key in "de"),
    ]


def test_a_slow_engine_delays_no_group_when_samples_may_be_stale() -> None:
    world = World(engines=2, threshold=1)
    world.role.update_weights(0)
    world.engine(0).room = 0  # it has none, all the time
    world.begin(*"abcd")
    assert reports(world.role.run_groups(list("abcd"))) == list("abcd")
    assert all(line.startswith("1 runs") for line in world.log if "runs" in line)


def test_a_dead_engine_is_replaced_gets_the_weights_and_its_groups_run_again() -> None:
    world = World(engines=2)
    world.role.update_weights(4)
    world.begin(*"abcd")
    world.role.run_groups(["a"], seconds=0.0)  # both engines take their groups
    world.engine(1).dies = {"take_groups"}
    assert reports(world.role.run_groups(list("abcd"))) == list("abcd")
    assert [engine.index for engine in world.started] == [0, 1, 1]
    assert "engine_1 died in take_groups. The engine is replaced" in world.told[0]
    assert world.log.count("1 runs c with version 4") == world.log.count("1 runs d with version 4") == 2
    assert world.log.count("0 runs a with version 4") == 1, "the others go on with theirs"
    assert world.rewards.cancelled == ["reward of c", "reward of d"], "else they would be submitted twice"


def test_the_groups_of_a_dead_engine_run_before_those_that_wait() -> None:
    """They are the oldest. At the end of the queue they could become too old, and the trainer would wait for them."""
    world = World(engines=1, threshold=1)
    world.role.update_weights(0)
    world.engine(0).room = 2
    world.begin(*"abcdef")
    world.role.run_groups(["a"], seconds=0.0)  # the engine takes group a, which has two samples
    world.engine(0).dies = {"take_groups"}
    assert reports(world.role.run_groups(list("abcdef"))) == list("abcdef")
    ran = [line for line in world.log if "runs" in line]
    assert ran == [f"0 runs {key} with version 0" for key in "aabcdef"]


def test_the_weights_of_a_replaced_engine_have_the_version_that_the_trainer_has() -> None:
    """Between an update of the trainer and that of the engines they differ. The address is new, too."""
    world = World(engines=1, threshold=1)
    world.role.update_weights(3)
    world.role._trained_version = 4
    world.engine(0).dies = {"snapshot_groups"}
    world.role.snapshot_groups()
    assert world.engine(0).version == 4
    assert world.trainer.channels == 2


def test_a_second_death_before_the_next_update_ends_the_run_with_the_first_cause() -> None:
    world = World(engines=2)
    world.role.update_weights(0)
    world.engine(0).dies, world.next_dies = {"take_groups"}, {"receive_weights"}
    world.begin("a", "b")
    with pytest.raises(WorkerDiedError, match="engine_0 died in take_groups") as caught:
        world.role.run_groups(["a", "b"])
    assert "died in receive_weights" in caught.value.__notes__[0]


def test_all_engines_of_a_lost_machine_are_replaced() -> None:
    world = World(engines=4)
    world.role.update_weights(0)
    world.begin(*"abcd")
    for engine in (1, 2):
        world.engine(engine).dies = {"take_groups"}
    world.role.run_groups(["a"], seconds=0.0)
    world.engine(3).dies = {"take_groups"}  # noticed later
    assert reports(world.role.run_groups(list("abcd"))) == list("abcd")
    assert [engine.index for engine in world.started] == [0, 1, 2, 3, 1, 2, 3]


def test_deaths_in_different_steps_do_not_add_up() -> None:
    world = World(engines=1)
    for version in range(3):
        world.role.update_weights(version)
        world.engine(0).dies = {"take_groups"}
        world.begin(f"group {version}")
        assert reports(world.role.run_groups([f"group {version}"])) == [f"group {version}"]
    assert len(world.started) == 4


def test_an_engine_that_dies_in_an_update_is_replaced_and_the_update_is_repeated() -> None:
    world = World(engines=2)
    world.role.update_weights(0)
    world.engine(1).dies = {"receive_weights"}
    world.role.update_weights(1)
    assert [world.engine(index).version for index in (0, 1)] == [1, 1]
    assert world.trainer.channels == 2, "a new engine needs a new channel"
    world.role.update_weights(2)
    assert world.trainer.channels == 2, "and nobody needs another one"


def test_an_update_that_nobody_died_of_ends_the_run_with_the_name_of_the_receiver() -> None:
    world = World(engines=2)
    world.trainer.late = 1
    with pytest.raises(TransferError, match="engine 1 did not answer"):
        world.role.update_weights(1)


def test_snapshots_contain_running_and_waiting_groups_and_aborts_reach_both() -> None:
    world = World(engines=1, threshold=1)
    world.role.update_weights(0)
    world.begin(*"abc")
    world.role.run_groups(["a"], seconds=0.0)
    plans = {plan.key: plan.samples for plan in world.role.snapshot_groups()}
    assert plans["a"] == ("continued",) and len(plans["b"]) == len(plans["c"]) == 2
    assert world.role.abort_groups(["a", "b"]) == 10
    assert reports(world.role.run_groups(["c"])) == ["c"]


def test_a_group_that_never_ends_does_not_keep_the_run_alive() -> None:
    world = World(engines=1)
    world.role.config.trainer.stall_timeout_s = 0.2
    world.role.update_weights(0)
    world.begin("a")
    world.engine(0).room = 0
    world.queue.call("remove", ["a"])  # lost
    started = time.monotonic()
    with pytest.raises(StalledError, match="no rollout engine has completed a group"):
        world.role.run_groups(["a"])
    assert time.monotonic() - started < 5


def test_an_engine_that_dies_at_the_end_is_not_replaced() -> None:
    world = World(engines=2)
    world.engine(1).dies = {"close"}
    with pytest.raises(WorkerDiedError, match="died in close"):
        world.role.close()
    assert len(world.started) == 2


def test_an_engine_that_does_not_start_ends_those_that_did() -> None:
    started: list[Engine] = []

    def start(index: int) -> Any:
        if index == 1:
            raise ValueError("no room")
        started.append(Engine(None, index, []))
        return started[-1]

    with pytest.raises(ValueError, match="no room"):
        EnginePool(start, 3, print)
    assert len(started) == 2 and not any(engine.is_alive for engine in started)

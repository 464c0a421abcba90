"""When the rollout engines receive weights, in each mode: the calls of a run of three steps, and the versions given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer.loop.steps import StepCounter
from trainer.rollout.weight_sync import WeightSync
from verl_lite.config import PPOConfig

NONE_AHEAD: dict[str, Any] = {"batches_ahead": 0, "spans_updates": False}
ONE_VERSION: dict[str, Any] = {"batches_ahead": 1, "spans_updates": False}
SPANNING: dict[str, Any] = {"batches_ahead": 1, "spans_updates": True}


class Run:
    """The calls of a run. given: the call and the version of each copy of weights; finished: calls that waited for
    running samples."""

    def __init__(self, mode: dict[str, Any], steps: int = 3, frequency: int = 1) -> None:
        self.call = ""
        self.given: list[str] = []
        self.finished: list[str] = []
        config = PPOConfig()
        config.agentic.model_update_frequency = frequency
        self.steps = StepCounter()
        self.steps.total = steps
        self.scheduler: Any = SimpleNamespace(version=None, finish=self.finish, **mode)
        actor: Any = SimpleNamespace(update_weights=self.update_weights)
        self.sync = WeightSync(config, self.scheduler, actor, self.steps)

    def finish(self) -> None:
        self.finished.append(self.call)

    def update_weights(self, version: int) -> dict[str, Any]:
        assert self.scheduler.version == version
        self.given.append(f"{self.call} {version}")
        return {"weight_sync/seconds": 1.0}

    def calls(self, *names: str) -> None:
        for name in names:
            self.call = name
            getattr(self.sync, name)()

    def train(self, *, after_step: tuple[str, ...] = ()) -> list[str]:
        """Runs the remaining steps. after_step: calls at the end of each step."""
        self.calls("start")
        while not self.steps.is_last:
            self.steps.global_step += 1
            self.calls("after_batch", "after_update", *after_step)
        return self.given


def test_without_batches_ahead_each_update_gives_its_weights() -> None:
    run = Run(NONE_AHEAD)
    assert run.train() == ["start 0", "after_update 1", "after_update 2", "after_update 3"]
    assert run.finished == ["start", "after_update", "after_update", "after_update"]


def test_running_samples_continue_under_the_new_weights() -> None:
    run = Run(SPANNING)
    assert run.train() == ["start 0", "after_update 1", "after_update 2", "after_update 3"]
    assert not run.finished


def test_batches_with_one_version_receive_the_weights_of_the_step_before() -> None:
    """Batch 2 is sampled during step 1 with version 0, and batch 3 during step 2 with version 1."""
    assert Run(ONE_VERSION).train() == ["start 0", "after_batch 1"]


@pytest.mark.parametrize("mode", [NONE_AHEAD, SPANNING, ONE_VERSION])
def test_a_validation_has_the_newest_weights(mode: dict[str, Any]) -> None:
    run = Run(mode)
    run.train(after_step=("before_validation",))
    assert run.scheduler.version == 3
    assert [int(given.split()[1]) for given in run.given] == [0, 1, 2, 3]


def test_a_checkpoint_of_batches_with_one_version_gives_the_weights_of_a_resumed_run() -> None:
    """The run ends after step 3, whose weights no sample needs."""
    run = Run(ONE_VERSION)
    assert run.train(after_step=("after_checkpoint",)) == ["start 0", "after_checkpoint 1", "after_checkpoint 2"]
    resumed = Run(ONE_VERSION)
    resumed.steps.global_step = 2
    assert resumed.train(after_step=("after_checkpoint",)) == ["start 2"]
    stopped = Run(ONE_VERSION)
    stopped.steps.global_step, stopped.steps.stopping = 1, True
    stopped.calls("after_checkpoint")
    assert not stopped.given
    for mode in (NONE_AHEAD, SPANNING):
        assert not any("checkpoint" in given for given in Run(mode).train(after_step=("after_checkpoint",)))


def test_the_frequency_of_updates_does_not_hold_for_the_start_and_for_validations() -> None:
    assert Run(NONE_AHEAD, 5, frequency=2).train() == ["start 0", "after_update 2", "after_update 4"]
    resumed = Run(NONE_AHEAD, 5, frequency=2)
    resumed.steps.global_step = 3
    assert resumed.train() == ["start 3", "after_update 4"]
    validated = Run(NONE_AHEAD, 3, frequency=2)
    assert validated.train(after_step=("before_validation",)) == [
        "start 0", "before_validation 1", "after_update 2", "before_validation 3",
    ]  # fmt: skip
    assert Run(ONE_VERSION, 6, frequency=2).train() == ["start 0", "after_batch 2", "after_batch 4"]


def test_an_engine_without_weights_receives_them_in_any_case() -> None:
    """A loop of the user may begin with version 3 although only every second version is given."""
    run = Run(NONE_AHEAD, frequency=2)
    assert run.sync.give_if_due(3)
    assert run.scheduler.version == 3
    assert not run.sync.give_if_due(5)


def test_the_weights_of_one_version_are_given_once() -> None:
    run = Run(NONE_AHEAD)
    run.calls("start", "start", "before_validation")
    assert run.given == ["start 0"]
    assert run.sync.start() == {}

"""Who holds the device: never two tenants, moves in the right order, no move without need, weights after a sleep."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl_lite.config import PPOConfig
from workers.engine.phase import PhaseManager
from workers.engines.weight_transfer import ChannelEnd
from workers.roles.actor_rollout import ActorWorker


class Tenant:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def move_in(self) -> None:
        self.log.append(f"{self.name} in")

    def move_out(self) -> None:
        self.log.append(f"{self.name} out")


def test_others_move_out_before_the_owner_moves_in_and_no_move_is_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch holds back is given up between."""
    log: list[str] = []
    monkeypatch.setattr("workers.engine.phase.empty_cache", lambda: log.append("emptied"))
    phases = PhaseManager()
    trainer, rollout, reference = (Tenant(name, log) for name in ("trainer", "rollout", "reference"))
    for tenant in (trainer, rollout, reference):
        phases.add(tenant)
    phases.enter(trainer)
    assert log == ["rollout out", "reference out", "emptied", "trainer in"]
    phases.enter(trainer)
    assert len(log) == 4, "entering again moves nothing"
    phases.enter(rollout)
    assert log[4:] == ["trainer out", "reference out", "emptied", "rollout in"]


def test_the_engines_of_a_run_that_has_ended_are_forgotten() -> None:
    """One process can train several times: the networks of earlier runs must not stay in memory."""
    log: list[str] = []
    phases = PhaseManager()
    former, current = Tenant("former", log), Tenant("current", log)
    for tenant in (former, current):
        phases.add(tenant)
    phases.enter(former)
    reference = weakref.ref(former)
    del former, tenant
    assert reference() is None
    log.clear()
    phases.enter(current)
    assert log == ["current in"]


def test_after_a_failed_move_the_former_owner_moves_in_again() -> None:
    log: list[str] = []
    trainer, rollout = Tenant("trainer", log), Tenant("rollout", log)
    phases = PhaseManager()
    for tenant in (trainer, rollout):
        phases.add(tenant)
    phases.enter(trainer)

    def fails() -> None:
        raise MemoryError

    rollout.move_in = fails  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        phases.enter(rollout)
    phases.enter(trainer)
    assert log[-2:] == ["rollout out", "trainer in"]


class Engine(Tenant):
    """What the trainer and the rollout engine do when weights are sent."""

    has_weights = False

    def move_out(self) -> None:
        super().move_out()
        self.has_weights = False

    def move_out_optimizer(self) -> None:
        self.log.append("optimizer out")

    def full_params(self, bucket_bytes: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield "weight", torch.ones(1)

    def whole_params(self) -> None: ...

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        self.log.append(f"{[name for name, _ in weights]} of version {version}")
        self.has_weights = True

    def reset_cache(self) -> None: ...


def test_an_engine_that_slept_gets_the_weights_again_and_the_optimizer_leaves_before() -> None:
    log: list[str] = []
    worker: Any = ActorWorker(PPOConfig(), total_training_steps=1, rewards=None)
    worker.phases, worker.engine, worker.rollout = PhaseManager(), Engine("trainer", log), Engine("rollout", log)
    worker.groups, worker.device = SimpleNamespace(is_idle=True), torch.device("cpu")
    worker.phases.add(worker.engine)
    worker.phases.add(worker.rollout)
    sent = ["optimizer out", "trainer out", "rollout in", "trainer in", "['weight'] of version 3", "trainer out"]
    worker.update_weights(3)
    worker.enter_rollout()
    assert log == sent, "what it has is not sent again"
    worker.phases.enter(worker.engine)
    log.clear()
    worker.enter_rollout()
    assert log == ["trainer out", "rollout in", "optimizer out", *sent[3:]]


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_gather_the_base_model_for_a_new_channel(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gathering is collective: if only the first rank knew of the new channel, the ranks would wait for each other."""
    asked: list[bool] = []

    def unmerged(with_base: bool, bucket_bytes: int) -> Iterator[Any]:
        asked.append(with_base)
        yield "weight", torch.ones(1)

    channel = SimpleNamespace(send=lambda weights, bucket_bytes: len(list(weights)))
    monkeypatch.setattr(ChannelEnd, "connect", lambda *_: channel)
    worker: Any = ActorWorker(PPOConfig(hybrid_engine=False), total_training_steps=1, rewards=None)
    worker.phases, worker.engine, worker.rank = PhaseManager(), Engine("trainer", []), rank
    worker.engine.unmerged_params, worker.device, worker._channel_store = unmerged, torch.device("cpu"), None
    worker.config.model.lora_rank = 4
    for port in (1, 1, 2, 2):
        worker.send_weights(ChannelEnd(("127.0.0.1", port), ("the trainer", "engine 0"), 0, 1.0))
    assert asked == [True, False, True, False]

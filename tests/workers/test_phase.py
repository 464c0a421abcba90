"""Who holds the device: never two tenants, moves in the right order, no move without need."""

from __future__ import annotations

import pytest

from workers.phase import Phase, PhaseManager


class Tenant:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log, self.inside = name, log, True

    def move_in(self) -> None:
        self.inside = True
        self.log.append(f"{self.name} in")

    def move_out(self) -> None:
        self.inside = False
        self.log.append(f"{self.name} out")


def test_others_move_out_before_the_owner_moves_in_and_no_move_is_without_need() -> None:
    log: list[str] = []
    phases = PhaseManager()
    trainer, rollout, reference = (Tenant(name, log) for name in ("trainer", "rollout", "reference"))
    for tenant in (trainer, rollout, reference):
        phases.add(tenant)
    phases.enter(Phase.TRAIN, trainer)
    assert log == ["rollout out", "reference out", "trainer in"]
    assert (phases.phase, phases.owner) == (Phase.TRAIN, trainer)
    assert [tenant.inside for tenant in (trainer, rollout, reference)] == [True, False, False]
    phases.enter(Phase.TRAIN, trainer)
    assert len(log) == 3, "entering again moves nothing"
    phases.leave()
    assert not trainer.inside and (phases.phase, phases.owner) == (Phase.IDLE, None)
    phases.enter(Phase.TRAIN, trainer)
    assert trainer.inside


def test_what_torch_holds_back_is_free_before_the_owner_moves_in(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    monkeypatch.setattr("workers.phase.empty_cache", lambda: log.append("emptied"))
    phases = PhaseManager()
    trainer, rollout = Tenant("trainer", log), Tenant("rollout", log)
    phases.add(trainer)
    phases.add(rollout)
    phases.enter(Phase.ROLLOUT, rollout)
    assert log == ["trainer out", "emptied", "rollout in"]

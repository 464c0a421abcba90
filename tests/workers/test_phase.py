"""Who holds the device: never two tenants, moves in the right order, no move without need."""

from __future__ import annotations

import pytest

from workers.phase import Phase, PhaseManager


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
    monkeypatch.setattr("workers.phase.empty_cache", lambda: log.append("emptied"))
    phases = PhaseManager()
    trainer, rollout, reference = (Tenant(name, log) for name in ("trainer", "rollout", "reference"))
    for tenant in (trainer, rollout, reference):
        phases.add(tenant)
    phases.enter(Phase.TRAIN, trainer)
    assert log == ["rollout out", "reference out", "emptied", "trainer in"]
    assert (phases.phase, phases.owner) == (Phase.TRAIN, trainer)
    phases.enter(Phase.TRAIN, trainer)
    assert len(log) == 4, "entering again moves nothing"
    phases.leave()
    assert log[4:] == ["trainer out", "rollout out", "reference out"]
    assert (phases.phase, phases.owner) == (Phase.IDLE, None)
    phases.enter(Phase.TRAIN, trainer)
    assert log[-1] == "trainer in"

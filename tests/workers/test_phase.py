"""Who holds the device: never two tenants, moves in the right order, no move without need."""

from __future__ import annotations

import pytest

from workers.phase import PhaseManager


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
    phases.enter(trainer)
    assert log == ["rollout out", "reference out", "emptied", "trainer in"]
    phases.enter(trainer)
    assert len(log) == 4, "entering again moves nothing"
    phases.enter(rollout)
    assert log[4:] == ["trainer out", "reference out", "emptied", "rollout in"]

"""Who runs which trial: one sweep at a time, another one after its death, on this machine and elsewhere."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trainer.sweeps import owners
from trainer.sweeps.owners import Place, Sweeper


def test_a_trial_has_one_owner_until_that_one_is_gone(tmp_path: Path) -> None:
    trial = tmp_path / "trials" / "0000"
    with Sweeper(tmp_path, stale_s=100) as second_to_none:
        with Sweeper(tmp_path, stale_s=100) as other:
            assert (second_to_none.number, other.number) == (0, 1) and second_to_none.is_alive(1)
            assert other.claim(trial) and not second_to_none.claim(trial) and not other.claim(trial)
            assert second_to_none.owner(trial) == 1 and f"pid {os.getpid()}" in second_to_none.who(1)
        assert not second_to_none.is_alive(1), "its lock is free"
        assert second_to_none.claim(trial) and second_to_none.owner(trial) == 0
        assert second_to_none.owner(tmp_path / "trials" / "0001") is None
        assert [path.name for path in trial.iterdir()] == ["owner.0", "owner.1"] or len(list(trial.iterdir())) == 2


def test_of_two_that_claim_at_once_one_gets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = tmp_path / "trials" / "0000"
    with Sweeper(tmp_path, 100) as first, Sweeper(tmp_path, 100) as second:
        latest = owners._latest
        with monkeypatch.context() as patch:
            # the second one looks, the first one claims, the second one goes on
            patch.setattr(owners, "_latest", lambda folder: (latest(folder), first.claim(trial))[0] if folder else None)
            monkeypatch.setattr(first, "claim", lambda folder: _claim_once(first, folder, latest, patch))
            assert not second.claim(trial)
        assert second.owner(trial) == 0


def _claim_once(sweeper: Sweeper, trial: Path, latest: object, patch: pytest.MonkeyPatch) -> bool:
    patch.setattr(owners, "_latest", latest)
    return Sweeper.claim(sweeper, trial)


def test_a_sweep_elsewhere_is_dead_when_its_beat_stands_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(owners.time, "monotonic", lambda: now)
    trial = tmp_path / "trials" / "0000"
    with Sweeper(tmp_path, 60, Place("far", "1")) as far, Sweeper(tmp_path, 60, Place("here", "2")) as here:
        assert far.claim(trial) and here.is_alive(0) and here.is_undecided(0)
        now += 40
        assert here.is_alive(0) and here.is_undecided(0)
        far._beat()
        assert here.is_alive(0) and not here.is_undecided(0), "it was seen to beat"
        now += 59
        assert here.is_alive(0) and not here.claim(trial)
        now += 2
        assert not here.is_alive(0) and here.claim(trial)
        assert far.owner(trial) == here.number != far.number, "it sees that it has lost the trial"


def test_a_sweep_of_a_host_with_the_same_name_is_judged_by_its_beat(tmp_path: Path) -> None:
    """Two machines may have one name; and this one may have started anew."""
    with Sweeper(tmp_path, 60, Place("here", "its")), Sweeper(tmp_path, 60, Place("here", "ours")) as ours:
        assert ours.is_alive(0) and ours.is_undecided(0)


def test_where_files_cannot_be_locked_the_beat_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(owners.time, "monotonic", lambda: now)

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(owners.fcntl, "flock", no_locks)
    with Sweeper(tmp_path, 60), Sweeper(tmp_path, 60) as other:
        assert other.is_alive(0) and other.is_undecided(0)
        now += 61
        assert not other.is_alive(0)

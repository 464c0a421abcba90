"""Sweeps of these tests draw no pictures and keep their trials in a journal: both take longer than all else in them.
test_report.py looks at pictures, and what names a storage, or runs in a process of its own, has SQLite."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def quick(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def journal(folder: Path, asked: str) -> str:
        return "journal" if asked == "auto" else asked

    if request.node.path.name in ("test_sweep.py", "test_real_sweep.py"):
        monkeypatch.setattr("trainer.sweeps.command.storage_for", journal)
    if request.node.path.name != "test_report.py":
        monkeypatch.setattr("trainer.sweeps.pictures.pictures", lambda record, importance: [])

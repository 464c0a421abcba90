"""Sweeps of these tests draw no pictures, which takes longer than all else in them; test_report.py looks at those."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.path.name != "test_report.py":
        monkeypatch.setattr("trainer.sweeps.pictures.pictures", lambda record, importance: [])

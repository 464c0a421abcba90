"""Saves of a real run, killed with SIGKILL at instants spread over them: `python -m tests.killed_saves` as a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.killed_saves import print_survived

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_a_run_killed_within_its_saves_loses_no_checkpoint(tmp_path: Path) -> None:
    assert print_survived(tmp_path, 25) >= 20, "too few kills hit a save"

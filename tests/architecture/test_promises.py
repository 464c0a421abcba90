"""Every promise of `tests/promises.md` has its test."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def missing(page: str) -> list[str]:
    """The tests of a page that are not there."""
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page)
    assert named, "no promise found"
    gone = []
    for path, name in named:
        file = ROOT / path
        if not file.is_file() or not re.search(rf"^(async )?def {name}\(", file.read_text(encoding="utf-8"), re.M):
            gone.append(f"{path}::{name}")
    return gone


def test_every_promise_has_its_test() -> None:
    assert not missing((ROOT / "tests/promises.md").read_text(encoding="utf-8"))


def test_a_promise_without_its_test_is_named() -> None:
    page = "`tests/architecture/test_promises.py::test_that_nobody_wrote`"
    assert missing(page) == ["tests/architecture/test_promises.py::test_that_nobody_wrote"]

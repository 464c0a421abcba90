"""The budget of each room in lines, and of the whole house in files: `rooms.json` says which files belong where.

Counted is what a reader has to read: Python, js, css and templates, blank lines and docstrings included. A room's
`budget` is where it has to be; `lines` is what it may have until then, and only falls.
"""

from __future__ import annotations

import fnmatch
import json
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOPS = ("verl_lite", "workers", "trainer", "recipes")
COUNTED = (".py", ".js", ".css", ".html", ".txt")
ROOMS: dict[str, dict] = json.loads((Path(__file__).parent / "rooms.json").read_text())
FILES = 356
TEST_LINES = 52_039


def product_files() -> list[str]:
    paths = (path for top in TOPS for path in (ROOT / top).rglob("*") if path.suffix in COUNTED)
    return sorted(path.relative_to(ROOT).as_posix() for path in paths)


def belongs(file: str, glob: str) -> bool:
    """Whether a file is in a glob; only a last `/*` also takes what lies deeper."""
    depth, wanted = file.count("/"), glob.count("/")
    return fnmatch.fnmatch(file, glob) and (depth == wanted or (depth > wanted and glob.endswith("/*")))


def lines_by_room() -> Counter[str]:
    lines: Counter[str] = Counter()
    for file in product_files():
        rooms = [name for name, room in ROOMS.items() if any(belongs(file, glob) for glob in room["globs"])]
        assert len(rooms) == 1, f"{file} is in {len(rooms)} rooms of tests/architecture/rooms.json: {rooms}"
        lines[rooms[0]] += len((ROOT / file).read_text(encoding="utf-8").splitlines())
    return lines


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_keeps_its_budget(name: str) -> None:
    room = ROOMS[name]
    allowed = room.get("lines", room["budget"])
    assert allowed >= room["budget"], f"{name}: leave `lines` out, the room is within its budget"
    assert lines_by_room()[name] <= allowed


def test_the_house_keeps_its_number_of_files() -> None:
    assert len(product_files()) <= FILES


def test_the_tests_keep_their_budget() -> None:
    files = (ROOT / "tests").rglob("*.py")
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= TEST_LINES


if __name__ == "__main__":
    for name, count in lines_by_room().items():
        print(f"{name:20} {count:6,} of {ROOMS[name]['budget']:6,}")
    total, budget = sum(lines_by_room().values()), sum(room["budget"] for room in ROOMS.values())
    print(f"{'all':20} {total:6,} of {budget:6,}  in {len(product_files())} files")

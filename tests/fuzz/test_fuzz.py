"""The fuzz itself: cases are the same each time, and a share of them holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import main, names_what_was_typed
from tests.fuzz.cases import Case
from tests.fuzz.configs import KEYS, draw_config
from tests.fuzz.datasets import draw_dataset


def test_a_case_is_made_again_from_its_seed_and_number(tmp_path: Path) -> None:
    root, made = Path("/root-of-good-files"), {}
    for draw in (draw_config, draw_dataset):
        assert draw(3, 1, root).arguments != draw(4, 1, root).arguments
        for name in ("one", "two"):
            for index in range(9):
                arguments = (case := draw(3, index, root)).write(folder := tmp_path / name / "cases" / case.name)
                files = [file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()]
                made.setdefault(name, []).append((arguments[2:], files))
    assert made["one"] == made["two"]


def test_every_key_of_the_schema_is_drawn() -> None:
    cases = [draw_config(0, index, Path("/r")) for index in range(4000)]
    texts = " ".join(text for case in cases for text in (*case.arguments, *case.overlay))
    assert [key.name for key in KEYS if key.name not in texts] == []


def test_an_error_has_to_name_something_of_what_was_typed() -> None:
    case = Case("config-0", ["actor.optim.lr=-1"])
    assert names_what_was_typed("actor.optim.lr=-1: at least 0 is expected", case)
    assert not names_what_was_typed("math domain error", case)


@pytest.mark.slow
def test_a_fixed_share_runs_or_stops_with_our_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--configs", "3", "--datasets", "2", "--jobs", "1", "--keep", str(tmp_path)]) == 0, capfd.readouterr()


@pytest.mark.long
def test_the_full_size_holds(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--configs", "500", "--datasets", "200", "--keep", str(tmp_path)]) == 0, capfd.readouterr()

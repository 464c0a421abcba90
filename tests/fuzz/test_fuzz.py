"""The fuzz itself: cases are the same each time, become as small as they can, and a share of them holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import main, names_what_was_typed
from tests.fuzz.cases import Case, Part
from tests.fuzz.configs import KEYS, draw_config
from tests.fuzz.datasets import draw_dataset
from tests.fuzz.shrink import shrink
from tests.fuzz.worker import kind_of


def test_a_case_is_made_again_from_its_seed_and_number(tmp_path: Path) -> None:
    root = Path("/root-of-good-files")
    for draw in (draw_config, draw_dataset):
        assert [draw(3, index, root).parts for index in range(9)] == [draw(3, index, root).parts for index in range(9)]
        assert draw(3, 1, root).parts != draw(4, 1, root).parts
    for name in ("one", "two"):
        for index in range(9):
            draw_dataset(0, index, root).write(tmp_path / name / "cases" / str(index))
    files = [[file for file in sorted((tmp_path / name).rglob("*")) if file.is_file()] for name in ("one", "two")]
    one, two = ([file.read_bytes() for file in each] for each in files)
    assert one == two and one


def test_every_key_of_the_schema_is_drawn() -> None:
    texts = " ".join(part.text for index in range(4000) for part in draw_config(0, index, Path("/r")).parts)
    assert [key.name for key in KEYS if key.name not in texts] == []


def test_a_case_is_written_as_files_and_arguments(tmp_path: Path) -> None:
    case = Case("config", 0, (Part("a.b: 1", in_file=True), Part("c=2"), Part("d:\n  e: 3", in_file=True)))
    folder = tmp_path / "cases" / "config-0"
    assert case.write(folder) == ["--config", str(tmp_path / "base.yaml"), "--config", "overlay.yaml", "c=2"]
    assert (folder / "overlay.yaml").read_text() == "a.b: 1\nd:\n  e: 3"


def test_a_case_shrinks_to_the_parts_that_it_takes() -> None:
    case = Case("config", 0, tuple(Part(letter) for letter in "abcdef"))
    small = shrink(case, lambda smaller: {Part("b"), Part("e")} <= set(smaller.parts))
    assert [part.text for part in small.parts] == ["b", "e"]


def test_an_error_has_to_name_something_of_what_was_typed() -> None:
    case = Case("config", 0, (Part("actor.optim.lr=-1"),))
    assert names_what_was_typed("actor.optim.lr=-1: at least 0 is expected", case)
    assert not names_what_was_typed("math domain error", case)


def test_failures_are_known_by_error_and_place() -> None:
    try:
        draw_config(0, 0, None)  # type: ignore[arg-type]
        raise ValueError("x")
    except ValueError as error:
        assert kind_of(error) == "ValueError in tests/fuzz/test_fuzz.py:test_failures_are_known_by_error_and_place"


@pytest.mark.slow
def test_a_fixed_share_runs_or_stops_with_our_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--configs", "30", "--datasets", "20", "--keep", str(tmp_path)]) == 0, capfd.readouterr().out

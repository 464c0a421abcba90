"""The comparison of golden runs: it finds every kind of difference, and nothing between equal runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.golden.__main__ import Case, compare

CASE = Case((), steps=2, half=1)


def write_run(folder: Path, first_step: int) -> None:
    """Writes the files of a run of two steps that starts at a step."""
    steps = [{"step": step, "data": {"loss": step / 3, "timing_s/gen": step}} for step in range(first_step, 3)]
    for kind in ("rollouts", "validation"):
        (folder / kind).mkdir(parents=True)
        (folder / kind / "2.jsonl").write_text(json.dumps({"output": "a", "score": 1.0}) + "\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


@pytest.mark.parametrize(
    ("file", "old", "new", "found"),
    [
        ("whole/metrics.jsonl", '"timing_s/gen": 2', '"timing_s/gen": 9', []),
        ("whole/metrics.jsonl", "0.3333333333333333", "0.33333333333333337", ["whole metrics of step 1/loss"]),
        ("whole/metrics.jsonl", '"loss"', '"lost"', ["1/loss", "1/lost", "2/loss", "2/lost", "against", "against"]),
        ("resumed/metrics.jsonl", "0.6666666666666666", "0.7", ["resumed metrics", "resumed against uninterrupted"]),
        ("whole/rollouts/2.jsonl", '"a"', '"b"', ["whole rollouts/2.jsonl[0]/output: 'a' -> 'b'"]),
        ("resumed/validation/2.jsonl", "1.0", "0.0", ["resumed validation"]),
    ],
)
def test_every_difference_is_found(tmp_path: Path, file: str, old: str, new: str, found: list[str]) -> None:
    write_run(tmp_path / "old" / "case" / "whole", 1)
    write_run(tmp_path / "old" / "case" / "resumed", 2)
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    assert compare("case", CASE, tmp_path / "old", tmp_path / "new") == []
    changed = tmp_path / "new" / "case" / file
    assert old in changed.read_text()
    changed.write_text(changed.read_text().replace(old, new))
    differences = compare("case", CASE, tmp_path / "old", tmp_path / "new")
    assert len(differences) == len(found)
    assert all(part in text for part, text in zip(found, differences, strict=True)), differences

"""Runs side by side: the command draws what the runs logged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes import curves


def test_the_command_writes_a_picture_of_runs_of_different_length(tmp_path: Path) -> None:
    for name, steps in (("short", 2), ("long", 5)):
        (tmp_path / name).mkdir()
        rows = [{"step": step, "data": {"a/b": step / 10, "a/b/ci95": 0.01, "c": 1.0}} for step in range(steps)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    picture = tmp_path / "curve.png"
    runs = [f"KL=0.3={tmp_path}/short", f"none={tmp_path}/long"]
    assert curves.main([*runs, "--metrics", "a/b=accuracy", "c=constant", "--to", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        curves.main(["no equals sign", "--metrics", "a/b=accuracy", "--to", str(picture)])

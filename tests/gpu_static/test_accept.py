"""The acceptance command where there is no GPU: what it does with a step that fails or hangs, and a rehearsal."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from tests.gpu import accept, accept_steps


def test_every_step_has_a_limit_and_its_function() -> None:
    assert list(accept.LIMITS_S) == list(accept_steps.STEPS)


@pytest.mark.slow
def test_a_step_that_hangs_is_ended_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept, "LIMITS_S", {"machine": 0.2, "update": 60})
    assert accept.main(["--out", str(tmp_path), "--rehearse", "--only", "machine", "update"]) == 1
    hung, done = (json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines())
    assert not hung["ok"] and hung["reason"] == "not done after 0.2 s"
    assert done["ok"] and done["kept_s"] > 0
    assert "| machine | **failed** |" in (tmp_path / "summary.md").read_text()


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="a rehearsal is for machines without a GPU")
def test_all_steps_run_in_a_rehearsal(tmp_path: Path) -> None:
    assert accept.main(["--out", str(tmp_path), "--rehearse"]) == 0, (tmp_path / "summary.md").read_text()


def test_wheels_are_installed_without_network_beside_the_packages_of_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr(accept.subprocess, "run", run)
    arguments = ["--out", str(tmp_path), "--wheels", str(tmp_path / "w")]
    assert accept.main([*arguments, "--rehearse", "--only", "machine"]) == 3
    made, installed, again = commands
    python = str(tmp_path / "venv" / "bin" / "python")
    assert made[-2:] == ["--system-site-packages", str(tmp_path / "venv")]
    assert installed[0] == python and {"--no-index", str(tmp_path / "w")} <= set(installed)
    assert again == [python, "-m", "tests.gpu.accept", "--out", str(tmp_path), "--only", "machine", "--rehearse"]

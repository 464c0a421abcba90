"""Whole commands: an evaluation that is killed by the kernel goes on to the numbers of one that was not; all
checkpoints of a run in one table; answers without rewards, scored afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet
import pytest

from tests.tiny_run import ROOT, TinyTask
from trainer.launch.ppo_job import run_ppo
from trainer.main_eval import main as main_eval
from trainer.main_generate import main as main_generate

REWARD = """
import time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(0.15)
    return {"score": sum(map(ord, solution_str)) % 7 / 7, "acc": float(sum(map(ord, solution_str)) % 3 == 0)}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints 1 and 2, whose training data are gone."""
    folder = tmp_path_factory.mktemp("task")
    task = TinyTask(folder, REWARD)
    (folder / "val.jsonl").write_text((folder / "train.jsonl").read_text())
    argv = [
        *task.options, f"data.val_files={folder / 'val.jsonl'}", "trainer.backend=inline", "actor.optim.lr=1e-2",
        "trainer.total_training_steps=2", "trainer.save_freq=1", f"trainer.default_local_dir={folder / 'run'}",
        "rollout.val_kwargs.n=2", "rollout.val_kwargs.do_sample=true", "rollout.val_kwargs.temperature=1.0",
    ]  # fmt: skip
    assert run_ppo(argv) == 0
    (folder / "train.jsonl").unlink()
    return folder / "run"


@pytest.mark.slow
def test_killed_evaluations_and_generations_go_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "trainer.main_eval", str(run / "global_step_2"), "data.val_batch_size=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.Popen(
        command, cwd=run.parent, env=environment, start_new_session=True, stdout=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 300
        while not (kept := sorted(run.glob("eval/*/answers/chunk-*"))):
            assert killed.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
    [folder] = run.glob("eval/*")
    assert not (folder / "results.json").exists() and len(kept) < 4
    first = kept[0].read_bytes()

    shown = "trainer.logger=[console,jsonl]"
    assert main_eval([str(run), "--all-checkpoints", "data.val_batch_size=3", shown]) == 0
    output = capsys.readouterr().out
    assert "answering 6 of 8 prompts, 3 at a time" in output or "answering 4 of 8 prompts, 3 at a time" in output
    assert "8 of 8 prompts are answered" in output and "without effect" not in output
    assert "Validation: acc mean@2" in output and "global_step_1" in output
    assert kept[0].read_bytes() == first
    continued = json.loads((folder / "results.json").read_text())
    assert continued["step"] == 2

    whole = run.parent / "whole"
    assert main_eval([str(run / "global_step_2"), f"trainer.default_local_dir={whole}"]) == 0
    assert json.loads((whole / "results.json").read_text()) == continued, "bit for bit"
    [earlier] = set(run.glob("eval/global_step_1-*"))
    assert json.loads((earlier / "results.json").read_text())["metrics"] != continued["metrics"], "other weights"

    assert main_eval([str(run / "global_step_2"), "rollout.val_kwargs.n=1", f"trainer.default_local_dir={whole}"]) == 2
    assert "rollout.val_kwargs.n: 2 there, 1 now" in capsys.readouterr().err
    (whole / "results.json").unlink()
    assert main_eval([str(run), "--all-checkpoints"]) == 0
    assert capsys.readouterr().out.count("was evaluated before under the same settings") == 2

    answers = run.parent / "answers.parquet"
    assert main_generate([str(run), f"output={answers}"]) == 0
    rows = pyarrow.parquet.read_table(answers).to_pylist()
    evaluated = [json.loads(line)["row"] for path in sorted(folder.glob("answers/chunk-*")) for line in path.open()]
    said = {(row["uid"], row["sample"]): row["output"] for row in evaluated}
    assert {(row["uid"], row["sample"]): row["output"] for row in rows} == said, "as the evaluation had them"

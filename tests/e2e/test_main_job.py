"""The main job as its user runs it: `python -m trainer.main_ppo`, in a process of its own, on the embedded task."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_runs import Runs
from tests.tiny_run import permitting
from trainer import export, main_eval
from trainer.main_ppo import main
from trainer.observe.tracking import read_metrics

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["data.train_batch_size=16", "actor.ppo_mini_batch_size=16", "rollout.n=4", "data.val_max_samples=16"]

pytestmark = pytest.mark.slow


def metrics(folder: Path) -> list[dict[str, float]]:
    """The metrics of each logged step."""
    return list(read_metrics(folder / "metrics.jsonl").values())


def trained(tmp_path: Path, name: str, *overrides: str) -> list[dict[str, float]]:
    """Runs two small steps into tmp_path/name; gives their metrics, validation included. The command runs in a folder
    that has nothing of the checkout, so that none of it is found by accident but the packages."""
    folder = tmp_path / name
    options = [*SMALL, "trainer.total_training_steps=2", f"trainer.default_local_dir={folder}", *overrides]
    done = subprocess.run(
        [sys.executable, "-m", "trainer.main_ppo", *options],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return metrics(folder)


def without_time(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """What must repeat: everything but seconds, speed and memory."""
    volatile = ("timing", "perf/", "_per_second", "seconds", "_gb", "weight_sync", "idle_frac")
    return [{k: v for k, v in row.items() if not any(part in k for part in volatile)} for row in rows]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a run of the command as it is, in `first`."""
    folder = tmp_path_factory.mktemp("main")
    trained(folder, "first")
    return folder


@pytest.mark.long
def test_the_same_command_gives_the_same_curve(folder: Path) -> None:
    first, second = metrics(folder / "first"), trained(folder, "second")
    assert len(first) >= 3
    assert without_time(first) == without_time(second)


def test_inline_and_ray_agree(folder: Path) -> None:
    """One slot in the driver's process and two under Ray: the same samples, gradients equal up to rounding. The first
    is its user's alone, the second is shared."""
    rows = metrics(folder / "first"), trained(folder, "inline", "trainer.backend=inline", "trainer.umask=022")
    assert not permitting(folder / "first", 0o077) and not permitting(folder / "inline", 0o022)
    assert set(permitting(folder / "inline", 0o044)) == {folder / "inline", *(folder / "inline").rglob("*")}
    steps = [row for row in zip(*rows, strict=True) if "actor/grad_norm" in row[0]]
    assert len(steps) == 2 and len(rows[0]) >= 3
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for pair in steps for row in pair)
    for name in ("critic/score/mean", "response_length/mean", "actor/pg_loss", "actor/grad_norm"):
        assert steps[0][0][name] == pytest.approx(steps[0][1][name], rel=1e-3, abs=1e-6), name


def test_evaluate_and_export_what_the_run_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # commands set their own
    run_dir = folder / "first"
    small = ["data.val_max_samples=16", "rollout.name=hf", "trainer.backend=inline", "trainer.n_gpus_per_node=1"]
    assert main_eval.main([str(run_dir), *small]) == 0
    assert "val-core" in (next((run_dir / "eval").glob("*")) / "metrics.jsonl").read_text()
    assert all(not permitting(folder, 0o077) for folder in (run_dir / "eval").iterdir())
    assert export.main([str(run_dir), "--to", str(folder / "hf")]) == 0
    assert (folder / "hf" / "model.safetensors").exists()


def test_a_breakpoint_in_a_worker_stops_the_inline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    stopped, loss = tmp_path / "stopped", "actor.policy_loss.loss_mode=my_loss:loss"
    (tmp_path / "my_loss.py").write_text(
        "import os, sys\n"
        "from verl_lite.core_algos import compute_policy_loss_vanilla\n"
        f"def stop(): open({str(stopped)!r}, 'w').write(str(os.getpid()))\n"
        "sys.breakpointhook = stop\n"
        "def loss(*args, **kwargs):\n"
        "    breakpoint()\n"
        "    return compute_policy_loss_vanilla(*args, **kwargs)\n"
    )
    process, _, log = Runs(tmp_path, 4, 4, [loss]).start("run", "trainer.total_training_steps=1")
    process.join(120)
    assert process.exitcode == 0, log.read_text()[-3000:]
    assert stopped.read_text() == str(process.pid), "the worker runs in the driver's process"


WRONG = {
    "actor.optim.lrr=1": ["actor.optim.lrr", "actor.optim.lr"],
    "data.train_files=/nothing.parquet": ["data.train_files", "/nothing.parquet"],
    "model.path=/no/such/model": ["model.path", "/no/such/model"],
    "data.max_prompt_length=2": ["data.max_prompt_length", "truncation"],
    "actor.ppo_mini_batch_size=100000": ["actor.ppo_mini_batch_size", "data.train_batch_size"],
    "trainer.n_gpus_per_node=4096": ["trainer.n_gpus_per_node"],
    "recipe=nothing": ["recipe", "quickstart"],
}


@pytest.mark.parametrize("argument", WRONG)
def test_each_wrong_input_is_told(
    argument: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which spares seven seconds of imports for each. One in its own: tests/recipes/test_launch.py."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the command sets its own
    assert main([argument]) == 2
    told = capsys.readouterr().err
    assert "Traceback" not in told
    assert all(text in told for text in WRONG[argument]), told

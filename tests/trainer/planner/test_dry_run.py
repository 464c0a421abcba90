"""`trainer.dry_run=true`: what it checks, prints and writes, and that it starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_run import TinyTask
from trainer.launch import ppo_job
from trainer.launch.ppo_job import run_ppo
from verl_lite.config import load_config
from verl_lite.errors import UserError

FEW = ["trainer.dry_run=true", "reward.num_workers=0", "trainer.total_training_steps=3"]


def test_it_checks_and_plans_and_writes_all_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_nothing(*_: object) -> None:
        raise AssertionError("a dry run builds no trainer")

    monkeypatch.setattr(ppo_job, "build_trainer", build_nothing)
    task, run_dir = TinyTask(tmp_path), tmp_path / "run"
    assert run_ppo([*task.options, *FEW, f"trainer.default_local_dir={run_dir}"]) == 0
    text = capsys.readouterr().out
    assert "memory per device, expected" in text and "disk, at most" in text and "peak of tensors" in text
    assert "Nothing was started (trainer.dry_run=true)" in text
    assert sorted(path.name for path in run_dir.iterdir()) == ["dry_run.yaml", "in_use"]
    written = load_config(["--config", str(run_dir / "dry_run.yaml")]).config
    assert written.trainer.dry_run and written.trainer.total_training_steps == 3

    (tmp_path / "reward.py").write_text("def compute_score(data_source): return 1.0\n")
    with pytest.raises(UserError, match="compute_score"):
        run_ppo([*task.options, *FEW, f"trainer.default_local_dir={run_dir}"])


def test_a_plan_that_does_not_fit_is_no_success(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*TinyTask(tmp_path).options, *FEW, f"trainer.default_local_dir={tmp_path / 'run'}"]
    assert run_ppo([*options, "rollout.name=vllm", "rollout.kv_cache_memory_mb=100000000"]) == 2
    text = capsys.readouterr().out
    assert "does not fit" in text and "a smaller rollout.kv_cache_memory_mb" in text


def test_a_machine_with_too_little_memory_for_two_processes_is_told_to_use_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process needs 0.55 GiB for its libraries alone, and has half of the free memory."""
    monkeypatch.setattr("trainer.planner.launched.available_memory", lambda: 1 << 30)
    options = [*TinyTask(tmp_path).options, *FEW, f"trainer.default_local_dir={tmp_path / 'run'}"]
    assert run_ppo([*options, "trainer.backend=ray", "trainer.n_gpus_per_node=2"]) == 2
    assert "trainer.n_gpus_per_node=1 fits" in capsys.readouterr().out

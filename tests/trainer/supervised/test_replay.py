"""Supervised runs that fail: the crash dump, its replay, and the final report of a run that succeeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import tiny_qwen2
from tests.trainer.prompt_rows import write
from trainer import main_rm, main_sft
from trainer.checkpoint.crash_dump import read_dump
from trainer.replay import main as replay
from workers.roles.training_worker import TrainingWorker
from workers.supervised.worker import SupervisedWorker

SFT_ROWS = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(4) for b in range(4)]
PAIRS = [{"prompt": f"{a}, {b}?", "chosen": str(max(a, b)), "rejected": "-1"} for a in range(4) for b in range(4)]


def losses(run_dir: Path) -> dict[int, float]:
    """Returns the logged training loss by step."""
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["data"]["train/loss"] for row in rows if "train/loss" in row["data"]}


@pytest.mark.parametrize(
    ("main", "rows"),
    [
        pytest.param(main_sft.main, SFT_ROWS, id="sft"),
        pytest.param(main_rm.main, PAIRS, id="rm", marks=pytest.mark.slow),
        pytest.param(lambda given: main_sft.main([*given, "loss=dpo"]), PAIRS, id="dpo", marks=pytest.mark.slow),
    ],
)
def test_a_failed_step_is_dumped_and_repeated_with_the_same_loss(
    main: Any,
    rows: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Step 4 fails, after a checkpoint of step 2: the replay repeats steps 3 and 4."""
    options = [
        f"model.path={tiny_qwen2(tmp_path / 'model')}",
        f"data.train_files={write(tmp_path / 'train.parquet', rows)}",
        *("data.train_batch_size=4", "trainer.device=cpu", "trainer.backend=inline", "optim.lr=5e-3"),
        *("trainer.total_training_steps=5", "trainer.save_freq=2", "trainer.log_freq=1", "trainer.logger=[jsonl]"),
    ]
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert main([*options, f"trainer.default_local_dir={whole}"]) == 0
    report = capsys.readouterr().out
    assert "What to do next" in report and "python -m trainer.main_ppo" in report and str(whole / "hf") in report

    train, calls = SupervisedWorker.train, []

    def fail_in_step_4(self: TrainingWorker, data: Any) -> Any:
        calls.append(data)
        if len(calls) == 4:
            raise ArithmeticError("step 4 is broken")
        return train(self, data)

    fail_in_step_4.__dict__.update(train.__dict__)  # the dispatch mode of the method
    with monkeypatch.context() as broken:
        broken.setattr(SupervisedWorker, "train", fail_in_step_4)
        with pytest.raises(ArithmeticError):
            main([*options, f"trainer.default_local_dir={run_dir}"])
        dump = run_dir / "crash" / "step_4"
        failed = read_dump(dump)
        assert failed.step == 4 and failed.checkpoint == str(run_dir / "global_step_2")
        calls[:] = calls[:2]
        elsewhere = tmp_path / "elsewhere"
        with pytest.raises(ArithmeticError) as caught:
            replay([str(dump), f"trainer.default_local_dir={elsewhere}"])
        assert "pickled" not in "".join(caught.value.__notes__)
        assert len(calls) == 4 and not list(elsewhere.glob("crash/*/step.pkl")), "a replay is not replayed"
    assert replay([str(dump), f"trainer.default_local_dir={tmp_path / 'again'}", "trainer.logger=[jsonl]"]) == 0
    assert losses(tmp_path / "again") == {step: losses(whole)[step] for step in (3, 4)}

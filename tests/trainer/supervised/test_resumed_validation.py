"""A resumed run repeats no validation, and its report begins with the first validation of the whole run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_model import tiny_qwen2
from tests.tiny_run import write_rows
from trainer import main_sft


@pytest.mark.parametrize("loss", ["sft", "dpo"])
def test_a_resumed_run_logs_the_validations_of_an_undisturbed_run(
    loss: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_qwen2(tmp_path / "model")
    pairs = {"chosen": "2", "rejected": "3"} if loss == "dpo" else {"response": "2"}
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": f"{row}+1=", **pairs} for row in range(6)])
    words = [f"model.path={tmp_path / 'model'}", f"data.train_files={data}", f"data.val_files={data}", f"loss={loss}"]
    words += ["data.train_batch_size=2", "trainer.device=cpu", "trainer.test_freq=2", "trainer.save_freq=1"]
    words += ["trainer.logger=[jsonl]", f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.resume_mode=auto"]
    assert main_sft.main([*words, "trainer.total_training_steps=2"]) == 0
    capsys.readouterr()
    assert main_sft.main([*words, "trainer.total_training_steps=5"]) == 0

    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    validated = [line["step"] for line in lines if any(name.startswith("val/") for name in line["data"])]
    # before the first step, every second step, and after the last; not once more at step 2, where the run resumed
    assert validated == [0, 2, 4, 5]
    assert any(line.split() == ["metric", "before", "after"] for line in capsys.readouterr().out.splitlines())

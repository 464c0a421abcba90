"""A whole run in this process with several rewards: each part is logged, and scored again they come out the same."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet
import pytest

from tests.trainer import tiny_run
from trainer.score import score

JUDGE = """
import asyncio

async def judge(data_source, solution_str, ground_truth, extra_info, prompt=None, scale=1):
    await asyncio.sleep(0.001)
    return {"score": scale * (sum(map(ord, solution_str)) % 7) / 7, "asked": len(prompt[0]["content"]), "note": "text"}
"""


@pytest.mark.slow
def test_parts_are_logged_saved_and_scored_again(tmp_path: Path) -> None:
    tiny_run.write_files(tmp_path, [], JUDGE, hidden=32, layers=1)
    rows = [
        {"data_source": "exact_match", "prompt": [{"role": "user", "content": text}],
         "reward_model": {"ground_truth": {"text": text}}}
        for text in ("1+2=", "3+4=", "5+1=", "sort 31")
    ]  # fmt: skip
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    functions = (
        f"{{right: {{weight: 2}}, judge: {{path: {tmp_path}/reward.py, name: judge, kwargs: {{scale: 3}}}}, "
        "letters: {reward: regex, weight: 0.5, kwargs: {pattern: '[a-z]'}}}"
    )
    lines = tiny_run.run(
        tmp_path, "run", "~reward.custom_reward_function", f"reward.functions={functions}", "~reward.num_workers",
        f"data.val_files={tmp_path}/prompts.jsonl", "trainer.total_training_steps=1",
        "trainer.val_before_train=false", "trainer.test_freq=1",
    )  # fmt: skip
    metrics = {name: value for line in lines for name, value in line.items()}
    samples = tiny_run.samples(tmp_path, "run", 1)
    assert len(samples) == 8
    for name in ("right", "judge", "letters", "acc", "judge.asked"):
        values = [sample["extra"][name] for sample in samples]
        assert metrics[f"reward/{name}/mean"] == pytest.approx(sum(values) / 8), name
    for sample in samples:
        parts = sample["extra"]
        assert sample["score"] == pytest.approx(2 * parts["right"] + parts["judge"] + 0.5 * parts["letters"])
        assert parts["judge"] == pytest.approx(3 * (sum(map(ord, sample["output"])) % 7) / 7)
        assert parts["judge.asked"] == len(sample["prompt"][0]["content"]) and parts["judge.note"] == "text"
        assert sample["ground_truth"] == {"text": sample["prompt"][0]["content"]}
    assert "reward/judge.note/mean" not in metrics
    assert "val-core/exact_match/acc/mean@1" in metrics and "val-aux/exact_match/letters/mean@1" in metrics

    assert score(tmp_path / "run", [f"out={tmp_path}/again.parquet"]) == 0
    again = pyarrow.parquet.read_table(tmp_path / "again.parquet").to_pylist()
    assert [row["score"] for row in again] == pytest.approx([sample["score"] for sample in samples])
    assert [row["reward/judge"] for row in again] == [sample["extra"]["judge"] for sample in samples]

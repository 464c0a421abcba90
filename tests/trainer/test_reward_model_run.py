"""A whole run with a reward model alone, in this process. Beside a function: tests/recipes/test_reward_model.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.tiny_model import tiny_reward_model
from tests.trainer import tiny_run
from tests.trainer.tiny_run import samples


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Its prompts have nothing that a reward function could compare to."""
    tiny_run.write_files(tmp_path, ["1+2=", "3+4=", "5+1=", "sort 31"], hidden=32, layers=1)
    tiny_reward_model(tmp_path / "reward")
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    without = [json.dumps({name: row[name] for name in ("data_source", "prompt")}) for row in rows]
    (tmp_path / "prompts.jsonl").write_text("\n".join(without))
    return tmp_path


def test_a_reward_model_alone_scores_as_transformers_and_needs_neither_function_nor_ground_truth(folder: Path) -> None:
    """Two steps of four prompts and three answers each, their texts rendered by the reward model's template."""
    rows = tiny_run.run(
        folder, "alone", f"data.val_files={folder}/prompts.jsonl", "actor.optim.lr=1e-2", "rollout.n=3",
        "reward_model.enable=true", f"reward_model.model.path={folder}/reward", "trainer.total_epochs=2",
        "reward.function_weight=0", "reward_model.weight=0.5", "reward_model.retokenize=true",
    )  # fmt: skip
    steps = [row for row in rows if "actor/pg_loss" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["reward/error_rate"] == 0
        assert row["critic/score/mean"] == pytest.approx(0.5 * row["reward/model/mean"])
        assert row["reward/model/min"] < row["reward/model/max"] and row["actor/grad_norm"] > 0
    validation = rows[0]
    assert validation["val-core/talk/reward/mean@1"] == pytest.approx(0.5 * validation["val-aux/talk/model/mean@1"])
    assert not list((folder / "alone" / "logs").glob("reward-*")), "no reward process was started"
    model = AutoModelForSequenceClassification.from_pretrained(folder / "reward").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "reward")
    assert len(kept := samples(folder, "alone", 2)) == 12
    for row in kept:
        chat = [{"role": "user", "content": row["input"]}, {"role": "assistant", "content": row["output"]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        with torch.no_grad():
            expected = model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits.item()
        assert row["extra"]["model"] == pytest.approx(expected, abs=1e-5)
        assert row["score"] == pytest.approx(0.5 * row["extra"]["model"])

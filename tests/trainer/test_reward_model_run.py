"""Whole runs with a reward model in this process: alone, beside a function, and under a tokenizer of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.tiny_model import tiny_reward_model
from tests.trainer import tiny_run
from tests.trainer.tiny_run import samples

FUNCTION = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {'score': float(len(solution_str)), 'acc': float('1' in solution_str)}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its prompts have nothing that a reward function could compare to."""
    folder = tmp_path_factory.mktemp("run")
    tiny_run.write_files(folder, ["1+2=", "3+4=", "5+1=", "sort 31"], FUNCTION, hidden=32, layers=1)
    tiny_reward_model(folder / "reward")
    rows = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    (folder / "with_truth.jsonl").write_text("\n".join(map(json.dumps, rows)))
    without = [json.dumps({name: row[name] for name in ("data_source", "prompt")}) for row in rows]
    (folder / "prompts.jsonl").write_text("\n".join(without))
    return folder


def run(folder: Path, name: str, *options: str) -> list[dict[str, float]]:
    """Two steps of four prompts and three answers each; the metrics of each logged step."""
    return tiny_run.run(
        folder, name, f"data.val_files={folder}/prompts.jsonl", "actor.optim.lr=1e-2", "rollout.n=3",
        "reward_model.enable=true", f"reward_model.model.path={folder}/reward", "trainer.total_epochs=2", *options,
    )  # fmt: skip


def test_a_reward_model_alone_needs_neither_function_nor_ground_truth(folder: Path) -> None:
    rows = run(folder, "alone", "reward.function_weight=0", "reward_model.weight=0.5")
    steps = [row for row in rows if "actor/pg_loss" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["reward/error_rate"] == 0
        assert row["critic/score/mean"] == pytest.approx(0.5 * row["reward/model/mean"])
        assert row["reward/model/min"] < row["reward/model/max"] and row["actor/grad_norm"] > 0
    validation = rows[0]
    assert validation["val-core/talk/reward/mean@1"] == pytest.approx(0.5 * validation["val-aux/talk/model/mean@1"])
    assert not list((folder / "alone" / "logs").glob("reward-*")), "no reward process was started"
    kept = samples(folder, "alone", 2)
    assert len(kept) == 12 and all(row["score"] == pytest.approx(0.5 * row["extra"]["model"]) for row in kept)


def test_beside_a_function_the_parts_are_added_and_logged(folder: Path) -> None:
    files = [f"data.{split}_files={folder}/with_truth.jsonl" for split in ("train", "val")]
    logged = run(folder, "both", "reward.function_weight=2", *files)
    for row in (row for row in logged if "actor/pg_loss" in row):
        assert row["critic/score/mean"] == pytest.approx(2 * row["reward/function/mean"] + row["reward/model/mean"])
    assert "val-core/talk/acc/mean@1" in logged[0], "what the function calls accuracy stays the headline"
    for name in ("reward", "function", "model"):
        assert f"val-aux/talk/{name}/mean@1" in logged[0]
    for row in samples(folder, "both", 1):
        assert row["extra"]["function"] == len(row["output"])
        assert row["score"] == pytest.approx(2 * row["extra"]["function"] + row["extra"]["model"])


def test_what_was_logged_is_what_transformers_says_of_the_text(folder: Path) -> None:
    run(folder, "texts", "reward.function_weight=0", "reward_model.retokenize=true", "trainer.total_training_steps=1")
    model = AutoModelForSequenceClassification.from_pretrained(folder / "reward").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "reward")
    for row in samples(folder, "texts", 1):
        chat = [{"role": "user", "content": row["input"]}, {"role": "assistant", "content": row["output"]}]
        text = tokenizer.apply_chat_template(chat, tokenize=False)
        with torch.no_grad():
            expected = model(**tokenizer(text, add_special_tokens=False, return_tensors="pt")).logits.item()
        assert row["extra"]["model"] == pytest.approx(expected, abs=1e-5)

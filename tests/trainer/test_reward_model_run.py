"""Whole runs with a reward model in this process: alone, beside a function, and under a tokenizer of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.tiny_model import tiny_qwen2, tiny_reward_model
from trainer.build import run_ppo

QUESTIONS = ["1+2=", "3+4=", "5+1=", "sort 31"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """policy/, reward/, and prompts.jsonl without anything that a reward function could compare to."""
    folder = tmp_path_factory.mktemp("run")
    tiny_qwen2(folder / "policy", hidden=32, layers=1)
    tiny_reward_model(folder / "reward")
    rows = [{"data_source": "talk", "prompt": [{"role": "user", "content": text}]} for text in QUESTIONS]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "function.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': float(len(solution_str)), 'acc': float('1' in solution_str)}\n"
    )
    return folder


def run(folder: Path, name: str, *options: str) -> list[dict[str, float]]:
    """Two steps of four prompts and three answers each; the metrics of each logged step."""
    argv = [
        f"model.path={folder}/policy", f"data.train_files={folder}/prompts.jsonl", "data.train_batch_size=4",
        f"data.val_files={folder}/prompts.jsonl", "data.max_prompt_length=48", "data.max_response_length=6",
        "actor.ppo_mini_batch_size=4", "actor.optim.lr=1e-2", "rollout.n=3", "rollout.name=hf",
        "reward.num_workers=0", "reward_model.enable=true", f"reward_model.model.path={folder}/reward",
        "trainer.backend=inline", "trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.total_epochs=2",
        "trainer.save_freq=0", "trainer.logger=jsonl", f"trainer.default_local_dir={folder}/{name}",
        f"trainer.rollout_data_dir={folder}/{name}/samples", *options,
    ]  # fmt: skip
    assert run_ppo(argv) == 0
    return [json.loads(line)["data"] for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def samples(folder: Path, name: str, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name / "samples" / f"{step}.jsonl").read_text().splitlines()]


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
    rows = (folder / "prompts.jsonl").read_text().splitlines()
    truth = [json.dumps(json.loads(row) | {"reward_model": {"ground_truth": "1"}}) for row in rows]
    (folder / "with_truth.jsonl").write_text("\n".join(truth))
    files = f"{folder}/with_truth.jsonl"
    logged = run(
        folder, "both", "reward.function_weight=2", f"reward.custom_reward_function.path={folder}/function.py",
        f"data.train_files={files}", f"data.val_files={files}",
    )  # fmt: skip
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

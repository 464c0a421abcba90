"""Whole runs in this process by their rewards: a function that breaks, a model alone, several parts, scored again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.tiny_model import tiny_reward_model
from tests.tiny_run import good_row, write_rows
from tests.trainer import tiny_run
from tests.trainer.tiny_run import samples
from trainer.checkpoint.files import saved_steps
from trainer.cli import failure_text, run_command
from trainer.evaluate.scoring import score
from trainer.export import main as export
from trainer.launch.ppo_job import run_ppo
from trainer.ray_trainer import RayPPOTrainer
from trainer.report import main as report
from trainer.rewards.failures import RewardFailure
from verl_lite.config import load_config
from verl_lite.protocol import DataProto

QUESTIONS = ["1+2=", "3+4=", "5+1=", "sort 31", "2*2=", "9-3=", "7+7=", "sort 20"]

REWARD = """
import ctypes, os, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == solution_str:  # the dry run
        return 0.0
    match sum(map(ord, solution_str)) % 9:
        case 0: raise ValueError("broken")
        case 1: return float("nan")
        case 2: os._exit(3)
        case 3: ctypes.string_at(0)
        case 4: time.sleep(1000)
    return {"score": sum(map(ord, solution_str)) % 5 / 5, "acc": 1.0}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_files(tmp_path_factory.mktemp("run"), QUESTIONS, REWARD, hidden=32, layers=1)


@pytest.mark.slow
def test_a_run_whose_folder_is_deleted_makes_what_its_commands_need_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deleted in the second of four steps, after which a checkpoint is not due."""
    folder = str(tmp_path / "run")
    delete = f"import shutil\ncalls = []\n{tiny_run.REWARD}\ndef deletes(*given, **named):\n    calls.append(1)\n"
    delete += f"    if len(calls) == 12: shutil.rmtree({folder!r})\n    return compute_score(*given, **named)\n"
    tiny_run.write_files(tmp_path, QUESTIONS, delete, hidden=32, layers=1)
    options = ["reward.custom_reward_function.name=deletes", "trainer.total_training_steps=4", "trainer.save_freq=3"]
    metrics = tiny_run.run(tmp_path, "run", *options, "trainer.samples_max_mb=0", "~trainer.rollout_data_dir")
    assert [row["training/global_step"] for row in metrics if "training/global_step" in row] == [2, 3, 4]
    assert "run WAS DELETED OR RENAMED while the run trains" in " ".join(capsys.readouterr().out.split())
    assert sorted(saved_steps(tmp_path / "run")) == [2, 3, 4], "the step of the deletion saves, since nothing was left"
    again = load_config(["--config", str(tmp_path / "run" / "config.yaml")]).config
    assert (again.trainer.total_training_steps, again.trainer.save_freq) == (4, 3)
    assert (tmp_path / "run" / "in_use").read_text() == ""
    assert export([str(tmp_path / "run")]) == report([str(tmp_path / "run")]) == 0


# --------------------------------------------------------------------------------------------- a function that breaks


class Watched(RayPPOTrainer):
    """The trainer; keeps the batch of each step."""

    batches: list[DataProto] = []

    def log_step(self, batch: DataProto, validation: dict[str, float]) -> None:
        self.batches.append(batch)
        super().log_step(batch, validation)


def run(folder: Path, name: str, *options: str) -> list[dict[str, float]]:
    """One step of eight prompts and four answers each; its metrics."""
    Watched.batches = []
    given = [
        "data.train_batch_size=8", "data.shuffle=false", "actor.ppo_mini_batch_size=8", "actor.optim.lr=1e-2",
        "rollout.n=4", "~reward.num_workers", "reward.timeout_s=1", "reward.max_error_rate=1",
        "trainer.total_training_steps=1",
    ]  # fmt: skip
    return tiny_run.run(folder, name, *given, *options, trainer_class=Watched)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["algorithm.filter_groups.metric=stlye"], "metric names 'stlye'.* the numbers style; did you mean"),
        (["algorithm.filter_groups.metric=word"], "names 'word', .* the numbers style"),  # a text
        (["algorithm.filter_groups.metric=model"], "set reward_model.enable=true"),
        (["algorithm.filter_groups.metric=style"], None),  # only the source of the third row has it
        (["algorithm.filter_groups.metric=score"], None),
        (["algorithm.filter_groups.enable=false", "algorithm.filter_groups.metric=nope"], None),
        (["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[style,nope]"], "gdpo_reward_keys names 'nope'"),
    ],
)
def test_a_number_that_the_reward_does_not_return_is_refused_before_anything_starts(
    tmp_path: Path, options: list[str], message: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    reward = "def compute_score(data_source, **_):\n"
    reward += "    return {'score': 0.5, 'style': 1.0, 'word': 'x'} if data_source == 'styled' else 0.5\n"
    tiny_run.write_files(tmp_path, QUESTIONS, reward, hidden=32, layers=1)
    write_rows(tmp_path / "prompts.jsonl", (good_row(n, "styled" if n > 1 else "plain") for n in range(8)))
    given = [*tiny_run.options_of(tmp_path), "algorithm.filter_groups.enable=true", "trainer.dry_run=true", *options]
    status = run_command(lambda: run_ppo(given))
    assert status == (0 if message is None else 2)
    assert message is None or re.search(message, capsys.readouterr().err)


@pytest.mark.slow
def test_a_run_that_diverged_says_so_at_its_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = folder / "calm.py"
    own.write_text(tiny_run.REWARD)
    options = [f"reward.custom_reward_function.path={own}", "trainer.total_training_steps=2"]
    tiny_run.run(folder, "diverged", *options, "actor.optim.lr=1e10", "actor.ppo_mini_batch_size=2")
    last = " ".join(capsys.readouterr().out.partition("Where things are")[2].split())
    assert "note: the run diverged: from step 2 on, no gradient is finite; lower the learning rate" in last
    assert "actor.optim.lr=10000000000.0" in last


@pytest.mark.slow
def test_failed_samples_are_in_no_loss_no_group_and_no_metric(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [metrics] = run(folder, "broken")
    [batch] = Watched.batches
    kept_samples = samples(folder, "broken", 1)
    answers = [sample["output"] for sample in kept_samples]
    cases = np.array([sum(map(ord, answer)) % 9 for answer in answers])
    lost, late = cases <= 4, cases == 4
    assert 5 < lost.sum() < 27 and late.any(), "the test needs both kinds"
    assert batch.non_tensor_batch["reward_failed"].tolist() == lost.tolist()
    assert [sample["score"] is None for sample in kept_samples] == lost.tolist()
    assert (batch.batch["response_mask"].sum(1).numpy() == 0).tolist() == lost.tolist(), "out of every loss"

    scores = np.array([sum(map(ord, answer)) % 5 / 5 for answer in answers])
    advantages = batch.batch["advantages"][:, 0].numpy()
    for group in range(8):
        rows = [row for row in range(4 * group, 4 * group + 4) if not lost[row]]
        if len(rows) > 1:  # GRPO over those that have a score
            expected = (scores[rows] - scores[rows].mean()) / (scores[rows].std(ddof=1) + 1e-6)
            assert advantages[rows] == pytest.approx(expected, abs=1e-4)
        else:
            assert not advantages[rows].any(), "one score is compared with nothing"
    assert np.abs(batch.batch["advantages"].numpy()[lost]).sum() == 0

    assert metrics["reward/error_rate"] == pytest.approx(lost.mean())
    assert metrics["reward/timeout_rate"] == pytest.approx(late.mean())
    assert metrics["reward/processes_replaced"] > 0
    assert metrics["critic/score/mean"] == pytest.approx(scores[~lost].mean())
    assert metrics["critic/score/max"] == pytest.approx(scores[~lost].max())

    text = (folder / "broken" / "reward_failures.jsonl").read_text()
    kept = [json.loads(line) for line in text.splitlines()]
    expected = sorted((answers[row], bool(late[row])) for row in np.flatnonzero(lost))
    assert sorted((line["response"], line["timed_out"]) for line in kept) == expected
    shown = capsys.readouterr().out
    assert shown.count("a reward failed") == 1 and kept[0]["response"] in shown and "Traceback" in text


ONE_SCORE_PER_PROMPT = """
asked = set()

def compute_score(data_source, solution_str, ground_truth, extra_info):
    if extra_info["index"] in asked and solution_str != ground_truth:  # the dry run asks as well
        raise ValueError("broken")
    if solution_str != ground_truth:
        asked.add(extra_info["index"])
    return 37.0
"""


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_a_run_in_which_one_score_of_each_group_is_valid_learns_nothing(tmp_path: Path, estimator: str) -> None:
    folder = tiny_run.write_files(tmp_path, QUESTIONS, ONE_SCORE_PER_PROMPT, hidden=32, layers=1)
    options = [f"algorithm.adv_estimator={estimator}", "reward.max_error_rate=1", "trainer.total_training_steps=1"]
    [metrics] = tiny_run.run(folder, estimator, *options, "trainer.val_before_train=false")
    assert metrics["critic/score/mean"] == 37 and metrics["reward/error_rate"] == 0.5
    assert metrics["critic/advantages/max"] == metrics["critic/advantages/min"] == 0
    assert metrics["actor/grad_norm"] == 0
    assert metrics["groups/incomparable"] == 4


@pytest.mark.slow
def test_validation_counts_failures_and_leaves_them_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first batch of the validation has no score at all, and so no `acc`: it decides neither names nor means."""
    (folder / "lose_three.py").write_text(
        "def compute_score(solution_str, ground_truth, extra_info, **rest):\n"
        "    if extra_info['index'] < 3 and solution_str != ground_truth: raise ValueError('lost')\n"
        "    return {'score': 0.5, 'acc': 1.0}\n"
    )
    options = [f"data.val_files={folder}/prompts.jsonl", "data.val_batch_size=2", "trainer.val_before_train=true"]
    reward = f"reward.custom_reward_function.path={folder}/lose_three.py"
    options += ["trainer.test_freq=0", "trainer.logger=[console,jsonl]", "rollout.val_kwargs.greedy_too=true"]
    options += ["rollout.val_kwargs.do_sample=true", "rollout.val_kwargs.temperature=1.0"]
    [before, _] = run(folder, "validated", reward, *options)
    assert before["val-core/talk/acc/mean@1"] == 1.0 and before["val-aux/talk/reward/mean@1"] == 0.5
    for prefix in ("", "greedy/"):
        assert before[f"val-aux/talk/{prefix}reward/error_rate"] == 3 / 8
        assert before[f"val-aux/talk/{prefix}reward/timeout_rate"] == 0.0
    assert "val-aux/talk/reward/error_rate 37.5%" in capsys.readouterr().out


def test_past_the_limit_the_run_stops_and_shows_answer_and_error(folder: Path) -> None:
    (folder / "lose_all.py").write_text(
        "def compute_score(solution_str, ground_truth, **rest):\n"
        "    return 0 if solution_str == ground_truth else {}[solution_str]\n"
    )
    reason = r"(?s)max_error_rate=0\.1 allows 3.*reward_failures\.jsonl.*KeyError"
    with pytest.raises(RewardFailure, match=reason) as caught:
        run(folder, "stopped", f"reward.custom_reward_function.path={folder}/lose_all.py", "reward.max_error_rate=0.1")
    cause, hint, summary = failure_text(caught.value).strip().split("\n\n")
    assert cause.startswith("The first cause, phase reward of step 1:\nsample ")
    assert cause.count("Traceback") == cause.count("KeyError") == 1 and cause.count("File ") == 1, cause
    assert hint.startswith("To run the failed step again") and "\n" not in summary and "KeyError" not in summary


# ------------------------------------------------------------------------------------ a model alone, several parts


def test_a_reward_model_alone_scores_as_transformers_and_needs_neither_function_nor_ground_truth(folder: Path) -> None:
    """Two steps of four prompts and three answers each, their texts rendered by the reward model's template."""
    asked = [{"data_source": "talk", "prompt": [{"role": "user", "content": text}]} for text in QUESTIONS[:4]]
    path = write_rows(folder / "asked.jsonl", asked)
    rows = tiny_run.run(
        folder, "alone", f"data.train_files={path}", f"data.val_files={path}", "actor.optim.lr=1e-2", "rollout.n=3",
        "reward_model.enable=true", f"reward_model.model.path={tiny_reward_model(folder / 'reward')}",
        "reward.function_weight=0", "reward_model.weight=0.5", "reward_model.retokenize=true", "trainer.total_epochs=2",
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


JUDGE = """
import asyncio

async def judge(data_source, solution_str, ground_truth, extra_info, prompt=None, scale=1):
    await asyncio.sleep(0.001)
    return {"score": scale * (sum(map(ord, solution_str)) % 7) / 7, "asked": len(prompt[0]["content"]), "note": "text"}
"""


@pytest.mark.slow
def test_parts_are_logged_saved_and_scored_again(folder: Path) -> None:
    (folder / "judge.py").write_text(JUDGE)
    rows = [
        {"data_source": "exact_match", "prompt": [{"role": "user", "content": text}],
         "reward_model": {"ground_truth": {"text": text}}}
        for text in QUESTIONS[:4]
    ]  # fmt: skip
    path = write_rows(folder / "exact.jsonl", rows)
    functions = (
        f"{{right: {{weight: 2}}, judge: {{path: {folder}/judge.py, name: judge, kwargs: {{scale: 3}}}}, "
        "letters: {reward: regex, weight: 0.5, kwargs: {pattern: '[a-z]'}}}"
    )
    lines = tiny_run.run(
        folder, "parts", "~reward.custom_reward_function", f"reward.functions={functions}", "~reward.num_workers",
        f"data.train_files={path}", f"data.val_files={path}", "trainer.total_training_steps=1",
        "trainer.val_before_train=false", "trainer.test_freq=1",
    )  # fmt: skip
    metrics = {name: value for line in lines for name, value in line.items()}
    assert len(kept := samples(folder, "parts", 1)) == 8
    for name in ("right", "judge", "letters", "acc", "judge.asked"):
        values = [sample["extra"][name] for sample in kept]
        assert metrics[f"reward/{name}/mean"] == pytest.approx(sum(values) / 8), name
    for sample in kept:
        parts = sample["extra"]
        assert sample["score"] == pytest.approx(2 * parts["right"] + parts["judge"] + 0.5 * parts["letters"])
        assert parts["judge"] == pytest.approx(3 * (sum(map(ord, sample["output"])) % 7) / 7)
        assert parts["judge.asked"] == len(sample["prompt"][0]["content"]) and parts["judge.note"] == "text"
        assert sample["ground_truth"] == {"text": sample["prompt"][0]["content"]}
    assert "reward/judge.note/mean" not in metrics
    assert "val-core/exact_match/acc/mean@1" in metrics and "val-aux/exact_match/letters/mean@1" in metrics

    assert score(folder / "parts", [f"out={folder}/again.parquet"]) == 0
    again = pyarrow.parquet.read_table(folder / "again.parquet").to_pylist()
    assert [row["score"] for row in again] == pytest.approx([sample["score"] for sample in kept])
    assert [row["reward/judge"] for row in again] == [sample["extra"]["judge"] for sample in kept]

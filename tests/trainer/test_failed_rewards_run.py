"""Whole runs in this process whose reward function breaks: nobody learns from the samples that it lost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.trainer import tiny_run
from tests.trainer.tiny_run import samples
from trainer.ray_trainer import RayPPOTrainer
from trainer.rewards.failures import RewardFailure
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
    with pytest.raises(RewardFailure, match=r"(?s)max_error_rate=0\.1 allows 3.*reward_failures\.jsonl.*KeyError"):
        run(folder, "stopped", f"reward.custom_reward_function.path={folder}/lose_all.py", "reward.max_error_rate=0.1")

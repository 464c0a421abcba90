"""The comparison with TRL: its runs and how it continues, its statistics and picture, and one step against TRL's
formula. TRL itself is not needed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from matplotlib.image import imread
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.smollm2 import recipe
from recipes.smollm2.compare import __main__ as command
from recipes.smollm2.compare import results, runs, settings, trl_side
from recipes.smollm2.compare.results import ACCURACY, OURS, TRL, Curve, Difference
from recipes.smollm2.compare.runs import Comparison
from recipes.smollm2.compare.same_answers import same_answers_trainer
from tests.trainer.tiny_run import run, write_files
from trainer.cli import INTERRUPTED
from verl_lite.config import load_config
from verl_lite.errors import UserError

T_2 = 4.302653
"""97.5% quantile of Student's t with two degrees of freedom, from a table."""

UNCOMPARED = {
    "trainer.save_freq",
    "trainer.max_actor_ckpt_to_keep",
    "trainer.resume_mode",
    "gradient_checkpointing",
    "save_strategy",
    "save_steps",
    "save_total_limit",
    "logging_steps",
    "report_to",
    "disable_tqdm",
}
"""Settings of speed, checkpoints and output, which do not change what is learned."""


def curve(rewards: Sequence[float], seconds: float = 30.0, accuracy: float = 0.5) -> Curve:
    return Curve(rewards, [seconds] * len(rewards), accuracy)


# ------------------------------------------------------------------------------------------------------------ the runs


class Recorded:
    """Two sides that write their curves at once, and what was trained."""

    def __init__(self) -> None:
        self.trained: list[tuple[str, int]] = []
        self.stops_at: tuple[str, int] | None = None

    def side(self, name: str) -> Callable[[Comparison, int], None]:
        def train(comparison: Comparison, seed: int) -> None:
            self.trained.append((name, seed))
            folder = comparison.run_folder(name, seed)
            folder.mkdir(exist_ok=True)
            lines = []
            for step in range(1, comparison.steps + 1):
                data = {"critic/score/mean": seed / 10, "timing_s/step": 2.0, "training/global_step": step}
                lines.append({"step": step, "data": data})
            if self.stops_at == (name, seed):
                lines = lines[:1]
            else:
                lines.append({"step": comparison.steps, "data": {ACCURACY: 0.75}})
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / "metrics.jsonl").write_text(text)
            if self.stops_at == (name, seed):
                raise KeyboardInterrupt

        return train


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Recorded:
    """Fake sides, an installed TRL, and 20 training questions."""
    sides = Recorded()
    monkeypatch.setattr(runs, "SIDES", {name: sides.side(name) for name in (OURS, TRL)})
    monkeypatch.setattr(command, "find_spec", lambda name: object())
    monkeypatch.setenv("VERL_LITE_CACHE", str(tmp_path / "cache"))
    addition = recipe.made_tasks().folder / "addition"
    addition.mkdir(parents=True)
    pq.write_table(pa.table({"number": list(range(20))}), addition / "train.parquet")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return sides


def compare(tmp_path: Path, *words: str) -> int:
    return command.main([str(tmp_path / "out"), "--model", str(tmp_path / "model"), *words])


def test_the_sides_alternate_and_finished_runs_are_not_repeated(
    recorded: Recorded, tmp_path: Path, capsys: Any
) -> None:
    recorded.stops_at = (OURS, 2)
    assert compare(tmp_path, "--steps", "2", "--seeds", "2") == INTERRUPTED
    assert recorded.trained == [(OURS, 1), (TRL, 1), (OURS, 2)]

    recorded.trained.clear()
    recorded.stops_at = None
    assert compare(tmp_path, "--steps", "2", "--seeds", "2") == 0
    assert recorded.trained == [(OURS, 2), (TRL, 2)]
    shown = capsys.readouterr().out
    # rewards 0.1 and 0.2 of the two seeds: mean 0.15, deviation 0.0707, times t(1) = 12.706 / sqrt(2) is 0.635
    assert f"| {OURS} | 2 | 0.150 ± 0.635 | 0.150 ± 0.635 | 0.750 ± 0.000 | 2.0 |" in shown
    assert "The curves over steps agree" in shown
    assert imread(tmp_path / "out" / "comparison.png").shape[2] == 4

    recorded.trained.clear()
    assert compare(tmp_path, "--steps", "2", "--seeds", "3") == 0
    assert recorded.trained == [(OURS, 3), (TRL, 3)]


def test_other_settings_do_not_mix_with_the_runs_of_a_folder(recorded: Recorded, tmp_path: Path, capsys: Any) -> None:
    assert compare(tmp_path, "--steps", "2", "--seeds", "1") == 0
    assert compare(tmp_path, "--steps", "3", "--seeds", "1") == 2
    assert "steps 2 (now 3)" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    assert command.main([str(tmp_path / "other"), "--model", str(tmp_path / "model")]) == 2
    assert "give a new folder" in capsys.readouterr().err
    assert (tmp_path / "other" / "thesis.txt").read_text() == "mine"


def test_without_trl_there_is_one_error_with_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "trl" else object())
    assert command.main([str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert 'pip install -e ".[cpu,bench]"' in error and "Traceback" not in error
    assert not (tmp_path / "out").exists()


def test_both_sides_read_the_same_questions_which_differ_between_seeds(recorded: Recorded, tmp_path: Path) -> None:
    """Two steps need 32 of the 20 questions: all of them in one order, then 12 in another."""
    numbers = []
    for seed in (1, 1, 2):
        file = tmp_path / f"questions-{len(numbers)}.parquet"
        runs.write_questions(file, 2, seed)
        numbers.append(pq.read_table(file)["number"].to_pylist())
    first, again, other = numbers
    assert first == again and first != other
    assert len(first) == 32 and sorted(first[:20]) == list(range(20)) and len(set(first[20:])) == 12
    assert first[:12] != first[20:]


def test_our_command_is_accepted_and_has_the_common_settings(recorded: Recorded, tmp_path: Path) -> None:
    comparison = Comparison(tmp_path, tmp_path / "model", 40, ("trainer.n_gpus_per_node=1",))
    words = [word for word in runs.our_words(comparison, tmp_path / "run", 3) if not word.startswith("recipe=")]
    config = load_config(words).config
    actor, trl = config.actor, settings.trl_settings()
    assert config.data.train_files == [str(tmp_path / "questions-3.parquet")] and not config.data.shuffle
    assert config.trainer.seed == 3 and config.trainer.n_gpus_per_node == 1

    answers = config.data.train_batch_size * config.rollout.n
    assert answers == trl["per_device_train_batch_size"] * trl["gradient_accumulation_steps"] == 128
    assert config.rollout.n == trl["num_generations"]
    assert config.data.max_response_length == trl["max_completion_length"]
    assert actor.optim.lr == trl["learning_rate"] and actor.optim.lr_scheduler_type == trl["lr_scheduler_type"]
    assert actor.optim.betas == [trl["adam_beta1"], trl["adam_beta2"]] and actor.optim.eps == trl["adam_epsilon"]
    assert actor.optim.weight_decay == trl["weight_decay"] and actor.optim.clip_grad == trl["max_grad_norm"]
    assert actor.clip_ratio == trl["epsilon"] == trl["epsilon_high"] and actor.clip_ratio_c is None
    assert config.rollout.temperature == trl["temperature"] and config.rollout.top_p == trl["top_p"]


def test_the_table_of_settings_names_each_setting_of_both_sides() -> None:
    table = settings.settings_table()
    given = settings.our_settings() | settings.trl_settings()
    assert {name for name in given if f"{name}=" not in table} == UNCOMPARED


def test_the_reward_of_the_other_side_is_that_of_the_task() -> None:
    answers = [[{"role": "assistant", "content": text}] for text in ("85", "58", "85.")]
    assert trl_side.addition_reward(answers, ground_truth=["85"] * 3, prompts=[]) == [1.0, 0.0, 1.0]


# ---------------------------------------------------------------------------------------------------------- statistics


def test_differences_are_taken_seed_by_seed_in_windows_of_ten_steps() -> None:
    """Seeds differ by 0.5, which the pairs cancel. Steps 11 and 12 are a window of their own."""
    ours = [curve([base + 0.01] * 10 + [base + shift] * 2) for base, shift in ((0.1, 0.1), (0.3, 0.2), (0.6, 0.3))]
    theirs = [curve([base] * 12) for base in (0.1, 0.3, 0.6)]
    curves = {OURS: ours, TRL: theirs}
    first = results.difference(curves, 0, 10)
    second = results.difference(curves, 10, 12)
    assert (first.first, first.last, second.first, second.last) == (1, 10, 11, 12)
    assert first.mean == pytest.approx(0.01) and first.half == pytest.approx(0.0, abs=1e-9) and not first.agrees
    # differences 0.1, 0.2, 0.3: deviation 0.1
    assert second.mean == pytest.approx(0.2)
    assert second.half == pytest.approx(T_2 * 0.1 / math.sqrt(3), rel=1e-5) and second.agrees

    shown = results.agreement(curves)
    assert "| 1 to 10 | +0.010 ± 0.000 | does not contain 0 |" in shown
    assert "| 11 to 12 | +0.200 ± 0.248 | contains 0 |" in shown
    # all steps: (10 x 0.01 + 2 x shift) / 12, that is 0.025, 0.0417 and 0.0583
    assert "| 1 to 12 | +0.042 ± 0.041 | does not contain 0 |" in shown


@pytest.mark.parametrize(
    ("halves", "text"),
    [
        ((0.1, 0.1), "The curves over steps agree"),
        ((0.1, 0.01), "do not agree in the steps 11 to 20, where"),
        ((None, None), "With one seed there is no interval"),
    ],
)
def test_the_verdict_on_the_curves(halves: tuple[float | None, float | None], text: str) -> None:
    shown = results.verdict_on([Difference(1, 10, 0.05, halves[0]), Difference(11, 20, -0.05, halves[1])])
    assert text in shown
    assert ("in 10% of comparisons" in shown) == ("do not agree" in text)  # 1 - 0.95^2


# ------------------------------------------------------------------------------------------------------------- picture


def test_the_picture_shows_means_over_steps_and_over_minutes(tmp_path: Path) -> None:
    fast = [curve([0.1, 0.2, 0.4], seconds=30), curve([0.3, 0.4, 0.4], seconds=90)]
    assert results.mean_minutes(fast) == pytest.approx([1.0, 2.0, 3.0])
    slow = [curve([0.1, 0.2, 0.3], seconds=120)] * 2
    results.draw({OURS: fast, TRL: slow}, tmp_path / "comparison.png")
    height, width, _ = imread(tmp_path / "comparison.png").shape
    assert (width, height) == (1210, 462)  # 11 x 4.2 inches at 110 dots per inch
    results.draw({OURS: fast, TRL: slow}, tmp_path / "steps.png", with_time=False)
    height, width, _ = imread(tmp_path / "steps.png").shape
    assert (width, height) == (605, 462)


def test_the_table_has_the_median_of_seconds_unless_the_machine_did_other_work() -> None:
    """Ours: first and last five of six rewards 0, 0.1, ..., 0.5 average 0.2 and 0.3. The seconds are 30, 30 and 90."""
    rewards = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    ours = [curve(rewards, 30.0), curve(rewards, 30.0), curve(rewards, 90.0)]
    curves = {OURS: ours, TRL: [curve(rewards, 60.0)] * 3}
    with_time = results.table(curves).splitlines()
    assert with_time[2] == "| verl_lite | 3 | 0.200 ± 0.000 | 0.300 ± 0.000 | 0.500 ± 0.000 | 30.0 |"
    without = results.table(curves, with_time=False).splitlines()
    assert without[2] == "| verl_lite | 3 | 0.200 ± 0.000 | 0.300 ± 0.000 | 0.500 ± 0.000 |"
    assert "seconds" in with_time[0] and "seconds" not in without[0]


# --------------------------------------------------------------------------------------------- one step, TRL's formula

QUESTIONS = ("1+1", "what is it")
TEXTS = (("2", "a b", "one", "22"), ("it", "is", "x", "what"))
REWARDS = ((1.0, 0.0, 0.0, 0.5), (0.25, 0.0, 1.0, 1.0))


@pytest.mark.slow
def test_a_step_on_given_answers_has_the_loss_and_gradient_of_trls_formula(tmp_path: Path) -> None:
    """TRL 1.16, loss_type="dapo", beta 0, scale_rewards="group", the first step of on-policy training: the sum over
    tokens of -A exp(log p - log p without gradient), divided by the number of tokens of the step, where A is the reward
    less the group's mean, divided by the group's standard deviation (n - 1) plus 1e-4."""
    folder = write_files(tmp_path, QUESTIONS)
    tokenizer = AutoTokenizer.from_pretrained(folder / "policy")
    prompts = []
    answers = []
    for question, texts in zip(QUESTIONS, TEXTS, strict=True):
        chat = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=True)
        for text in texts:
            prompts.append(prompt["input_ids"])
            answers.append([*tokenizer(text)["input_ids"], tokenizer.eos_token_id])
    rewards = [reward for group in REWARDS for reward in group]
    file = tmp_path / "answers.json"
    file.write_text(json.dumps({"prompts": prompts, "answers": answers, "rewards": rewards}))

    # the settings of the comparison, on two questions with four answers
    common = [f"{key}={json.dumps(value)}" for key, value in settings.our_settings().items()]
    small = ["data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "rollout.n=4", "data.max_response_length=6"]
    more = ["rollout.calculate_log_probs=false", "trainer.save_freq=0", "trainer.total_training_steps=1"]
    trainer = same_answers_trainer(file)
    [metrics] = run(folder, "run", *common, *small, *more, trainer_class=trainer)

    model = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32)
    num_tokens = sum(map(len, answers))
    loss = torch.zeros(())
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        group = torch.tensor(REWARDS[row // 4])
        advantage = (rewards[row] - group.mean()) / (group.std() + 1e-4)
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        log_probs = logits.log_softmax(-1)[torch.arange(len(answer)), torch.tensor(answer)]
        loss = loss - (advantage * torch.exp(log_probs - log_probs.detach())).sum() / num_tokens
    loss.backward()
    norm = math.sqrt(sum(float(parameter.grad.square().sum()) for parameter in model.parameters()))

    assert metrics["critic/score/mean"] == pytest.approx(sum(rewards) / 8)
    assert metrics["actor/pg_loss"] == pytest.approx(loss.item(), rel=command.TOLERANCE)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=command.TOLERANCE)
    own_rewards = json.loads((folder / "run" / "own_rewards.json").read_text())
    assert len(own_rewards) == 8


@pytest.mark.slow
def test_answers_to_other_questions_are_refused(tmp_path: Path) -> None:
    folder = write_files(tmp_path, QUESTIONS)
    file = tmp_path / "answers.json"
    file.write_text(json.dumps({"prompts": [[5, 6]] * 8, "answers": [[7, 2]] * 8, "rewards": [0.0] * 8}))
    small = ["data.train_batch_size=2", "actor.ppo_mini_batch_size=2", "rollout.n=4", "trainer.total_training_steps=1"]
    with pytest.raises(UserError, match="question 0: the file has the tokens"):
        run(folder, "run", *small, "data.shuffle=false", trainer_class=same_answers_trainer(file))


def test_the_check_tells_equal_from_different_steps() -> None:
    ours = {"actor/pg_loss": 0.0100, "actor/grad_norm": 2.0, "actor/entropy": 1.0}
    theirs = {"actor/pg_loss": 0.0100, "actor/grad_norm": 2.5, "actor/entropy": 1.0}
    shown = command.compared_step(ours, theirs)
    assert "| loss | 0.010000 | 0.010000 | 0.0e+00 | equal |" in shown
    assert "| norm of the gradient | 2.000000 | 2.500000 | 2.0e-01 | differs by more than 0.001 |" in shown


def test_own_answers_are_compared_question_by_question() -> None:
    """Of three questions, one side answers 1, 2 and 6 of eight rightly, the other none."""
    ours = [1.0] + [0.0] * 7 + [1.0] * 2 + [0.0] * 6 + [1.0] * 6 + [0.0] * 2
    half = T_2 * math.sqrt(7 / 64 / 3)  # 1, 2, 6: deviations -2, -1, 3
    expected = f"difference +0.375 ± {half:.3f} (95%): they agree"
    assert command.own_answers(ours, [0.0] * 24) == f"{OURS} 0.375, {TRL} 0.000, {expected}"


def test_a_comparison_belongs_to_the_weights_and_not_to_their_folder(tmp_path: Path) -> None:
    for name, content in (("old", b"weights"), ("moved", b"weights"), ("other", b"other weights")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    runs.claim(Comparison(tmp_path / "comparison", tmp_path / "old", 20))
    runs.claim(Comparison(tmp_path / "comparison", tmp_path / "moved", 20))
    with pytest.raises(UserError, match=r"has a comparison with weights '[0-9a-f]{64}' \(now '[0-9a-f]{64}'\): repeat"):
        runs.claim(Comparison(tmp_path / "comparison", tmp_path / "other", 20))
    with pytest.raises(UserError, match=r"has a comparison with steps 20 \(now 40\)"):
        runs.claim(Comparison(tmp_path / "comparison", tmp_path / "old", 40))

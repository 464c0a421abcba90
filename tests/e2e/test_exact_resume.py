"""train(2N) equals train(N), kill -9, resume: bit for bit, in everything that a run leaves.

Runs train a tiny model inline. One is killed with SIGKILL in the middle of a step, and another goes on from one of its
checkpoints up to another of them. What is compared:
weights, moments, schedule, data position, controller, running statistics, random states, and the metrics.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.forked_runs import ACTOR, CRITIC, Runs, assert_same_end, differences, history
from tests.tiny_run import good_row, write_rows
from trainer.checkpoint.files import MARKER
from trainer.observe.tracking import read_metrics

pytestmark = pytest.mark.slow


def reward_by_parity(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, Any]:
    """Something that is equal for about half of all pairs of answers."""
    total = sum(map(ord, solution_str))
    return {"score": total % 7 / 7, "acc": total % 2}


class ByScore:
    """A sampler whose next prompt depends on the scores of the last step."""

    def __init__(self, data_source: Any, data_config: Any) -> None:
        self.size, self.start, self.given = len(data_source), 0, 0

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size - self.given % self.size):
            self.given += 1
            yield (self.start + self.given) % self.size

    def update(self, batch: Any) -> dict[str, float]:
        assert "advantages" in batch
        self.start += round(7 * float(batch.batch["token_level_scores"].sum()))
        return {"start": self.start}

    def state_dict(self) -> dict[str, int]:
        return {"start": self.start, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start, self.given = state["start"], state["given"]


OFF_POLICY = ["actor.ppo_epochs=2", "actor.shuffle=true", "actor.optim.lr_warmup_steps=3"]
KL = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=50"]

GAE = ["algorithm.adv_estimator=gae", "algorithm.lam=0.9", "critic.optim.lr=1e-3"]
WARM_UP = [*GAE, "trainer.critic_warmup=2"]
RUNNING = [
    "algorithm.adv_estimator=reinforce", "algorithm.norm_mean_type=running", "algorithm.norm_std_type=running",
    "trainer.async_save=true", "data.sources={odd: {weight: 3}, even: {weight: 1}}",
]  # fmt: skip
LORA = ["model.lora_rank=4", "model.lora_alpha=8", "model.target_modules=[q_proj,down_proj]", "actor.use_kl_loss=true"]
LORA += [f"data.sampler.class_path={__file__}", "data.sampler.class_name=ByScore"]
FILTERED = [
    "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc", "data.sources.odd.n=3",
    f"reward.custom_reward_function.path={__file__}",
    "reward.custom_reward_function.name=reward_by_parity", "reward.overlong_buffer.enable=true",
    "reward.overlong_buffer.len=3",
]  # fmt: skip
AHEAD = ["async_training.max_off_policy_threshold=1"]
FOREVER = 1000
ALL_LINEAR = ["model.lora_rank=4", "model.lora_alpha=8", *GAE, "trainer.critic_warmup=1", "trainer.async_save=true"]


@pytest.mark.parametrize(
    ("rows", "batch", "resumed_from", "total", "options", "parts"),
    [
        pytest.param(12, 4, 2, 4, [], ACTOR, id="mid-epoch"),
        pytest.param(12, 4, 3, 5, OFF_POLICY, ACTOR, id="epoch boundary, off-policy, shuffled"),
        pytest.param(10, 4, 3, 7, KL, ACTOR, id="rows do not divide, boundary, adaptive KL"),
        pytest.param(10, 4, 4, 5, [], ACTOR, id="only the last step is left", marks=pytest.mark.long),
        pytest.param(12, 4, 1, 3, WARM_UP, CRITIC, id="critic, within its warm-up", marks=pytest.mark.long),
        pytest.param(12, 4, 2, 3, [*GAE, "trainer.critic_warmup=1"], CRITIC, id="critic, after its warm-up"),
        pytest.param(12, 4, 2, 3, RUNNING, ACTOR, id="running statistics, saved in the background, a mixture"),
        pytest.param(12, 4, 2, 4, LORA, ACTOR, id="LoRA on named layers, its own reference, a sampler that learns"),
        pytest.param(14, 4, 3, 4, FILTERED, ACTOR, id="dynamic sampling, prompts with their own number of answers"),
        pytest.param(10, 4, 2, 5, AHEAD, ACTOR, id="a batch ahead"),
        pytest.param(14, 4, 1, 4, [*FILTERED, *AHEAD], ACTOR, id="a batch ahead, dynamic sampling"),
        pytest.param(10, 4, 2, 4, ALL_LINEAR, CRITIC, id="LoRA on all layers, critic", marks=pytest.mark.long),
    ],
)
def test_train_kill_resume_is_train(
    rows: int, batch: int, resumed_from: int, total: int, options: list[str], parts: tuple[str, ...], tmp_path: Path
) -> None:
    runs = Runs(tmp_path, rows, batch, options)
    whole = runs.kill_after(total, "whole", f"trainer.total_training_steps={FOREVER}")
    start = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={whole}/global_step_{resumed_from}"]
    if set(AHEAD) <= set(options):  # the last step of a run starts nothing ahead, so that its checkpoint would differ
        resumed = runs.kill_after(total, "resumed", f"trainer.total_training_steps={FOREVER}", *start)
        rows = read_metrics(whole / "metrics.jsonl")
        assert rows[total]["rollout/seconds_beside_training"] > 0, "nothing was sampled during training"
    else:
        resumed = runs.finish("resumed", f"trainer.total_training_steps={total}", *start)
    assert_same_end(whole, resumed, total, parts)
    expected = {step: row for step, row in history(whole).items() if resumed_from < step <= total}
    found = {step: row for step, row in history(resumed).items() if step <= total}
    assert differences(expected, found) == [] and len(expected) == total - resumed_from
    if options is LORA:
        starts = [row["sampler/start"] for row in history(whole).values()]
        assert len(set(starts)) == len(starts), "the sampler hears of every step"


def test_a_budget_that_ends_loses_no_step_and_a_larger_one_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    runs = Runs(tmp_path, 60, 2, [*FILTERED, "trainer.total_training_steps=4", "trainer.save_freq=-1"])
    whole = runs.finish("whole")
    asked = [row["groups/gen_batches"] for row in history(whole).values()]
    budget = int(max(asked[1:]) - 1)
    assert asked[0] <= budget, asked
    said = runs.refused("ended", f"algorithm.filter_groups.max_num_gen_batches={budget}")
    assert "its budget of generation batches is used up" in said
    ended = tmp_path / "ended"
    done = next(step for step, number in enumerate(asked) if number > budget)
    assert int((ended / MARKER).read_text()) == done == len(history(ended))
    runs.finish("ended", "trainer.resume_mode=auto")
    assert_same_end(whole, ended, 4)
    assert differences(history(whole), history(ended)) == []


FEW_SEATS = ["data.max_response_length=40", "rollout.max_num_seqs=3"]
"""Answers of many lengths on three seats, so that checkpoints hold complete groups, running ones and waiting ones."""
OVERSAMPLED = ["rollout.oversample=1.5"]
ONLY_DIFFERENT = ["algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score"]
ONLY_DIFFERENT += ["algorithm.filter_groups.max_num_gen_batches=0"]


@pytest.mark.parametrize(
    ("threshold", "ahead", "more"),
    [
        pytest.param(1, 1, [], id="K=1"),
        pytest.param(2, 2, [], id="K=2"),
        pytest.param(1, 0, OVERSAMPLED, id="K=1, oversampling"),
        pytest.param(2, 1, OVERSAMPLED, id="K=2, oversampling", marks=pytest.mark.long),
        pytest.param(1, 1, ONLY_DIFFERENT, id="K=1, filter", marks=pytest.mark.long),
        pytest.param(2, 2, ONLY_DIFFERENT, id="K=2, filter"),
    ],
)
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
def test_a_run_with_partial_rollouts_killed_at_random_times_trains_on_every_prompt_once(
    kills: int, threshold: int, ahead: int, more: list[str], tmp_path: Path
) -> None:
    """Time decides which groups are complete first, so resumed runs differ; but none is lost or repeated."""
    random, steps, batch = np.random.default_rng(kills), 4 * kills, 4
    options = [
        f"async_training.max_off_policy_threshold={threshold}", f"async_training.batches_ahead={ahead}",
        "async_training.partial_rollout=true", "trainer.resume_mode=auto",
        f"trainer.total_training_steps={steps}", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=2",
        *FEW_SEATS, *more,
    ]  # fmt: skip
    runs = Runs(tmp_path, 10, batch, options)
    for _ in range(kills):
        process, run_dir, log = runs.start("run")
        marker = run_dir / MARKER
        reached = int(marker.read_text()) if marker.exists() else 0
        while process.is_alive() and not (marker.exists() and int(marker.read_text()) >= min(reached + 2, steps)):
            time.sleep(0.002)
        time.sleep(random.uniform(0, 0.5))
        assert process.pid is not None
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join(120)
        assert process.exitcode in (0, -signal.SIGKILL), log.read_text()[-4000:]
        if process.exitcode == 0:
            break
    else:
        # the last of them may have been killed after its last checkpoint
        if int(marker.read_text()) < steps:
            runs.finish("run")
    rows = history(tmp_path / "run")
    assert sorted(rows) == list(range(1, steps + 1))
    assert max(row["async/staleness/oldest"] for row in rows.values()) <= threshold
    files = sorted((tmp_path / "run" / "samples" / "train").glob("*.parquet"))
    uids = Counter(uid for file in files for uid in pq.read_table(file)["uid"].to_pylist())
    assert set(uids.values()) == {2}, "each prompt of a batch once, with two answers"
    if more:  # batches are filled up across the end of an epoch, and contain groups that were carried over
        assert len(uids) == steps * batch
        return
    drawn = [2 if step % 3 == 0 else batch for step in range(1, steps + 1)]  # 10 prompts an epoch
    assert len(uids) == sum(drawn)
    assert Counter(int(uid.rpartition("@")[2]) for uid in uids) == dict(enumerate(drawn, start=1))


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_ctrl_c_saves_and_the_rest_is_as_if_nothing_had_been(number: signal.Signals, tmp_path: Path) -> None:
    steps = 12  # more than are done until the signal is heard
    runs = Runs(tmp_path, 12, 4, [f"trainer.total_training_steps={steps}", "trainer.save_freq=-1"])
    whole = runs.finish("whole")
    process, stopped, log = runs.start("stopped")
    while not (stopped / "metrics.jsonl").exists():
        assert process.is_alive(), log.read_text()[-4000:]
        time.sleep(0.002)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(120)
    text = log.read_text()
    assert process.exitcode == 130, text[-4000:]
    assert f"{number.name}: stopping after this step" in text and "trainer.resume_mode=auto" in text
    assert 1 <= int((stopped / MARKER).read_text()) < steps
    runs.finish("stopped", "trainer.resume_mode=auto")
    assert_same_end(whole, stopped, steps)
    assert differences(history(whole), history(stopped)) == []


SLOW_VALIDATION = """
import pathlib, time
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "val" and solution_str != ground_truth:  # not when it is tried before the run
        pathlib.Path(__file__).with_name("validating").touch()
        time.sleep(0.1)
    return len(solution_str) / 9
"""


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.long), 3])
def test_signals_during_validation(times: int, tmp_path: Path) -> None:
    """One stops after the step, with a checkpoint; three within a second stop at once, and the log says so last."""
    (tmp_path / "reward.py").write_text(SLOW_VALIDATION)
    val = write_rows(tmp_path / "val.jsonl", [good_row(number, "val") for number in range(20)])
    options = ["trainer.test_freq=2", f"data.val_files={val}", "trainer.total_training_steps=40"]
    options += ["~reward.custom_reward_function.name", f"reward.custom_reward_function.path={tmp_path}/reward.py"]
    options += [f"trainer.save_freq={-1 if times == 1 else 0}"]
    process, run_dir, log = Runs(tmp_path, 8, 4, options).start("run")
    while not (tmp_path / "validating").exists():
        assert process.is_alive(), log.read_text()[-4000:]
        time.sleep(0.002)
    for _ in range(times):
        with contextlib.suppress(ProcessLookupError):  # the second may have ended it
            os.kill(process.pid or 0, signal.SIGTERM)
        time.sleep(0.05)
    process.join(120)
    text = log.read_text()
    if times == 1:
        assert process.exitcode == 130 and (run_dir / MARKER).read_text() == "2", text[-4000:]
        assert text.splitlines()[-2:-1] == ["Stopped. To continue:"]
    else:
        assert process.exitcode != 0 and "repeat it to stop at once, without" in text, text[-4000:]
        assert "Stopped. No step is saved" in text or text.splitlines()[-1].startswith("Stopped at once by SIGTERM"), (
            text
        )


def test_other_data_and_other_settings_are_refused(tmp_path: Path) -> None:
    runs = Runs(tmp_path, 4, 4, [])
    runs.finish("run", "trainer.total_training_steps=1")
    resume = ["trainer.total_training_steps=2", "trainer.resume_mode=auto"]
    assert "rollout.n: 2 in the checkpoint, 3 now" in runs.refused("run", *resume, "rollout.n=3")
    (tmp_path / "train.jsonl").write_text((tmp_path / "train.jsonl").read_text().replace("1+1", "1+2"))
    assert "The training prompts differ from the checkpoint" in runs.refused("run", *resume)

"""Dynamic sampling: which prompts a step asks, which groups fill its batch, what it says when there are too few."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.test_fit import RESPONSE, FakePrompts, Parts, make
from trainer.dynamic_sampling import DynamicSamplingSteps, FilterBudgetExceeded, collect_groups, joined, refill_size
from trainer.ray_trainer import RayPPOTrainer
from trainer.rewards.groups import group_shares, groups_of
from trainer.roles import rows_of_prompts
from trainer.steps import TrainingSteps
from verl_lite.config import PPOConfig
from verl_lite.metrics import values
from verl_lite.protocol import DataProto, as_column


def data_of(rows: int) -> Any:
    return FakePrompts(rows, "easy", "hard")


def configured(batch: int, budget: int = 10, steps: int = 100) -> PPOConfig:
    config = PPOConfig()
    config.data.train_batch_size, config.rollout.n, config.data.max_response_length = batch, 2, RESPONSE
    config.algorithm.filter_groups.enable = True
    config.algorithm.filter_groups.max_num_gen_batches = budget
    config.trainer.total_training_steps, config.trainer.save_freq = steps, 0
    return config


def stream(rows: int, batch: int, **settings: int) -> DynamicSamplingSteps:
    return DynamicSamplingSteps(configured(batch, **settings), data_of(rows))


def uids(prompts: DataProto | None) -> list[str]:
    return [] if prompts is None else prompts.non_tensor_batch["uid"].tolist()


def ask(steps: DynamicSamplingSteps, refills: Sequence[int]) -> list[list[str]]:
    """The prompts of each step that is left, of which each asks for further ones twice: as many as its number says."""
    asked = []
    for prompts in steps:
        further = [uids(steps.draw_prompts(refills[steps.global_step - 1])) for _ in range(2)]
        asked.append(uids(prompts) + sum(further, []))
        if steps.global_step == len(refills):
            break
    return asked


def test_each_prompt_is_asked_once_an_epoch_and_none_twice_in_a_step() -> None:
    rows, steps = 23, stream(23, 4)
    asked = ask(steps, [0, 3, 0, 5, 1, 4, 2, 0, 3])
    assert [len(each) for each in asked] == [4, 10, 4, 14, 6, 12, 8, 4, 10]
    assert all(len(each) == len(set(each)) for each in asked)
    inside = sum(asked, [])
    assert set(inside[:rows]) == {f"p{i}" for i in range(rows)}
    assert steps.epoch == 3  # 72 prompts of 23: the fourth epoch


@pytest.mark.parametrize("rows", [7, 12, 40])
def test_a_resumed_stream_asks_what_the_uninterrupted_one_asks(rows: int) -> None:
    refills = [int(x) for x in np.random.default_rng(rows).integers(0, 3, 9)]
    whole = ask(stream(rows, 4), refills)
    for done in range(1, 9):
        before, after = stream(rows, 4), stream(rows, 4)
        assert ask(before, refills[:done]) == whole[:done]
        after.load_state_dict(before.state_dict())
        assert (after.global_step, after.epoch) == (done, before.epoch)
        assert ask(after, refills) == whole[done:]


def test_the_replay_of_a_step_asks_the_same_prompts() -> None:
    before = stream(11, 4)
    steps = iter(before)
    for _ in range(2):
        next(steps)
        before.draw_prompts(3)
    prompts = next(steps)
    expected = [uids(prompts), uids(before.draw_prompts(2)), uids(before.draw_prompts(3))]
    replayed = stream(11, 4)
    replayed.restrict_to_step(3, before.epoch, prompts)
    again = next(iter(replayed))
    assert [uids(again), uids(replayed.draw_prompts(2)), uids(replayed.draw_prompts(3))] == expected
    assert replayed.global_step == 3 and replayed.is_last


def scored(prompts: DataProto, outcome: Mapping[str, Sequence[float | None]], n: int = 2) -> DataProto:
    """Answers of three tokens with these outcomes by uid (None = the reward failed); the others have 0 and 1."""
    rows = prompts.repeat(n)
    scores = [x for uid in uids(prompts) for x in outcome.get(uid, [float(i % 2) for i in range(n)])]
    failed = torch.tensor([score is None for score in scores])
    mask = torch.tensor([[1, 1, 1, 0]]).repeat(len(rows), 1)
    token_scores = torch.zeros(len(rows), 4)
    token_scores[:, 2] = torch.tensor([score or 0.0 for score in scores])
    rows.batch["responses"] = torch.ones(len(rows), 4, dtype=torch.long)
    rows.batch["attention_mask"] = torch.cat([rows.batch["prompt_mask"], mask], dim=1)
    rows.batch["response_mask"], rows.batch["token_level_scores"] = mask * ~failed[:, None], token_scores
    rows.meta_info = {}
    return rows


RIGHT, WRONG = (1.0, 1.0), (0.0, 0.0)


def collect(
    steps: DynamicSamplingSteps, outcome: Mapping[str, Sequence[float | None]]
) -> tuple[DataProto, dict[str, float], list[int]]:
    """A filled batch, its metrics, and the sizes of its generation batches."""
    sizes = []

    def answer(prompts: DataProto) -> DataProto:
        sizes.append(len(prompts))
        return scored(prompts, outcome)

    batch, metrics = collect_groups(next(iter(steps)), steps, answer)
    return batch, values(metrics), sizes


def test_the_batch_is_full_of_groups_that_differ_whatever_is_dropped() -> None:
    for seed in range(8):
        random = np.random.default_rng(seed)
        outcome = {f"p{i}": (RIGHT, WRONG, (0.0, 1.0))[random.integers(3)] for i in range(200)}
        steps = stream(200, 12)
        batch, metrics, sizes = collect(steps, outcome)
        kept = list(dict.fromkeys(batch.non_tensor_batch["uid"]))
        assert len(kept) == 12 and len(batch) == 24
        assert all(outcome[uid] == (0.0, 1.0) for uid in kept)
        assert batch.batch["token_level_scores"].sum() == 12
        assert metrics["groups/generated"] == sum(sizes) and metrics["groups/gen_batches"] == len(sizes)
        dropped = metrics["training/filter_groups/evicted_samples"]
        surplus = metrics["training/filter_groups/discarded_surplus_samples"]
        assert dropped + surplus == 2 * sum(sizes) - 24
        assert metrics["groups/wasted_tokens_frac"] == pytest.approx(1 - 12 / sum(sizes))


def test_groups_stand_in_the_order_in_which_they_were_asked_and_the_last_are_surplus() -> None:
    steps = stream(40, 6)
    order = ask(stream(40, 6), [17])[0]
    outcome = {uid: RIGHT for uid in order[:2]}
    batch, metrics, sizes = collect(steps, outcome)
    # 4 of 6 kept: for 2 more (2 + 2 sqrt(2 / 3)) / (2 / 3) = 5.4 prompts are asked, and all of them differ
    assert sizes == [6, 6]
    assert list(dict.fromkeys(batch.non_tensor_batch["uid"])) == order[2:8]
    assert metrics["training/filter_groups/discarded_surplus_samples"] == 8


def test_the_size_of_a_further_batch() -> None:
    """By hand: three quarters kept, 16 missing: 16 / 0.75 = 21.3, and 2 sqrt(16 / 4) / 0.75 = 5.3."""
    assert refill_size(16, kept=48, asked=64, most=64) == 27
    assert refill_size(16, kept=48, asked=64, most=20) == 20
    assert refill_size(10, kept=0, asked=64, most=64) == 64
    assert refill_size(3, kept=5, asked=5, most=8) == 3


def test_where_the_budget_ends_the_message_names_step_sources_and_remedies() -> None:
    steps = stream(200, 4, budget=3)
    outcome = {f"p{i}": RIGHT if i % 2 == 0 else WRONG for i in range(200)} | {"p0": (0.0, 1.0)}
    with pytest.raises(FilterBudgetExceeded) as caught:
        collect(steps, outcome)
    message = str(caught.value)
    asked = {source: 0 for source in ("easy", "hard")}
    for uid in ask(stream(200, 4), [4])[0]:
        asked[("easy", "hard")[int(uid[1:]) % 2]] += 1
    assert "Step 1: its budget of generation batches is used up" in message
    assert "max_num_gen_batches=3" in message and "of the 4 groups" in message and "rollout.n=2" in message
    assert f"hard: {asked['hard']} asked: {asked['hard']} all wrong" in message
    assert f"easy: {asked['easy']} asked" in message and "all right" in message


def test_an_outcome_of_its_own_beside_the_score() -> None:
    """acc where rows have one, the score before the penalty else; or what the metric names."""
    batch = scored(data_of(3).__getitems__([0, 1, 2]), {"p0": (0.5, 1.0), "p1": (0.5, 1.0), "p2": (0.5, 1.0)})
    batch.non_tensor_batch["reward/acc"] = as_column([True, True, 0, 1, None, None])
    batch.non_tensor_batch["reward/length"] = as_column([3, 3, 3, 3, 3, "three"])
    kept = {metric: groups_of(batch, metric).kinds["kept"].tolist() for metric in (None, "acc", "score", "length")}
    assert kept == {
        None: [False, True, True],
        "acc": [False, True, True],
        "score": [True, True, True],
        "length": [False, False, False],
    }
    assert values(group_shares(batch, "length")) == {
        "groups/kept": 0,
        "groups/all_right": pytest.approx(2 / 3),
        "groups/all_wrong": 0,
        "groups/unjudged": pytest.approx(1 / 3),
    }
    batch.batch["outcomes"] = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert groups_of(batch, "score").kinds["all_right"].all()


def test_batches_with_other_columns_are_joined() -> None:
    left, right = (scored(data_of(4).__getitems__([place]), {}) for place in (0, 1))
    left.non_tensor_batch["reward/acc"] = as_column([1.0, 0.0])
    right.batch["answers_per_prompt"] = torch.tensor([2, 2])
    whole = joined([left, right], configured(1))
    assert whole.non_tensor_batch["reward/acc"].tolist() == [1.0, 0.0, None, None]
    assert whole.batch["answers_per_prompt"].tolist() == [2, 2, 2, 2] and len(whole) == 4


class Slow(Parts):
    """Answers to every other prompt are equal; generation takes a while, rewards take longer."""

    def generate(self, rows: DataProto) -> DataProto:
        time.sleep(0.02)
        return super().generate(rows)

    def call(self, method: str, keys: Sequence[str] = ()) -> Any:
        if method == "processes_replaced":
            return 0
        time.sleep(0.1)
        self.calls.append("reward")
        results = {}
        for key in keys:
            uid, sample = key.split("/")[-2:]
            score = 1.0 if int(uid[1:]) % 2 else float(sample)
            results[key] = SimpleNamespace(score=score, failed=False, error=None, timed_out=False, extra={})
        return results


def trainer_of(tmp_path: Path, parts: Parts, **settings: Any) -> RayPPOTrainer:
    trainer = make(tmp_path, parts, data__train_batch_size=6, algorithm__filter_groups__enable=True, **settings)
    trainer.config.trainer.total_training_steps = 2
    trainer.steps = DynamicSamplingSteps(trainer.config, data_of(40))
    trainer.val_data = None
    return trainer


def test_a_step_generates_and_scores_until_its_batch_is_full(tmp_path: Path) -> None:
    parts = Slow()
    trainer = trainer_of(tmp_path, parts)
    trainer.fit()
    update = parts.batches["update"]
    assert len(update) == 12 and len(set(update.non_tensor_batch["uid"])) == 6
    assert all(int(uid[1:]) % 2 == 0 for uid in update.non_tensor_batch["uid"])
    first, second = (row for _, row in parts.logged)
    batches = int(second["groups/gen_batches"])
    tail = parts.calls[parts.calls.index("update_weights", parts.calls.index("update")) + 1 :]
    assert batches > 1 and tail == ["generate train", "reward"] * batches + ["update", "update_weights"]
    for row in (first, second):
        assert row["groups/kept"] + row["groups/all_right"] == pytest.approx(1) and row["groups/kept"] < 1
        # each phase has its own seconds, although one is inside the other
        assert row["timing_s/reward"] >= 0.1 * row["groups/gen_batches"] > row["timing_s/gen"] > 0.02
        assert row["timing_s/gen"] + row["timing_s/reward"] <= row["timing_s/step"]
        assert row["reward/error_rate"] == 0


def test_greedy_baselines_of_dropped_groups_go_with_them(tmp_path: Path) -> None:
    parts = Slow()
    original = parts.call

    def call(method: str, keys: Sequence[str] = ()) -> Any:
        results = original(method, keys)
        for key in keys:  # the third answer is the greedy one
            results[key].score = 0.5 if key.endswith("/2") else results[key].score
        return results

    parts.call = call  # type: ignore[method-assign]
    trainer = trainer_of(tmp_path, parts, algorithm__adv_estimator="remax")
    trainer.fit()
    update = parts.batches["update"]
    assert len(update) == 12 and update.batch["reward_baselines"].eq(0.5).all()
    assert update.batch["advantages"].abs().amax(1).eq(0.5).all()


UNEQUAL = {2: [-1, 1], 3: [-1.5, 0, 1.5], 4: [-2, -2 / 3, 2 / 3, 2]}
"""Of scores 0, 1, 2 ... by rloo, each less the mean of the others."""


@pytest.mark.parametrize("filtered", [True, False])
def test_prompts_with_their_own_number_of_answers(tmp_path: Path, filtered: bool) -> None:
    class Data(FakePrompts):
        def __getitems__(self, positions: Sequence[int]) -> DataProto:
            batch = super().__getitems__(positions)
            batch.batch["answers_per_prompt"] = torch.tensor([2 + place % 3 for place in positions])
            return batch

    parts = Slow()
    trainer = trainer_of(tmp_path, parts, algorithm__adv_estimator="rloo", rollout__n=5)
    data: Any = Data(40)
    trainer.steps = (DynamicSamplingSteps if filtered else TrainingSteps)(trainer.config, data)
    trainer.fit()
    update = parts.batches["update"]
    rows: dict[str, list[float]] = {}
    for uid, advantage in zip(update.non_tensor_batch["uid"], update.batch["advantages"][:, 0].tolist(), strict=True):
        rows.setdefault(uid, []).append(advantage)
    assert len(rows) == 6 and len({len(group) for group in rows.values()}) > 1
    for uid, advantages in rows.items():
        place, answers = int(uid[1:]), UNEQUAL[2 + int(uid[1:]) % 3]
        assert advantages == pytest.approx([0.0] * len(answers) if place % 2 else answers, abs=1e-5)


def test_a_mini_batch_is_whole_prompts() -> None:
    """Groups of 2, 3, 4, 2 and 3 rows, two prompts a mini-batch: 5, 6 and 3 rows."""
    counts = [2] * 2 + [3] * 3 + [4] * 4 + [2] * 2 + [3] * 3
    batch = DataProto.from_dict(tensors={"answers_per_prompt": torch.tensor(counts)})
    assert rows_of_prompts(batch, 2, n=8) == [5, 6, 3]
    assert rows_of_prompts(batch, 9, n=8) == [14]
    assert rows_of_prompts(batch.select(batch_keys=[]), 2, n=8) == 16

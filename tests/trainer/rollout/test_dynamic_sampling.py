"""Dynamic sampling: the prompts of a step, the groups that fill its batch, and the message if there are too few."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.test_fit import FakePrompts, Parts, make
from trainer.callbacks import Callback, RunControl, RunState
from trainer.ppo.roles import rows_of_prompts
from trainer.ray_trainer import RayPPOTrainer
from trainer.rewards.groups import group_shares, groups_of
from trainer.rollout.dynamic_sampling import FilterBudgetExceeded
from trainer.rollout.group_sources import PromptSource
from trainer.rollout.sample_groups import Group, Rows, assembled
from verl_lite.config import PPOConfig
from verl_lite.metrics import values
from verl_lite.protocol import DataProto, as_column
from workers.rollout.specs import GroupPlan, GroupResults

FILTERED: dict[str, Any] = {
    "algorithm__filter_groups__enable": True,
    "trainer__val_before_train": False,
    "trainer__test_freq": 0,
}
RIGHT, WRONG = (1.0, 1.0), (0.0, 0.0)


def data_of(rows: int) -> Any:
    return FakePrompts(rows, "easy", "hard")


def source_of(rows: int, batch: int) -> PromptSource:
    config = PPOConfig()
    config.data.train_batch_size, config.algorithm.filter_groups.enable = batch, True
    return PromptSource(config, data_of(rows))


def uids(batch: DataProto) -> list[str]:
    return list(dict.fromkeys(batch.non_tensor_batch["uid"]))


def draw(source: PromptSource, further: Sequence[int], first: int = 1) -> list[list[str]]:
    """The prompts of each step from `first` on: a batch, and twice as many further ones as its number in `further`."""
    drawn = []
    for step, number in enumerate(further, start=first):
        groups = [*source.draw_batch(step, step), *source.draw(number, step), *source.draw(number, step)]
        drawn.append([group.plan.key.rpartition("/")[2] for group in groups])
    return drawn


def test_each_prompt_is_drawn_once_an_epoch_and_none_twice_in_a_step() -> None:
    rows, source = 23, source_of(23, 4)
    drawn = draw(source, [0, 3, 0, 5, 1, 4, 2, 0, 3])
    assert [len(each) for each in drawn] == [4, 10, 4, 14, 6, 12, 8, 4, 10]
    assert all(len(each) == len(set(each)) for each in drawn)
    assert set(list(chain(*drawn))[:rows]) == {f"p{i}" for i in range(rows)}
    assert source.epoch == 3  # 72 prompts of 23: the fourth epoch


@pytest.mark.parametrize("rows", [7, 12, 40])
def test_a_resumed_source_draws_what_the_uninterrupted_one_draws(rows: int) -> None:
    further = [int(x) for x in np.random.default_rng(rows).integers(0, 3, 9)]
    whole = draw(source_of(rows, 4), further)
    for done in range(1, 9):
        before, after = source_of(rows, 4), source_of(rows, 4)
        assert draw(before, further[:done]) == whole[:done]
        after.load_state_dict(before.state_dict())
        assert after.epoch == before.epoch
        assert draw(after, further[done:], first=done + 1) == whole[done:]


class Answers(Parts):
    """Scores by prompt, by default 0 and 1. seed: of the order in which groups, and then rewards, are complete; None =
    all at once. seconds: of a generation, and of a reward."""

    def __init__(
        self,
        scores: Mapping[str, Sequence[float]],
        seed: int | None = None,
        seconds: tuple[float, float] = (0, 0),
    ) -> None:
        super().__init__()
        self.scores, self.seconds, self.versions = scores, seconds, [0]
        self.random = None if seed is None else np.random.default_rng(seed)
        self.submitted: list[str] = []
        self.ready: set[str] = set()

    def some(self, items: list[Any]) -> list[Any]:
        return items if self.random is None else [item for item in items if self.random.integers(2)]

    def run_groups(self, keys: Sequence[str], seconds: float | None = None) -> list[GroupResults]:
        time.sleep(self.seconds[0])
        begun = self.running
        if seconds is not None:
            self.running = self.some(begun)
        later = [plan for plan in begun if plan not in self.running]
        results = super().run_groups(keys)
        self.running = later
        return results

    def call(self, method: str, keys: Sequence[Any] = ()) -> Any:
        if method == "ready":
            self.ready = set(self.some(list(keys)))
            return self.ready
        if method == "submit":
            self.submitted += [item.key for item in keys]
        if method != "collect":
            return 0
        assert not self.running or set(keys) <= self.ready, "the engines would wait for rewards"
        time.sleep(self.seconds[1])
        self.calls.append("reward")
        names = [key.split("/")[-2:] for key in keys]
        scores = [self.scores.get(uid, range(9))[int(sample)] for uid, sample in names]
        facts: dict[str, Any] = {"failed": False, "error": None, "timed_out": False, "extra": {}}
        return {key: SimpleNamespace(score=float(x), **facts) for key, x in zip(keys, scores, strict=True)}


def trainer_of(tmp_path: Path, parts: Parts, batch: int = 6, rows: int = 40, **settings: Any) -> RayPPOTrainer:
    usual = {"data__train_batch_size": batch, "data__shuffle": True, "prompts": data_of(rows)}
    return make(tmp_path, parts, steps=2, **FILTERED | usual | settings)


def outcomes_of(seed: int) -> dict[str, Sequence[float]]:
    random = np.random.default_rng(seed)
    return {f"p{i}": (RIGHT, WRONG, (0.0, 1.0))[random.integers(3)] for i in range(200)}


@pytest.mark.parametrize("ahead", [0, 1])
def test_the_batch_is_the_first_groups_that_differ_in_whatever_order_they_are_complete(
    tmp_path: Path, ahead: int
) -> None:
    for seed in range(6):
        scores = outcomes_of(seed)
        parts = Answers(scores, seed)
        settings = {"algorithm__filter_groups__max_num_gen_batches": 0}
        settings["async_training__max_off_policy_threshold"] = ahead
        scheduler = trainer_of(tmp_path, parts, 12, 200, **settings).scheduler
        order = list(chain(*draw(source_of(200, 12), [0] * 16)))
        for step in (1, 2):
            scheduler.version = 0 if ahead else step - 1
            batch = scheduler.get_batch(step)
            scheduler.begin_ahead(step)
            last = [place for place, uid in enumerate(order) if scores[uid] == (0.0, 1.0)][11]
            drawn, order = order[: last + 1], order[last + 1 :]
            assert uids(batch) == [uid for uid in drawn if scores[uid] == (0.0, 1.0)]
            assert len(batch) == 24 and batch.batch["token_level_scores"].sum() == 12
            shown, count = values(batch.meta_info["metrics"]), len(drawn)
            assert shown["groups/generated"] == count and shown["groups/gen_batches"] == -(-count // 12)
            assert shown["training/filter_groups/evicted_samples"] == 2 * (count - 12)
            assert shown["training/filter_groups/discarded_surplus_samples"] == 0
            assert 0 < shown["groups/wasted_tokens_frac"] < 1


def test_the_share_of_wasted_tokens(tmp_path: Path) -> None:
    """The answers of a generation have 1, 2 and 3 tokens in turn. The groups p0 and p1, with 3 and 4 tokens, are
    dropped. p2 has 5 tokens, and p3 and p4 of the second generation have 3 and 4."""
    parts = Answers({"p0": RIGHT, "p1": WRONG})
    batch = trainer_of(tmp_path, parts, 3, data__shuffle=False).scheduler.get_batch(1)
    assert uids(batch) == ["p2", "p3", "p4"]
    assert values(batch.meta_info["metrics"])["groups/wasted_tokens_frac"] == pytest.approx(7 / 19)


def test_no_prompt_occurs_twice_in_a_batch_where_an_epoch_ends(tmp_path: Path) -> None:
    scheduler = trainer_of(tmp_path, Answers({"p3": RIGHT, "p4": WRONG}, seed=1), 7, rows=10).scheduler
    for step in range(1, 9):
        scheduler.version = step - 1
        batch = scheduler.get_batch(step)
        assert len(uids(batch)) == 7 and len(batch) == 14
    assert scheduler.source.epoch >= 5


def test_a_checkpoint_resumes_the_groups_and_the_rewards_that_it_interrupts(tmp_path: Path) -> None:
    """A batch that was started ahead is complete in a checkpoint, but its rewards are not; they are computed again."""
    for filtered in (True, False):
        settings = {"algorithm__filter_groups__enable": filtered, "async_training__max_off_policy_threshold": 1}
        first, second = (Answers({f"p{i}": RIGHT for i in range(0, 40, 3)}) for _ in range(2))
        before, after = (trainer_of(tmp_path, parts, **settings).scheduler for parts in (first, second))
        before.get_batch(1)
        before.begin_ahead(1)
        after.load_state_dict(before.state_dict())
        expected, batch = before.get_batch(2), after.get_batch(2)
        for name in ("uid", "sample_id"):
            assert batch.non_tensor_batch[name].tolist() == expected.non_tensor_batch[name].tolist()
        assert batch.batch["responses"].equal(expected.batch["responses"])
        assert batch.batch["policy_version"].eq(0).all() and not first.submitted
        assert len(second.submitted) == 12 and all(key.startswith("train/2/") for key in second.submitted)
        if not filtered:
            assert second.submitted == batch.non_tensor_batch["sample_id"].tolist()


def test_the_message_at_the_end_of_the_budget_names_step_sources_and_remedies(tmp_path: Path) -> None:
    scores = {f"p{i}": RIGHT if i % 2 == 0 else WRONG for i in range(200)} | {"p0": (0.0, 1.0)}
    settings = {"algorithm__filter_groups__max_num_gen_batches": 3}
    for seed in range(4):
        with pytest.raises(FilterBudgetExceeded) as caught:
            trainer_of(tmp_path, Answers(scores, seed), 4, 200, **settings).scheduler.get_batch(1)
        message = str(caught.value)
        hard = sum(int(uid[1:]) % 2 for uid in draw(source_of(200, 4), [4])[0])
        assert "Step 1: its budget of generation batches is used up" in message and "after 12 groups" in message
        assert "max_num_gen_batches=3" in message and "of the 4 groups" in message and "rollout.n=2" in message
        assert f"hard: {hard} asked: {hard} all wrong" in message
        assert f"easy: {12 - hard} asked" in message and "all right" in message
    with pytest.raises(FilterBudgetExceeded, match="Step 1: all training prompts were asked, and 1 of the 4 groups"):
        trainer_of(tmp_path, Answers(scores), 4, rows=8).scheduler.get_batch(1)


def test_a_run_whose_budget_ends_saves_the_step_before(tmp_path: Path) -> None:
    """The state is that before the step, so that a run resumed with more budget draws the same prompts."""
    scores = {f"p{i}": RIGHT for i in range(6, 40)}
    settings = {"data__shuffle": False, "trainer__save_freq": 10, "algorithm__filter_groups__max_num_gen_batches": 3}

    class Counter(Callback):
        steps = 0

        def on_step_end(self, state: RunState, control: RunControl) -> None:
            self.steps += 1

        def state_dict(self) -> dict[str, int]:
            return {"steps": self.steps}

        def load_state_dict(self, state: Mapping[str, int]) -> None:
            self.steps = state["steps"]

    trainer = trainer_of(tmp_path, Answers(scores), **settings)
    trainer.callbacks.by_name["counter"] = Counter()
    with pytest.raises(FilterBudgetExceeded, match="Step 2"):
        trainer.fit()
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_1"]
    resumed = trainer_of(tmp_path, parts := Answers({}), trainer__resume_mode="auto", **settings)
    resumed.callbacks.by_name["counter"] = counter = Counter()
    resumed.fit()
    assert counter.steps == 2, "the callback continues with the state that it had after step 1"
    assert resumed.steps.global_step == 2 and uids(parts.batches["update"]) == [f"p{i}" for i in range(6, 12)]


def test_an_outcome_of_its_own_beside_the_score() -> None:
    """acc where rows have one, the score before the penalty else; or what the metric names."""
    batch = scored([0, 1, 2], (0.5, 1.0))
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


def scored(places: Sequence[int], scores: Sequence[float]) -> DataProto:
    """One answer of three tokens with each of these scores, to each of these prompts."""
    rows = data_of(40).__getitems__(places).repeat(len(scores))
    mask = torch.tensor([[1, 1, 1, 0]]).repeat(len(rows), 1)
    rows.batch["response_mask"], rows.batch["token_level_scores"] = mask, torch.zeros(len(rows), 4)
    rows.batch["token_level_scores"][:, 2] = torch.tensor([*scores] * len(places))
    return rows


def test_groups_with_different_columns_are_joined() -> None:
    left, right = (scored([place], (0.0, 1.0)) for place in (0, 1))
    left.non_tensor_batch["reward/acc"] = as_column([1.0, 0.0])
    whole = assembled([Group(GroupPlan("", ()), sampled=Rows(rows, 0, 2)) for rows in (right, left)])
    assert whole.non_tensor_batch["reward/acc"].tolist() == [None, None, 1.0, 0.0] and uids(whole) == ["p1", "p0"]


EVERY_OTHER: dict[str, Sequence[float]] = {f"p{i}": (1.0,) * 9 for i in range(1, 40, 2)}


def test_a_step_generates_and_scores_until_its_batch_is_full(tmp_path: Path) -> None:
    parts = Answers(EVERY_OTHER, seconds=(0.02, 0.1))
    trainer_of(tmp_path, parts).fit()
    update = parts.batches["update"]
    assert len(update) == 12 and len(uids(update)) == 6
    assert all(int(uid[1:]) % 2 == 0 for uid in uids(update))
    tail = parts.calls[parts.calls.index("update_weights", parts.calls.index("update")) + 1 :]
    times = tail.count("reward")
    assert times > 1 and tail == ["generate train", "reward"] * times + ["update", "update_weights"]
    for _, row in parts.logged:
        assert row["groups/kept"] + row["groups/all_right"] == pytest.approx(1) and row["groups/kept"] < 1
        # each phase has its own seconds, although one is inside the other
        assert row["timing_s/reward"] >= 0.1 * row["groups/gen_batches"] and row["timing_s/gen"] > 0.02
        assert row["timing_s/gen"] + row["timing_s/reward"] <= row["timing_s/step"]
        assert row["reward/error_rate"] == 0


def test_greedy_baselines_of_dropped_groups_are_dropped_with_them(tmp_path: Path) -> None:
    """The third answer is the greedy one."""
    parts = Answers(EVERY_OTHER | {f"p{i}": (0.0, 1.0, 0.5) for i in range(0, 40, 2)}, seed=0)
    trainer_of(tmp_path, parts, algorithm__adv_estimator="remax").fit()
    update = parts.batches["update"]
    assert len(update) == 12 and update.batch["reward_baselines"].eq(0.5).all()
    assert update.batch["advantages"].abs().amax(1).eq(0.5).all()


UNEQUAL: dict[int, list[float]] = {2: [-1, 1], 3: [-1.5, 0, 1.5], 4: [-2, -2 / 3, 2 / 3, 2]}
"""Advantages of scores 0, 1, 2 ... by rloo: each score less the mean of the others."""


@pytest.mark.parametrize("filtered", [True, False])
def test_prompts_with_their_own_number_of_answers(tmp_path: Path, filtered: bool) -> None:
    class Data(FakePrompts):
        def __getitems__(self, places: Sequence[int]) -> DataProto:
            batch = super().__getitems__(places)
            batch.batch["answers_per_prompt"] = torch.tensor([2 + place % 3 for place in places])
            return batch

    parts = Answers(EVERY_OTHER, seed=0)
    settings: dict[str, Any] = {
        "algorithm__adv_estimator": "rloo",
        "rollout__n": 5,
        "algorithm__filter_groups__enable": filtered,
    }
    trainer_of(tmp_path, parts, prompts=Data(40, "easy"), **settings).fit()
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

"""`RayPPOTrainer.fit` with fake parts: the order of calls, the columns that flow, critic on and off, warm-up, what is
due.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.set_keys import set_keys
from trainer.checkpoint.files import DiskFull
from trainer.loop.saving import Saver
from trainer.loop.steps import StepCounter
from trainer.ray_trainer import RayPPOTrainer
from trainer.rewards.failures import reward_failure_log
from trainer.rewards.scores import RewardManager
from trainer.rollout.group_sources import PromptSource
from verl_lite.config import PPOConfig
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto, as_column
from workers.engines.base import SamplingParams
from workers.rollout.rows import Response, left_padded, write_rows
from workers.rollout.specs import GroupPlan, GroupReport, GroupResults

PROMPTS, RESPONSE = 3, 4
QUIET: dict[str, Any] = {"trainer__val_before_train": False, "trainer__test_freq": 0}


class Parts:
    """Fake actor, reference, critic, reward pool, trackers: they note their calls and give plausible columns."""

    def __init__(self, *, on_policy: bool = True, failing: tuple[str, ...] = ()) -> None:
        self.calls: list[str] = []
        self.batches: dict[str, DataProto] = {}
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.needs_old_log_prob, self.failing, self.num_engines = not on_policy, failing, 1
        self.world_size = 1
        self.usage, self.groups = np.zeros(2), [self]
        self.versions: list[int] = []
        self.running: list[GroupPlan] = []
        self.logged_before_save: list[list[int]] = []

    def begin_groups(self, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
        self.calls.append(f"generate {plans[0].key.split('/')[0]}")
        self.running += plans

    def run_groups(self, keys: Sequence[str], seconds: float | None = None) -> list[GroupResults]:
        plans, self.running = self.running, []
        metrics = {"rollout/slowest_rank_seconds": Metric.max(1.0)}
        if not plans:
            return [GroupResults([], None, metrics)]
        samples = [spec for plan in plans for spec in plan.samples]
        prompts = left_padded([spec.prompt_ids for spec in samples], 2, 0)
        lengths = [1 + row % 3 for row in range(len(samples))]
        rows = [
            Response(
                [5, 6, 1][:length], [1] * length, [-0.5, -0.4, -0.3][:length], [self.versions[-1]] * length, "stop", {}
            )
            for length in lengths
        ]
        reports = [GroupReport(plan.key, len(plan.samples)) for plan in plans]
        return [GroupResults(reports, write_rows(*prompts, rows, RESPONSE, 0, {}), metrics)]

    def compute_log_prob(self, batch: DataProto) -> DataProto:
        self.calls.append("old_log_prob")
        return DataProto.from_dict(tensors={"old_log_probs": batch.batch["rollout_log_probs"].clone()})

    def compute_ref_log_prob(self, batch: DataProto) -> DataProto:
        self.calls.append("ref")
        return DataProto.from_dict(tensors={"ref_log_prob": batch.batch["rollout_log_probs"] - 0.1})

    def compute_values(self, batch: DataProto) -> DataProto:
        self.calls.append("values")
        return DataProto.from_dict(tensors={"values": torch.zeros(len(batch), RESPONSE)})

    def update(self, batch: DataProto, step: int) -> dict[str, Metric]:
        self.calls.append("update")
        self.batches["update"] = batch
        return {"actor/pg_loss": Metric.last(0.1)}

    def update_weights(self, version: int) -> dict[str, Metric]:
        self.calls.append("update_weights")
        self.versions.append(version)
        return {}

    def save(self, folder: str, background: bool = False) -> None:
        self.calls.append("save in the background" if background else "save")
        self.logged_before_save.append([step for step, _ in self.logged])
        Path(folder).mkdir()

    def finish_save(self) -> None:
        self.calls.append("finish save")

    def load(self, folder: str) -> None:
        assert Path(folder).is_dir()
        self.calls.append("load")

    def call(self, method: str, keys: Sequence[str] = ()) -> Any:
        if method == "processes_replaced":
            return 0
        if method == "ready":
            return set(keys)
        self.calls.append("reward")
        return {
            key: SimpleNamespace(score=float(index % 2), failed=key.endswith(self.failing) if self.failing else False,
                                 error="Traceback: boom", timed_out=False, extra={"acc": float(index % 2)})
            for index, key in enumerate(keys)
        }  # fmt: skip

    def logged_at(self, step: int) -> dict[str, float]:
        return {name: value for at, values in self.logged if at == step for name, value in values.items()}

    def note(self, text: str) -> None:
        self.calls.append("note")

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def log_samples(self, samples: list[Any], step: int) -> None:
        self.calls.append("log_samples")

    keeps_training = False

    def ignore(self, *_: Any) -> None: ...

    write_validation = write_training = write_images = rewind = show = ignore

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        return "text"


class FakePrompts:
    """Prompts p0, p1, ... of these sources in turn: as much of `PromptDataset` as sources and validation need."""

    def __init__(self, rows: int, *sources: str) -> None:
        self.rows, self.sources = rows, sources or ("task",)

    def __len__(self) -> int:
        return self.rows

    def fingerprint(self) -> str:
        return "fake"

    def __getitems__(self, places: Sequence[int]) -> DataProto:
        count = len(places)
        return DataProto.from_dict(
            tensors={"prompts": torch.full((count, 2), 7), "prompt_mask": torch.ones(count, 2, dtype=torch.long)},
            non_tensors={
                "uid": as_column([f"p{place}" for place in places]),
                "data_source": as_column([self.sources[place % len(self.sources)] for place in places]),
                "raw_prompt": as_column([[{"role": "user", "content": str(place)}] for place in places]),
                "reward_model": as_column([{"style": "rule", "ground_truth": "text"}] * count),
                "extra_info": as_column([{}] * count),
                "index": np.array(places),
            },
        )


def make(
    tmp_path: Path,
    parts: Parts,
    *,
    ref: bool = False,
    critic: bool = False,
    prompts: FakePrompts | None = None,
    steps: int = 3,
    **settings: Any,
) -> RayPPOTrainer:
    config = PPOConfig()
    config.data.train_batch_size, config.data.shuffle = PROMPTS, False
    config.rollout.n = 2
    config.data.max_response_length = RESPONSE
    config.trainer.save_freq = 0
    set_keys(config, **settings)
    fake: Any = parts
    value_model: Any = FakeCritic(parts) if critic else None
    failures = reward_failure_log(config.reward.max_error_rate, tmp_path)
    learners: dict[str, Any] = {"actor": fake} | ({"critic": value_model} if critic else {})
    trainer = RayPPOTrainer(
        config,
        actor=fake,
        ref=fake if ref else None,
        critic=value_model,
        rewards=RewardManager(fake, config.reward, failures),
        source=PromptSource(config, prompts or FakePrompts(PROMPTS)),  # type: ignore[arg-type]
        total_steps=steps,
        val_data=FakePrompts(2),  # type: ignore[arg-type]
        tokenizer=fake,
        tracking=fake,
        samples=fake,
        saver=Saver(tmp_path, config, learners, 0, parts.calls.append),
        run_dir=tmp_path,
    )
    trainer.needs_old_log_prob = parts.needs_old_log_prob
    return trainer


class FakeCritic:
    def __init__(self, parts: Parts) -> None:
        self.parts, self.groups = parts, parts.groups

    def compute_values(self, batch: DataProto) -> DataProto:
        return self.parts.compute_values(batch)

    def update(self, batch: DataProto, step: int) -> dict[str, Metric]:
        self.parts.calls.append("update_critic")
        self.parts.batches["update_critic"] = batch
        return {"critic/vf_loss": Metric.last(0.2)}

    def save(self, folder: str, background: bool = False) -> None:
        Path(folder).mkdir()

    def finish_save(self) -> None:
        self.parts.calls.append("finish critic")

    def load(self, folder: str) -> None:
        assert Path(folder).is_dir()


STEP = ["generate train", "reward", "update", "update_weights"]
VALIDATION = ["generate val1", "reward", "log_samples"]


def test_on_policy_order_skips_the_old_log_prob_pass(tmp_path: Path) -> None:
    parts = Parts(on_policy=True)
    make(tmp_path, parts).fit()
    assert parts.calls == ["update_weights", *VALIDATION, *STEP, *STEP, *STEP, *VALIDATION]
    assert parts.versions == [0, 1, 2, 3], "each weight update has the version of its step"
    parts = Parts(on_policy=False)
    make(tmp_path, parts, ref=True, critic=True, **QUIET).fit()
    stages = ["reward", "old_log_prob", "ref", "values", "update_critic", "update", "update_weights"]
    assert parts.calls[1:9] == ["generate train", *stages]


def test_batches_that_are_started_ahead(tmp_path: Path) -> None:
    """The batch of step s + 1 is sampled while step s is trained. With a threshold above 1 it is also sampled across
    weight updates. The ratio of the policy update is taken against the log-probs of the rollout."""
    settings = QUIET | {"algorithm__rollout_correction__bypass_mode": True}
    make(tmp_path, one := Parts(), async_training__max_off_policy_threshold=1, **settings).fit()
    first, step = ["update_weights", "generate train"], ["reward", "update"]
    assert one.calls == [*first, "generate train", *step, *first, *step, *step]
    assert one.versions == [0, 1], "no samples need the weights of the last two steps"
    batch = one.batches["update"].batch
    assert batch["policy_version"].eq(1).all() and batch["old_log_probs"].equal(batch["rollout_log_probs"])
    assert [row["async/staleness/oldest"] for _, row in one.logged] == [0, 1, 1]
    ahead: dict[str, Any] = {"async_training__max_off_policy_threshold": 2, "async_training__batches_ahead": 2}
    make(tmp_path, two := Parts(), **ahead, **settings).fit()
    assert two.calls == ["update_weights", *["generate train"] * 3, *[*step, "update_weights"] * 3]
    assert [row["async/staleness/oldest"] for _, row in two.logged] == [0, 1, 2]


def test_critic_warm_up_leaves_the_actor_alone(tmp_path: Path) -> None:
    parts = Parts()
    make(tmp_path, parts, critic=True, trainer__critic_warmup=2, **QUIET).fit()
    assert parts.calls.count("update_critic") == 3
    assert parts.calls.count("update") == 1
    assert parts.versions == [0, 3], "weights that did not change are not sent"


def test_a_resumed_run_goes_on_with_its_steps_its_coefficient_and_its_running_moments(tmp_path: Path) -> None:
    running = {"algorithm__norm_mean_type": "running", "algorithm__norm_std_type": "running"}
    settings = QUIET | running | {"trainer__save_freq": 2, "algorithm__adv_estimator": "reinforce"}
    first = make(tmp_path, Parts(failing=("p0/0",)), reward__max_error_rate=0.5, **settings)
    first.steps.total, first.kl_ctrl.value = 2, 0.25
    first.fit()
    second = make(tmp_path, parts := Parts(), trainer__resume_mode="auto", **settings)
    second.fit()
    assert parts.calls[0] == "load" and parts.versions == [2, 3] and second.kl_ctrl.value == 0.25
    counts = [run.running_moments["task"].count for run in (first, second)]
    assert counts == [2 * 5, 2 * 5 + 6], "the failed row of each step is not among them"


def test_history_is_logged_before_the_checkpoint_that_continues_it(tmp_path: Path) -> None:
    """Else a run that is killed in between and resumed would never log that step."""
    parts = Parts()
    make(tmp_path, parts, trainer__val_before_train=False, trainer__test_freq=1, trainer__save_freq=1).fit()
    assert [steps[-1] for steps in parts.logged_before_save] == [1, 2, 3]
    assert "val-core/task/acc/mean@1" in parts.logged[-2][1]
    assert parts.logged[-1][1].keys() == {"timing_s/save_checkpoint"}


def test_a_save_in_the_background_is_complete_when_the_next_one_begins_or_the_run_ends(tmp_path: Path) -> None:
    parts = Parts()
    make(tmp_path, parts, critic=True, trainer__save_freq=1, trainer__async_save=True, **QUIET).fit()
    saving = [call for call in parts.calls if call in ("update", "finish save", "finish critic") or "save" in call]
    once = ["save in the background", "update", "finish save", "finish critic"]
    assert saving == ["update", *once, *once, "save in the background", "finish save", "finish critic"]
    assert sorted(path.name for path in tmp_path.glob("global_step_*/*")) == sorted(
        ["actor", "critic", "data.pt", "manifest.json"] * 3
    )


def test_a_run_that_is_stopped_ends_after_the_step_with_a_checkpoint(tmp_path: Path) -> None:
    settings = QUIET | {"trainer__save_freq": -1, "trainer__test_freq": -1}
    run = make(tmp_path, parts := Parts(), **settings)
    begin = parts.begin_groups

    def begin_and_stop(plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
        run.steps.stop()
        begin(plans, sampling)

    parts.begin_groups = begin_and_stop  # type: ignore[method-assign]
    result = run.fit()
    assert result.stopped and result.checkpoint == tmp_path / "global_step_1"
    assert parts.calls.count("update") == 1 and "log_samples" not in parts.calls, "no validation on the way out"
    second = make(tmp_path, Parts(), trainer__resume_mode="auto", **settings)
    assert not second.fit().stopped and second.steps.global_step == 3


def test_a_stop_that_comes_when_the_checkpoint_is_decided_is_for_the_next_step(tmp_path: Path) -> None:
    run = make(tmp_path, Parts(), trainer__save_freq=-1, **QUIET)
    is_due = run.saver.is_due

    def stop_after_asking(steps: StepCounter) -> bool:
        answer = is_due(steps)
        run.steps.stop()
        return answer

    run.saver.is_due = stop_after_asking  # type: ignore[method-assign]
    result = run.fit()
    assert result.stopped and result.checkpoint == tmp_path / "global_step_2"


def test_a_full_disk_does_not_end_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts()
    settings = QUIET | {"trainer__save_freq": 2}
    free = iter([0, 10**9, 10**9])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=next(free)))
    run = make(tmp_path, parts, **settings)
    run.saver.expected_bytes = 1000
    run.fit()
    [told] = [call for call in parts.calls if "no checkpoint at step 2" in call]
    assert "need about 1e-06 GB there, and 0 GB are free" in told
    assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_3"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    (tmp_path / "at the end").mkdir()
    with pytest.raises(DiskFull):
        make(tmp_path / "at the end", parts, **settings).fit()


def test_pf_ppo_draws_what_is_learnt_from_and_logs_what_was_sampled(tmp_path: Path) -> None:
    settings = QUIET | {"algorithm__adv_estimator": "gae", "algorithm__use_pf_ppo": True}
    batches = []
    for _ in range(2):
        parts = Parts(on_policy=False)
        make(tmp_path, parts, critic=True, **settings).fit()
        batches.append(parts.batches["update"])
        assert parts.batches["update_critic"] is parts.batches["update"], "both learn from the same draw"
        logged = dict(parts.logged)[3]
        assert logged["critic/score/mean"] == 0.5, "three of the six answers have score 1"
        assert logged["pf_ppo/distinct_rows_frac"] == len(set(batches[-1].non_tensor_batch["sample_id"])) / 6
    first, second = batches
    assert len(first) == 6 and bool((first.batch["token_level_scores"].sum(1) == 1).all()), "score 0 has weight 1e-8"
    assert list(first.non_tensor_batch["sample_id"]) == list(second.non_tensor_batch["sample_id"])


@pytest.mark.parametrize("estimator", ["grpo", "gae", "rloo", "reinforce_plus_plus"])
def test_a_step_whose_rewards_all_failed(tmp_path: Path, estimator: str) -> None:
    parts = Parts(on_policy=False, failing=("/0", "/1"))
    settings = QUIET | {"reward__max_error_rate": 1.0, "algorithm__adv_estimator": estimator}
    settings |= {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"}
    trainer = make(tmp_path, parts, ref=True, critic=estimator == "gae", **settings)
    before = trainer.kl_ctrl.value
    trainer.fit()
    batch = parts.batches["update"].batch
    assert not batch["response_mask"].any()
    assert not batch["advantages"].any() and not batch["returns"].any()
    assert trainer.kl_ctrl.value == before, "no sequence was measured, so the coefficient has nothing to react to"
    logged = dict(parts.logged)[1]
    assert logged["reward/error_rate"] == 1.0
    assert all(math.isfinite(value) for value in logged.values())
    assert "critic/score/mean" not in logged, "a mean over nothing is left out"


@pytest.mark.parametrize("threshold", [1, 2])
def test_a_validation_beside_samples_of_later_steps_has_the_newest_weights(threshold: int, tmp_path: Path) -> None:
    begun: list[tuple[str, int]] = []

    class Noting(Parts):
        def begin_groups(self, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
            begun.append((plans[0].key.split("/")[0].rstrip("01"), self.versions[-1]))
            super().begin_groups(plans, sampling)

    settings = {"async_training__max_off_policy_threshold": threshold, "trainer__test_freq": 1}
    parts = Noting()
    make(tmp_path, parts, trainer__val_before_train=False, **settings).fit()
    assert [version for purpose, version in begun if purpose == "val"] == [1, 2, 3]
    assert [version for purpose, version in begun if purpose == "train"] == [0, 0, 1]
    oldest = [row["async/staleness/oldest"] for _, row in parts.logged if "async/staleness/oldest" in row]
    assert oldest == [0, 1, 1]


@pytest.mark.parametrize("has_model", [False, True])
def test_a_group_waits_for_its_rewards_only_if_they_are_computed_during_sampling(
    has_model: bool, tmp_path: Path
) -> None:
    """Scores of a reward model are computed after sampling, so no group may wait for them."""
    settings = {"async_training__max_off_policy_threshold": 2, "reward_model__enable": has_model}

    class NotReady(Parts):
        def call(self, method: str, keys: Sequence[str] = ()) -> Any:
            return set() if method == "ready" else super().call(method, keys)

        def run_groups(self, keys: Sequence[str], seconds: float | None = None) -> list[GroupResults]:
            last = self.running.pop()  # continues to run
            results = super().run_groups(keys, seconds)
            self.running = [last]
            return results

    parts = NotReady()
    scheduler = make(tmp_path, parts, **settings).scheduler
    parts.versions.append(0)
    scheduler.begin_ahead(0)
    scheduler._run_and_judge()
    complete, running = scheduler.groups[:-1], scheduler.groups[-1]
    assert len(complete) == PROMPTS - 1 and running.sampled is None
    assert {group.kind for group in complete} == {"kept" if has_model else None}

"""Seed 004, ROLL's AgenticPipeline: its names, and a loop of its calls that trains FrozenLake as the built-in one does.

The agent is a random model of one layer; engines, environments and workers are the real ones, in this process.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipes.agentic_frozen_lake import recipe
from recipes.agentic_frozen_lake.data import write_model
from recipes.agentic_frozen_lake.roll_loop import RollLoop
from trainer.agentic.episode_metrics import compute_data_metrics
from trainer.agentic.roll import AgenticPipeline, BasePipeline, get_score_normalize_fn
from trainer.launch.ppo_job import run_ppo
from trainer.observe.final_report import FitResult
from trainer.observe.tracking import read_metrics
from trainer.recipe import load_recipe
from verl_lite.config import RewardNormalizationConfig
from verl_lite.envs.frozen_lake import FrozenLake
from verl_lite.metrics import reduce_metrics
from verl_lite.protocol import DataProto, DataProtoFuture


class AnyWord(FrozenLake):
    """A lake of two by two on which every word is a move: an untrained agent arrives now and then."""

    def step(self, action: str) -> Any:
        return super().step(f"<answer>{self.moves[crc32(action.encode()) % 4]}</answer>")


LAKE = (
    f"{{env_type: {AnyWord.__module__}:AnyWord, max_steps: 4, max_tokens_per_step: 2, env_config: {{desc: [SF, FG]}}}}"
)
SMALL = [
    "recipe=agentic_frozen_lake", "trainer.backend=inline", "trainer.device=cpu", "trainer.logger=[jsonl]",
    "rollout.name=hf", "trainer.total_training_steps=3", "trainer.save_freq=0", "trainer.test_freq=2",
    "rollout.val_kwargs.greedy_too=false", f"agentic.custom_envs.lake={LAKE}", "agentic.env_pool.num_workers=0",
    "agentic.rollout_batch_size=8", "agentic.val_batch_size=2", "data.max_prompt_length=600",
    *(f"agentic.{kind}_env_manager.tags=[lake]" for kind in ("train", "val")),
    *(f"agentic.{kind}_env_manager.num_groups_partition=null" for kind in ("train", "val")),
    "agentic.train_env_manager.num_env_groups=2", "agentic.train_env_manager.group_size=4",
    "agentic.val_env_manager.num_env_groups=2", "actor.optim.lr_warmup_steps=0",
]  # fmt: skip
CLOCKS = re.compile("tim(e|ing)|perf/|second|busy|idle|tps|weight_sync")
SCORES = {f"val/score/{name}" for name in ("mean", "max", "min")}
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, seed=1, layers=1, hidden=32)
    return str(folder)


def trained(kind: type[AgenticPipeline], model: str, run_dir: Path, *options: str) -> tuple[dict[int, Any], Weights]:
    """Metrics by step and the last weights of actor and critic, of a run through the main command."""
    weights: Weights = {}

    class Kept(kind):  # type: ignore[misc, valid-type]
        def fit(self) -> FitResult:
            result = super().fit()
            for name, learner in self.saver.learners.items():
                worker = learner.group._transport._slots[0].roles[learner.group.role]
                weights.update({f"{name}.{key}": p.clone() for key, p in worker.engine.full_params()})
            return result

    assert run_ppo([*SMALL, f"model.path={model}", f"trainer.default_local_dir={run_dir}", *options], Kept) == 0
    return read_metrics(run_dir / "metrics.jsonl"), weights


def numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    """Those that are no clock's."""
    return {name: value for name, value in metrics.items() if not CLOCKS.search(name)}


def same(found: Mapping[str, float], expected: Mapping[str, float]) -> None:
    assert set(expected) <= set(found)
    for name, value in expected.items():
        assert found[name] == value or math.isnan(value) and math.isnan(found[name]), name


GAE = [
    "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "actor.ppo_mini_batch_size=4",
    "actor.shuffle=true", "trainer.critic_warmup=1", "critic.optim.lr=1e-2",
]  # fmt: skip
# the loop computes old log-probs, as ROLL does
AHEAD = ["agentic.async_generation_ratio=1", "algorithm.rollout_correction.bypass_mode=false"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="grpo"),
        pytest.param(GAE, id="gae", marks=pytest.mark.slow),
        pytest.param(AHEAD, id="ahead", marks=pytest.mark.slow),
    ],
)
def test_the_loop_of_the_seeds_calls_has_the_built_in_loops_numbers(
    options: list[str], model: str, tmp_path: Path
) -> None:
    expected, weights = trained(AgenticPipeline, model, tmp_path / "built_in", *options)
    found, same_weights = trained(RollLoop, model, tmp_path / "written_out", *options)
    assert set(found) == set(expected) == {0, 1, 2, 3}
    assert [step for step in found if SCORES <= set(found[step])] == [0, 2, 3], "every two steps, and at the end"
    for step in expected:
        same(found[step], numbers(expected[step]))
    assert any(metrics.get("critic/advantages/max", 0) > 0 for metrics in expected.values()), "nothing was learnt"
    assert weights.keys() == same_weights.keys() and all(torch.equal(weights[n], same_weights[n]) for n in weights)


@pytest.mark.slow
def test_both_loops_go_on_from_the_others_checkpoint(model: str, tmp_path: Path) -> None:
    """do_checkpoint writes what `fit` writes: the step after it is that of the run that was not broken off."""
    saving = [*GAE, "trainer.save_freq=2", "trainer.resume_mode=auto"]
    whole, weights = trained(RollLoop, model, tmp_path, *saving)
    saved = sorted(folder.name for folder in tmp_path.glob("global_step_*"))
    assert saved == ["global_step_2", "global_step_3"], "every 2 steps, and at the end"
    for kind in (AgenticPipeline, RollLoop):
        shutil.rmtree(tmp_path / "global_step_3")
        again, same_weights = trained(kind, model, tmp_path, *saving)
        same(again[3], numbers(whole[3]))
        assert all(torch.equal(weights[name], same_weights[name]) for name in weights)


# ------------------------------------------------------------------------------------------------------- the calls


def within(model: str, run_dir: Path, check: Callable[[Any], None], *options: str) -> None:
    """Calls check with a pipeline that the main command has built."""

    class Probe(AgenticPipeline):
        def fit(self) -> FitResult:
            check(self)
            return self.result

    assert run_ppo([*SMALL, f"model.path={model}", f"trainer.default_local_dir={run_dir}", *options], Probe) == 0


def plain_log_probs(path: str, batch: DataProto) -> torch.Tensor:
    """Of the responses, by transformers alone: log-softmax of the logits before each token that was sampled, else 0."""
    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokens, width = batch.batch["input_ids"], batch.batch["responses"].shape[1]
    with torch.no_grad():
        logits = network(
            tokens, attention_mask=batch.batch["attention_mask"], position_ids=batch.batch["position_ids"]
        ).logits
    found = logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)[:, -width:]
    return torch.where(batch.batch["response_mask"].bool(), found, 0.0)


def test_the_calls_of_the_seed(model: str, tmp_path: Path) -> None:
    def check(self: Any) -> None:
        assert BasePipeline in type(self).__mro__ and self.pipeline_config.adv_estimator == "gae"
        self.set_model_update_pair(
            src_cluster=self.actor_train,
            tgt_cluster=self.actor_infer,
            frequency=self.pipeline_config.actor_train.model_update_frequency,
        )
        metrics: dict[str, Any] = {}
        model_update_metrics: dict[str, Any] = self.model_update(0)
        metrics.update(model_update_metrics)
        assert metrics and self.model_update(0) == {}, "the engines have them"

        batch = DataProto(meta_info={"global_step": 0})
        batch = self.train_rollout_scheduler.get_batch(batch, self.pipeline_config.rollout_batch_size)
        assert len(set(batch.non_tensor_batch["traj_id"])) == self.pipeline_config.rollout_batch_size == 8
        played = self.val_rollout_scheduler.get_batch(batch, self.pipeline_config.val_batch_size)
        assert len(played) == self.pipeline_config.val_batch_size == 2

        expected = plain_log_probs(model, batch)
        future = self.actor_train.compute_log_probs(batch, blocking=False)
        values = self.critic.compute_values(batch, blocking=False)
        assert isinstance(future, DataProtoFuture) and isinstance(values, DataProtoFuture)
        before = self.critic.compute_values(batch).batch["values"]
        assert torch.equal(values.get().batch["values"], before) and values.get() is values.get()
        reference = self.reference.compute_log_probs(batch)
        torch.testing.assert_close(reference.batch["ref_log_prob"], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(future.get().batch["old_log_probs"], expected, rtol=1e-4, atol=1e-5)
        again = self.reference.compute_log_probs(batch, blocking=False)
        assert torch.equal(again.get().batch["ref_log_prob"], reference.batch["ref_log_prob"])

        batch.meta_info.pop("metrics")
        batch = batch.union(future.get()).union(values.get()).union(reference)
        batch = self.estimate_advantages(self.score(batch))
        mask = batch.batch["response_mask"].bool()
        error = [(before - batch.batch["returns"])[mask].square().mean()]
        for _ in range(10):
            answer = self.critic.train_step(batch, blocking=False)
            assert isinstance(answer, DataProtoFuture) and "critic/vf_loss" in answer.get().meta_info["metrics"]
        error.append((self.critic.compute_values(batch).batch["values"] - batch.batch["returns"])[mask].square().mean())
        assert error[1] < error[0], "the critic comes nearer to the returns"
        metrics.update(self.actor_train.train_step(batch).meta_info["metrics"])
        assert {"actor/pg_loss", "actor/grad_norm", "weight_sync/seconds"} <= set(reduce_metrics(metrics))
        moved = self.actor_train.compute_log_probs(batch).batch["old_log_probs"]
        gain = ((moved - expected) * batch.batch["advantages"]).sum()
        assert gain > 0, "what was better than expected is likelier now"
        assert torch.equal(
            self.reference.compute_log_probs(batch).batch["ref_log_prob"], reference.batch["ref_log_prob"]
        )

        shown = compute_data_metrics(batch, use_critic=True)
        scores = batch.batch["episode_scores"]
        for name in ("mean", "max", "min"):
            assert shown[f"critic/score/{name}"] == pytest.approx(float(getattr(scores, name)()))
        self.do_checkpoint(0)
        self.saver.finish()
        assert (self.run_dir / "global_step_1").is_dir() and self.steps.global_step == 1
        self.model_update(1)
        later = DataProto(meta_info={"global_step": 1})
        later = self.train_rollout_scheduler.get_batch(later, self.pipeline_config.rollout_batch_size)
        assert set(later.batch["policy_version"].tolist()) == {1} and later.meta_info["global_step"] == 1

    within(model, tmp_path, check, *GAE, "trainer.save_freq=1")


def test_the_recipe_brings_the_loop() -> None:
    written_out = load_recipe("recipes.agentic_frozen_lake.roll_loop")
    assert written_out.trainer_class is RollLoop and written_out.prepare is recipe.prepare
    assert written_out.overrides() == recipe.overrides()


def test_attributes_and_options_have_the_seeds_names(model: str, tmp_path: Path) -> None:
    def check(self: Any) -> None:
        assert self.reference is None and self.critic is None, "nothing asks for them"
        assert self.train_rollout_scheduler.infer_cluster is self.actor_infer
        assert self.val_rollout_scheduler.infer_cluster is self.actor_infer
        assert (
            self.running is self.running_moments and self.tracker is self.tracking and self.tokenizer and self.kl_ctrl
        )
        config, own = self.pipeline_config, self.config
        assert (config.max_steps, config.eval_steps) == (own.trainer.total_training_steps, own.trainer.test_freq)
        assert config.agentic.logging_steps == config.logging_steps == own.agentic.logging_steps
        assert config.critic_warmup == own.trainer.critic_warmup
        for absent in ("no_such_option", "dual_clip_loss"):  # a switch in ROLL, a bound of the ratio here
            with pytest.raises(AttributeError, match=absent):
                getattr(config, absent)
        self.set_model_update_pair(src_cluster=self.actor_train, tgt_cluster=self.actor_infer, frequency=2)
        assert [bool(self.model_update(step)) for step in range(4)] == [True, False, True, False]
        for pair, frequency in (((self.actor_train, None), 1), ((self.actor_train, self.actor_infer), 0)):
            with pytest.raises(ValueError, match=f"set_model_update_pair: found .*frequency={frequency}"):
                self.set_model_update_pair(*pair, frequency)
        with pytest.raises(ValueError, match=r"train_step: the batch has no meta_info\['global_step'\]"):
            self.actor_train.train_step(DataProto())

    within(model, tmp_path, check)
    assert AgenticPipeline.run(SimpleNamespace(fit=lambda: "what fit gives")) == "what fit gives"  # type: ignore[arg-type]


def test_rolls_older_name_of_a_normalisation() -> None:
    """What each method does is in tests/trainer/agentic/test_agentic_advantage.py."""
    normalize = get_score_normalize_fn(rn_cfg=RewardNormalizationConfig(method="mean"))
    assert normalize(torch.tensor([0.0, 0.0, 3.0, 5.0])).tolist() == [-2.0, -2.0, 1.0, 3.0]

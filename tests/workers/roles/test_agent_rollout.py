"""The agent's worker, with a tiny model and environments in threads or in processes: episodes become rows, go on beside
training under the same weights, and end with the worker. It also answers single prompts.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2
from tests.workers.engines.test_engines import STOPS, load, make_engine
from tests.workers.rollout.scripted import answer
from trainer.agentic.agent_trainer import EpisodeFilter
from trainer.ppo.advantage import estimate_advantages
from trainer.ppo.roles import ActorRole
from trainer.rollout.group_sources import EnvSource
from trainer.rollout.scheduler import RolloutScheduler
from verl_lite.config import AlgorithmConfig, PPOConfig
from verl_lite.metrics import values
from verl_lite.protocol import DataProto
from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, create_worker_groups
from verl_lite.single_controller.worker_group import LocalTransport
from workers.agents.episodes import EpisodeRunner
from workers.engines.base import SamplingParams
from workers.roles.actor_rollout import ActorWorker
from workers.rollout.answers import AnswerRunner
from workers.rollout.specs import EpisodeCounts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("model"), hidden=32, heads=1)


def settings(model: str, *, threshold: int = 0, workers: int = 0, **env_config: Any) -> PPOConfig:
    config = PPOConfig()
    config.model.path, config.rollout.name, config.trainer.device = model, "hf", "cpu"
    config.model.enable_gradient_checkpointing = False
    config.data.max_prompt_length, config.data.max_response_length = 48, 96
    config.actor.ppo_mini_batch_size, config.actor.use_dynamic_bsz = -1, False
    config.actor.ppo_micro_batch_size_per_gpu, config.actor.optim.lr = 2, 1e-2
    config.algorithm.adv_estimator = "grpo"
    agentic = config.agentic
    agentic.custom_envs = {
        "count": {
            "env_type": "tests.workers.counting_env:Counting",
            "env_config": env_config,
            "max_tokens_per_step": 8,
            "max_steps": 5,
        }
    }
    agentic.train_env_manager.tags = ["count"]
    agentic.train_env_manager.num_env_groups, agentic.train_env_manager.group_size = 3, 2
    agentic.rollout_batch_size, config.async_training.max_off_policy_threshold = 6, threshold
    agentic.env_pool.num_workers = workers
    return config


class Agent:
    """Worker group, role and scheduler of one slot."""

    def __init__(self, config: PPOConfig, log_dir: Path) -> None:
        recipe = ClassWithInitArgs(ActorWorker, config, 10, None, (), str(log_dir))
        self.group = create_worker_groups("inline", ResourcePool([1], use_gpu=False), {"actor_rollout": recipe})[
            "actor_rollout"
        ]
        self.group.init_model()
        self.role = ActorRole(self.group, config)
        source = EnvSource(config.agentic.train_env_manager, config.trainer.seed, config.agentic.rollout_batch_size)
        sampling, chosen = SamplingParams(max_tokens=96), EpisodeFilter(config)
        self.scheduler = RolloutScheduler(config, source, self.role, sampling, chosen, last_step=10)
        transport = self.group._transport
        assert isinstance(transport, LocalTransport)
        self.worker: ActorWorker = transport._slots[0].roles["actor_rollout"]

    def update_weights(self, version: int) -> None:
        self.scheduler.version = version
        self.role.update_weights(version)

    def train(self, steps: int) -> list[DataProto]:
        """Trains as a trainer does, with a threshold of 0 or 1."""
        batches = []
        self.update_weights(0)
        for step in range(1, steps + 1):
            batch = self.scheduler.get_batch(step)
            if self.scheduler.batches_ahead and step > 1:
                self.update_weights(step - 1)
            self.scheduler.begin_ahead(step)
            batches.append(batch)
            lesson = batch.select(meta_info_keys=[])
            lesson.batch["token_level_rewards"] = lesson.batch["token_level_scores"]
            self.role.compute_log_prob(lesson)
            self.role.update(estimate_advantages(lesson, AlgorithmConfig(), "grpo")[0], step)
            if not self.scheduler.batches_ahead:
                self.update_weights(step)
        return batches


@contextmanager
def agent(config: PPOConfig, log_dir: Path) -> Iterator[Agent]:
    made = Agent(config, log_dir)
    try:
        yield made
    finally:
        made.scheduler.finish()
        made.group.close()
        made.group.shutdown()


def contents(batch: DataProto) -> list[Any]:
    """All but the log-probs, whose last bits depend on what else was decoded."""
    columns = sorted(batch.batch.items())
    tensors = [(name, value.tolist()) for name, value in columns if name != "rollout_log_probs"]
    names = ("traj_id", "finish_reason", "step_scores", "reward_failed")
    return [tensors, [(name, batch.non_tensor_batch[name].tolist()) for name in names]]


def test_episodes_become_rows_that_the_policy_learns_from(model: str, tmp_path: Path) -> None:
    with agent(settings(model, bad=0), tmp_path) as subject:
        first, second = subject.train(2)
    for version, batch in enumerate((first, second)):
        failed = torch.from_numpy(batch.non_tensor_batch["reward_failed"].astype(bool))
        assert len(batch) == 6 and set(batch.batch["policy_version"][~failed].tolist()) <= {version}
        scores = batch.batch["token_level_scores"].sum(1)
        torch.testing.assert_close(scores, batch.batch["episode_scores"])
        assert batch.batch["response_mask"][failed].sum() == 0
        counts: EpisodeCounts = batch.meta_info["episodes"]
        assert counts.episodes == 6 and counts.failed == int(failed.sum())
        if counts.failed:
            assert "is bad" in str(counts.first_failure) and "count" in str(counts.first_failure)
    numbers = values(first.meta_info["metrics"])
    assert 0 < numbers["rollout/engine_busy_frac"] <= 1 and numbers["env/step_seconds/max"] >= 0
    assert numbers["scheduler/off_policy_ratio"] == 0


def test_the_rows_of_an_asynchronous_run_are_of_one_version_and_the_same_each_time(model: str, tmp_path: Path) -> None:
    """Environments take 0 or 3 ms a step: which turns are sampled beside training differs, what they say does not."""
    runs = []
    for latency_s in (0.0, 0.003):
        with agent(settings(model, threshold=1, latency_s=latency_s), tmp_path) as subject:
            batches = subject.train(3)
            beside = [values(batch.meta_info["metrics"]).get("rollout/seconds_beside_training", 0) for batch in batches]
            assert beside[0] == 0 and beside[1] > 0 and beside[2] > 0
        runs.append([contents(batch) for batch in batches])
        assert [set(batch.batch["policy_version"].tolist()) for batch in batches] == [{0}, {0}, {1}]
        assert [set(batch.batch["start_step"].tolist()) for batch in batches] == [{1}, {1}, {2}]
    assert runs[0] == runs[1]


def test_weights_change_under_episodes_only_if_they_may_span_updates(model: str, tmp_path: Path) -> None:
    with agent(settings(model, threshold=1), tmp_path) as subject:
        subject.update_weights(0)
        subject.scheduler.begin_ahead(1)
        with pytest.raises(RuntimeError, match=r"groups are running.*RolloutScheduler\.finish"):
            subject.update_weights(1)
        subject.scheduler.finish()
        subject.update_weights(1)
    with agent(settings(model, threshold=2), tmp_path) as subject:
        subject.update_weights(0)
        subject.scheduler.begin_ahead(1)
        assert not subject.worker.groups.is_idle
        subject.update_weights(1)
        assert subject.scheduler.get_batch(1).meta_info["episodes"].failed == 0


def test_a_loop_without_a_trainer_gets_answers_in_the_order_of_its_rows(model: str, tmp_path: Path) -> None:
    """The answers equal those of an engine with the worker's weights."""
    places = torch.arange(6)
    mask = (places >= places[:, None] - 1).long()
    names = {"uid": np.array(list("aabbcc"), dtype=object), "sample": np.tile(np.arange(2), 3)}
    rows = DataProto.from_dict({"prompts": mask * (places[:, None] + 20 + places), "prompt_mask": mask}, names)
    rows.meta_info |= {"sampling": SamplingParams(max_tokens=96), "seed": 3, "step": 2}
    with agent(settings(model), tmp_path) as subject:
        subject.role.update_weights(5)
        found = subject.group.generate_sequences(rows)
    engine = make_engine("hf", model, 144)
    load(engine, AutoModelForCausalLM.from_pretrained(model), 5)
    expected = answer(engine, rows, SamplingParams(max_tokens=96, stop_token_ids=STOPS), 96, step=2)
    lengths = found.batch["response_mask"].sum(1).tolist()
    assert lengths != sorted(lengths) and found.batch["policy_version"].tolist() == [5] * 6
    for name in ("prompts", "responses", "response_mask", "attention_mask"):
        assert torch.equal(found.batch[name], expected.batch[name])


def test_a_worker_runs_the_samples_of_its_run(model: str, tmp_path: Path) -> None:
    with agent(settings(model), tmp_path) as subject:
        worker = subject.worker
        assert isinstance(worker.groups._runner, EpisodeRunner)
        worker.runner.leads = False
        assert isinstance(worker.sample_runner(), AnswerRunner), "the rank only repeats the calls of the first rank"
        worker.runner.leads = True
        worker.config.agentic.train_env_manager.tags = []
        assert isinstance(worker.sample_runner(), AnswerRunner)


@pytest.mark.slow
def test_environments_are_processes_that_end_with_the_worker(model: str, tmp_path: Path) -> None:
    """And a reply that came in time is not late because nobody looked: training took longer than timeout_s."""
    config = settings(model, threshold=1, workers=1)
    config.agentic.env_pool.timeout_s = 3.0
    with agent(config, tmp_path) as subject:
        subject.update_weights(0)
        first = subject.scheduler.get_batch(1)
        pids = {int(metrics["pid"]) for metrics in first.non_tensor_batch["env_metrics"]}
        assert os.getpid() not in pids and all(Path(f"/proc/{pid}").exists() for pid in pids)
        subject.scheduler.begin_ahead(1)
        time.sleep(4)
        second = subject.scheduler.get_batch(2)
        assert second.meta_info["episodes"].failed == 0
        assert sorted(tmp_path.rglob("env-0.log"))
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

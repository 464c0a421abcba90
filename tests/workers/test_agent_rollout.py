"""The agent's worker, with a tiny model and environments in threads or in processes: episodes become rows, go on beside
training under the same weights, and end with the worker.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_model import tiny_qwen2
from trainer.advantage import compute_advantage
from trainer.roles import AgentRole
from trainer.rollout_scheduler import RolloutScheduler
from verl_lite.config import PPOConfig
from verl_lite.metrics import values
from verl_lite.protocol import DataProto
from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, create_worker_groups
from verl_lite.single_controller.worker_group import LocalTransport
from workers.agent_rollout import AgentRolloutWorker
from workers.rollout.base import SamplingParams
from workers.rollout.group_run import EpisodeCounts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("model"), hidden=32, heads=1)


def settings(model: str, *, ratio: int = 0, workers: int = 0, **env_config: Any) -> PPOConfig:
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
    agentic.rollout_batch_size, agentic.async_generation_ratio = 6, ratio
    agentic.env_pool.num_workers = workers
    return config


class Agent:
    """Worker group, role and scheduler of one slot."""

    def __init__(self, config: PPOConfig, log_dir: Path) -> None:
        recipe = ClassWithInitArgs(AgentRolloutWorker, config, 10, (), str(log_dir))
        self.group = create_worker_groups("inline", ResourcePool([1], use_gpu=False), {"actor_rollout": recipe})[
            "actor_rollout"
        ]
        self.group.init_model()
        self.role = AgentRole(self.group, config)
        self.scheduler = RolloutScheduler(
            config, config.agentic.train_env_manager, self.role, SamplingParams(max_tokens=96)
        )
        self.size = config.agentic.rollout_batch_size
        transport = self.group._transport
        assert isinstance(transport, LocalTransport)
        self.worker: AgentRolloutWorker = transport._slots[0].roles["actor_rollout"]

    def train(self, steps: int) -> list[DataProto]:
        """As a trainer does, ratio 0 or 1."""
        batches = []
        self.role.update_weights(0)
        for step in range(steps):
            data = DataProto(meta_info={"global_step": step})
            batch = self.scheduler.get_batch(data, self.size)
            if self.scheduler.ratio and step:
                self.role.update_weights(step)
            self.scheduler.begin_ahead(data, self.size)
            batches.append(batch)
            lesson = batch.select(meta_info_keys=[])
            lesson.batch["token_level_rewards"] = lesson.batch["token_level_scores"]
            self.role.compute_log_prob(lesson)
            self.role.update(compute_advantage(lesson, 1.0, 1.0, "grpo"), step + 1)
            if not self.scheduler.ratio:
                self.role.update_weights(step + 1)
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
        with agent(settings(model, ratio=1, latency_s=latency_s), tmp_path) as subject:
            batches = subject.train(3)
            beside = [values(batch.meta_info["metrics"]).get("rollout/seconds_beside_training", 0) for batch in batches]
            assert beside[0] == 0 and beside[1] > 0 and beside[2] > 0
        runs.append([contents(batch) for batch in batches])
        assert [set(batch.batch["policy_version"].tolist()) for batch in batches] == [{0}, {0}, {1}]
        assert [set(batch.batch["start_step"].tolist()) for batch in batches] == [{0}, {0}, {1}]
    assert runs[0] == runs[1]


def test_weights_do_not_change_under_episodes(model: str, tmp_path: Path) -> None:
    with agent(settings(model, ratio=1), tmp_path) as subject:
        subject.role.update_weights(0)
        subject.scheduler.begin_ahead(DataProto(meta_info={"global_step": 0}), 6)
        with pytest.raises(RuntimeError, match=r"episodes are running.*RolloutScheduler\.finish"):
            subject.role.update_weights(1)
        subject.scheduler.finish()
        subject.role.update_weights(1)


@pytest.mark.slow
def test_environments_are_processes_that_end_with_the_worker(model: str, tmp_path: Path) -> None:
    """And a reply that came in time is not late because nobody looked: training took longer than timeout_s."""
    config = settings(model, ratio=1, workers=1)
    config.agentic.env_pool.timeout_s = 3.0
    with agent(config, tmp_path) as subject:
        subject.role.update_weights(0)
        data = DataProto(meta_info={"global_step": 0})
        first = subject.scheduler.get_batch(data, 6)
        pids = {int(metrics["pid"]) for metrics in first.non_tensor_batch["env_metrics"]}
        assert os.getpid() not in pids and all(Path(f"/proc/{pid}").exists() for pid in pids)
        subject.scheduler.begin_ahead(data, 6)
        time.sleep(4)
        second = subject.scheduler.get_batch(DataProto(meta_info={"global_step": 1}), 6)
        assert second.meta_info["episodes"].failed == 0
        assert sorted(tmp_path.rglob("env-0.log"))
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

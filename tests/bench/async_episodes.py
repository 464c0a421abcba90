"""What agentic.async_generation_ratio=1 saves: episodes of the next step beside training, against one after the other.

Agents of a random model (Hugging Face engine, 1.1M parameters) in environments whose step takes 0, 50, 200 ms learn by
GRPO; steps of a synchronous and of an asynchronous run take turns in one process. On one device episodes and training
share the computer: what can be saved is the time in which the engine waits for environments, and no more of it than
training takes. Printed are medians of a step and its parts, and the shortest step that is possible: the synchronous one
less its waits. Options: --rounds N; --clock cpu counts processor seconds of this process and lets environments take
their time in these, for a machine that is busy otherwise.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.bench.agentic import Clock, TimedPool
from tests.bench.agentic_env import TURNS

WARM_UP = 2
EPISODES, GROUP_SIZE = 32, 4
TURN_TOKENS = 24
LATENCIES_MS = (0, 50, 200)


@dataclass
class Seconds:
    """Of each step of one run: waiting for the batch, training on it, all; and of the engine at work."""

    batch: list[float] = field(default_factory=list)
    training: list[float] = field(default_factory=list)
    step: list[float] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    beside: list[float] = field(default_factory=list)

    def median(self, name: str) -> float:
        return statistics.median(getattr(self, name)[WARM_UP:])


class Run:
    """A run of one ratio, one step at a time."""

    def __init__(self, config: Any, clock: Clock) -> None:
        from trainer.ray_trainer import training_sampling
        from trainer.roles import AgentRole
        from trainer.rollout_scheduler import RolloutScheduler
        from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, create_worker_groups
        from workers.agent_rollout import AgentRolloutWorker

        recipe = ClassWithInitArgs(AgentRolloutWorker, config, 1000)
        self.group = create_worker_groups("inline", ResourcePool([1], use_gpu=False), {"agent": recipe})["agent"]
        self.group.init_model()
        self.role, self.config, self.step_number = AgentRole(self.group, config), config, 0
        manager = config.agentic.train_env_manager
        self.scheduler = RolloutScheduler(config, manager, self.role, training_sampling(config))
        self.role.update_weights(0)
        self.seconds, self.clock = Seconds(), clock

    def step(self) -> None:
        """One training step, in the order of `trainer.agentic.agentic_pipeline`."""
        from trainer.advantage import compute_advantage
        from verl_lite.metrics import values
        from verl_lite.protocol import DataProto

        step, size, began = self.step_number, self.config.agentic.rollout_batch_size, self.clock.now()
        data = DataProto(meta_info={"global_step": step})
        batch = self.scheduler.get_batch(data, size)
        got = self.clock.now()
        if self.scheduler.ratio:
            self.role.update_weights(step)
            self.scheduler.begin_ahead(data, size)
        rows = batch.select(meta_info_keys=[])
        rows.batch["token_level_rewards"] = rows.batch["token_level_scores"]
        self.role.update(compute_advantage(rows, 1.0, 1.0, "grpo"), step + 1)
        if not self.scheduler.ratio:
            self.role.update_weights(step + 1)
        ended = self.clock.now()
        numbers = values(batch.meta_info["metrics"])
        beside = numbers.get("rollout/seconds_beside_training", 0.0)
        driven = numbers["rollout/mean_rank_seconds"] + beside
        self.seconds.batch.append(got - began)
        self.seconds.training.append(ended - got)
        self.seconds.step.append(ended - began)
        self.seconds.engine.append(numbers["rollout/engine_busy_frac"] * driven)
        self.seconds.beside.append(beside)
        self.step_number += 1


def options(model: str, ratio: int, latency_ms: float) -> Any:
    """The configuration of a run."""
    from verl_lite.config import PPOConfig

    config = PPOConfig()
    config.model.path, config.rollout.name, config.trainer.device = model, "hf", "cpu"
    config.model.enable_gradient_checkpointing = False
    config.data.max_prompt_length, config.data.max_response_length = 48, (TURN_TOKENS + 48) * TURNS
    config.actor.ppo_mini_batch_size, config.actor.ppo_max_token_len_per_gpu = -1, 2048
    agentic = config.agentic
    entry = {"env_type": "tests.bench.agentic_env:Slow", "max_tokens_per_step": TURN_TOKENS, "max_steps": TURNS}
    agentic.custom_envs = {"slow": entry | {"env_config": {"seconds": latency_ms / 1000}}}
    agentic.train_env_manager.tags, agentic.train_env_manager.group_size = ["slow"], GROUP_SIZE
    agentic.train_env_manager.num_env_groups = EPISODES // GROUP_SIZE
    agentic.rollout_batch_size, agentic.async_generation_ratio = EPISODES, ratio
    return config


def show(runs: dict[int, Run], latency_ms: float) -> None:
    """Prints medians, and what asynchrony saved of what it could."""
    names = ("batch", "training", "step", "engine", "beside")
    medians = {ratio: {name: run.seconds.median(name) for name in names} for ratio, run in runs.items()}
    print(f"{latency_ms:g} ms")
    for ratio, parts in medians.items():
        listed = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in parts.items())
        print(f"  ratio {ratio}: {listed}")
    sync, ahead = medians[0], medians[1]
    waits = min(sync["batch"] - sync["engine"], sync["training"])
    possible = sync["step"] - max(0.0, waits)
    print(
        f"  asynchronous / synchronous step {ahead['step'] / sync['step']:.2f}; "
        f"shortest possible {possible / sync['step']:.2f}",
        flush=True,
    )


def measure(model: str, latency_ms: float, clock: Clock, rounds: int) -> dict[int, Run]:
    """Both runs, turn by turn."""
    import workers.agent_rollout
    from workers.rollout import episodes, group_run

    if not clock.is_wall:
        for module in (episodes, group_run):
            module.time = SimpleNamespace(perf_counter=clock.now)  # type: ignore[attr-defined]
        workers.agent_rollout.EnvPool = lambda *_, **__: CpuPool(clock, latency_ms / 1000)  # type: ignore[misc,assignment]
    runs = {ratio: Run(options(model, ratio, latency_ms), clock) for ratio in (0, 1)}
    for _ in range(WARM_UP + rounds):
        for run in runs.values():
            run.step()
    for run in runs.values():
        run.scheduler.finish()
        run.group.close()
    return runs


class CpuPool(TimedPool):
    """As the worker wants it."""

    processes_replaced = 0

    def start(self) -> None:
        pass


def main(argv: list[str]) -> int:
    """Runs all latencies."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench async_episodes", description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    arguments = parser.parse_args(argv)
    from trainer.environment import prepare_driver

    prepare_driver()
    import torch

    torch.set_num_threads(1)
    from tests.tiny_model import tiny_qwen2

    folder = Path(tempfile.mkdtemp(prefix="bench-async-"))
    try:
        model = tiny_qwen2(folder / "model", hidden=128, layers=4, heads=2, max_positions=1024)
        for latency_ms in LATENCIES_MS:
            show(measure(model, latency_ms, Clock(arguments.clock), arguments.rounds), latency_ms)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0

"""A trainer that only answers, over any number of ranks in this process, each with a rollout engine of its own.

The ranks are real but for the training engine, which has room for one in a process: dispatch, padding, engines, reward
pool and metrics are those of a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2
from tests.tiny_run import good_row, write_rows
from trainer.data.prompts import PromptDataset
from trainer.observe.final_report import FitResult
from trainer.ppo.roles import ActorRole
from trainer.ray_trainer import RayPPOTrainer
from trainer.rewards.failures import reward_failure_log
from trainer.rewards.scores import RewardManager
from trainer.validation.sample import Sample
from verl_lite.config import PPOConfig
from verl_lite.rewards import RewardItem
from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, create_worker_groups
from verl_lite.single_controller.decorator import Dispatch, register
from verl_lite.single_controller.resource_pool import LocalService
from workers.engine.phase import PhaseManager
from workers.engines.base import build_rollout_engine
from workers.policy.tokenizer import load_tokenizer
from workers.rewards.reward_pool import RewardPool
from workers.roles.actor_rollout import ActorWorker
from workers.rollout.group_run import GroupRun
from workers.rollout.runner import Runner

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    mark = sum(map(ord, solution_str))
    return {"score": mark % 7 / 7, "acc": float(mark % 3 == 0), "pred": solution_str[:1]}
"""


class AnsweringWorker(ActorWorker):
    """The policy's worker without its training engine."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        config = self.config
        assert config.model.path is not None
        self.phases, self.tokenizer = PhaseManager(), load_tokenizer(config.model)
        self.rollout = build_rollout_engine(
            config.rollout.name,
            config.model.path,
            config.rollout,
            max_model_len=config.data.max_prompt_length + config.data.max_response_length,
            device=torch.device("cpu"),
            dtype=torch.float32,
            seed=config.trainer.seed,
        )
        model = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float32)
        self.rollout.load_weights(iter(model.named_parameters()), 0)
        self.rollout.reset_cache()
        self.runner = Runner(self.rollout)
        self.groups = GroupRun(self.sample_runner())
        self.register_mesh("rollout", dp_rank=self.rank, dp_size=self.world_size)


class CountingPool(RewardPool):
    """The pool; notes the key of each sample that it is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keys: list[Any] = []

    def submit(self, items: Iterable[RewardItem]) -> None:
        items = list(items)
        self.keys += [item.key for item in items]
        super().submit(items)

    def seen(self) -> list[Any]:
        return self.keys


def task(folder: Path, prompts: int = 11) -> PPOConfig:
    """The options of a validation of so many prompts of two sources with a random model, both in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = (f"{row}+{row * row}" + "+1" * (row % 4) for row in range(prompts))
    rows = (
        good_row(row, "sums" if row % 3 else "lists")
        | {"prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": str(row)}}
        for row, text in enumerate(asked)
    )
    (folder / "reward.py").write_text(REWARD)
    config = PPOConfig()
    config.model.path = tiny_qwen2(folder / "model")
    config.data.val_files = [str(write_rows(folder / "val.jsonl", rows))]
    config.data.max_prompt_length, config.data.max_response_length = 40, 8
    config.rollout.name, config.rollout.kv_cache_memory_mb, config.rollout.max_num_seqs = "hf", 32, 64
    config.reward.custom_reward_function.path, config.reward.num_workers = str(folder / "reward.py"), 0
    config.trainer.val_only, config.trainer.log_val_generations = True, 2
    return config


def sampled(config: PPOConfig, n: int) -> None:
    """Validation samples n answers at temperature 1, and a greedy one besides."""
    kwargs = config.rollout.val_kwargs
    kwargs.do_sample, kwargs.temperature, kwargs.n, kwargs.greedy_too = True, 1.0, n, True


class Quiet:
    """Trackers, and files of samples: keeps the samples, shows nothing."""

    def __init__(self) -> None:
        self.rows: list[Sample] = []
        self.lines: list[str] = []

    def log_samples(self, samples: list[Sample], step: int) -> None: ...

    def write_validation(self, samples: list[Sample], step: int, way: str = "") -> None:
        self.rows += samples

    def write_images(self, batch: Any) -> None: ...

    def show(self, text: str) -> None:
        self.lines.append(text)


@contextmanager
def answering(
    config: PPOConfig, folder: Path, ranks: int, trainer_class: type[RayPPOTrainer] = RayPPOTrainer
) -> Iterator[RayPPOTrainer]:
    """A trainer whose `validate` works, on so many ranks."""
    pool = LocalService(ClassWithInitArgs(CountingPool, config.reward, 0))
    recipe = {"actor_rollout": ClassWithInitArgs(AnsweringWorker, config, 1, pool)}
    group = create_worker_groups("inline", ResourcePool([ranks], use_gpu=False), recipe)["actor_rollout"]
    group.init_model()
    tokenizer, quiet = load_tokenizer(config.model), Quiet()
    failures = reward_failure_log(config.reward.max_error_rate, folder)
    parts: Any = {
        "actor": ActorRole(group, config),
        "rewards": RewardManager(pool, config.reward, failures),  # type: ignore[arg-type]
        "source": None,
        "total_steps": 0,
        "val_data": PromptDataset(config.data.val_files, tokenizer, config.data, split="val"),
        "tokenizer": tokenizer,
        "tracking": quiet,
        "samples": quiet,
        "saver": None,
        "run_dir": folder,
    }
    trainer = trainer_class(config, ref=None, critic=None, **parts)
    trainer.scheduler.version = trainer.steps.global_step  # the workers loaded the weights themselves
    yield trainer
    group.close()
    group.shutdown()


def validated(config: PPOConfig, folder: Path, ranks: int) -> tuple[dict[str, float], list[Sample], list[str]]:
    """Numbers, samples, and the keys of the samples that the reward function was given."""
    with answering(config, folder, ranks) as trainer:
        metrics = trainer.validate(FitResult())
        rows: list[Sample] = trainer.samples.rows  # type: ignore[attr-defined]
        return metrics, rows, trainer.rewards.pool.call("seen")  # type: ignore[attr-defined]

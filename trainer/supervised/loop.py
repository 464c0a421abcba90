"""Training without a rollout: the loop that supervised fine-tuning and reward models share.

Rows are drawn in epochs, collated, planned once for all ranks and given to workers, whose class and loss are the
caller's. With one rank everything runs in this process. The result is a folder in Hugging Face format.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch

from trainer.environment import worker_environment
from verl_lite.config import ConfigError, SupervisedConfig
from verl_lite.config.checks import ranges
from verl_lite.device import cpu_count, device_type, dist_backend, get_device
from verl_lite.errors import UserError
from verl_lite.machine.claim import Wish, claimed_gpus
from verl_lite.metrics import combine, values
from verl_lite.protocol import DataProto
from verl_lite.seqlen_balance import plan_batch
from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup, create_worker_groups
from verl_lite.single_controller.decorator import Dispatch, register
from verl_lite.single_controller.guard import guarded
from workers.engine.checkpoint import export
from workers.engine.fsdp import FSDPEngine
from workers.policy.loading import PolicyBuilder, token_network
from workers.update import LossFunction


class Sized(Protocol):
    """A row. Its length: tokens that a forward pass over it reads."""

    def __len__(self) -> int: ...


Row = TypeVar("Row", bound=Sized)


@dataclass(frozen=True)
class Task(Generic[Row]):
    """What is trained. worker: its class, a `SupervisedWorker` made as worker(config, steps). train, val: rows.

    collate: rows to a batch. count: (B,) what the loss counts of each row of a batch; their sum over an optimizer step
    is meta_info["num_tokens"] of its micro-batches.
    """

    name: str
    worker: type[SupervisedWorker]
    train: Sequence[Row]
    val: Sequence[Row]
    collate: Callable[[Sequence[Row]], DataProto]
    count: Callable[[DataProto], torch.Tensor]


class SupervisedWorker(Worker):
    """One rank's training engine. A subclass names the policy, its options in a pass, and the loss."""

    def __init__(
        self,
        config: SupervisedConfig,
        total_training_steps: int,
        build_policy: PolicyBuilder,
        loss: LossFunction,
        **options: Any,
    ) -> None:
        super().__init__()
        self.loss, self.options = loss, options
        device = get_device(config.trainer.device)
        self.init_process_group(dist_backend(device))
        self.engine = FSDPEngine(
            token_network(config.model, build_policy),
            config.fsdp_config,
            config.optim,
            device=device,
            total_training_steps=total_training_steps,
            seed=config.trainer.seed,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def train(self, data: DataProto) -> DataProto:
        """One optimizer step on a planned batch; metrics in meta_info, of which one is `loss`."""
        metrics = self.engine.train(self.rows(data), self.loss, epochs=1, **self.options)
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def measure(self, data: DataProto) -> DataProto:
        """What `train` reports of the loss on a planned batch, without training."""
        rows = self.rows(data)
        outputs = self.engine.infer(rows, **self.options)
        rows.meta_info["num_tokens"] = 1  # of the loss itself nothing is used here
        return DataProto(meta_info={"metrics": self.loss(rows, outputs)[1]})

    def rows(self, data: DataProto) -> DataProto:
        """What the policy reads of a planned batch."""
        return data

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, path: str) -> None:
        """Writes a sharded checkpoint."""
        self.engine.save(path)


@dataclass(frozen=True)
class Trained:
    """folder: the model in Hugging Face format. loss: mean of the last training steps. val: the last measurements, by
    name; empty without validation rows."""

    folder: Path
    steps: int
    loss: float
    val: dict[str, float]


def train(config: SupervisedConfig, task: Task[Row], report: Callable[[str], None]) -> Trained:
    """Trains as configured. report: takes each line of progress."""
    check_lengths(config, task)
    rows = task.train if config.data.train_max_samples < 0 else task.train[: config.data.train_max_samples]
    batches = list(draw_batches(len(rows), config))
    folder = Path(config.trainer.default_local_dir).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with (
        guarded(),
        own_devices(config, folder, report),
        worker_group(config, task, len(batches), folder) as group,
        (folder / "metrics.jsonl").open("w") as log,
    ):
        run = _Run(config, task, group, report, log.write)
        for step, chosen in enumerate(batches, start=1):
            run.step(step, len(batches), [rows[place] for place in chosen])
            if task.val and (
                step == len(batches) or (config.trainer.test_freq > 0 and step % config.trainer.test_freq == 0)
            ):
                run.validate(step)
        shards = folder / "checkpoint"
        group.save(str(shards))
    export(str(shards), str(folder / "hf"))
    shutil.rmtree(shards)
    return Trained(folder / "hf", len(batches), float(np.mean(run.losses[-config.trainer.log_freq :])), run.val)


def own_devices(config: SupervisedConfig, folder: Path, report: Callable[[str], None]) -> AbstractContextManager[None]:
    """Inside, the run's devices are its own, or shared knowingly; see `verl_lite.machine.claim`."""
    trainer = config.trainer
    if device_type(trainer.device) == "cpu" or config.ray_kwargs.ray_init.address is not None:
        return nullcontext()
    return claimed_gpus(Wish(trainer.n_gpus_per_node, str(folder), shared=trainer.share_devices), report)


def check(config: SupervisedConfig) -> None:
    """Raises UserError for settings that cannot work."""
    if not config.data.train_files:
        raise UserError("data.train_files is empty: give parquet, json or jsonl files")
    if config.model.path is None:
        raise UserError("model.path is null: give a Hugging Face folder or a cached hub name")
    if problems := list(ranges(config)):
        raise ConfigError(problems)
    if config.trainer.backend == "inline" and config.trainer.n_gpus_per_node > 1:
        raise UserError(
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node} with trainer.backend=inline: one process is one "
            "rank; set trainer.backend=ray"
        )


def check_lengths(config: SupervisedConfig, task: Task[Row]) -> None:
    """Raises UserError if a row is longer than a micro-batch."""
    longest = max(len(row) for row in (*task.train, *task.val))
    if longest > config.data.max_token_len_per_gpu:
        raise UserError(
            f"data.max_token_len_per_gpu={config.data.max_token_len_per_gpu}: the longest row has {longest} tokens, "
            "which a micro-batch has to hold; raise it, or lower data.max_length"
        )


def draw_batches(rows: int, config: SupervisedConfig) -> Iterator[list[int]]:
    """Row numbers of each optimizer step. A step has data.train_batch_size rows; the last of an epoch may have fewer.

    Raises UserError if there are no steps.
    """
    steps, size = config.trainer.total_training_steps, config.data.train_batch_size
    per_epoch = -(-rows // size)
    total = config.trainer.total_epochs * per_epoch if steps is None else steps
    if total < 1:
        raise UserError(
            f"trainer.total_training_steps={steps}, trainer.total_epochs={config.trainer.total_epochs}: there is no "
            "step to train"
        )
    for step in range(total):
        epoch, place = divmod(step, per_epoch)
        order = np.arange(rows)
        if config.data.shuffle:
            order = np.random.default_rng([config.trainer.seed, epoch]).permutation(rows)
        yield order[place * size : (place + 1) * size].tolist()


@contextmanager
def worker_group(config: SupervisedConfig, task: Task[Row], total_steps: int, folder: Path) -> Iterator[WorkerGroup]:
    """The ranks, started, and ended with the context."""
    trainer = config.trainer
    on_cpu = device_type(trainer.device) == "cpu"
    threads = max(1, cpu_count() // trainer.n_gpus_per_node)
    pool = ResourcePool([trainer.n_gpus_per_node], use_gpu=not on_cpu)
    roles = {task.name: ClassWithInitArgs(task.worker, config, total_steps)}
    with ExitStack() as stack:
        if trainer.backend == "ray":
            from verl_lite.single_controller.ray_cluster import ray_running

            gpus = 0 if on_cpu else trainer.n_gpus_per_node
            stack.enter_context(ray_running(config.ray_kwargs.ray_init, task.name, num_gpus=gpus))
        env = worker_environment(on_cpu, threads)
        group = create_worker_groups(trainer.backend, pool, roles, env=env, log_dir=folder / "logs")[task.name]
        yield group
        group.shutdown()


class _Run(Generic[Row]):
    """One training: plans and dispatches batches, keeps and writes metrics."""

    def __init__(
        self,
        config: SupervisedConfig,
        task: Task[Row],
        group: WorkerGroup,
        report: Callable[[str], None],
        write: Callable[[str], object],
    ) -> None:
        self.config, self.task, self.group = config, task, group
        self.report, self.write = report, write
        self.losses: list[float] = []
        self.val: dict[str, float] = {}
        self.started = time.perf_counter()

    def step(self, step: int, total: int, rows: Sequence[Row]) -> None:
        """Trains on one batch."""
        metrics = self._dispatch(self.group.train, rows)
        self.losses.append(metrics["loss"])
        seconds = time.perf_counter() - self.started
        self._log(step, {f"train/{name}": value for name, value in metrics.items()} | {"seconds": seconds})
        if step % self.config.trainer.log_freq == 0 or step == total:
            recent = float(np.mean(self.losses[-self.config.trainer.log_freq :]))
            self.report(f"step {step}/{total}  loss {recent:.3f}  {seconds:.0f} s")

    def validate(self, step: int) -> None:
        """Measures on the validation rows."""
        self.val = self._dispatch(self.group.measure, self.task.val)
        self._log(step, {f"val/{name}": value for name, value in self.val.items()})
        shown = ", ".join(f"{name} {value:.3f}" for name, value in self.val.items())
        self.report(f"step {step}  validation {shown}")

    def _dispatch(self, call: Callable[[DataProto], list[DataProto]], rows: Sequence[Row]) -> dict[str, float]:
        batch = self.task.collate(rows)
        plan = plan_batch(
            np.array([len(row) for row in rows]),
            world_size=self.group.world_size,
            mini_batch_size=None,
            max_token_len=self.config.data.max_token_len_per_gpu,
            num_tokens=self.task.count(batch).numpy(),
        )
        return values(combine([answer.meta_info["metrics"] for answer in call(plan.apply(batch))]))

    def _log(self, step: int, data: dict[str, float]) -> None:
        self.write(json.dumps({"step": step, "data": data}) + "\n")

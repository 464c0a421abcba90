"""Supervised fine-tuning: the loop, and the worker that does its heavy part.

The same training engine, planner and worker groups as in reinforcement learning; only the loss differs. With one rank
everything runs in this process. The result is a folder in Hugging Face format.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trainer.environment import worker_environment
from trainer.sft_data import Example, collate, load_examples
from verl_lite.config import SFTConfig
from verl_lite.device import cpu_count, device_type, dist_backend, get_device
from verl_lite.device_claim import Wish, claimed_gpus
from verl_lite.errors import UserError
from verl_lite.metrics import Metric, combine, values
from verl_lite.model_checks import adapter
from verl_lite.protocol import DataProto
from verl_lite.seqlen_balance import plan_batch
from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup, create_worker_groups
from verl_lite.single_controller.decorator import Dispatch, register
from verl_lite.single_controller.guard import guarded
from workers.engine.checkpoint import export
from workers.engine.fsdp import FSDPEngine
from workers.policy.causal_lm import causal_lm
from workers.policy.tokenizer import load_tokenizer

LOG_PROB_CHUNK_TOKENS = 1024


def sft_loss(data: DataProto, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Negative log-likelihood of the learnt tokens, divided by their number in the whole optimizer step."""
    nll = -(outputs["log_probs"] * data.batch["response_mask"]).sum()
    tokens = int(data.batch["response_mask"].sum())
    return nll / data.meta_info["num_tokens"], {"loss": Metric.mean(float(nll.detach()), tokens)}


class SFTWorker(Worker):
    """One rank's training engine."""

    def __init__(self, config: SFTConfig, total_training_steps: int) -> None:
        super().__init__()
        self.config = config
        device = get_device(config.trainer.device)
        self.init_process_group(dist_backend(device))
        self.engine = FSDPEngine(
            config.model,
            config.fsdp_config,
            config.optim,
            device=device,
            total_training_steps=total_training_steps,
            build_policy=causal_lm(LOG_PROB_CHUNK_TOKENS),
            seed=config.trainer.seed,
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def train(self, data: DataProto) -> DataProto:
        """One optimizer step on a planned batch; metrics in meta_info."""
        metrics = self.engine.train(data, sft_loss, temperature=1.0, calculate_entropy=False, epochs=1)
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def measure(self, data: DataProto) -> DataProto:
        """The loss on a planned batch, without training; metrics in meta_info."""
        outputs = self.engine.infer(data, temperature=1.0, calculate_entropy=False)
        mask = data.batch["response_mask"]
        nll = -float((outputs["log_probs"] * mask).sum())
        return DataProto(meta_info={"metrics": {"loss": Metric.mean(nll, int(mask.sum()))}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save(self, path: str) -> None:
        """Writes a sharded checkpoint."""
        self.engine.save(path)


@dataclass(frozen=True)
class SFTResult:
    """folder: the model in Hugging Face format. loss: of the last training steps; val_loss: None without such files."""

    folder: Path
    steps: int
    loss: float
    val_loss: float | None


def run_sft(config: SFTConfig, report: Callable[[str], None] = print) -> SFTResult:
    """Trains as configured. report: takes each line of progress. Raises UserError for input that cannot be used."""
    check(config)
    tokenizer = load_tokenizer(config.model)
    train = load_examples(config.data.train_files, tokenizer, config.data, option="data.train_files")
    if config.data.train_max_samples >= 0:
        train = train[: config.data.train_max_samples]
    val = []
    if config.data.val_files:
        val = load_examples(config.data.val_files, tokenizer, config.data, option="data.val_files")
    batches = list(draw_batches(len(train), config))
    folder = Path(config.trainer.default_local_dir).expanduser().absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with (
        guarded(),
        own_devices(config, folder, report),
        worker_group(config, len(batches), folder) as group,
        (folder / "metrics.jsonl").open("w") as log,
    ):
        run = _Run(config, group, tokenizer.pad_token_id, report, log.write)
        for step, rows in enumerate(batches, start=1):
            run.step(step, len(batches), [train[row] for row in rows])
            if val and (
                step == len(batches) or (config.trainer.test_freq > 0 and step % config.trainer.test_freq == 0)
            ):
                run.validate(step, val)
        shards = folder / "checkpoint"
        group.save(str(shards))
    export(str(shards), str(folder / "hf"))
    shutil.rmtree(shards)
    return SFTResult(folder / "hf", len(batches), float(np.mean(run.losses[-config.trainer.log_freq :])), run.val_loss)


def own_devices(config: SFTConfig, folder: Path, report: Callable[[str], None]) -> AbstractContextManager[None]:
    """Inside, the run's devices are its own, or shared knowingly; see `verl_lite.device_claim`."""
    trainer = config.trainer
    if device_type(trainer.device) == "cpu" or config.ray_kwargs.ray_init.address is not None:
        return nullcontext()
    return claimed_gpus(Wish(trainer.n_gpus_per_node, str(folder), shared=trainer.share_devices), report)


def check(config: SFTConfig) -> None:
    """Raises UserError for settings that cannot work."""
    if not config.data.train_files:
        raise UserError("data.train_files is empty: give parquet, json or jsonl files")
    if config.model.path is None:
        raise UserError("model.path is null: give a Hugging Face folder or a cached hub name")
    for key, value in (
        ("data.train_batch_size", config.data.train_batch_size),
        ("trainer.log_freq", config.trainer.log_freq),
        ("trainer.n_gpus_per_node", config.trainer.n_gpus_per_node),
    ):
        if value < 1:
            raise UserError(f"{key}={value}: expected at least 1")
    for problem in adapter(config.model):
        raise UserError(problem)
    if config.trainer.backend == "inline" and config.trainer.n_gpus_per_node > 1:
        raise UserError(
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node} with trainer.backend=inline: one process is one "
            "rank; set trainer.backend=ray"
        )


def draw_batches(rows: int, config: SFTConfig) -> Iterator[list[int]]:
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
def worker_group(config: SFTConfig, total_steps: int, folder: Path) -> Iterator[WorkerGroup]:
    """The ranks, started, and ended with the context."""
    trainer = config.trainer
    on_cpu = device_type(trainer.device) == "cpu"
    threads = max(1, cpu_count() // trainer.n_gpus_per_node)
    pool = ResourcePool([trainer.n_gpus_per_node], use_gpu=not on_cpu)
    roles = {"sft": ClassWithInitArgs(SFTWorker, config, total_steps)}
    if trainer.backend == "ray":
        from verl_lite.single_controller.ray_cluster import ray_running

        with ray_running(config.ray_kwargs.ray_init, "sft", num_gpus=0 if on_cpu else trainer.n_gpus_per_node):
            group = create_worker_groups("ray", pool, roles, env=worker_environment(on_cpu, threads), log_dir=folder)
            yield group["sft"]
            group["sft"].shutdown()
        return
    group = create_worker_groups(trainer.backend, pool, roles)
    yield group["sft"]
    group["sft"].shutdown()


class _Run:
    """One training: plans and dispatches batches, keeps and writes metrics."""

    def __init__(
        self,
        config: SFTConfig,
        group: WorkerGroup,
        pad_token_id: int,
        report: Callable[[str], None],
        write: Callable[[str], object],
    ) -> None:
        self.config, self.group, self.pad_token_id = config, group, pad_token_id
        self.report, self.write = report, write
        self.losses: list[float] = []
        self.val_loss: float | None = None
        self.started = time.perf_counter()

    def step(self, step: int, total: int, examples: list[Example]) -> None:
        """Trains on one batch."""
        metrics = self._dispatch(self.group.train, examples)
        self.losses.append(metrics["loss"])
        seconds = time.perf_counter() - self.started
        self._log(step, {f"train/{name}": value for name, value in metrics.items()} | {"seconds": seconds})
        if step % self.config.trainer.log_freq == 0 or step == total:
            recent = float(np.mean(self.losses[-self.config.trainer.log_freq :]))
            self.report(f"step {step}/{total}  loss {recent:.3f}  {seconds:.0f} s")

    def validate(self, step: int, examples: list[Example]) -> None:
        """Measures the loss on the validation rows."""
        self.val_loss = self._dispatch(self.group.measure, examples)["loss"]
        self._log(step, {"val/loss": self.val_loss})
        self.report(f"step {step}  validation loss {self.val_loss:.3f}")

    def _dispatch(self, call: Callable[[DataProto], list[DataProto]], examples: list[Example]) -> dict[str, float]:
        batch = collate(examples, self.pad_token_id)
        plan = plan_batch(
            batch.batch["attention_mask"].sum(1).numpy(),
            world_size=self.group.world_size,
            mini_batch_size=None,
            max_token_len=self.config.data.max_token_len_per_gpu,
            num_tokens=batch.batch["response_mask"].sum(1).numpy(),
        )
        return values(combine([answer.meta_info["metrics"] for answer in call(plan.apply(batch))]))

    def _log(self, step: int, data: dict[str, float]) -> None:
        self.write(json.dumps({"step": step, "data": data}) + "\n")

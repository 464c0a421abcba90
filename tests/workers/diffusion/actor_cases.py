"""What runs on each rank in the tests of reward flow's worker."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.workers.diffusion.tiny_wan import clips, flow_config, planned
from tests.workers.engine_cases import CPU, rank_and_world, whole_state
from verl_lite.metrics import Metric, values
from verl_lite.protocol import DataProto
from workers.diffusion.reward_flow_worker import RewardFlowWorker
from workers.diffusion.reward_policy import RewardFlowPolicy, reward_flow_network
from workers.engine.network import BuildArguments

Arrays = dict[str, np.ndarray]


def worker_of(path: str, **options: Any) -> RewardFlowWorker:
    """A worker of this rank, with its model."""
    worker = RewardFlowWorker(flow_config(path, **options), total_training_steps=10)
    worker.init_model()
    return worker


def policy_of(path: str, **options: Any) -> RewardFlowPolicy:
    """The policy alone, without an engine."""
    torch.manual_seed(5)
    arguments = BuildArguments(torch.float32, torch.float32, trains=True, with_weights=True, device=CPU)
    policy = reward_flow_network(flow_config(path, **options))(arguments)
    assert isinstance(policy, RewardFlowPolicy)
    return policy.train()


def part(rows: int, micro_batch_size: int, without_face: tuple[int, ...] = ()) -> DataProto:
    """This rank's part of the planned batch."""
    rank, world = rank_and_world()
    return planned(clips(rows, without_face), world, micro_batch_size)[rank]


def start(name: str, shape: torch.Size) -> torch.Tensor:
    """A start of the adapter at which all of it has a gradient (B = 0 leaves A without one)."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return 0.2 * torch.randn(shape, generator=generator)


@torch.no_grad()
def move(worker: RewardFlowWorker) -> None:
    """Puts the adapter at `start`."""
    for name, parameter in worker.engine.trained.items():
        whole = start(name, parameter.shape)
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements))


def gradient(
    path: str, rows: int, micro_batch_size: int, without_face: tuple[int, ...], options: dict[str, Any]
) -> tuple[Arrays, dict[str, float]]:
    """The whole gradient of one optimizer step through the worker, and this rank's metrics."""
    worker = worker_of(path, **options)
    move(worker)
    captured: Arrays = {}

    def capture(lr: float) -> dict[str, Metric]:
        gradients = {name: value.grad for name, value in worker.engine.trained.items()}
        assert all(isinstance(value, DTensor) for value in gradients.values())
        captured.update({name: value.full_tensor().numpy() for name, value in gradients.items()})  # type: ignore[union-attr]
        return {}

    assert worker.engine.optimizer is not None
    worker.engine.optimizer.step = capture  # type: ignore[method-assign, assignment]
    metrics = worker.train_step(part(rows, micro_batch_size, without_face)).meta_info["metrics"]
    return captured, values(metrics)


@cache
def plain_gradient(
    path: str, rows: int, without_face: tuple[int, ...] = (), noise: int | None = None
) -> tuple[Arrays, float]:
    """The same by autograd on the module alone, a sample at a time: no engine, no sharding. And the mean divergence.

    noise: the seed of all samples'; None = that of the clip.
    """
    policy: Any = policy_of(path)
    data, divergence = planned(clips(rows, without_face), 1, rows)[0], 0.0
    if noise is not None:
        data.batch["noise_seed"].fill_(noise)
    with torch.no_grad():
        for name, parameter in policy.model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(start(name, parameter.shape))
    for row in range(rows):
        outputs = policy(policy.prepare_inputs(data[[row]], CPU)[0])
        (outputs["loss"].sum() / rows).backward()
        divergence += float(outputs["kl_loss"].detach()) / rows
    found = {name: value.grad.numpy() for name, value in policy.model.named_parameters() if value.grad is not None}
    return found, divergence


def trained(path: str, steps: int, save: str = "", load: str = "", **options: Any) -> Arrays:
    """State after some train steps; loads first and saves last where asked to."""
    worker = worker_of(path, **options)
    if load:
        worker.load_checkpoint(load)
    for _ in range(steps):
        worker.train_step(part(3, 1))
    if save:
        worker.save_checkpoint(save, background=True)
        worker.finish_save()
    return whole_state(worker.engine)

"""AdamW on shards against torch.optim.AdamW, clipping, skipping, the schedule."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from verl_lite.config import OptimConfig
from workers.engine.fsdp import ensure_process_group
from workers.engine.optimizer import ShardedAdamW, lr_factor


def sharded(*tensors: torch.Tensor) -> dict[str, DTensor]:
    ensure_process_group(torch.device("cpu"))
    mesh = init_device_mesh("cpu", (1,))
    return {
        f"p{index}": torch.nn.Parameter(DTensor.from_local(tensor.clone(), mesh, [Shard(0)]))
        for index, tensor in enumerate(tensors)
    }


def set_gradients(parameters: dict[str, DTensor], *gradients: torch.Tensor) -> None:
    for parameter, gradient in zip(parameters.values(), gradients, strict=True):
        parameter.grad = DTensor.from_local(gradient.clone(), parameter.device_mesh, parameter.placements)


def test_equals_adamw_with_clipping() -> None:
    torch.manual_seed(0)
    start = torch.randn(5, 3), torch.randn(4)
    config = OptimConfig(lr=1.0, weight_decay=0.1, betas=[0.8, 0.95], eps=1e-6, clip_grad=1.0)
    parameters = sharded(*start)
    optimizer = ShardedAdamW(parameters, config, dist.group.WORLD)
    reference = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    expected = torch.optim.AdamW(reference, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-6)
    for step in range(4):
        gradients = torch.randn(5, 3) * 10**step * 0.1, torch.randn(4) * 0.1
        set_gradients(parameters, *gradients)
        metrics = optimizer.step(lr=1e-2)
        for parameter, gradient in zip(reference, gradients, strict=True):
            parameter.grad = gradient.clone()
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
        assert metrics["grad_norm"].value == pytest.approx(norm, rel=1e-6)
        for parameter in reference:
            parameter.grad *= min(1.0, 1.0 / (norm + 1e-6))
        expected.step()
        for found, wanted in zip(parameters.values(), reference, strict=True):
            assert torch.allclose(found.to_local(), wanted, atol=1e-6)
            assert found.grad is None


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_non_finite_gradient_skips_the_step(poison: float) -> None:
    parameters = sharded(torch.ones(3), torch.ones(2))
    optimizer = ShardedAdamW(parameters, OptimConfig(lr=1.0), dist.group.WORLD)
    set_gradients(parameters, torch.tensor([1.0, poison, 1.0]), torch.ones(2))
    metrics = optimizer.step(lr=0.1)
    assert metrics["grad_norm_nonfinite"].value == 1.0
    assert math.isnan(metrics["grad_norm"].value)  # a mean over nothing: left out of reports
    assert optimizer.steps_taken == 0
    for parameter in parameters.values():
        assert torch.equal(parameter.to_local(), torch.ones_like(parameter.to_local()))
        assert parameter.grad is None
    set_gradients(parameters, torch.ones(3), torch.ones(2))
    assert optimizer.step(lr=0.1)["grad_norm_nonfinite"].value == 0.0
    assert optimizer.steps_taken == 1


def test_a_missing_gradient_names_its_parameter() -> None:
    parameters = sharded(torch.ones(3), torch.ones(2))
    optimizer = ShardedAdamW(parameters, OptimConfig(), dist.group.WORLD)
    with pytest.raises(ValueError, match="p0"):
        optimizer.step(lr=0.1)


def test_lr_schedules_by_hand() -> None:
    constant = OptimConfig(lr_warmup_steps=4)
    assert [lr_factor(step, constant, 100) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    by_ratio = OptimConfig(lr_warmup_steps_ratio=0.2)
    assert [lr_factor(step, by_ratio, 10) for step in range(3)] == [0.5, 1.0, 1.0]
    assert lr_factor(0, OptimConfig(), 10) == 1.0
    cosine = OptimConfig(lr_scheduler_type="cosine", lr_warmup_steps=2, min_lr_ratio=0.1)
    found = [lr_factor(step, cosine, 10) for step in (0, 1, 2, 6, 10, 50)]
    assert found == pytest.approx([0.5, 1.0, 1.0, 0.55, 0.1, 0.1])

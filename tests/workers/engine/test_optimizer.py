"""AdamW and Muon on shards against torch's, clipping, skipping, the schedule."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.workers.engine_cases import Batch, Case, build_engine, loss_fn, planned, ragged_batch
from tests.workers.ranks import Ranks
from verl_lite.config import OptimConfig
from verl_lite.errors import UserError
from workers.engine.fsdp import ensure_process_group
from workers.engine.optimizer import ShardedAdamW, ShardedMuon, hidden_matrices, lr_factor


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


MUON = OptimConfig(optimizer="muon", weight_decay=0.1, betas=[0.8, 0.95], eps=1e-6, clip_grad=1e9, muon_momentum=0.9)
SHAPES = {"wide": (5, 8), "tall": (9, 4), "rows": (3, 6), "bias": (7,), "embedding": (6, 4)}
MATRICES = ("wide", "tall", "rows")


def muon_steps(meshes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Parameters and moments, whole, after three steps with the same whole gradients on a mesh of ranks."""
    ensure_process_group(torch.device("cpu"))
    mesh = init_device_mesh("cpu", meshes)
    placements = [Replicate()] * (len(meshes) - 1) + [Shard(0)]
    generator = torch.Generator().manual_seed(0)

    def draw() -> dict[str, DTensor]:
        whole = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
        return {name: distribute_tensor(tensor, mesh, placements) for name, tensor in whole.items()}

    parameters = {name: torch.nn.Parameter(value) for name, value in draw().items()}
    optimizer = ShardedMuon(parameters, MUON, mesh.get_group(mesh.ndim - 1), MATRICES)
    for _ in range(3):
        for name, gradient in draw().items():
            parameters[name].grad = gradient
        optimizer.step(lr=1e-2)
    return {key: value.full_tensor().detach().numpy() for key, value in {**parameters, **optimizer.moments()}.items()}


def test_muon_equals_torch() -> None:
    found = muon_steps((1,))
    generator = torch.Generator().manual_seed(0)
    wanted = {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    matrices = [wanted[name] for name in MATRICES]
    optimizers = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([wanted["bias"], wanted["embedding"]], 1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    ]
    for _ in range(3):
        for parameter in wanted.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value.detach().numpy(), atol=1e-6, err_msg=name)
        assert (f"momentum.{name}" in found) == (name in MATRICES) == (f"exp_avg_sq.{name}" not in found)
    np.testing.assert_allclose(found["momentum.wide"], optimizers[0].state[matrices[0]]["momentum_buffer"], atol=1e-6)


def test_muon_clips_gradients_by_the_norm_of_all_parameters() -> None:
    """The orthogonalized momentum has no scale, but the steps' weights in it depend on the clipping: the gradients grow
    tenfold from step to step."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 8, generator=generator), torch.randn(7, generator=generator)
    config = replace(MUON, clip_grad=1.0)
    parameters = sharded(*start)
    optimizer = ShardedMuon(parameters, config, dist.group.WORLD, ["p0"])
    matrix, bias = (torch.nn.Parameter(tensor.clone()) for tensor in start)
    muon = torch.optim.Muon([matrix], lr=1e-2, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([bias], 1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(3):
        matrix.grad, bias.grad = (torch.randn(tensor.shape, generator=generator) * 10**step for tensor in start)
        set_gradients(parameters, matrix.grad, bias.grad)
        optimizer.step(lr=1e-2)
        torch.nn.utils.clip_grad_norm_([matrix, bias], 1.0)
        muon.step()
        adamw.step()
    assert torch.allclose(parameters["p0"].to_local(), matrix, atol=1e-6)
    assert torch.allclose(parameters["p1"].to_local(), bias, atol=1e-6)


def muon_changes(path: str) -> dict[str, np.ndarray]:
    """The change of each parameter of a small model after two mini-batches with Muon."""
    engine = build_engine(path, Case(), OptimConfig(lr=1e-3, optimizer="muon"))
    data, _ = planned(ragged_batch(Batch(rows=9, shared_prompts=3)), Case(), mini_batch_size=4)
    start = {name: value.full_tensor().detach().clone() for name, value in engine.trained.items()}
    engine.train(data, loss_fn, temperature=1.0, calculate_entropy=True)
    return {name: (value.full_tensor().detach() - start[name]).numpy() for name, value in engine.trained.items()}


@pytest.mark.slow
def test_muon_makes_the_same_update_on_any_number_of_ranks(path: str, ranks: Ranks) -> None:
    alone = muon_steps((1,))
    for mesh in ((2,), (4,), (2, 2)):  # of 3 rows, the fourth of 4 ranks has none
        for found in ranks.run(muon_steps, mesh, size=math.prod(mesh)):
            for name, value in alone.items():
                exact = name.removeprefix("momentum.") in MATRICES
                np.testing.assert_allclose(found[name], value, rtol=0, atol=0 if exact else 1e-6, err_msg=name)
    one, two = (ranks.run(muon_changes, path, size=size)[0] for size in (1, 2))
    for name, value in one.items():  # the sum of gradients over ranks differs by rounding, which torch's bf16 amplifies
        assert np.linalg.norm(two[name] - value) < 0.05 * np.linalg.norm(value), name


def test_muon_updates_the_linear_layers_of_the_blocks(path: str) -> None:
    engine = build_engine(path, Case(), OptimConfig(optimizer="muon"))
    linear = {f"{part}_proj.weight" for part in ("q", "k", "v", "o", "gate", "up", "down")}
    assert isinstance(engine.optimizer, ShardedMuon)
    assert {".".join(name.split(".")[-2:]) for name in engine.optimizer.matrices} == linear
    assert all(".layers." in name for name in engine.optimizer.matrices)
    with pytest.raises(UserError, match=r"optim.optimizer=muon: no layer .* use adamw"):
        hidden_matrices([torch.nn.LayerNorm(3)], sharded(torch.ones(3)))


def test_moments_of_another_optimizer_are_refused(path: str, tmp_path: Path) -> None:
    build_engine(path, Case()).save(str(tmp_path))
    engine = build_engine(path, Case(), OptimConfig(optimizer="muon"))
    with pytest.raises(
        UserError, match=r"has no momentum\..*, which optim.optimizer=muon needs. Set the optim.optimizer"
    ):
        engine.load(str(tmp_path))


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

"""Offload of activations and placement of frozen modules on a CUDA device: what the device holds, and equal numbers."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import nn

from workers.diffusion.memory import Placement, activation_offload

pytestmark = pytest.mark.gpu


def test_offload_holds_nothing_on_the_device() -> None:
    """A chain of 64 layers: of its 64 activations of 4 MiB the device holds a few."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Tanh()) for _ in range(64))).cuda()
    first = cast("nn.Linear", cast("nn.Sequential", layers[0])[0])
    x, held, gradients = torch.randn(1024, 1024, device="cuda"), [], []
    for enabled in (False, True):
        layers.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        with activation_offload(enabled):
            loss = layers(x).sum()
        held.append(torch.cuda.memory_allocated() - before)
        loss.backward()
        assert first.weight.grad is not None
        gradients.append(first.weight.grad.clone())
    assert torch.equal(*gradients)
    assert held[1] < 0.1 * held[0]


def test_a_placed_module_takes_device_memory_only_at_work() -> None:
    module = nn.Linear(1024, 1024).requires_grad_(False)
    x = torch.randn(4, 1024)
    expected = module(x)
    before = torch.cuda.memory_allocated()
    placement = Placement(torch.device("cuda"), offload=True)
    placement.add(module)
    assert torch.cuda.memory_allocated() == before
    for _ in range(2):
        with placement.at_work(module):
            assert torch.cuda.memory_allocated() >= before + 4 * 1024 * 1024
            torch.testing.assert_close(module(x.cuda()).cpu(), expected, rtol=1e-3, atol=1e-3)
        assert module.weight.device.type == "cpu"
    assert torch.cuda.memory_allocated() < before + 4 * 1024 * 1024

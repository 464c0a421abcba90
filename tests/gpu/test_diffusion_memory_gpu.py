"""Placement of frozen modules on a CUDA device: what the device holds, and equal numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from workers.diffusion.memory_saving import Placement

pytestmark = pytest.mark.gpu


def test_a_placed_module_takes_device_memory_only_at_work() -> None:
    module = nn.Linear(1024, 1024).requires_grad_(False)
    x = torch.randn(4, 1024)
    expected = module(x)
    x.cuda() @ x.cuda().T  # cuBLAS allocates its workspace, which it keeps
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

"""In a joined cluster each worker looks at the device that it was given, before anything is built on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.build import worker_classes
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.machine import gpus
from verl_lite.machine.gpus import GIB, Gpu, GpuProcess, ResourceRequest
from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, create_worker_groups
from workers.device_holder import DeviceHolder


def test_a_device_that_is_taken_is_refused_by_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = (GpuProcess(1, 40 * GIB),)
    monkeypatch.setattr(gpus, "list_gpus", lambda: [Gpu(0, "GPU-0", "x", 80 * GIB, 39 * GIB, taken)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as Ray sets it
    roles = {"devices": ClassWithInitArgs(DeviceHolder, ResourceRequest(1))}
    with pytest.raises(UserError, match="GPU 0 .* is in use") as caught:
        create_worker_groups("inline", ResourcePool([1]), roles)
    assert "raised in devices, rank 0, its constructor" in caught.value.__notes__


def test_it_is_the_first_role_and_only_in_joined_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.build.device_type", lambda name: "cuda")
    monkeypatch.setattr("trainer.resources.device_type", lambda name: "cuda")
    config = PPOConfig()
    assert "devices" not in worker_classes(config, 10, None, tmp_path)
    config.ray_kwargs.ray_init.address = "10.0.0.1:6379"
    config.trainer.nnodes = 2
    roles = worker_classes(config, 10, None, tmp_path)
    assert next(iter(roles)) == "devices" and roles["devices"].args[0].count == 1

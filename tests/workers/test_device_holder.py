"""In a joined cluster each worker leases the device that it was given, before anything else is built on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.build import worker_classes
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.machine import claim
from verl_lite.machine.claim import Wish
from verl_lite.machine.gpus import GIB, Gpu
from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, create_worker_groups
from workers.device_holder import DeviceHolder


def test_the_device_is_held_as_long_as_the_worker_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(index, f"GPU-{index}", "x", 80 * GIB, 79 * GIB) for index in range(4)]
    monkeypatch.setattr(claim, "list_gpus", lambda: gpus)
    monkeypatch.setenv("VERL_LITE_LEASES", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")  # as Ray sets it
    roles = {"devices": ClassWithInitArgs(DeviceHolder, Wish(1, "/runs/one"))}
    group = create_worker_groups("inline", ResourcePool([1]), roles)["devices"]
    group.init_model()
    assert [path.name for path in tmp_path.iterdir()] == ["GPU-3"]
    with pytest.raises(UserError, match="run /runs/one") as caught:
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

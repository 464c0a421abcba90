"""What a run over several machines needs of them, and of the devices that a joined cluster gives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.launch.build import worker_classes
from trainer.launch.resources import require_shared_folder
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.machine import gpus
from verl_lite.machine.gpus import GIB, Gpu, GpuProcess, ResourceRequest
from verl_lite.single_controller import ClassWithInitArgs, ResourcePool, create_worker_groups
from verl_lite.single_controller.worker import Worker
from workers.roles.device_holder import DeviceHolder


class Machines:
    """A worker group whose ranks see these folders in the place of the driver's."""

    def __init__(self, *folders: Path) -> None:
        self.folders = folders

    def execute_all_sync(self, method: str, path: str) -> list[Any]:
        return [getattr(Worker(), method)(f"{folder}/{Path(path).name}", 0.1) for folder in self.folders]


def test_a_machine_that_does_not_share_the_run_folder_is_named(tmp_path: Path) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    own.mkdir()
    require_shared_folder(Machines(shared, shared), shared)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"trainer\.default_local_dir=.*shared is not the same folder on .*NFS"):
        require_shared_folder(Machines(shared, own), shared)  # type: ignore[arg-type]
    assert not list(shared.iterdir())


def test_a_device_that_is_taken_is_refused_by_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = (GpuProcess(1, 40 * GIB),)
    monkeypatch.setattr(gpus, "list_gpus", lambda: [Gpu(0, "GPU-0", "x", 80 * GIB, 39 * GIB, taken)])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as Ray sets it
    roles = {"devices": ClassWithInitArgs(DeviceHolder, ResourceRequest(1))}
    with pytest.raises(UserError, match="GPU 0 .* is in use") as caught:
        create_worker_groups("inline", ResourcePool([1]), roles)
    assert "raised in devices, rank 0, its constructor" in caught.value.__notes__


def test_its_holder_is_the_first_role_in_a_joined_cluster_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.launch.build.device_type", lambda name: "cuda")
    monkeypatch.setattr("trainer.launch.resources.device_type", lambda name: "cuda")
    config = PPOConfig()
    assert "devices" not in worker_classes(config, 10, None, tmp_path)
    config.ray_kwargs.ray_init.address = "10.0.0.1:6379"
    config.trainer.nnodes = 2
    roles = worker_classes(config, 10, None, tmp_path)
    assert next(iter(roles)) == "devices" and roles["devices"].args[0].count == 1

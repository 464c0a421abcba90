"""Which GPUs there are, which are ours and who uses them, on machines made of a fake management library."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from verl_lite.errors import UserError
from verl_lite.machine.gpus import (
    GIB,
    Gpu,
    GpuProcess,
    ResourceRequest,
    is_busy,
    list_gpus,
    reserve_gpus,
    visible_gpus,
    without_processes,
)


class FakeNvml:
    """As `pynvml`: devices are dicts; a divided one has `parts`."""

    NVML_DEVICE_MIG_ENABLE = 1

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    def __init__(self, *devices: dict[str, Any], driver: bool = True) -> None:
        self.devices, self.driver, self.open = devices, driver, 0

    def nvmlInit(self) -> None:
        if not self.driver:
            raise self.NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.devices[index]

    def nvmlDeviceGetMigMode(self, device: dict[str, Any]) -> tuple[int, int]:
        if "parts" not in device:
            raise self.NVMLError("not supported")
        return (1, 1) if device["parts"] else (0, 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, device: dict[str, Any]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: dict[str, Any], place: int) -> dict[str, Any]:
        if place >= len(device["parts"]):
            raise self.NVMLError("not found")
        return device["parts"][place]

    def nvmlDeviceGetUUID(self, device: dict[str, Any]) -> bytes:
        return device["uuid"].encode()  # older versions give bytes

    def nvmlDeviceGetName(self, device: dict[str, Any]) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, device: dict[str, Any]) -> Any:
        if device.get("unified"):
            raise self.NVMLError_NotSupported("Not Supported")
        total = device.get("total", 80 * GIB)
        return SimpleNamespace(total=total, free=total - device.get("used", GIB // 2))

    def nvmlDeviceGetComputeRunningProcesses(self, device: dict[str, Any]) -> list[Any]:
        if "processes" not in device:
            raise self.NVMLError("no permission")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in device["processes"]]


def device(uuid: str, *processes: tuple[int, int | None], **more: Any) -> dict[str, Any]:
    used = GIB // 2 + sum(used or 0 for _, used in processes)
    return {"uuid": uuid, "processes": processes, "used": used} | more


def four(*processes: tuple[int, int | None]) -> list[Gpu]:
    """Four devices; the processes are on the second."""
    names = ["GPU-aa11", "GPU-ab22", "GPU-cc33", "GPU-dd44"]
    found = list_gpus(FakeNvml(*(device(name, *(processes if place == 1 else ())) for place, name in enumerate(names))))
    assert found is not None
    return found


def test_a_device_without_memory_of_its_own_has_that_of_the_machine() -> None:
    """As a DGX Spark: whatever runs on the machine is no other user of the device; processes on it are."""
    idle, used = list_gpus(FakeNvml(device("GPU-a", unified=True), device("GPU-b", (1, 3 * GIB), unified=True))) or []
    assert idle.shares_memory and idle.total_bytes == psutil.virtual_memory().total
    assert not is_busy(replace(idle, free_bytes=0)) and is_busy(used)


def test_devices_and_parts_are_listed() -> None:
    parts = [device("MIG-1"), device("MIG-2", (7, GIB))]
    nvml = FakeNvml(device("GPU-a"), device("GPU-b", parts=parts), device("GPU-c", parts=[]), {"uuid": "GPU-d"})
    gpus = list_gpus(nvml)
    assert gpus is not None and nvml.open == 0
    assert [(gpu.index, gpu.uuid) for gpu in gpus] == [
        (0, "GPU-a"), (1, "MIG-1"), (1, "MIG-2"), (2, "GPU-c"), (3, "GPU-d"),
    ]  # fmt: skip
    assert gpus[2].processes == (GpuProcess(7, GIB),) and str(gpus[0]) == "GPU 0 (NVIDIA H200, GPU-a)"
    assert list_gpus(FakeNvml(driver=False)) is None
    (one,) = list_gpus(FakeNvml(device("GPU-a", (7, 20 * GIB), (8, 4 * GIB)))) or []
    left = without_processes(one, {7, 99})
    assert left.processes == (GpuProcess(8, 4 * GIB),) and left.free_bytes == one.free_bytes + 20 * GIB


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, ["GPU-aa11", "GPU-ab22", "GPU-cc33", "GPU-dd44"]),
        ("2,0", ["GPU-cc33", "GPU-aa11"]),
        (" 3 , 1", ["GPU-dd44", "GPU-ab22"]),
        ("GPU-cc33", ["GPU-cc33"]),
        ("GPU-d,GPU-aa", ["GPU-dd44", "GPU-aa11"]),  # beginnings, as CUDA allows
        ("", []),
        ("-1", []),
        ("1,-1,2", ["GPU-ab22"]),
        ("NoDevFiles", []),
    ],
)
def test_cuda_visible_devices_in_any_spelling(setting: str | None, expected: list[str]) -> None:
    environment = {} if setting is None else {"CUDA_VISIBLE_DEVICES": setting}
    assert [one.gpu.uuid for one in visible_gpus(four(), environment)] == expected


@pytest.mark.parametrize(
    ("setting", "problem"),
    [("0,4", "'4' names no device"), ("GPU-a", "names no device"), ("1,GPU-ab22", "named twice")],
)
def test_what_names_nothing_is_an_error_not_fewer_devices(setting: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        visible_gpus(four(), {"CUDA_VISIBLE_DEVICES": setting})
    assert "0 (GPU-aa11), 1 (GPU-ab22)" in str(caught.value)


def test_parts_are_named_by_their_own_uuid_or_by_the_device() -> None:
    gpus = list_gpus(FakeNvml(device("GPU-a", parts=[device("MIG-1"), device("MIG-2")]), device("GPU-b")))
    assert gpus is not None
    for setting, expected in (("MIG-2", ["MIG-2"]), ("0", ["MIG-1"]), ("1,MIG-1", ["GPU-b", "MIG-1"])):
        found = visible_gpus(gpus, {"CUDA_VISIBLE_DEVICES": setting})
        assert [one.gpu.uuid for one in found] == expected
    assert [one.gpu.uuid for one in visible_gpus(gpus, {})] == ["MIG-1", "GPU-b"]


@pytest.mark.parametrize(
    ("processes", "used", "busy"),
    [
        ([], GIB, False),
        ([(4711, 12 * GIB)], 13 * GIB, True),
        ([(4711, GIB // 2)], GIB, False),  # a desktop
        ([(4711, None)], GIB, True),  # memory not told
        ([], 20 * GIB, True),  # another container
        ([(4711, GIB // 2)], 20 * GIB, True),
        ([(os.getpid(), 12 * GIB)], 13 * GIB, False),  # ourselves
    ],
)
def test_when_a_device_is_busy(processes: list[tuple[int, int | None]], used: int, busy: bool) -> None:
    others = tuple(GpuProcess(pid, memory) for pid, memory in processes)
    assert is_busy(Gpu(0, "GPU-a", "x", 80 * GIB, 80 * GIB - used, others)) is busy


def reserve(request: ResourceRequest, gpus: list[Gpu]) -> tuple[str, list[str]]:
    told: list[str] = []
    with reserve_gpus(request, told.append, gpus):
        return os.environ["CUDA_VISIBLE_DEVICES"], told


def test_the_first_free_devices_are_taken_and_only_those_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert reserve(ResourceRequest(2), four()) == ("0,1", [])
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-dd44,1,2")
    busy = four((os.getppid(), 12 * GIB))
    seen, told = reserve(ResourceRequest(2), busy)
    assert seen == "GPU-dd44,2" and os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-dd44,1,2"
    assert len(told) == 1 and "GPU 1 " in told[0] and f"pid {os.getppid()} of user" in told[0]
    assert "12.0 GiB" in told[0]


def test_too_few_devices_says_who_has_the_others_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    busy = four((2**22 + 1, 12 * GIB))
    with pytest.raises(UserError) as caught:
        reserve(ResourceRequest(3), busy)
    for part in (
        "trainer.n_gpus_per_node=3, but only 2 of 3", "CUDA_VISIBLE_DEVICES=0,1,2", "GPU 1 (NVIDIA H200, GPU-ab22)",
        "12.0 GiB, not visible from here", "trainer.share_devices=true",
    ):  # fmt: skip
        assert part in str(caught.value)
    assert reserve(ResourceRequest(1), busy) == ("0", [])
    seen, told = reserve(ResourceRequest(3, shared=True), busy)
    assert seen == "0,1,2" and len(told) == 1 and "GPU 1 " in told[0]


def test_memory_that_the_engine_will_not_get(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with pytest.raises(UserError, match=r"has 19.5 of 80.0 GiB free, rollout.gpu_memory_utilization=0.5 .* 0.24 fits"):
        reserve(ResourceRequest(1, memory_share=0.5, shared=True), four((1, 60 * GIB)))
    assert reserve(ResourceRequest(1, memory_share=0.2, shared=True), four((1, 60 * GIB)))[0] == "1"

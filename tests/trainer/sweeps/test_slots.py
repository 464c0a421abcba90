"""Places for runs on devices that others use too, with devices that are made up."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from trainer.sweeps.slots import CpuPool, GpuPool, Slot, choose_devices, shared_memory
from verl_lite.errors import UserError
from verl_lite.machine.gpus import GIB, Gpu, GpuProcess, VisibleGpu
from verl_lite.machine.lease import Holder, leased

OWN, FOREIGN = 4_000_001, 4_000_002
"""No processes: above the largest id that Linux gives."""


class Machine:
    """Devices whose state a test changes."""

    def __init__(self, count: int) -> None:
        self.gpus = [Gpu(number, f"GPU-{number}", "H200", 80 * GIB, 80 * GIB) for number in range(count)]

    def use(self, number: int, pid: int, used: int, utilisation: int | None = None) -> None:
        gpu = self.gpus[number]
        processes = (*gpu.processes, GpuProcess(pid, used))
        self.gpus[number] = dataclasses.replace(
            gpu, free_bytes=gpu.free_bytes - used, processes=processes, utilisation=utilisation
        )

    def pool(self, leases: Path, **more: object) -> GpuPool:
        devices = [VisibleGpu(str(gpu.index), gpu) for gpu in self.gpus]
        return GpuPool(devices, look=lambda: self.gpus, own=lambda: [OWN], leases=leases, **more)  # type: ignore[arg-type]


def taken(pool: GpuPool, avoid: tuple[str, ...] = ()) -> Slot:
    slot = pool.take(avoid)
    assert slot is not None, pool.why_not()
    return slot


def visible(slot: Slot) -> str:
    return slot.environment["CUDA_VISIBLE_DEVICES"]


def test_cpu_slots() -> None:
    pool = CpuPool(2, threads=3)
    first, second = pool.take(), pool.take()
    assert first is not None and second is not None and pool.take() is None
    assert first.environment == {"OMP_NUM_THREADS": "3"} and (first.name, second.name) == ("cpu 0", "cpu 1")
    pool.give_back(first)
    assert pool.take() == first


def test_each_run_gets_free_devices_of_its_own(tmp_path: Path) -> None:
    machine = Machine(4)
    machine.use(1, FOREIGN, 20 * GIB)
    pool = machine.pool(tmp_path, per_trial=2)
    assert pool.size == 2
    slot = taken(pool)
    assert visible(slot) == "0,2" and pool.take() is None, "3 is alone, and 1 is somebody else's"
    assert any("GPU 1" in reason and str(FOREIGN) in reason for reason in pool.why_not())
    machine.gpus[1] = Machine(2).gpus[1]
    assert visible(taken(pool)) == "1,3", "looked at anew"
    pool.give_back(slot)
    assert visible(taken(pool)) == "0,2"


def test_a_lease_of_a_run_and_of_another_sweep_are_heeded(tmp_path: Path) -> None:
    machine = Machine(2)
    with leased("GPU-0", Holder(os.getpid(), "ann", "/home/ann/run", "noon"), folder=tmp_path):
        first = machine.pool(tmp_path)
        assert visible(taken(first)) == "1"
    other = machine.pool(tmp_path)
    assert visible(taken(other)) == "0" and other.take() is None, "1 belongs to the first sweep"
    assert any("is held by pid" in reason for reason in other.why_not())


def test_a_device_that_works_for_nobody_visible_is_busy(tmp_path: Path) -> None:
    machine = Machine(1)
    machine.gpus[0] = dataclasses.replace(machine.gpus[0], utilisation=80)
    pool = machine.pool(tmp_path)
    assert pool.take() is None and "80% of its time" in pool.why_not()[0]


def test_several_runs_share_a_device_by_memory(tmp_path: Path) -> None:
    machine = Machine(2)
    pool = machine.pool(tmp_path, share=0.5)
    assert pool.size == 4
    first = taken(pool)
    machine.use(0, OWN, 35 * GIB, utilisation=95)
    second = taken(pool)
    assert (visible(first), visible(second)) == ("0", "0"), "one device is filled before the next"
    assert "trainer.share_devices=true" in first.settings
    assert visible(taken(pool)) == "1"
    machine.use(1, OWN, 10 * GIB)
    machine.use(1, FOREIGN, 15 * GIB)
    assert pool.take() is None, "somebody else came to 1"
    assert shared_memory({"rollout.gpu_memory_utilization": 0.6}, 0.5) == ("rollout.gpu_memory_utilization=0.3",)
    assert shared_memory({"rollout.gpu_memory_utilization": 0.6}, 1.0) == shared_memory({}, 0.5) == ()


def test_a_device_that_loses_runs_is_left_alone(tmp_path: Path) -> None:
    pool = Machine(2).pool(tmp_path)
    first = taken(pool)
    pool.give_back(first, lost=True)
    assert visible(taken(pool, avoid=first.devices)) == "1", "the same run goes elsewhere"
    again = taken(pool)
    assert visible(again) == "0"
    pool.give_back(again, lost=True)
    assert pool.take() is None and "was lost by 2 runs" in pool.why_not()[0] and pool.size == 1


def test_devices_are_chosen_within_what_is_visible() -> None:
    gpus = Machine(4).gpus
    names = [one.token for one in choose_devices(["0", "GPU-3"], gpus, {})]
    assert names == ["0", "GPU-3"] or names == ["0", "3"]
    assert len(choose_devices(None, gpus, {"CUDA_VISIBLE_DEVICES": "2,3"})) == 2
    for words, environment, said in (
        (["0", "7"], {}, "'7' is no device of this machine; there are 0 \\(GPU-0\\), 1"),
        (["0"], {"CUDA_VISIBLE_DEVICES": "2,3"}, "'0' is not among CUDA_VISIBLE_DEVICES=2,3"),
        (["1", "GPU-1"], {}, "named twice"),
    ):
        with pytest.raises(UserError, match=said):
            choose_devices(words, gpus, environment)
    with pytest.raises(UserError, match="--per-trial 3: there are 2 devices"):
        GpuPool(choose_devices(["0", "1"], gpus, {}), per_trial=3)

"""Which GPUs this process may use, and who uses them already, before any of them is touched.

NVIDIA's management library (package nvidia-ml-py, module `pynvml`) tells what there is; CUDA_VISIBLE_DEVICES, in any of
its spellings, says which of that is ours. A part of a device that is divided (MIG) counts as a device.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil

from verl_lite.errors import UserError

GIB = 1 << 30
_NONE = ("", "-1", "NoDevFiles")
_IDLE_PROCESSES_BYTES = 1 * GIB  # a desktop, an idle notebook
_IDLE_DEVICE_BYTES = 2 * GIB  # what a driver itself may hold of a large device


@dataclass(frozen=True)
class GpuProcess:
    """A process on a GPU; used_bytes is None where the library does not tell."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a part of one. index: of the whole device, in the order of the bus. uuid: GPU-... or MIG-...

    utilisation: percent of the last moment in which something ran on it; None where the library does not tell.
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    processes: tuple[GpuProcess, ...] = ()
    utilisation: int | None = None

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.uuid})"


@dataclass(frozen=True)
class VisibleGpu:
    """A GPU and the word by which CUDA_VISIBLE_DEVICES names it."""

    token: str
    gpu: Gpu


def list_gpus(nvml: Any = None) -> list[Gpu] | None:
    """The GPUs of this machine, with parts in place of a divided one; None if nvidia-ml-py is not installed or finds
    no driver. nvml: the module, or one like it."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        wholes = [(index, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())]
        return [_gpu(nvml, index, part) for index, whole in wholes for part in _parts(nvml, whole)]
    finally:
        nvml.nvmlShutdown()


def _parts(nvml: Any, whole: Any) -> list[Any]:
    try:
        divided = nvml.nvmlDeviceGetMigMode(whole)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError:  # a device that cannot be divided
        return [whole]
    if not divided:
        return [whole]
    parts = []
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
        try:
            parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, place))
        except nvml.NVMLError:  # this place is empty
            continue
    return parts


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:  # not told of this kind of device, or not to this user; the memory in use still tells
        processes = []
    try:
        utilisation = int(nvml.nvmlDeviceGetUtilizationRates(handle).gpu)
    except nvml.NVMLError:  # parts of a device have none
        utilisation = None
    return Gpu(
        index,
        _text(nvml.nvmlDeviceGetUUID(handle)),
        _text(nvml.nvmlDeviceGetName(handle)),
        int(memory.total),
        int(memory.free),
        tuple(GpuProcess(process.pid, process.usedGpuMemory) for process in processes),
        utilisation,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str] = os.environ) -> list[VisibleGpu]:
    """Those of `gpus` that CUDA_VISIBLE_DEVICES leaves to this process, in its order; all of them where it is not set.

    It may hold numbers, UUIDs (GPU-..., MIG-..., or the beginnings of these), or nothing; -1 ends the list, as in CUDA.
    Raises UserError for a word that names no device or a device named twice, where CUDA would silently see fewer.
    """
    setting = environment.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return [VisibleGpu(str(gpu.index), gpu) for gpu in _first_parts(gpus)]
    chosen: list[VisibleGpu] = []
    for token in (word.strip() for word in setting.split(",")):
        if token in _NONE:
            break
        found = _find(gpus, token)
        if found is None or any(found is one.gpu for one in chosen):
            problem = "names no device of this machine" if found is None else "is named twice"
            known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
            raise UserError(f"CUDA_VISIBLE_DEVICES={setting!r}: {token!r} {problem}; there are {known}")
        chosen.append(VisibleGpu(token, found))
    return chosen


def _find(gpus: Sequence[Gpu], token: str) -> Gpu | None:
    if token.isdigit():
        return next((gpu for gpu in gpus if gpu.index == int(token)), None)
    found = [gpu for gpu in gpus if gpu.uuid.startswith(token)]
    return found[0] if len(found) == 1 else None


def _first_parts(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Of a divided device CUDA shows only the first part unless another is named."""
    return list({gpu.index: gpu for gpu in reversed(gpus)}.values())[::-1]


def other_users(gpu: Gpu) -> list[str]:
    """One line for each process on the device: pid, user, memory, command."""
    return [_describe(process) for process in gpu.processes if process.pid != os.getpid()]


def _describe(process: GpuProcess) -> str:
    memory = "unknown memory" if process.used_bytes is None else f"{process.used_bytes / GIB:.1f} GiB"
    try:
        known = psutil.Process(process.pid)
        command = " ".join(known.cmdline()) or known.name()
        return f"pid {process.pid} of user {known.username()}, {memory}: {command[:100]}"
    except psutil.Error:
        return f"pid {process.pid}, {memory}, not visible from here (another container, or it just ended)"


def without_processes(gpu: Gpu, own: Collection[int]) -> Gpu:
    """The device as if these processes were not there: what others leave of it. Its utilisation is then not known."""
    theirs = tuple(process for process in gpu.processes if process.pid not in own)
    if len(theirs) == len(gpu.processes):
        return gpu
    freed = sum(process.used_bytes or 0 for process in gpu.processes if process.pid in own)
    return replace(gpu, free_bytes=gpu.free_bytes + freed, processes=theirs, utilisation=None)


def is_busy(gpu: Gpu) -> bool:
    """Whether others use the device in earnest: by more than a desktop or an idle notebook does.

    That is processes with together more than 1 GiB, or with memory that is not told; or more than 2 GiB held by nobody
    that can be seen (another container).
    """
    others = [process.used_bytes for process in gpu.processes if process.pid != os.getpid()]
    held = sum(used or 0 for used in others)
    hidden = gpu.total_bytes - gpu.free_bytes - sum(process.used_bytes or 0 for process in gpu.processes)
    return None in others or held > _IDLE_PROCESSES_BYTES or hidden > _IDLE_DEVICE_BYTES

"""Lists the GPUs that this process may use and their other users, and reserves free ones for a run.

NVIDIA's management library (package nvidia-ml-py, module `pynvml`) lists the devices without initializing them;
CUDA_VISIBLE_DEVICES, in any of its spellings, selects from them. Each MIG partition of a device counts as a device.
"""

import importlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import psutil

from verl_lite.errors import UserError

GIB = 1 << 30
_VARIABLE = "CUDA_VISIBLE_DEVICES"
_IDLE_PROCESSES_BYTES = 1 * GIB  # memory of a desktop or an idle notebook
_IDLE_DEVICE_BYTES = 2 * GIB  # memory that the GPU's driver itself may use on a large device


class GpuProcess(NamedTuple):
    """A process on a GPU; used_bytes is None if the library does not report it."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """A GPU or a MIG partition. index: PCI bus index of the whole device. uuid: GPU-... or MIG-..."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    processes: tuple[GpuProcess, ...] = ()

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.uuid})"


class VisibleGpu(NamedTuple):
    """A GPU and its name in CUDA_VISIBLE_DEVICES."""

    token: str
    gpu: Gpu


def list_gpus(nvml: Any = None) -> list[Gpu] | None:
    """Returns the GPUs of this machine, with MIG partitions instead of a partitioned device.

    Returns None if nvidia-ml-py is not installed or finds no driver. nvml: replaces the module `pynvml`.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return None
    except nvml.NVMLError:
        return None
    try:
        wholes = [(index, nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())]
        return [_gpu(nvml, index, part) for index, whole in wholes for part in _parts(nvml, whole)]
    finally:
        nvml.nvmlShutdown()


def _parts(nvml: Any, whole: Any) -> list[Any]:
    parts = []
    with suppress(nvml.NVMLError):  # the device has no MIG, or no further partitions
        if nvml.nvmlDeviceGetMigMode(whole)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
            for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
                parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, place))
    return parts or [whole]


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:  # not supported by the device or not permitted; used memory is still known
        processes = []
    words = (nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle))
    uuid, name = (word.decode() if isinstance(word, bytes) else word for word in words)
    found = tuple(GpuProcess(process.pid, process.usedGpuMemory) for process in processes)
    return Gpu(index, uuid, name, int(memory.total), int(memory.free), found)


def visible_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str] | None = None) -> list[VisibleGpu]:
    """Selects the GPUs named by CUDA_VISIBLE_DEVICES, in its order; all GPUs if the variable is not set.

    The variable contains indices or UUIDs (GPU-..., MIG-..., or prefixes of these), or is empty; -1 ends the list, as
    in CUDA. Raises UserError for a name that matches no device and for a repeated device; CUDA would ignore the rest of
    the list.
    """
    setting = (os.environ if environment is None else environment).get(_VARIABLE)
    if setting is None:  # CUDA shows only the first partition of a partitioned device
        first = {gpu.index: gpu for gpu in reversed(gpus)}
        return [VisibleGpu(str(gpu.index), gpu) for gpu in reversed(first.values())]
    chosen: list[VisibleGpu] = []
    for token in (word.strip() for word in setting.split(",")):
        if token in ("", "-1", "NoDevFiles"):
            break
        found = [gpu for gpu in gpus if (gpu.index == int(token) if token.isdigit() else gpu.uuid.startswith(token))]
        found = found[:1] if token.isdigit() or len(found) == 1 else []
        if not found or any(found[0] is one.gpu for one in chosen):
            problem = "is named twice" if found else "names no device of this machine"
            known = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
            raise UserError(f"{_VARIABLE}={setting!r}: {token!r} {problem}; the devices are {known}")
        chosen.append(VisibleGpu(token, found[0]))
    return chosen


def other_users(gpu: Gpu) -> list[str]:
    """Returns one line for each other process on the device: pid, user, memory, command."""
    lines = []
    for process in (process for process in gpu.processes if process.pid != os.getpid()):
        memory = "unknown memory" if process.used_bytes is None else f"{process.used_bytes / GIB:.1f} GiB"
        try:
            known = psutil.Process(process.pid)
            command = " ".join(known.cmdline()) or known.name()
            lines.append(f"pid {process.pid} of user {known.username()}, {memory}: {command[:100]}")
        except psutil.Error:
            lines.append(f"pid {process.pid}, {memory}, not visible from here (another container, or it just ended)")
    return lines


def without_processes(gpu: Gpu, own: Collection[int]) -> Gpu:
    """Returns the device as it would be without these processes."""
    theirs = tuple(process for process in gpu.processes if process.pid not in own)
    freed = sum(process.used_bytes or 0 for process in gpu.processes if process.pid in own)
    return replace(gpu, free_bytes=gpu.free_bytes + freed, processes=theirs)


def is_busy(gpu: Gpu) -> bool:
    """Returns True if other processes use the device, beyond what a desktop or an idle notebook uses.

    The limits are 1 GiB for all other processes together, and 2 GiB of memory that no visible process holds (another
    container). A process with unknown memory also counts as use.
    """
    others = [process.used_bytes for process in gpu.processes if process.pid != os.getpid()]
    held = sum(used or 0 for used in others)
    hidden = gpu.total_bytes - gpu.free_bytes - sum(process.used_bytes or 0 for process in gpu.processes)
    return None in others or held > _IDLE_PROCESSES_BYTES or hidden > _IDLE_DEVICE_BYTES


@dataclass(frozen=True)
class ResourceRequest:
    """The devices that a run needs on one machine.

    count: number of devices. memory_share: share of each device's memory that must be free for the rollout engine.
    shared: True to also accept devices that other processes use.
    """

    count: int
    memory_share: float = 0.0
    shared: bool = False


@contextmanager
def reserve_gpus(
    request: ResourceRequest, log: Callable[[str], None], gpus: Sequence[Gpu] | None = None
) -> Iterator[None]:
    """Context manager that sets CUDA_VISIBLE_DEVICES to the first free devices of its previous value.

    Args:
        request: the devices that are needed.
        log: receives messages about skipped devices and other users of a device.
        gpus: the devices of this machine; None = `list_gpus()`.

    Raises:
        UserError: if too few devices are free. The message names the users of the others and the options.
    """
    gpus = list_gpus() if gpus is None else gpus
    if gpus is None:
        log("other users of the GPUs are not checked, because nvidia-ml-py is not installed")
        yield
        return
    visible = visible_gpus(gpus)
    taken = list[VisibleGpu]()
    refused = list[str]()
    setting = os.environ.get(_VARIABLE)
    for one in visible:
        if len(taken) < request.count:
            reason = unavailable(one.gpu, request)
            taken += [one] if reason is None else []
            refused += [] if reason is None else [f"{one.gpu} {reason}"]
    if len(taken) < request.count:
        raise UserError(
            f"trainer.n_gpus_per_node={request.count}, but only {len(taken)} of {len(visible)} devices are available "
            f"({_VARIABLE}={setting}):" + "".join(f"\n  {reason}" for reason in refused) + "\nChoose others with "
            f"{_VARIABLE} or fewer with trainer.n_gpus_per_node. If their users agree, share them with "
            "trainer.share_devices=true"
        )
    for sentence in refused:
        log(sentence)
    for one in taken:
        for user in other_users(one.gpu):
            log(f"{one.gpu} is also used by {user}")
    os.environ[_VARIABLE] = ",".join(one.token for one in taken)
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        os.environ |= {} if setting is None else {_VARIABLE: setting}


def unavailable(gpu: Gpu, request: ResourceRequest) -> str | None:
    """Returns the reason why the device cannot be used, or None."""
    if is_busy(gpu) and not request.shared:
        hidden = f"{(gpu.total_bytes - gpu.free_bytes) / GIB:.1f} GiB by processes that are not visible from here"
        return "is in use:" + "".join(f"\n    {user}" for user in other_users(gpu) or [hidden])
    share = int(100 * gpu.free_bytes / gpu.total_bytes) / 100
    if gpu.free_bytes < request.memory_share * gpu.total_bytes:
        return (
            f"has {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free, "
            f"rollout.gpu_memory_utilization={request.memory_share:g} needs more; at most {share:g} fits"
        )
    return None

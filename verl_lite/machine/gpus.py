"""Lists the GPUs that this process may use and their other users, and reserves free ones for a run.

NVIDIA's management library (package nvidia-ml-py, module `pynvml`) lists the devices without initializing them;
CUDA_VISIBLE_DEVICES, in any of its spellings, selects from them. Each MIG partition of a device counts as a device.
"""

import importlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import ModuleType
from typing import NamedTuple

import psutil

from verl_lite.errors import UserError

GIB = 1 << 30
_VARIABLE = "CUDA_VISIBLE_DEVICES"
# memory of a desktop or an idle notebook
_IDLE_PROCESSES_BYTES = 1 * GIB
# memory that the GPU's driver itself may use on a large device
_IDLE_DEVICE_BYTES = 2 * GIB


class GpuProcess(NamedTuple):
    """A process on a GPU; used_bytes is None if the library does not report it."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """A GPU or a MIG partition.

    Attributes:
        index: PCI bus index of the whole device.
        uuid: GPU-... or MIG-...
        name: name of the model.
        total_bytes: memory of the device.
        free_bytes: memory that no process uses.
        processes: the processes on the device that the library lists.
        shares_memory: True if its memory is that of the machine, as on a DGX Spark (GB10).
    """

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    processes: tuple[GpuProcess, ...] = ()
    shares_memory: bool = False

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.uuid})"


class VisibleGpu(NamedTuple):
    """A GPU and its name in CUDA_VISIBLE_DEVICES."""

    token: str
    gpu: Gpu


def list_gpus(nvml: ModuleType | None = None) -> list[Gpu] | None:
    """Returns the GPUs of this machine, with MIG partitions instead of a partitioned device.

    Returns None if nvidia-ml-py is not installed or finds no driver.

    Args:
        nvml: replaces the module `pynvml`.
    """
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
        gpus = []
        for index in range(nvml.nvmlDeviceGetCount()):
            device = nvml.nvmlDeviceGetHandleByIndex(index)
            for part in _parts(nvml, device):
                gpus.append(_gpu(nvml, index, part))
        return gpus
    finally:
        nvml.nvmlShutdown()


def _parts(nvml: ModuleType, device: object) -> list[object]:
    """Returns the MIG partitions of a device, or the device itself if it has none."""
    partitions = []
    # the device has no MIG, or no further partitions
    with suppress(nvml.NVMLError):
        current_mode, _pending_mode = nvml.nvmlDeviceGetMigMode(device)
        if current_mode == nvml.NVML_DEVICE_MIG_ENABLE:
            for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(device)):
                partition = nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, number)
                partitions.append(partition)
    return partitions or [device]


def _gpu(nvml: ModuleType, index: int, handle: object) -> Gpu:
    """Returns the description of a device or partition.

    Args:
        nvml: the library.
        index: index of the whole device.
        handle: the library's handle of the device or partition.
    """
    shares_memory = False
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total_bytes, free_bytes = int(memory.total), int(memory.free)
    except nvml.NVMLError_NotSupported:
        # a device without memory of its own
        shares_memory = True
        machine = psutil.virtual_memory()
        total_bytes, free_bytes = machine.total, machine.available
    try:
        entries = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        # not supported by the device or not permitted; used memory is still known
        entries = []
    processes = [GpuProcess(entry.pid, entry.usedGpuMemory) for entry in entries]
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=total_bytes,
        free_bytes=free_bytes,
        processes=tuple(processes),
        shares_memory=shares_memory,
    )


def _text(value: str | bytes) -> str:
    """Returns a name as text; old versions of the library return bytes."""
    if isinstance(value, bytes):
        return value.decode()
    return value


def visible_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str] | None = None) -> list[VisibleGpu]:
    """Selects the GPUs named by CUDA_VISIBLE_DEVICES, in its order; all GPUs if the variable is not set.

    The variable contains indices or UUIDs (GPU-..., MIG-..., or prefixes of these), or is empty; -1 ends the list, as
    in CUDA.

    Raises:
        UserError: for a name that matches no device, and for a repeated device. CUDA would ignore the rest of the
            list.
    """
    variables = os.environ if environment is None else environment
    setting = variables.get(_VARIABLE)
    # CUDA shows only the first partition of a partitioned device
    if setting is None:
        first_partitions: dict[int, Gpu] = {}
        for gpu in gpus:
            first_partitions.setdefault(gpu.index, gpu)
        return [VisibleGpu(str(index), gpu) for index, gpu in first_partitions.items()]

    visible: list[VisibleGpu] = []
    for word in setting.split(","):
        token = word.strip()
        # Slurm sets NoDevFiles for a job without GPUs
        if token in ("", "-1", "NoDevFiles"):
            break
        gpu_of_token = _find_gpu(gpus, token)
        if gpu_of_token is None:
            raise UserError(_refused_token(setting, token, "names no device of this machine", gpus))
        if any(gpu_of_token is other.gpu for other in visible):
            raise UserError(_refused_token(setting, token, "is named twice", gpus))
        visible.append(VisibleGpu(token, gpu_of_token))
    return visible


def _refused_token(setting: str, token: str, problem: str, gpus: Sequence[Gpu]) -> str:
    """Returns the message for a name in CUDA_VISIBLE_DEVICES that cannot be used."""
    devices = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus) or "none"
    return f"{_VARIABLE}={setting!r}: {token!r} {problem}; the devices are {devices}"


def _find_gpu(gpus: Sequence[Gpu], token: str) -> Gpu | None:
    """Returns the device with this index (the first of its partitions), or with this prefix of its UUID alone."""
    if token.isdecimal():
        for gpu in gpus:
            if gpu.index == int(token):
                return gpu
        return None
    with_prefix = [gpu for gpu in gpus if gpu.uuid.startswith(token)]
    # a prefix of several UUIDs names none of them
    if len(with_prefix) != 1:
        return None
    return with_prefix[0]


def other_users(gpu: Gpu) -> list[str]:
    """Returns one line for each other process on the device: pid, user, memory, command."""
    lines = []
    for process in gpu.processes:
        if process.pid == os.getpid():
            continue
        memory = "unknown memory"
        if process.used_bytes is not None:
            memory = f"{process.used_bytes / GIB:.1f} GiB"
        try:
            entry = psutil.Process(process.pid)
            command = " ".join(entry.cmdline()) or entry.name()
            lines.append(f"pid {process.pid} of user {entry.username()}, {memory}: {command[:100]}")
        except psutil.Error:
            lines.append(f"pid {process.pid}, {memory}, not visible from here (another container, or it just ended)")
    return lines


def without_processes(gpu: Gpu, own: Collection[int]) -> Gpu:
    """Returns the device as it would be without these processes."""
    remaining: list[GpuProcess] = []
    free_bytes = gpu.free_bytes
    for process in gpu.processes:
        if process.pid in own:
            free_bytes += process.used_bytes or 0
        else:
            remaining.append(process)
    return replace(gpu, free_bytes=free_bytes, processes=tuple(remaining))


def is_busy(gpu: Gpu) -> bool:
    """Returns True if other processes use the device, beyond what a desktop or an idle notebook uses.

    The limits are 1 GiB for all other processes together, and 2 GiB of memory that no visible process holds (another
    container). A process with unknown memory also counts as use. Memory that the device shares with the machine also
    holds everything that does not run on the device, so only the processes count there.
    """
    listed_bytes = sum(process.used_bytes or 0 for process in gpu.processes)
    hidden_bytes = gpu.total_bytes - gpu.free_bytes - listed_bytes
    if hidden_bytes > _IDLE_DEVICE_BYTES and not gpu.shares_memory:
        return True

    others = [process for process in gpu.processes if process.pid != os.getpid()]
    bytes_of_others = 0
    for process in others:
        if process.used_bytes is None:
            return True
        bytes_of_others += process.used_bytes
    return bytes_of_others > _IDLE_PROCESSES_BYTES


@dataclass(frozen=True)
class ResourceRequest:
    """The devices that a run needs on one machine.

    Attributes:
        count: number of devices.
        memory_share: share of each device's memory that must be free for the rollout engine.
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
    if gpus is None:
        gpus = list_gpus()
    if gpus is None:
        log("other users of the GPUs are not checked, because nvidia-ml-py is not installed")
        yield
        return
    setting = os.environ.get(_VARIABLE)
    reserved = _reserve(visible_gpus(gpus), request, log)
    os.environ[_VARIABLE] = ",".join(visible.token for visible in reserved)
    try:
        yield
    finally:
        if setting is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = setting


def _reserve(visible: Sequence[VisibleGpu], request: ResourceRequest, log: Callable[[str], None]) -> list[VisibleGpu]:
    """Returns the first free devices. Logs why others before them are skipped, and their other users."""
    reserved: list[VisibleGpu] = []
    refusals: list[str] = []
    for candidate in visible:
        if len(reserved) == request.count:
            break
        reason = unavailable(candidate.gpu, request)
        if reason is None:
            reserved.append(candidate)
        else:
            refusals.append(f"{candidate.gpu} {reason}")

    if len(reserved) < request.count:
        setting = os.environ.get(_VARIABLE)
        listed = "".join(f"\n  {refusal}" for refusal in refusals)
        raise UserError(
            f"trainer.n_gpus_per_node={request.count}, but only {len(reserved)} of {len(visible)} devices are "
            f"available ({_VARIABLE}={setting}):{listed}\nChoose others with {_VARIABLE} or fewer with "
            "trainer.n_gpus_per_node. If their users agree, share them with trainer.share_devices=true"
        )
    for refusal in refusals:
        log(refusal)
    for device in reserved:
        for user in other_users(device.gpu):
            log(f"{device.gpu} is also used by {user}")
    return reserved


def unavailable(gpu: Gpu, request: ResourceRequest) -> str | None:
    """Returns the reason why the device cannot be used, or None."""
    if is_busy(gpu) and not request.shared:
        used_gib = (gpu.total_bytes - gpu.free_bytes) / GIB
        users = other_users(gpu) or [f"{used_gib:.1f} GiB by processes that are not visible from here"]
        return "is in use:" + "".join(f"\n    {user}" for user in users)
    if gpu.free_bytes < request.memory_share * gpu.total_bytes:
        # rounded down, so that the printed share really fits
        share = int(100 * gpu.free_bytes / gpu.total_bytes) / 100
        return (
            f"has {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free, "
            f"rollout.gpu_memory_utilization={request.memory_share:g} needs more; at most {share:g} fits"
        )
    return None

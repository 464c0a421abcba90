"""Which GPUs this process may use, who uses them already, and which a run takes, before any of them is touched.

NVIDIA's management library (package nvidia-ml-py, module `pynvml`) says what there is; CUDA_VISIBLE_DEVICES, in any of
its spellings, says which of that is ours. A part of a device that is divided (MIG) counts as a device.
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
_IDLE_PROCESSES_BYTES = 1 * GIB  # a desktop, an idle notebook
_IDLE_DEVICE_BYTES = 2 * GIB  # what a driver itself may hold of a large device


class GpuProcess(NamedTuple):
    """A process on a GPU; used_bytes is None where the library does not say."""

    pid: int
    used_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a part of one. index: of the whole device, in the order of the bus. uuid: GPU-... or MIG-..."""

    index: int
    uuid: str
    name: str
    total_bytes: int
    free_bytes: int
    processes: tuple[GpuProcess, ...] = ()

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.uuid})"


class VisibleGpu(NamedTuple):
    """A GPU and the word by which CUDA_VISIBLE_DEVICES names it."""

    token: str
    gpu: Gpu


def list_gpus(nvml: Any = None) -> list[Gpu] | None:
    """The GPUs of this machine, with parts in place of a divided one; None if nvidia-ml-py is not installed or finds
    no driver. nvml: the module, or one like it."""
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
    with suppress(nvml.NVMLError):  # it cannot be divided, or this place and those after it are empty
        if nvml.nvmlDeviceGetMigMode(whole)[0] == nvml.NVML_DEVICE_MIG_ENABLE:
            for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(whole)):
                parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(whole, place))
    return parts or [whole]


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:  # not for this kind of device, or not for this user; the memory in use still shows it
        processes = []
    words = (nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle))
    uuid, name = (word.decode() if isinstance(word, bytes) else word for word in words)
    found = tuple(GpuProcess(process.pid, process.usedGpuMemory) for process in processes)
    return Gpu(index, uuid, name, int(memory.total), int(memory.free), found)


def visible_gpus(gpus: Sequence[Gpu], environment: Mapping[str, str] | None = None) -> list[VisibleGpu]:
    """Those of `gpus` that CUDA_VISIBLE_DEVICES leaves to this process, in its order; all of them where it is not set.

    It may hold numbers, UUIDs (GPU-..., MIG-..., or the beginnings of these), or nothing; -1 ends the list, as in CUDA.
    Raises UserError for a word that names no device or a device named twice, where CUDA would silently see fewer.
    """
    setting = (os.environ if environment is None else environment).get(_VARIABLE)
    if setting is None:  # of a divided device CUDA shows only the first part
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
            raise UserError(f"{_VARIABLE}={setting!r}: {token!r} {problem}; there are {known}")
        chosen.append(VisibleGpu(token, found[0]))
    return chosen


def other_users(gpu: Gpu) -> list[str]:
    """One line for each process on the device: pid, user, memory, command."""
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
    """The device as if these processes were not there: what others leave of it."""
    theirs = tuple(process for process in gpu.processes if process.pid not in own)
    freed = sum(process.used_bytes or 0 for process in gpu.processes if process.pid in own)
    return replace(gpu, free_bytes=gpu.free_bytes + freed, processes=theirs)


def is_busy(gpu: Gpu) -> bool:
    """True if others use the device in earnest: by more than a desktop or an idle notebook does.

    That is processes with together more than 1 GiB, or with memory that is not known; or more than 2 GiB held by nobody
    that can be seen (another container).
    """
    others = [process.used_bytes for process in gpu.processes if process.pid != os.getpid()]
    held = sum(used or 0 for used in others)
    hidden = gpu.total_bytes - gpu.free_bytes - sum(process.used_bytes or 0 for process in gpu.processes)
    return None in others or held > _IDLE_PROCESSES_BYTES or hidden > _IDLE_DEVICE_BYTES


@dataclass(frozen=True)
class ResourceRequest:
    """What a run asks of one machine.

    count: devices. memory_share: of each, to be free for the rollout engine. shared: with others, knowingly.
    """

    count: int
    memory_share: float = 0.0
    shared: bool = False


@contextmanager
def reserve_gpus(
    request: ResourceRequest, log: Callable[[str], None], gpus: Sequence[Gpu] | None = None
) -> Iterator[None]:
    """Inside, CUDA_VISIBLE_DEVICES names the first devices that others leave free, in the user's own words.

    Args:
        log: takes sentences worth knowing: which devices were passed over, who else uses one.
        gpus: those of this machine, unless given.

    Raises:
        UserError: too few are free; says who has the others and what to do.
    """
    gpus = list_gpus() if gpus is None else gpus
    if gpus is None:
        log("who uses the GPUs is not known: nvidia-ml-py is not installed")
        yield
        return
    visible, taken, refused, setting = visible_gpus(gpus), list[VisibleGpu](), list[str](), os.environ.get(_VARIABLE)
    for one in visible:
        if len(taken) < request.count:
            reason = unavailable(one.gpu, request)
            taken += [one] if reason is None else []
            refused += [] if reason is None else [f"{one.gpu} {reason}"]
    if len(taken) < request.count:
        raise UserError(
            f"trainer.n_gpus_per_node={request.count}, but only {len(taken)} of {len(visible)} devices can be had "
            f"({_VARIABLE}={setting}):" + "".join(f"\n  {reason}" for reason in refused) + "\nChoose others with "
            f"{_VARIABLE}, or fewer with trainer.n_gpus_per_node; or use them together with those who have them, if "
            "they agree: trainer.share_devices=true"
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
    """Why the device cannot be had; None if it can."""
    if is_busy(gpu) and not request.shared:
        hidden = f"{(gpu.total_bytes - gpu.free_bytes) / GIB:.1f} GiB by processes that are not visible from here"
        return "is in use:" + "".join(f"\n    {user}" for user in other_users(gpu) or [hidden])
    share = int(100 * gpu.free_bytes / gpu.total_bytes) / 100
    if gpu.free_bytes < request.memory_share * gpu.total_bytes:
        return (
            f"has {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free, "
            f"rollout.gpu_memory_utilization={request.memory_share:g} takes more: at most {share:g} fits"
        )
    return None

"""CPU and CUDA behind one face: the only file that knows which of the two a run uses. Everything else in the project
takes a `torch.device` and works on both."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from verl_lite.errors import UserError
from verl_lite.machine.host import cpu_count as cpu_count

GIB = 1 << 30
KEPT_FREED_BYTES = 1 << 30
DTYPES = {"fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}


def device_type(name: str = "auto") -> str:
    """cpu or cuda: what `trainer.device` stands for here. `auto` is CUDA where a device is visible, else the CPU.

    Touches no device, so that a driver beside its workers takes none of their memory. Raises UserError for an unknown
    name or CUDA without a device.
    """
    is_there = torch.cuda.is_available()
    if name not in ("auto", "cpu", "cuda") or (name == "cuda" and not is_there):
        visible = "a CUDA device is visible here" if is_there else "no CUDA device is visible here"
        raise UserError(f"trainer.device={name!r}: expected auto, cpu or cuda; {visible}")
    return "cuda" if name != "cpu" and is_there else "cpu"


def get_device(name: str = "auto") -> torch.device:
    """The device of this process, made current; see `device_type` for names and errors.

    A worker process sees the one CUDA device it was given (Ray sets CUDA_VISIBLE_DEVICES); with several visible the
    launcher's LOCAL_RANK tells which.
    """
    if device_type(name) == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def dist_backend(device: torch.device) -> str:
    """Backend of torch.distributed for tensors on `device`; on CUDA host tensors can be sent too."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


# what cuBLAS and vLLM read when they start; see `deterministic_kernels`
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "VLLM_BATCH_INVARIANT": "1"}


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Inside, torch runs only operations that give the same numbers each time, or (not wanted) any.

    It raises RuntimeError, with the operation's name, for one that has no such kernel on its device.
    """
    before = torch.are_deterministic_algorithms_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def visible_devices(device_type: str) -> int:
    """Devices that this machine offers: CUDA devices, or cores for the CPU."""
    return torch.cuda.device_count() if device_type == "cuda" else cpu_count()


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that a config name stands for: `auto` is bf16 on CUDA and fp32 on a CPU. ValueError if unknown."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r}: expected auto, fp32 or bf16")
    return DTYPES[name]


def device_memory(device: torch.device) -> dict[str, float]:
    """Memory of this process in GiB, now and at most since it began, under verl's metric names without the role; on
    CUDA also the peak allocated and reserved."""
    figures = {"host_rss_gb": psutil.Process().memory_info().rss / GIB}
    status = Path("/proc/self/status")  # getrusage would count the parent's before exec
    for line in status.read_text().splitlines() if status.is_file() else ():
        if line.startswith("VmHWM:"):
            figures["host_peak_gb"] = int(line.split()[1]) * 1024 / GIB
    if device.type == "cuda":
        figures["max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / GIB
        figures["max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / GIB
    return figures


def empty_cache() -> None:
    """Gives cached device memory back, in a process that uses CUDA."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def keep_freed_memory(device: torch.device) -> None:
    """On a CPU: lets glibc keep up to KEPT_FREED_BYTES of freed memory for the next tensor.

    Otherwise each tensor above 128 KiB may be mapped anew and its pages cleared by the kernel on first touch, which
    costs as much as the arithmetic on it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if device.type == "cpu" else None
    if mallopt is not None:
        mmap_threshold, trim_threshold = -3, -1  # glibc's names for the two settings
        mallopt(mmap_threshold, 256 << 20)
        mallopt(trim_threshold, KEPT_FREED_BYTES)

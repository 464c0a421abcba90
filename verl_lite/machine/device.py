"""Selects CPU or CUDA. Only this module knows which of the two a run uses; all other code takes a `torch.device`."""

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
KEPT_FREED_BYTES = 512 << 20
# memory of this process that the C library does not manage, such as libraries; 0 before the first trim
_other_bytes = 0
DTYPES = {"fp32": torch.float32, "float32": torch.float32, "bf16": torch.bfloat16, "bfloat16": torch.bfloat16}


def device_type(name: str = "auto") -> str:
    """Returns "cpu" or "cuda" for a value of `trainer.device`. `auto` is CUDA if a device is visible, else the CPU.

    The function does not initialize a device, so that the driver uses none of the workers' device memory.

    Raises:
        UserError: for an unknown name, or for CUDA without a device.
    """
    has_cuda = torch.cuda.is_available()
    is_missing = name == "cuda" and not has_cuda
    if name not in ("auto", "cpu", "cuda") or is_missing:
        visible = "no CUDA device is visible here"
        if has_cuda:
            visible = "a CUDA device is visible here"
        raise UserError(f"trainer.device={name!r}: expected auto, cpu or cuda; {visible}")
    if name == "cpu" or not has_cuda:
        return "cpu"
    return "cuda"


def get_device(name: str = "auto") -> torch.device:
    """Returns the device of this process and makes it the current one; see `device_type` for names and errors.

    A worker process sees only its own CUDA device, because Ray sets CUDA_VISIBLE_DEVICES. If several devices are
    visible, the launcher's LOCAL_RANK selects one.
    """
    if device_type(name) == "cpu":
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def is_on_cpu(device: str) -> bool:
    """Returns True if the value of `trainer.device` means the CPU on this machine."""
    if device == "auto":
        return device_type() == "cpu"
    return device == "cpu"


def dist_backend(device: torch.device) -> str:
    """Returns the torch.distributed backend for tensors on `device`. The backend for CUDA also sends host tensors."""
    if device.type == "cuda":
        return "cpu:gloo,cuda:nccl"
    return "gloo"


# environment variables that cuBLAS and vLLM read when they start; see `deterministic_kernels`
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "VLLM_BATCH_INVARIANT": "1"}


def set_deterministic(wanted: bool) -> None:
    """Sets the variables of `DETERMINISTIC` if `wanted`. Call it before CUDA and vLLM start."""
    if wanted:
        for name, value in DETERMINISTIC.items():
            # a value that the user has set stays
            os.environ.setdefault(name, value)


@contextmanager
def deterministic_kernels(wanted: bool) -> Iterator[None]:
    """Restricts torch to deterministic operations within the block if `wanted` is set, and allows all if it is not.

    An operation without a deterministic kernel on its device raises RuntimeError with its name.
    """
    before = torch.are_deterministic_algorithms_enabled()
    # filling new tensors costs time and changes no result of a valid program
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(wanted)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def visible_devices(device_type: str) -> int:
    """Returns the number of visible CUDA devices, or of CPU cores."""
    if device_type == "cuda":
        return torch.cuda.device_count()
    return cpu_count()


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Returns the dtype for an option's value: `auto` is bf16 on CUDA and fp32 on a CPU.

    Raises:
        ValueError: the name is unknown.
    """
    if name == "auto" and device.type == "cuda":
        return torch.bfloat16
    if name == "auto":
        return torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r}: expected auto, fp32 or bf16")
    return DTYPES[name]


def device_memory(device: torch.device) -> dict[str, float]:
    """Returns the current and peak memory of this process in GiB, under verl's metric names without the role.

    On CUDA the peak allocated and reserved device memory is included.
    """
    figures = {"host_rss_gb": psutil.Process().memory_info().rss / GIB}
    # the peak of getrusage includes the parent process before exec
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                peak_kib = int(line.split()[1])
                figures["host_peak_gb"] = peak_kib * 1024 / GIB
    if device.type == "cuda":
        figures["max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / GIB
        figures["max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / GIB
    return figures


def empty_cache() -> None:
    """Releases memory that is kept after tensors were freed: torch's cache on CUDA, the C library's on the host."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    release_freed_memory()


def release_freed_memory() -> None:
    """Gives freed host memory back to the system if the C library keeps more than KEPT_FREED_BYTES of it.

    glibc's own limit (`keep_freed_memory`) covers the end of the heap alone, not the gaps between tensors that remain.
    Up to version 2.37, glibc finds no room for an aligned tensor in the gap that a tensor of the same size has left,
    once a small object lies at its edge: without this call, the heap would grow with every layer of a pass.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        return
    global _other_bytes
    if _bytes_not_in_use(libc) - _other_bytes > KEPT_FREED_BYTES:
        libc.malloc_trim(0)
        # the bytes that are not in use even after the trim belong to others
        _other_bytes = _bytes_not_in_use(libc)


def _bytes_not_in_use(libc: ctypes.CDLL) -> int:
    """Returns the resident bytes of this process that belong to no allocated block."""
    # not glibc's own number of free bytes, which includes bytes that it has given back to the system
    libc.mallinfo2.restype = _MallocInfo
    blocks = libc.mallinfo2()
    statm = Path("/proc/self/statm").read_text().split()
    # the second number is the resident set
    resident_pages = int(statm[1])
    resident_bytes = resident_pages * os.sysconf("SC_PAGE_SIZE")
    bytes_in_blocks: int = blocks.uordblks + blocks.hblkhd
    return resident_bytes - bytes_in_blocks


class _MallocInfo(ctypes.Structure):
    """The result of glibc's mallinfo2.

    Of its fields, `uordblks` and `hblkhd` are used: bytes in use in heaps, and in mappings of their own.
    """

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
        )
    ]  # fmt: skip


def keep_freed_memory(device: torch.device) -> None:
    """Lets glibc keep up to KEPT_FREED_BYTES of freed memory for later tensors. Does nothing on CUDA.

    Without this setting glibc maps new memory for each tensor above 128 KiB, and the kernel clears its pages on first
    access, which takes as long as the arithmetic on the tensor.
    """
    if device.type != "cpu":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # another C library has no such function
    if mallopt is not None:
        mmap_threshold = -3  # glibc's M_MMAP_THRESHOLD
        trim_threshold = -1  # glibc's M_TRIM_THRESHOLD
        # larger tensors still get memory of their own
        mallopt(mmap_threshold, 256 << 20)
        mallopt(trim_threshold, KEPT_FREED_BYTES)

"""CPU and CUDA behind one face: the only file that knows which of the two a run uses.

Gives the device, the communication backend, dtypes, memory figures and core counts. Everything else in the
project takes a `torch.device` and works on both.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import psutil
import torch

from verl_lite.errors import UserError
from verl_lite.machine.host import cpu_count as cpu_count

GIB = 1 << 30
DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
}


def device_type(name: str = "auto") -> str:
    """cpu or cuda: what `trainer.device` stands for here. `auto` is CUDA where a device is visible, else the CPU.

    Touches no device, so that a driver beside its workers takes none of their memory. Raises UserError for an unknown
    name or CUDA without a device.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"trainer.device={name!r}: expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("trainer.device='cuda': no CUDA device is visible here; set trainer.device=cpu or auto")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


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
    """Memory of this process in GiB, under verl's metric names (without the role in front).

    host_rss_gb always, and its highest value since the process began where the system tells (host_peak_gb); on CUDA
    also the peak allocated and reserved.
    """
    figures = {"host_rss_gb": host_rss_bytes() / GIB}
    if (peak := host_peak_bytes()) is not None:
        figures["host_peak_gb"] = peak / GIB
    if device.type == "cuda":
        figures["max_memory_allocated_gb"] = torch.cuda.max_memory_allocated(device) / GIB
        figures["max_memory_reserved_gb"] = torch.cuda.max_memory_reserved(device) / GIB
    return figures


def host_rss_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def host_peak_bytes() -> int | None:
    """The most resident memory that this process had; None where the system does not tell."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
    return int(found[0]) << 10 if found else None


def empty_cache(device: torch.device) -> None:
    """Gives cached device memory back (CUDA only)."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


KEPT_FREED_BYTES = 1 << 30


def keep_freed_memory(device: torch.device, mapped_bytes: int = 256 << 20, kept_bytes: int = KEPT_FREED_BYTES) -> None:
    """On a CPU: lets the C library keep freed memory for the next tensor instead of returning it to the system.

    Otherwise each tensor above 128 KiB may be mapped anew and its pages cleared by the kernel on first touch, which
    costs as much as the arithmetic on it (10% of an update of a 1M-parameter model). Allocations from mapped_bytes on
    are mapped as before; up to kept_bytes stay with the process. Does nothing where the C library is not glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if device.type == "cpu" else None
    if mallopt is not None:
        mmap_threshold, trim_threshold = -3, -1  # glibc's names for the two settings
        mallopt(mmap_threshold, mapped_bytes)
        mallopt(trim_threshold, kept_bytes)

"""The devices that a run can be planned for, with their memory and speed."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Accelerator:
    """A kind of device.

    Attributes:
        memory_gib: Its memory; None: the machine's.
        flops: Peak operations per second in bf16 (for one CPU core in fp32).
        bandwidth: Memory bandwidth in bytes/s.
        link, network: Bandwidth in bytes/s per direction to devices of the same machine and of other machines.
        size: Bytes per element of its default compute dtype.
        training, prefill, reading: Assumed shares of the peaks: of `flops` in training and in generation, and of
            `bandwidth`.
        layer_s: Assumed seconds of a layer in a decode step besides its matrix products: calls, small operations.
    """

    name: str
    memory_gib: float | None
    flops: float
    bandwidth: float
    link: float
    network: float
    size: int = 2
    training: float = 0.4
    prefill: float = 0.5
    reading: float = 0.5
    layer_s: float = 0.0


# From NVIDIA's data sheets (dense): H100 SXM, H200 SXM, A100 80GB SXM, L40S; memory as torch reports it. network: one
# adapter per device with 400 Gb/s (A100 200, L40S 100), assumed. cpu: one core of the Zen 4 CPU used for the tables,
# whose shares `python -m tests.bench plan_memory` compares with runs; its rate is measured, see `with_measured_rate`.
ACCELERATORS = {
    device.name: device
    for device in (
        # name, memory_gib, flops, bandwidth, link, network
        Accelerator("h100", 79.1, 989e12, 3.35e12, 450e9, 50e9),
        Accelerator("h200", 139.8, 989e12, 4.8e12, 450e9, 50e9),
        Accelerator("a100", 79.2, 312e12, 2.039e12, 300e9, 25e9),
        Accelerator("l40s", 44.4, 362e12, 0.864e12, 32e9, 12.5e9),
        Accelerator("cpu", None, 92e9, 20e9, 10e9, 1e9, size=4, training=0.75, prefill=0.65, layer_s=3e-3),
    )
}


def with_measured_rate(device: Accelerator) -> Accelerator:
    """Returns a CPU with the rate at which one core of this machine multiplies fp32 matrices; another device as it is.

    The measurement takes about 0.2 s. It counts CPU time, so that other programs on the machine disturb it little.
    """
    if device.name != "cpu":
        return device
    return replace(device, flops=_core_flops())


def _core_flops(size: int = 1024, repeat: int = 6) -> float:
    """Returns the fp32 operations per second of one core in a product of two matrices of `size` rows and columns."""
    import torch

    # one thread, because the rate is that of one core
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        matrix = torch.ones(size, size)
        seconds = []
        for _ in range(repeat):
            started = time.process_time()
            torch.mm(matrix, matrix)
            seconds.append(time.process_time() - started)
    finally:
        torch.set_num_threads(threads)
    # the fastest repetition is the one that other programs disturbed least
    flops = 2.0 * size**3
    return flops / min(seconds)

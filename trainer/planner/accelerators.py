"""The devices that a run can be planned for, with their memory and speed."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Accelerator:
    """A kind of device. memory_gib: its memory; None: the machine's. flops: peak operations per second in bf16 (for one
    CPU core in fp32). bandwidth: memory bandwidth in bytes/s. link, network: bandwidth in bytes/s per direction to
    devices of the same machine and of other machines. size: bytes per element of its default compute dtype."""

    name: str
    memory_gib: float | None
    flops: float
    bandwidth: float
    link: float
    network: float
    size: int = 2


# From NVIDIA's data sheets (dense): H100 SXM, H200 SXM, A100 80GB SXM, L40S; memory as torch reports it. network: one
# adapter per device with 400 Gb/s (A100 200, L40S 100), assumed. cpu: one core of the Zen 4 CPU used for the tables.
ACCELERATORS = {
    device.name: device
    for device in (
        Accelerator("h100", 79.1, 989e12, 3.35e12, 450e9, 50e9),
        Accelerator("h200", 139.8, 989e12, 4.8e12, 450e9, 50e9),
        Accelerator("a100", 79.2, 312e12, 2.039e12, 300e9, 25e9),
        Accelerator("l40s", 44.4, 362e12, 0.864e12, 32e9, 12.5e9),
        Accelerator("cpu", None, 92e9, 20e9, 10e9, 1e9, size=4),
    )
}

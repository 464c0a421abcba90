"""Environment variables of the driver and of every worker process. Imports nothing heavy: it must run before torch
does.

They belong together (measured: two OpenMP pools on two cores slow each other 40 times): one compute thread for each
process unless a slot has more cores, the engine inside the worker's process, no compilation on a CPU, no network.
"""

from __future__ import annotations

import os

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}

ENGINE = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


def worker_environment(cpu: bool, threads: int) -> dict[str, str]:
    """What a worker process is started with. threads: compute threads of the process."""
    environment = {**OFFLINE, **ENGINE, "OMP_NUM_THREADS": str(threads)}
    if cpu:
        environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment


DEVICES = {
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the numbers of CUDA_VISIBLE_DEVICES mean what nvidia-smi shows
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking whether there is CUDA does not yet fix which devices are seen
}


def prepare_driver() -> None:
    """Sets this process's environment; what the user has set stays."""
    for name, value in {**OFFLINE, **ENGINE, **DEVICES, "OMP_NUM_THREADS": "1"}.items():
        os.environ.setdefault(name, value)

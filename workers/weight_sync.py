"""Weights from the training engine to the rollout engine, in the same process, with the cache reset that must follow.

The parameters are gathered in buckets (never the whole model twice), handed over under their Hugging Face names, and
the prefix cache is dropped: keys and values of the old weights would otherwise answer for the new ones. Each weight
update has a version; the samples drawn afterwards carry it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from verl_lite.metrics import Metric
from workers.engine.fsdp import FSDPEngine
from workers.rollout.base import RolloutEngine


def sync_weights(source: FSDPEngine, rollout: RolloutEngine, version: int, bucket_mb: int) -> dict[str, Metric]:
    """Streams all parameters into the rollout engine and resets its cache.

    All ranks call it together (gathering is collective). bucket_mb: MiB of full tensors alive at one time.
    Returns seconds and megabytes, for the log.
    """
    started, sent = time.perf_counter(), 0

    def counted() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal sent
        for name, tensor in source.full_params(bucket_mb << 20):
            sent += tensor.numel() * tensor.element_size()
            yield name, tensor

    rollout.load_weights(counted(), version)
    rollout.reset_cache()
    return {
        "weight_sync/seconds": Metric.max(time.perf_counter() - started),
        "weight_sync/megabytes": Metric.max(sent / 1e6),
    }

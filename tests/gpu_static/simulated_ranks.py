"""`python -m tests.gpu_static.simulated_ranks WORLD,FSDP_SIZE,SEQUENCE_PARALLEL ...`: one rank of many trains, with
communication that does nothing; prints how often it would have communicated, a JSON object for each. In a process of
its own, for the sake of the process group."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny_model import tiny_qwen2
from tests.workers.engine_cases import Batch, Case, build_engine, loss_fn, parts_of, ragged_batch
from verl_lite.config import OptimConfig

LAYERS, MICRO_BATCHES, MINI_BATCHES = 3, 2, 2


class Collectives(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func.overloadpacket._qualified_op_name.partition("::")
        if namespace in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            self.count[name.strip("_")] += 1
        return func(*args, **(kwargs or {}))


def counted(world: int, fsdp_size: int, sequence_parallel: int) -> dict[str, dict[str, int]]:
    """Of a step of MINI_BATCHES optimizer steps of MICRO_BATCHES each, and of handing out all weights."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    case = Case(micro_batch_size=1, fsdp_size=fsdp_size, sequence_parallel=sequence_parallel)
    engine = build_engine(tiny_qwen2(tempfile.mkdtemp(), layers=LAYERS, heads=4), case, OptimConfig(lr=1e-3))
    data_parallel = world // sequence_parallel
    rows = data_parallel * MICRO_BATCHES
    parts, _ = parts_of(ragged_batch(Batch(rows=rows * MINI_BATCHES)), case, data_parallel, mini_batch_size=rows)
    with Collectives() as step:
        engine.train(parts[0], loss_fn, temperature=1.0, calculate_entropy=True)
    with Collectives() as weights:
        for _ in engine.full_params():
            pass
    return {"step": dict(step.count), "weights": dict(weights.count)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[1:]:
        print(json.dumps(counted(*map(int, case.split(",")))))
        dist.destroy_process_group()

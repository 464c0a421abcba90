"""One rank of a trainer's world that generates with vLLM; run by test_vllm_processes.py.

Arguments: rank, world size, tensor parallel size, model folder, scratch folder. Writes {rank}.json there.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.workers.rollout.test_engines import load, make_engine, mixed_requests, run


def mapped_shared_memory() -> list[str]:
    """Paths under /dev/shm that this process uses; "(deleted)" follows those whose name is gone."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line[line.index("/dev/shm") :] for line in lines if "/dev/shm" in line})


def main(rank: int, world_size: int, tensor_parallel: int, folder: str, scratch: str) -> None:
    store = dist.FileStore(f"{scratch}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    engine = make_engine("vllm", folder, tensor_model_parallel_size=tensor_parallel)
    model = AutoModelForCausalLM.from_pretrained(folder)
    requests = mixed_requests(24, max_tokens=16)
    # without tensor parallelism each rank has its own half, and one of them a longer one
    mine = requests if tensor_parallel > 1 else (requests[:6], requests[6:])[rank]
    results = []
    for version in (1, 2):
        load(engine, model, version)
        results = [vars(result) for result in run(engine, mine).values()]
    mapped = mapped_shared_memory()
    engine.close()
    gc.collect()
    dist.barrier()
    left = [path for path in mapped if Path(path).exists()]
    # the trainer's group outlives the engine
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    Path(scratch, f"{rank}.json").write_text(
        json.dumps({"results": results, "mapped": mapped, "left": left, "sum_of_ranks": total.item()})
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5])

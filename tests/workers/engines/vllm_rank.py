"""Two ranks of a trainer's world that share one engine of vLLM; run by test_vllm_processes.py.

Arguments: model folder, scratch folder. Each rank, a fork of a process that has imported vLLM, writes {rank}.json
there. The leader answers prompts and runs episodes, whose environments only the leader has.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from tests.workers.engines.test_engines import episodes, load, make_engine, mixed_requests
from workers.engines.base import Completion
from workers.engines.vllm_process import prepare_process
from workers.rollout.runner import Runner, group_of_engine

RANKS = 2


def mapped_shared_memory() -> list[str]:
    """Paths under /dev/shm that this process uses; "(deleted)" follows those whose name is gone."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line[line.index("/dev/shm") :] for line in lines if "/dev/shm" in line})


def answers(runner: Runner[Any]) -> list[Completion]:
    """Answers the requests of the engines' tests."""
    for request in mixed_requests(24, max_tokens=16):
        runner.submit(request, None)
    done: list[Completion] = []
    while runner.is_decoding:
        done += [completion for _, completion in runner.step(until_completion=True)]
    return done


def generate(rank: int, folder: str, scratch: str) -> None:
    store = dist.FileStore(f"{scratch}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    engine = make_engine("vllm", folder, tensor_model_parallel_size=RANKS)
    model = AutoModelForCausalLM.from_pretrained(folder)
    runner: Runner[Any] = Runner(engine, group_of_engine(RANKS))
    results, turns = [], []
    for version in (1, 2):
        load(engine, model, version)
        with runner.lead() as leads:
            if leads:
                results = [vars(result) for result in answers(runner)]
    with runner.lead() as leads:
        if leads:
            found = episodes(runner, max_live=5, latency=(0, 4), by="step")
            turns = [(turn.prompt_ids, turn.response_ids, turn.log_probs) for one in found for turn in one.turns]
    unfinished = engine.unfinished
    mapped = mapped_shared_memory()
    engine.close()
    gc.collect()
    dist.barrier()
    left = [path for path in mapped if Path(path).exists()]
    # the trainer's group outlives the engine
    total = torch.tensor([rank + 1])
    dist.all_reduce(total)
    report = {"results": results, "turns": turns, "unfinished": unfinished, "mapped": mapped, "left": left}
    report["sum_of_ranks"] = total.item()
    Path(scratch, f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    prepare_process(torch.device("cpu"))
    import vllm.v1.worker.cpu_worker  # noqa: F401  most of what an engine loads

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=generate, args=(rank, *sys.argv[1:])) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(any(process.exitcode for process in ranks))

"""Recommends a placement: on how many devices the policy trains, and on how many others the engines generate.

Each candidate is simulated (`trainer.planner.simulation`) with the durations of `trainer.planner.step_time`. Candidates
share all devices, or give the trainer between an eighth and three quarters of them.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from trainer.planner import memory
from trainer.planner.accelerators import Accelerator
from trainer.planner.memory import GIB, Networks
from trainer.planner.simulation import Simulated, Workload, median_of, simulate
from trainer.planner.step_time import Lengths, generation_stages, step_stages
from verl_lite.config import PPOConfig

SIGMA = 1.2
"""Spread of the logarithm of the lengths: measured answers of reasoning models have about this."""
STEPS, MOST_PROMPTS = 16, 512
OWN_DEVICE = 0.9  # share of its memory that an engine uses on a device of its own
WORTH_IT = 1.05  # a separate pool must be this much faster than shared devices to be recommended
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
ASYNC = "async_training.max_off_policy_threshold"


class Placement(NamedTuple):
    """A candidate. trainers, engines: numbers of devices, which are the same devices if `is_shared`. threshold: largest
    staleness. reason: why the candidate cannot be used; empty if it can."""

    trainers: int
    engines: int
    is_shared: bool
    threshold: int
    found: Simulated | None
    reason: str = ""

    def options(self, per_node: int) -> str:
        """Returns the command line options. per_node: devices per machine."""
        given = [f"{ASYNC}={self.threshold}"] + ["async_training.partial_rollout=true"] * (self.threshold > 0)
        if not self.is_shared:
            given += ["hybrid_engine=false", *_split("trainer", self.trainers, per_node)]
            given += [*_split("rollout", self.engines, per_node), f"rollout.gpu_memory_utilization={OWN_DEVICE}"]
        return " ".join(given)


def _split(section: str, devices: int, per_node: int) -> list[str]:
    nodes = math.ceil(devices / per_node)
    return [f"{section}.nnodes={nodes}", f"{section}.n_gpus_per_node={devices // nodes}"]


def workload(
    config: PPOConfig, networks: Networks, devices: tuple[int, int], device: Accelerator, mean: Lengths, scale: float
) -> Workload:
    """Returns the work of a run. devices: those of the trainer and of the engines. scale: share of the prompts that is
    simulated, with the same share of the engines."""
    rollout, size = config.rollout, memory.compute_size(config.rollout.dtype, device)
    longest = config.data.max_response_length
    sigma = SIGMA if mean.response < longest else 0.0
    median = median_of(mean.response, sigma, longest) if sigma else float(longest)

    def step_seconds(sequences: int) -> float:
        """Returns the duration of an engine step in the middle of the mean answer."""
        at = Lengths(mean.prompt + mean.response / 2, 1.0)
        stages = generation_stages(networks.policy, device, at, sequences, 1.0, sequences, size, parallel)
        return stages[1].seconds

    plan = memory.memory_plan(config, networks, devices[0], device)
    parts, parallel = plan.engine or plan.phases["rollout"], rollout.tensor_model_parallel_size
    per_token = memory.kv_bytes_per_token(networks.policy, size, parallel)
    seats = int(parts["engine: KV cache"] / (per_token * sum(mean)))
    prompts = memory.mini_batch_prompts(config, -1)
    samples = max(1, memory.rows_per_step(config) // prompts)
    seats = max(1, min(rollout.max_num_seqs, seats))
    together = max(2, min(seats, math.ceil(memory.rows_per_step(config) * parallel / devices[1])))
    one, many = step_seconds(1), step_seconds(together)
    stages = step_stages(config, networks, devices[0], device, mean)
    update = sum(stage.seconds for name, stage in stages.items() if not name.startswith("generation"))
    slope = (many - one) / (together - 1)
    kept = max(1, round(prompts * scale))
    return Workload(kept, samples, median, sigma, longest, max(one - slope, 1e-9), slope, update, seats)


def placements(
    config: PPOConfig, networks: Networks, devices: int, device: Accelerator, memory_gib: float | None, mean: Lengths
) -> list[Placement]:
    """Returns the candidates for this number of devices."""
    prompts, parallel = memory.mini_batch_prompts(config, -1), config.rollout.tensor_model_parallel_size
    scale = min(1.0, MOST_PROMPTS / prompts)

    def candidate(trainers: int, engines: int, is_shared: bool, threshold: int) -> Placement:
        planned = copy.deepcopy(config)
        planned.hybrid_engine = is_shared
        if not is_shared:
            planned.rollout.gpu_memory_utilization = max(OWN_DEVICE, config.rollout.gpu_memory_utilization)
        planned.trainer.nnodes, planned.rollout.nnodes, planned.rollout.n_gpus_per_node = 1, 1, engines
        plan = memory.memory_plan(planned, networks, trainers, device)
        if memory_gib is not None and not plan.fits(memory_gib * GIB):
            needed = max(plan.device_bytes, plan.engine_bytes) / GIB
            return Placement(trainers, engines, is_shared, threshold, None, f"needs {needed:.0f} GiB on a device")
        planned.trainer.nnodes = config.trainer.nnodes if is_shared else 1
        work = workload(planned, networks, (trainers, engines), device, mean, scale)
        simulated = max(1, round(engines / parallel * scale))
        sleeps = is_shared and config.rollout.free_cache_engine and device.name != "cpu"
        found = simulate(
            work, simulated, STEPS,
            is_separate=not is_shared, sleeps=sleeps, threshold=threshold, partial=threshold > 0,
        )  # fmt: skip
        return Placement(trainers, engines, is_shared, threshold, replace(found, tokens=found.tokens / scale))

    rows = [candidate(devices, devices, True, threshold) for threshold in (0, 1)]
    parts = sorted({round(devices * share) for share in SHARES} - {0, devices})
    return rows + [candidate(part, devices - part, False, 1) for part in parts if (devices - part) % parallel == 0]


def placement_lines(
    config: PPOConfig, networks: Networks, devices: int, device: Accelerator, memory_gib: float | None, mean: Lengths
) -> Iterator[str]:
    """Yields a table of the candidates and a recommendation."""
    rows = placements(config, networks, devices, device, memory_gib, mean)
    first = next((row.found.tokens for row in rows if row.found is not None), 0.0)
    title = f"placement of {devices} devices"
    yield f"{title:<30}{'K':>3}{'tokens/s':>12}{'ratio':>7}{'idle: trainer':>15}{'engines':>9}"
    for row in rows:
        name = f"shared by {row.trainers}" if row.is_shared else f"{row.trainers} train, {row.engines} generate"
        if row.found is None:
            yield f"  {name:<28}{row.threshold:>3}   {row.reason}"
            continue
        found = row.found
        yield (
            f"  {name:<28}{row.threshold:>3}{found.tokens:>12,.0f}{found.tokens / first:>7.2f}"
            f"{found.trainer_idle:>15.0%}{found.engine_idle:>9.0%}"
        )
    fitting = [row for row in rows if row.found is not None]
    if not fitting:
        yield "No placement fits the devices' memory."
        return
    shared = max((row for row in fitting if row.is_shared), key=_speed, default=None)
    best = max(fitting, key=_speed)
    if shared is not None and _speed(best) < WORTH_IT * _speed(shared):
        best = shared
    per_node = max(1, devices // config.trainer.nnodes)
    yield f"Recommended: {best.options(per_node)}"
    longest = config.data.max_response_length
    sigma = f"log-normal with sigma {SIGMA}, cut at {longest}" if mean.response < longest else "all equally long"
    yield (
        f"Simulated for {STEPS} steps. Answers of {mean.response:g} tokens on average (--mean_response), {sigma}.\n"
        "K: largest staleness; with K=1 running samples continue under new weights. Devices are shared unless others\n"
        f"are {WORTH_IT - 1:.0%} faster. The times of prompts and rewards are not counted."
    )


def _speed(row: Placement) -> float:
    return row.found.tokens if row.found is not None else 0.0

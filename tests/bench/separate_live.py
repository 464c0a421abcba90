"""Engines on devices of their own, live: seconds per step against shared devices, and the cost of a weight update.

The main job of `bench async_live` through Ray on two CPU slots: both train and generate (shared), or one trains and the
other generates (separate). Runs of all settings take turns. Printed is the median over rounds of the ratio to shared
devices with K = async_training.max_off_policy_threshold = 0 in the same round, with the smallest and largest. Then the
seconds and megabytes of a weight update of a larger model, and the seconds relative to one copy of the same bytes in
memory. Options: --rounds N (0: only the
weight updates), --steps N, --seconds S, --engines hf vllm.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

from tests.bench.async_live import REWARD, WARM_UP, seconds_per_step
from tests.bench.frame import options
from tests.bench.step_task import SIZES, make_task
from trainer.observe.tracking import read_metrics

RAY = {"trainer.backend": "ray", "trainer.n_gpus_per_node": 2}
POOL = RAY | {"trainer.n_gpus_per_node": 1, "hybrid_engine": "false", "rollout.nnodes": 1, "rollout.n_gpus_per_node": 1}
KEY = "async_training.max_off_policy_threshold"
SETTINGS: dict[str, dict[str, object]] = {
    "shared, K=0": RAY,
    "shared, K=1": RAY | {KEY: 1},
    "shared, K=2": RAY | {KEY: 2},
    "separate, K=0": POOL,
    "separate, K=1": POOL | {KEY: 1},
    "separate, K=1, partial": POOL | {KEY: 1, "async_training.partial_rollout": "true"},
    "separate, K=2": POOL | {KEY: 2},
}
UPDATES: dict[str, dict[str, object]] = {
    "shared": RAY | {"trainer.n_gpus_per_node": 1},
    "separate": POOL,
    "separate, adapter of rank 8": POOL | {"model.lora_rank": 8},
}


def copy_seconds(megabytes: float) -> float:
    """Returns the median time of a copy of so many bytes in memory."""
    source = torch.ones(max(1, int(megabytes * 1e6)), dtype=torch.uint8)
    target, seconds = torch.empty_like(source), []
    for _ in range(20):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def main(argv: list[str]) -> int:
    """Runs all engines and settings in turn, then the weight updates."""
    given = options("separate_live", __doc__, argv, rounds=3, steps=12, seconds=0.0, engines=["hf", "vllm"])
    with tempfile.TemporaryDirectory(prefix="bench-pools-", ignore_cleanup_errors=True) as root:
        folder = Path(root)
        make_task(folder, SIZES[0], SIZES[0].lengths[1])
        (folder / "reward.py").write_text(REWARD)
        for engine in given.engines if given.rounds else ():
            took: dict[str, list[float]] = {name: [] for name in SETTINGS}
            for number in range(given.rounds):
                for place, (name, setting) in enumerate(SETTINGS.items()):
                    run = f"{engine}-{number}-{place}"
                    took[name].append(seconds_per_step(folder, run, engine, setting, given.steps, given.seconds))
            base = took["shared, K=0"]
            print(f"{engine}, reward of {given.seconds} s, shared, K=0: {statistics.median(base):.2f} s per step")
            for name in list(SETTINGS)[1:]:
                ratios = sorted(one / other for one, other in zip(took[name], base, strict=True))
                shown = f"{statistics.median(ratios):.2f} x the time ({ratios[0]:.2f} to {ratios[-1]:.2f})"
                print(f"  {name}: {shown}", flush=True)
        larger = SIZES[1]
        make_task(folder, larger, larger.lengths[1])
        print(f"weight update, {larger.name} parameters, hf")
        for name, setting in UPDATES.items():
            seconds_per_step(folder, name.replace(" ", "-"), "hf", setting, WARM_UP + 4, 0.0)
            rows = list(read_metrics(folder / name.replace(" ", "-") / "metrics.jsonl").values())[1:]
            sent, seconds = (
                statistics.median(row[f"weight_sync/{x}"] for row in rows) for x in ("megabytes", "seconds")
            )
            print(
                f"  {name}: {sent:.3g} MB, {seconds * 1e3:.1f} ms, {seconds / copy_seconds(sent):.1f} x a copy",
                flush=True,
            )
    return 0

"""Asynchronous training, live: seconds per step for K = async_training.max_off_policy_threshold against K = 0, and for
partial rollouts.

The main job on the task of `bench step` (1.06M parameters, 16 prompts x 8 samples of skewed lengths) with a reward that
takes `--seconds` for each sample, all samples at once, as a judge or a sandbox does. Runs of all settings take turns.
Printed is the median over rounds of the ratio to K = 0 in the same round, with the smallest and largest. Options:
--rounds N, --steps N, --seconds S, --engines hf vllm.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench.frame import options
from tests.bench.step_task import SIZES, arguments, make_task
from trainer.observe.tracking import read_metrics

SETTINGS: dict[str, dict[str, object]] = {
    "K=0": {},
    "K=1": {"async_training.max_off_policy_threshold": 1},
    "K=1, partial": {"async_training.max_off_policy_threshold": 1, "async_training.partial_rollout": "true"},
    "K=2": {"async_training.max_off_policy_threshold": 2},
}
WARM_UP = 3
REWARD = """
import asyncio, zlib

async def compute_score(data_source, solution_str, ground_truth, extra_info=None, seconds=0.0):
    if solution_str != ground_truth:  # not when it is tried before the run
        await asyncio.sleep(seconds)
    return (zlib.crc32(solution_str.encode()) % 1000) / 1000
"""


def seconds_per_step(
    folder: Path, name: str, engine: str, setting: dict[str, object], steps: int, seconds: float
) -> float:
    """Returns the mean time of a step after the first ones, from their times in the log."""
    own = {
        "rollout.name": engine,
        "reward.custom_reward_function.path": folder / "reward.py",
        "reward.reward_kwargs": f"{{seconds: {seconds}}}",
        "reward.max_concurrent": 512,
        "reward.num_workers": 1,
        "trainer.backend": "inline",
        "trainer.device": "cpu",
        "trainer.total_training_steps": steps,
        "trainer.default_local_dir": folder / name,
        **setting,
    }
    command = [sys.executable, "-m", "trainer.main_ppo", *arguments(folder, SIZES[0].lengths[1], own)]
    with (folder / f"{name}.log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit((folder / f"{name}.log").read_text()[-3000:])
    rows = read_metrics(folder / name / "metrics.jsonl")
    return statistics.fmean(rows[step]["timing_s/step"] for step in range(1 + WARM_UP, steps))


def main(argv: list[str]) -> int:
    """Runs all engines and settings in turn."""
    given = options("async_live", __doc__, argv, rounds=3, steps=14, seconds=0.5, engines=["hf", "vllm"])
    with tempfile.TemporaryDirectory(prefix="bench-async-", ignore_cleanup_errors=True) as root:
        folder = Path(root)
        make_task(folder, SIZES[0], SIZES[0].lengths[1])
        (folder / "reward.py").write_text(REWARD)
        for engine in given.engines:
            ratios: dict[str, list[float]] = {name: [] for name in SETTINGS}
            base = list[float]()
            for round_number in range(given.rounds):
                for number, (name, setting) in enumerate(SETTINGS.items()):
                    place = f"{engine}-{round_number}-{number}"
                    took = seconds_per_step(folder, place, engine, setting, given.steps, given.seconds)
                    base += [took] if not setting else []
                    ratios[name].append(took / base[-1])
            print(f"{engine}, reward of {given.seconds} s, K=0: {statistics.median(base):.2f} s per step")
            for name in list(SETTINGS)[1:]:
                low, high = min(ratios[name]), max(ratios[name])
                print(
                    f"  {name}: {statistics.median(ratios[name]):.2f} x the time ({low:.2f} to {high:.2f})", flush=True
                )
    return 0

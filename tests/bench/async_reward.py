"""Asynchronous training: the rewards of runs with K = async_training.max_off_policy_threshold and of K = 0, same seeds.

The quickstart and FrozenLake with the hf engine, `--seeds` seeds. Two rewards are compared: the mean reward of the
training samples in the last quarter of the steps, and the mean reward of the last validation. Printed is the mean over
seeds of the difference to K = 0 in points (hundredths of the reward), with the 95% interval of paired differences
(Student's t). Options: --seeds N, --steps N, --thresholds 1 2 4, --extra 'key=value ...' for the runs with K > 0,
--jobs N runs at a time.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.bench.frame import options, print_row
from trainer.observe.tracking import read_metrics
from trainer.validation.metrics import student_t

TASKS = {"quickstart": 100, "agentic_frozen_lake": 60}
"""Recipes and their numbers of steps."""


def rewards(folder: Path, recipe: str, threshold: int, seed: int, steps: int, extra: list[str]) -> tuple[float, float]:
    """Runs one training. Returns the training and the validation reward."""
    own = {
        "rollout.name": "hf",
        "async_training.max_off_policy_threshold": threshold,
        "trainer.seed": seed,
        "trainer.backend": "inline",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": steps,
        "trainer.save_freq": 0,
        "trainer.test_freq": -1,
        "trainer.val_before_train": False,
        "trainer.logger": "[jsonl]",
        "trainer.default_local_dir": folder / f"{recipe}-{threshold}-{seed}",
    }
    given = [f"{key}={value}" for key, value in own.items()] + (extra if threshold else [])
    command = [sys.executable, "-m", "trainer.main_ppo", f"recipe={recipe}", *given]
    log = folder / f"{recipe}-{threshold}-{seed}.log"
    with log.open("w") as output:
        done = subprocess.run(command, stdout=output, stderr=output, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(log.read_text()[-3000:])
    rows = read_metrics(folder / f"{recipe}-{threshold}-{seed}" / "metrics.jsonl")
    trained = statistics.fmean(rows[step]["critic/score/mean"] for step in range(steps - steps // 4 + 1, steps + 1))
    last = rows[steps]
    greedless = [value for key, value in last.items() if key.startswith("val-core/") and "greedy" not in key]
    return trained, statistics.fmean(greedless)


def main(argv: list[str]) -> int:
    """Runs all recipes, thresholds and seeds."""
    given = options(
        "async_reward", __doc__, argv, seeds=5, steps=0, thresholds=[1, 2, 4], tasks=list(TASKS), extra="", jobs=2
    )
    extra = given.extra.split()
    print_row(["recipe", "K", "training reward to K=0, points", "validation reward to K=0, points"], head=True)
    with (
        tempfile.TemporaryDirectory(prefix="bench-async-", ignore_cleanup_errors=True) as name,
        ThreadPoolExecutor(given.jobs) as pool,
    ):
        for recipe in given.tasks:
            steps = given.steps or TASKS[recipe]
            runs = {
                (threshold, seed): pool.submit(rewards, Path(name), recipe, threshold, seed, steps, extra)
                for seed in range(1, given.seeds + 1)
                for threshold in (0, *given.thresholds)
            }
            base = [runs[0, seed].result() for seed in range(1, given.seeds + 1)]
            means = [statistics.fmean(pair[kind] for pair in base) for kind in (0, 1)]
            print_row([recipe, 0, f"(reward {means[0]:.3f})", f"(reward {means[1]:.3f})"])
            for threshold in given.thresholds:
                found = [runs[threshold, seed].result() for seed in range(1, given.seeds + 1)]
                cells = [_interval([100 * (a[k] - b[k]) for a, b in zip(found, base, strict=True)]) for k in (0, 1)]
                print_row([recipe, threshold, *cells])
    return 0


def _interval(differences: list[float]) -> str:
    """Returns mean and 95% interval of the mean of paired differences."""
    mean, number = statistics.fmean(differences), len(differences)
    if number < 2:
        return f"{mean:+.1f}"
    half = student_t(number - 1) * statistics.stdev(differences) / number**0.5
    return f"{mean:+.1f} ({mean - half:+.1f} to {mean + half:+.1f})"

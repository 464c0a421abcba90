"""Asynchronous training, simulated: tokens per second and idle share for K = async_training.max_off_policy_threshold,
partial rollouts and oversampling.

The real `RolloutScheduler` decides what runs; the engines have a simulated clock. Every device trains and generates, as
in a run: between the micro-batches of an update, its engine runs for as long as the update did. A device has 8 prompts
with 8 answers each per step. An engine step takes 1 + n / 256 time units for n running sequences, and gives each of
them a token. Answer lengths are log-normal and cut at 32,768 tokens:

    (a) median 1,000, sigma 1.2
    (b) median and sigma such that the mean is 12,700, as in a published run of verl: median 8,690, sigma 1.2

An update takes half of the mean generation time of a synchronous step, and in case (c), with the lengths of (a), twice
that time. The last row gives the engines devices of their own, in the fastest of six divisions: the update takes longer
by the ratio of the devices, and there are fewer engines. Printed are tokens per time unit relative to K = 0 and to a
run without a threshold (limit), the share of device time without work, the largest staleness, and the mean length of
the trained answers relative to the drawn ones.
Options: --steps N (training steps), --most N (largest number of devices).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.bench.frame import options, print_row
from tests.bench.simulation import Simulated, Workload, simulate

PROMPTS, SAMPLES, CAP, SIGMA = 8, 8, 32_768, 1.2
MEDIANS = {"a": 1_000, "b": 8_690}
PARTS = (1, 2, 3, 4, 5, 6)  # eighths of the devices that train, if the engines have the others
CASES = (("a", 0.5), ("b", 0.5), ("c", 2.0))
SETTINGS: dict[str, dict[str, Any]] = {
    "K=0": {},
    "K=0, oversample=1.25": {"oversample": 1.25},
    "K=1": {"threshold": 1},
    "K=1, partial": {"threshold": 1, "partial": True},
    "K=1, partial, oversample=1.25, 0 ahead": {"threshold": 1, "partial": True, "oversample": 1.25, "ahead": 0},
    "K=2": {"threshold": 2},
    "K=4": {"threshold": 4},
    "limit": {"threshold": 10**6},
}


def work(median: float, devices: int, update: float) -> Workload:
    """Returns the workload of a case on so many devices."""
    return Workload(PROMPTS * devices, SAMPLES, median, SIGMA, CAP, 1.0, 1 / 256, update)


def generation_time(median: float, steps: int) -> float:
    """Returns the mean time of a synchronous generation on 8 devices."""
    return simulate(work(median, 8, 0.0), 8, steps).seconds / steps


def separate(median: float, devices: int, update: float, steps: int) -> tuple[str, Simulated]:
    """Returns the name and the result of the fastest division of the devices between trainer and engines."""
    found = {}
    for part in PARTS:
        trainers = devices * part // 8
        given = work(median, devices, update * devices / trainers)
        name = f"K=1, partial, {part}/8 train"
        found[name] = simulate(given, devices - trainers, steps, is_separate=True, threshold=1, partial=True)
    return max(found.items(), key=lambda item: item[1].tokens)


def main(argv: list[str]) -> int:
    """Prints a table for each case and number of devices."""
    given = options("async", __doc__, argv, steps=12, most=1024)
    lengths = np.minimum(np.random.default_rng(0).lognormal(np.log(MEDIANS["b"]), SIGMA, 10**6), CAP)
    lengths = np.minimum(np.random.default_rng(0).lognormal(np.log(MEDIANS["b"]), SIGMA, 10**6), CAP)
    print(f"lengths (b): mean {lengths.mean():,.0f} tokens")
    head = ["case", "devices", "update / generation", "setting", "tokens per unit and device"]
    print_row([*head, "to K=0", "to the limit", "idle", "staleness", "length"], head=True)
    for case, share in CASES:
        median = MEDIANS.get(case, MEDIANS["a"])
        update = share * generation_time(median, given.steps)
        for devices in (number for number in (8, 64, 512, 1024) if number <= given.most):
            whole = work(median, devices, update)
            found = {name: simulate(whole, devices, given.steps, **setting) for name, setting in SETTINGS.items()}
            found |= dict([separate(median, devices, update, given.steps)])
            for name, each in found.items():
                ratios = [f"{each.tokens / found[peer].tokens:.2f}" for peer in ("K=0", "limit")]
                idle = f"{each.engine_idle:.0%}"
                if name.endswith("train"):
                    idle = f"{each.trainer_idle:.0%} trainer, {idle} engines"
                row = [case, f"{devices:,}", share, name, f"{each.tokens / devices:.1f}", *ratios, idle]
                print_row([*row, each.staleness, f"{each.length:.2f}"])
    return 0

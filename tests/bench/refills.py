"""`python -m tests.bench refills`: what the size of further generation batches costs in dynamic sampling.

Plays steps with a given share of groups that are kept, and prints by rule how many generation batches a step takes and
how many groups it asks for, over the number that would be enough (batch / share). Rules: as many as are missing on
average; with one or two standard deviations more (`trainer.dynamic_sampling.refill_size` has two); a full batch, as
verl's DAPO recipe does.
"""

from __future__ import annotations

import argparse
import math

import numpy as np

from trainer.dynamic_sampling import SPARE_DEVIATIONS, refill_size

RULES: dict[str, float] = {"mean": 0.0, "+1 deviation": 1.0, "+2 deviations": 2.0, "full batch": math.inf}


def step(batch: int, share: float, spare: float, rng: np.random.Generator) -> tuple[int, int]:
    """Generation batches of one step, and groups asked for."""
    kept, asked, batches, size = 0, 0, 0, batch
    while True:
        kept, asked, batches = kept + int(rng.binomial(size, share)), asked + size, batches + 1
        if kept >= batch:
            return batches, asked
        size = batch if math.isinf(spare) else refill_size(batch - kept, kept, asked, batch, spare)


def main(argv: list[str]) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench refills", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    steps = parser.parse_args(argv).steps
    print(f"{steps} steps each; generation batches, groups asked over batch / share; used: +{SPARE_DEVIATIONS:g}")
    print(f"{'batch':>6} {'share':>6}" + "".join(f"{name:>18}" for name in RULES))
    for batch in (64, 512):
        for share in (0.8, 0.5, 0.2):
            cells = []
            for spare in RULES.values():
                rng = np.random.default_rng(0)
                batches, asked = np.mean([step(batch, share, spare, rng) for _ in range(steps)], axis=0)
                cells.append(f"{batches:.2f}  x{asked * share / batch:.2f}")
            print(f"{batch:>6} {share:>6}" + "".join(f"{cell:>18}" for cell in cells))
    return 0

"""Asynchronous training, simulated: tokens per second and idle share for K = async_training.max_off_policy_threshold.

The real `RolloutScheduler` decides what runs; the engines have a simulated clock. Every device trains and generates, as
in a run: between the micro-batches of an update, its engine runs for as long as the update did. A device has 8 prompts
with 8 answers each per step. An engine step takes 1 + n / 256 time units for n running sequences, and gives each of
them a token. Answer lengths are log-normal and cut at 32,768 tokens:

    (a) median 1,000, sigma 1.2
    (b) median and sigma such that the mean is 12,700, as in a published run of verl: median 8,690, sigma 1.2

An update takes half of the mean generation time of a synchronous step, and in case (c), with the lengths of (a), twice
that time. Printed are tokens per time unit relative to K = 0, the share of device time without work, and the largest
staleness. Options: --steps N (training steps), --most N (largest number of devices).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tests.bench.frame import options, print_row
from trainer.rollout_scheduler import Group, RolloutScheduler
from verl_lite.config import PPOConfig
from verl_lite.protocol import DataProto
from workers.rollout.base import SamplingParams
from workers.rollout.group_run import GroupPlan, GroupReport, GroupResults

PROMPTS, SAMPLES, CAP, SIGMA = 8, 8, 32_768, 1.2
MEDIANS = {"a": 1_000, "b": 8_690}
CASES = (("a", 0.5), ("b", 0.5), ("c", 2.0))
TICKS = 400  # parts of the time of the longest possible answer


class Engines:
    """One engine per device, with a common clock. busy: device time in which an engine had something to decode."""

    def __init__(self, devices: int) -> None:
        self.devices, self.clock, self.busy, self.load = devices, 0.0, 0.0, np.zeros(devices, dtype=np.int64)
        self.keys: list[str] = []
        self.left, self.of = np.zeros((0, SAMPLES)), np.zeros(0, dtype=np.int64)  # tokens; engine of each group

    def begin_groups(self, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
        engines = np.arange(len(plans)) * self.devices // len(plans)
        self.keys += [plan.key for plan in plans]
        self.left = np.concatenate([self.left, np.array([plan.samples for plan in plans], dtype=float)])
        self.of = np.concatenate([self.of, engines])

    def advance(self, seconds: float) -> None:
        """Decodes for this time on every engine."""
        running = np.bincount(self.of, weights=(self.left > 0).sum(1), minlength=self.devices)
        self.left -= (seconds / (1 + running / 256))[self.of, None]
        self.busy += seconds * np.count_nonzero(running)

    def run_groups(self, keys: Sequence[str], seconds: float | None = None) -> list[GroupResults]:
        """Decodes until the groups are complete, or with a time limit until any group is."""
        wanted = np.isin(self.keys, list(keys))
        while wanted.any() and (self.left[wanted] > 0).any():
            if seconds is not None and (self.left <= 0).all(1).any():
                break
            self.advance(CAP / TICKS)
            self.clock += CAP / TICKS
        ended = (self.left <= 0).all(1)
        reports = [GroupReport(key, 1) for key, is_ended in zip(self.keys, ended, strict=True) if is_ended]
        self.keys = [key for key, is_ended in zip(self.keys, ended, strict=True) if not is_ended]
        self.left, self.of = self.left[~ended], self.of[~ended]
        rows = DataProto.from_dict({"x": torch.zeros(len(reports))}) if reports else None
        return [GroupResults(reports, rows)]

    def train(self, seconds: float) -> None:
        """An update of this duration, during which the engines get as much time if they have something to decode."""
        done = 0.0
        while done < seconds and (self.left > 0).any():
            self.advance(CAP / TICKS)
            self.clock += CAP / TICKS
            done += CAP / TICKS
        self.clock += seconds
        self.busy += seconds * self.devices


class Source:
    """Groups with random lengths, the same for every K."""

    epoch = 0

    def __init__(self, median: float, prompts: int) -> None:
        self.median, self.prompts, self.random, self.tokens = (
            median,
            prompts,
            np.random.default_rng(1),
            dict[str, float](),
        )

    def draw_batch(self, step: int, start_step: int) -> list[Group]:
        lengths = np.minimum(self.random.lognormal(np.log(self.median), SIGMA, (self.prompts, SAMPLES)), CAP)
        plans = [GroupPlan(f"{step}/{number}", tuple(row)) for number, row in enumerate(lengths)]
        self.tokens |= {plan.key: float(sum(plan.samples)) for plan in plans}
        return [Group(plan) for plan in plans]


def simulate(devices: int, median: float, threshold: int, update: float, steps: int) -> tuple[float, float, int]:
    """Returns tokens per time unit, the idle share and the largest staleness. update: duration of an update."""
    config = PPOConfig()
    config.async_training.max_off_policy_threshold = threshold
    engines, source = Engines(devices), Source(median, PROMPTS * devices)
    fake: Any = source
    scheduler = RolloutScheduler(config, fake, engines, SamplingParams(), last_step=steps)
    scheduler.version, tokens, oldest = 0, 0.0, 0
    for step in range(1, steps + 1):
        if scheduler.spans_updates:
            scheduler.begin_ahead(step)
        before = {group.plan.key: group for group in scheduler.groups}
        scheduler.get_batch(step)
        left = {group.plan.key for group in scheduler.groups}
        oldest = max([oldest, *(step - 1 - group.version for key, group in before.items() if key not in left)])
        if scheduler.batches_ahead and not scheduler.spans_updates:
            scheduler.version = step - 1
            scheduler.begin_ahead(step)
        engines.train(update)
        if scheduler.spans_updates or not scheduler.batches_ahead:
            scheduler.version = step
    tokens = sum(source.tokens.values())
    return tokens / engines.clock, 1 - engines.busy / (engines.clock * devices), oldest


def generation_time(median: float, steps: int) -> float:
    """Returns the mean time of a synchronous generation on 8 devices."""
    engines, source = Engines(8), Source(median, PROMPTS * 8)
    for step in range(steps):
        plans = [group.plan for group in source.draw_batch(step, step)]
        engines.begin_groups(plans, SamplingParams())
        engines.run_groups([plan.key for plan in plans])
    return engines.clock / steps


def main(argv: list[str]) -> int:
    """Prints a table for each case and number of devices."""
    given = options("async", __doc__, argv, steps=12, most=1024)
    lengths = np.minimum(np.random.default_rng(0).lognormal(np.log(MEDIANS["b"]), SIGMA, 10**6), CAP)
    print(f"lengths (b): mean {lengths.mean():,.0f} tokens")
    head = [
        "case",
        "devices",
        "update / generation",
        "K",
        "tokens per unit and device",
        "to K = 0",
        "idle",
        "staleness",
    ]
    print_row(head, head=True)
    for case, share in CASES:
        median = MEDIANS.get(case, MEDIANS["a"])
        update = share * generation_time(median, given.steps)
        for devices in (number for number in (8, 64, 512, 1024) if number <= given.most):
            base = 0.0
            for threshold in (0, 1, 2, 4):
                speed, idle, oldest = simulate(devices, median, threshold, update, given.steps)
                base = base or speed
                row = [case, f"{devices:,}", share, threshold, f"{speed / devices:.1f}", f"{speed / base:.2f}"]
                print_row([*row, f"{idle:.0%}", oldest])
    return 0

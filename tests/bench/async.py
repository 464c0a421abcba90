"""Asynchronous training, simulated: tokens per second and idle share for K = async_training.max_off_policy_threshold,
partial rollouts and oversampling.

The real `RolloutScheduler` decides what runs; the engines have a simulated clock. Every device trains and generates, as
in a run: between the micro-batches of an update, its engine runs for as long as the update did. A device has 8 prompts
with 8 answers each per step. An engine step takes 1 + n / 256 time units for n running sequences, and gives each of
them a token. Answer lengths are log-normal and cut at 32,768 tokens:

    (a) median 1,000, sigma 1.2
    (b) median and sigma such that the mean is 12,700, as in a published run of verl: median 8,690, sigma 1.2

An update takes half of the mean generation time of a synchronous step, and in case (c), with the lengths of (a), twice
that time. Printed are tokens per time unit relative to K = 0 and to a run without a threshold (limit), the share of
device time without work, the largest staleness, and the mean length of the trained answers relative to the drawn ones.
Options: --steps N (training steps), --most N (largest number of devices).
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
TICKS = 400  # parts of the time of the longest possible answer


class Engines:
    """One engine per device, with a common clock. busy: device time in which an engine had something to decode."""

    def __init__(self, devices: int) -> None:
        self.num_engines = devices
        self.devices, self.clock, self.busy, self.load = devices, 0.0, 0.0, np.zeros(devices, dtype=np.int64)
        self.keys: list[str] = []
        self.lengths: dict[str, tuple[float, ...]] = {}
        self.left, self.of = np.zeros((0, SAMPLES)), np.zeros(0, dtype=np.int64)  # tokens; engine of each group

    def begin_groups(self, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
        engines = np.arange(len(plans)) * self.devices // len(plans)
        self.keys += [plan.key for plan in plans]
        self.lengths |= {plan.key: plan.samples for plan in plans}
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
        keys = [key for key, is_ended in zip(self.keys, ended, strict=True) if is_ended]
        self._remove(ended)
        tokens = torch.tensor([sum(self.lengths[key]) for key in keys]).round().long()
        rows = DataProto.from_dict({"response_mask": tokens[:, None]}) if keys else None
        return [GroupResults([GroupReport(key, 1) for key in keys], rows)]

    def snapshot_groups(self) -> list[GroupPlan]:
        return []

    def abort_groups(self, keys: Sequence[str]) -> int:
        aborted = np.isin(self.keys, list(keys))
        done = sum(sum(self.lengths[key]) for key in keys) - self.left[aborted].clip(0).sum()
        self._remove(aborted)
        return int(done)

    def _remove(self, which: np.ndarray) -> None:
        self.keys = [key for key, is_gone in zip(self.keys, which, strict=True) if not is_gone]
        self.left, self.of = self.left[~which], self.of[~which]

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
    """Groups with random lengths, the same for all settings."""

    epoch = 0

    def __init__(self, median: float, prompts: int) -> None:
        self.median, self.prompts, self.random = median, prompts, np.random.default_rng(1)
        self.drawn = 0

    def draw_batch(self, step: int, start_step: int) -> list[Group]:
        return self.draw(self.prompts, step)

    def draw(self, number: int, step: int) -> list[Group]:
        lengths = np.minimum(self.random.lognormal(np.log(self.median), SIGMA, (number, SAMPLES)), CAP)
        first, self.drawn = self.drawn, self.drawn + number
        return [Group(GroupPlan(str(first + row), tuple(lengths[row]))) for row in range(number)]


def simulate(
    devices: int,
    median: float,
    update: float,
    steps: int,
    *,
    threshold: int = 0,
    ahead: int | None = None,
    partial: bool | None = None,
    oversample: float = 1.0,
) -> tuple[float, float, int, float]:
    """Returns tokens per time unit, the idle share, the largest staleness, and the mean length of the trained answers
    relative to the drawn ones. update: duration of an update."""
    config = PPOConfig()
    config.async_training.max_off_policy_threshold, config.async_training.batches_ahead = threshold, ahead
    config.async_training.partial_rollout, config.rollout.oversample = partial, oversample
    engines, source = Engines(devices), Source(median, PROMPTS * devices)
    fake: Any = source
    scheduler = RolloutScheduler(config, fake, engines, SamplingParams(), last_step=steps)
    scheduler.version, tokens, oldest = 0, 0, 0
    for step in range(1, steps + 1):
        if scheduler.spans_updates:
            scheduler.begin_ahead(step)
        before = {group.plan.key: group for group in scheduler.groups}
        tokens += int(scheduler.get_batch(step).batch["response_mask"].sum())
        left = {group.plan.key for group in scheduler.groups}
        oldest = max([oldest, *(step - 1 - group.version for key, group in before.items() if key not in left)])
        if scheduler.batches_ahead and not scheduler.spans_updates:
            scheduler.version = step - 1
            scheduler.begin_ahead(step)
        engines.train(update)
        if scheduler.spans_updates or not scheduler.batches_ahead:
            scheduler.version = step
    drawn = sum(map(sum, engines.lengths.values())) / len(engines.lengths)
    bias = tokens / (steps * PROMPTS * devices) / drawn
    return tokens / engines.clock, 1 - engines.busy / (engines.clock * devices), oldest, bias


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
    head = ["case", "devices", "update / generation", "setting", "tokens per unit and device"]
    print_row([*head, "to K=0", "to the limit", "idle", "staleness", "length"], head=True)
    for case, share in CASES:
        median = MEDIANS.get(case, MEDIANS["a"])
        update = share * generation_time(median, given.steps)
        for devices in (number for number in (8, 64, 512, 1024) if number <= given.most):
            found = {
                name: simulate(devices, median, update, given.steps, **setting) for name, setting in SETTINGS.items()
            }
            for name, (speed, idle, oldest, bias) in found.items():
                ratios = [f"{speed / found[peer][0]:.2f}" for peer in ("K=0", "limit")]
                row = [case, f"{devices:,}", share, name, f"{speed / devices:.1f}", *ratios, f"{idle:.0%}"]
                print_row([*row, oldest, f"{bias:.2f}"])
    return 0

"""Simulates the sampling of a run: the real `RolloutScheduler` over engines with a clock.

All engines advance by ticks. An engine step takes `base` seconds plus `per_sequence` for each running sequence, and
gives each of them a token. Engines on the trainer's devices run between the micro-batches of an update, for as long as
the update takes; engines on their own devices run all the time, and a group goes to the engine that runs the fewest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.rollout.sample_groups import Group
from trainer.rollout.scheduler import RolloutScheduler
from verl_lite.config import PPOConfig
from verl_lite.protocol import DataProto
from workers.engines.base import SamplingParams
from workers.rollout.specs import GroupPlan, GroupReport, GroupResults

TICKS = 400  # parts of the time of the longest possible answer


@dataclass(frozen=True)
class Workload:
    """The work of a run.

    prompts: prompts per step. samples: answers to each. median, sigma: of the log-normal lengths, cut at `longest`.
    base, per_sequence: duration of an engine step. update: duration of an update. seats: sequences that an engine
    decodes at the same time; others wait.
    """

    prompts: int
    samples: int
    median: float
    sigma: float
    longest: int
    base: float
    per_sequence: float
    update: float
    seats: int = 1 << 30


class SimulatedEngines:
    """The engines. busy, trained: device time in which engines and trainer worked."""

    def __init__(self, num_engines: int, work: Workload, is_separate: bool, sleeps: bool) -> None:
        self.num_engines, self.work, self.is_separate, self.sleeps = num_engines, work, is_separate, sleeps
        self.clock = self.busy = self.trained = 0.0
        self.tick = work.longest / TICKS * work.base
        self.keys: list[str] = []
        self.lengths: dict[str, tuple[float, ...]] = {}
        self.left, self.of = np.zeros((0, work.samples)), np.zeros(0, dtype=np.int64)  # tokens; engine of each group
        self.order = self.of  # the groups by engine, first come first served

    def begin_groups(self, plans: Sequence[GroupPlan], sampling: SamplingParams) -> None:
        engines = np.arange(len(plans)) * self.num_engines // max(1, len(plans))
        if self.is_separate:
            running = np.bincount(self.of, weights=(self.left > 0).sum(1), minlength=self.num_engines)
            for number in range(len(plans)):
                engines[number] = running.argmin()
                running[engines[number]] += self.work.samples
        self.keys += [plan.key for plan in plans]
        lengths: list[Any] = [plan.samples for plan in plans]  # a simulated sample is its length
        self.lengths |= {plan.key: numbers for plan, numbers in zip(plans, lengths, strict=True)}
        self.left = np.concatenate([self.left, np.array(lengths, dtype=float)])
        self.of = np.concatenate([self.of, engines])
        self.order = np.argsort(self.of, kind="stable")

    def advance(self) -> None:
        """Decodes for a tick on every engine."""
        is_left, of = self.left[self.order] > 0, self.of[self.order]
        before = np.cumsum(is_left).reshape(is_left.shape)  # counts the sequences of earlier engines, too
        per_engine = np.bincount(of, weights=is_left.sum(1), minlength=self.num_engines)
        earlier = np.concatenate([[0.0], np.cumsum(per_engine)[:-1]])
        is_running = is_left & (before - earlier[of, None] <= self.work.seats)
        running = np.minimum(per_engine, self.work.seats)
        step = self.work.base + self.work.per_sequence * running
        self.left[self.order] -= np.where(is_running, (self.tick / step)[of, None], 0.0)
        self.busy += self.tick * np.count_nonzero(running)
        self.clock += self.tick

    def run_groups(self, keys: Sequence[str], seconds: float | None = None) -> list[GroupResults]:
        """Decodes until the groups are complete, or with a time limit until any group is."""
        wanted = np.isin(self.keys, list(keys))
        while wanted.any() and (self.left[wanted] > 0).any():
            if seconds is not None and (self.left <= 0).all(1).any():
                break
            self.advance()
        ended = np.atleast_1d((self.left <= 0).all(axis=1))
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
        self.order = np.argsort(self.of, kind="stable")

    def train(self) -> None:
        """An update, during which the engines run if they have something to decode."""
        started = self.clock
        while not self.sleeps and self.clock - started < self.work.update and (self.left > 0).any():
            self.advance()
        if self.is_separate:
            self.clock = started + self.work.update
        else:
            self.clock += self.work.update
        self.trained += self.work.update


class RandomLengths:
    """A group source with random lengths, the same in every simulation of a workload."""

    epoch = 0

    def __init__(self, work: Workload) -> None:
        self.work, self.random, self.drawn = work, np.random.default_rng(1), 0

    def draw_batch(self, step: int, start_step: int) -> list[Group]:
        return self.draw(self.work.prompts, step)

    def draw(self, number: int, step: int) -> list[Group]:
        work, size = self.work, (number, self.work.samples)
        lengths = np.minimum(self.random.lognormal(np.log(work.median), work.sigma, size), work.longest)
        first, self.drawn = self.drawn, self.drawn + number
        return [Group(GroupPlan(str(first + row), tuple(lengths[row]))) for row in range(number)]


@dataclass(frozen=True)
class Simulated:
    """The result of a simulation.

    seconds: of all steps. tokens: per second. trainer_idle, engine_idle: shares of the time in which a device of the
    trainer or of an engine does nothing; equal if they share devices. staleness: the largest. length: mean length of
    the trained answers relative to the drawn ones.
    """

    seconds: float
    tokens: float
    trainer_idle: float
    engine_idle: float
    staleness: int
    length: float


def simulate(
    work: Workload,
    num_engines: int,
    steps: int,
    *,
    is_separate: bool = False,
    sleeps: bool = False,
    threshold: int = 0,
    ahead: int | None = None,
    partial: bool | None = None,
    oversample: float = 1.0,
) -> Simulated:
    """Simulates so many training steps. is_separate: engines have devices of their own. sleeps: engines do not run
    during an update. The other options are those of `async_training` and `rollout`."""
    config = PPOConfig()
    config.async_training.max_off_policy_threshold, config.async_training.batches_ahead = threshold, ahead
    config.async_training.partial_rollout, config.rollout.oversample = partial, oversample
    engines, source = SimulatedEngines(num_engines, work, is_separate, sleeps), RandomLengths(work)
    fake: Any = source
    scheduler = RolloutScheduler(config, fake, engines, SamplingParams(), last_step=steps)
    scheduler.version, tokens, oldest = 0, 0, 0
    for step in range(1, steps + 1):
        before = {group.plan.key: group for group in scheduler.groups}
        tokens += int(scheduler.get_batch(step).batch["response_mask"].sum())
        left = {group.plan.key for group in scheduler.groups}
        oldest = max([oldest, *(step - 1 - group.version for key, group in before.items() if key not in left)])
        if scheduler.batches_ahead and not scheduler.spans_updates:
            scheduler.version = step - 1
        scheduler.begin_ahead(step)
        engines.train()
        if scheduler.spans_updates or not scheduler.batches_ahead:
            scheduler.version = step
    drawn = sum(map(sum, engines.lengths.values())) / len(engines.lengths)
    engine_idle, trainer_idle = 1 - engines.busy / (engines.clock * num_engines), 1 - engines.trained / engines.clock
    if not is_separate:
        engine_idle = trainer_idle = 1 - (engines.busy / num_engines + engines.trained) / engines.clock
    bias = tokens / (steps * work.prompts) / drawn
    return Simulated(engines.clock, tokens / engines.clock, trainer_idle, engine_idle, oldest, bias)


def median_of(mean: float, sigma: float, longest: int) -> float:
    """Returns the median of the log-normal distribution whose values, cut at `longest`, have this mean."""
    unit = np.random.default_rng(0).lognormal(0.0, sigma, 100_000)
    low, high = 1e-3, float(longest) * 1e3
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if np.minimum(unit * middle, longest).mean() > mean else (middle, high)
    return low

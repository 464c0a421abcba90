"""Several rewards for each answer: the score is their weighted sum, and each stays visible before its weight.

A part that fails fails the sample: a sum without one of its terms would be another reward. Parts that await something
do so at the same time; the sample's deadline (`reward.timeout_s`) is for all its parts together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from verl_lite.rewards.result import RewardItem, RewardResult
from verl_lite.rewards.scorers import AsyncScorer, BatchScorer, FunctionScorer


@dataclass(frozen=True)
class WeighedPart:
    """One of the rewards. name: in columns and metrics. is_outcome: see `weighted_sum`."""

    name: str
    weight: float
    scorer: FunctionScorer
    is_outcome: bool = False


Parts = tuple[WeighedPart, ...]


def weighted_sum(parts: Parts, results: Sequence[RewardResult]) -> RewardResult:
    """The result of one sample, of which `results` has one from each part.

    extra: under the name of each part its score before the weight. The other entries of the part that is the outcome
    keep their names; those of another part, and one that has the name of a part, are called part.entry. `acc` is that
    of the outcome, or its score where it returned none.
    """
    for part, result in zip(parts, results, strict=True):
        if result.failed:
            error = f"The part {part.name!r} of reward.functions failed.\n{result.error}"
            return RewardResult.failure(error, timed_out=result.timed_out)
    extra: dict[str, float | str] = {}
    names = {part.name for part in parts}
    for part, result in zip(parts, results, strict=True):
        extra[part.name] = result.score
        for name, value in result.extra.items():
            extra[name if part.is_outcome and name not in names else f"{part.name}.{name}"] = value
    if "acc" not in extra:
        extra["acc"] = next(result.score for part, result in zip(parts, results, strict=True) if part.is_outcome)
    return RewardResult(sum(part.weight * result.score for part, result in zip(parts, results, strict=True)), extra)


@dataclass(frozen=True)
class WeightedPlain:
    """Parts of which none awaits: one sample, and of it one part, after the other."""

    parts: Parts
    style: ClassVar[Literal["sample"]] = "sample"

    def score(self, item: RewardItem) -> RewardResult:
        """Scores one sample."""
        return weighted_sum(self.parts, [part.scorer.score_all([item])[0] for part in self.parts])

    def score_all(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples here and now, one after the other."""
        return [self.score(item) for item in items]


@dataclass(frozen=True)
class WeightedAsync:
    """Parts of which some await: all of a sample at once, and many samples at once."""

    parts: Parts
    style: ClassVar[Literal["async"]] = "async"

    async def score(self, item: RewardItem) -> RewardResult:
        """Scores one sample."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_awaited(part.scorer, item)) for part in self.parts]
        return weighted_sum(self.parts, [task.result() for task in tasks])

    def score_all(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples here and now, one after the other."""
        return [asyncio.run(self.score(item)) for item in items]


@dataclass(frozen=True)
class WeightedLists:
    """Parts of which some take lists: each part is called with all samples of the list, the others with one by one."""

    parts: Parts
    style: ClassVar[Literal["batch"]] = "batch"

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples. Where a part's list fails as a whole, that part is called with each of them alone."""
        columns = [_of_all(part.scorer, items) for part in self.parts]
        return [weighted_sum(self.parts, results) for results in zip(*columns, strict=True)]

    def score_all(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """The same; nothing is raised here."""
        return self.score(items)


WeightedScorer = WeightedPlain | WeightedAsync | WeightedLists


def weighted_scorer(parts: Parts) -> WeightedScorer:
    """The way to call parts together: with lists if one of them takes lists, else many at once if one awaits."""
    if any(isinstance(part.scorer, BatchScorer) for part in parts):
        return WeightedLists(parts)
    if any(isinstance(part.scorer, AsyncScorer) for part in parts):
        return WeightedAsync(parts)
    return WeightedPlain(parts)


async def _awaited(scorer: FunctionScorer, item: RewardItem) -> RewardResult:
    return await scorer.score(item) if isinstance(scorer, AsyncScorer) else scorer.score_all([item])[0]


def _of_all(scorer: FunctionScorer, items: Sequence[RewardItem]) -> list[RewardResult]:
    async def together() -> list[RewardResult]:
        return list(await asyncio.gather(*(_awaited(scorer, item) for item in items)))

    return asyncio.run(together()) if isinstance(scorer, AsyncScorer) else scorer.score_all(items)

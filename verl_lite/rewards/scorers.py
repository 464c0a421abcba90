"""How the reward function of a run is called: with one sample, with many samples at once, or with lists of them.

Each of the three scorers is the guarded door to untrusted code: whatever the function raises or returns becomes the
outcome of the sample. `verl_lite.rewards.load` makes them from the configuration.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from verl_lite.rewards.dispatch import RewardFunction
from verl_lite.rewards.result import RewardItem, RewardResult, read_score, short

Style = Literal["sample", "async", "batch"]
"""How a scorer takes samples: one after the other, many at once, or as a list."""


@dataclass(frozen=True)
class PlainScorer:
    """Calls a function with one sample at a time. with_prompt: also pass the prompt."""

    function: RewardFunction
    with_prompt: bool = False
    style: ClassVar[Literal["sample"]] = "sample"

    def score(self, item: RewardItem) -> RewardResult:
        """Scores one sample; a coroutine that the function returns is run to its end."""
        try:
            returned = self.function(**_arguments(item, self.with_prompt))
            return RewardResult(*read_score(_run(returned)))
        except Exception:  # the one door to untrusted code: what it raises is this sample's outcome, not the run's
            return RewardResult.failure(traceback.format_exc())

    def score_all(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples here and now, one after the other."""
        return [self.score(item) for item in items]


@dataclass(frozen=True)
class AsyncScorer:
    """Awaits a function, so that many samples can be under way in one event loop. with_prompt: also pass the prompt."""

    function: RewardFunction
    with_prompt: bool = False
    style: ClassVar[Literal["async"]] = "async"

    async def score(self, item: RewardItem) -> RewardResult:
        """Scores one sample. A function among async ones that is not async itself is simply called."""
        try:
            returned = self.function(**_arguments(item, self.with_prompt))
            if inspect.isawaitable(returned):
                returned = await returned
            return RewardResult(*read_score(returned))
        except Exception:  # as above
            return RewardResult.failure(traceback.format_exc())

    def score_all(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples here and now, one after the other."""
        return [asyncio.run(self.score(item)) for item in items]


@dataclass(frozen=True)
class BatchScorer:
    """Calls a function with lists. arguments: makes its keyword arguments from samples."""

    function: RewardFunction
    arguments: Callable[[Sequence[RewardItem]], dict[str, Any]]
    style: ClassVar[Literal["batch"]] = "batch"

    def score(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples in one call. A bad entry fails its own sample only.

        Raises whatever the function raises, and ValueError if it does not return one result for each sample: then
        nobody knows which of them is to blame.
        """
        returned = _run(self.function(**self.arguments(items)))
        results = list(returned) if hasattr(returned, "__len__") and not isinstance(returned, str | dict) else None
        if results is None or len(results) != len(items):
            found = short(returned) if results is None else f"{len(results)} results"
            raise ValueError(
                f"The reward function returned {found} for {len(items)} samples; expected a list of so many"
            )
        return [_read(result) for result in results]

    def score_all(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples here and now: in one call, or each alone if that call as a whole fails."""
        try:
            return self.score(items)
        except Exception:  # as above
            if len(items) == 1:
                return [RewardResult.failure(traceback.format_exc())]
            return [result for item in items for result in self.score_all([item])]


FunctionScorer = PlainScorer | AsyncScorer | BatchScorer


def lists_of_verl(items: Sequence[RewardItem]) -> dict[str, Any]:
    """The arguments of a function for verl's batch reward manager."""
    return {
        "data_sources": [item.data_source for item in items],
        "solution_strs": [item.solution_str for item in items],
        "ground_truths": [item.ground_truth for item in items],
        "extra_infos": [item.extra_info for item in items],
    }


def lists_of_trl(items: Sequence[RewardItem]) -> dict[str, Any]:
    """The arguments of a TRL reward function: prompts and completions as chat messages, and each column of the data.

    Columns are ground_truth, data_source and the entries of extra_info, None for a row without that entry.
    """
    infos = [item.extra_info or {} for item in items]
    columns = {name: [info.get(name) for info in infos] for name in sorted({name for info in infos for name in info})}
    return {
        **columns,
        "data_source": [item.data_source for item in items],
        "ground_truth": [item.ground_truth for item in items],
        "prompts": [item.prompt for item in items],
        "completions": [[{"role": "assistant", "content": item.solution_str}] for item in items],
    }


def _arguments(item: RewardItem, with_prompt: bool) -> dict[str, Any]:
    arguments = {
        "data_source": item.data_source,
        "solution_str": item.solution_str,
        "ground_truth": item.ground_truth,
        "extra_info": item.extra_info,
    }
    return arguments | {"prompt": item.prompt} if with_prompt else arguments


def _read(returned: Any) -> RewardResult:
    try:
        return RewardResult(*read_score(returned))
    except Exception:  # as above: also reading what was returned runs code of others
        return RewardResult.failure(traceback.format_exc())


def _run(returned: Any) -> Any:
    async def awaited() -> Any:
        return await returned

    return asyncio.run(awaited()) if inspect.isawaitable(returned) else returned

"""The reward function of a run inside a process of the pool; imports no torch."""

from __future__ import annotations

from typing import Any

from verl_lite.config import RewardConfig
from verl_lite.registry import import_modules
from verl_lite.rewards import RewardItem, Scorer, load_scorer


class RewardHandler:
    """Scores lists of samples: one for styles sample and async. info: the style.

    modules: imported first, for the rewards that they register.
    """

    def __init__(self, config: RewardConfig, modules: tuple[str, ...]) -> None:
        import_modules(modules)
        self.scorer: Scorer = load_scorer(config)
        self.info = self.scorer.style
        self.is_async = self.scorer.style == "async"

    def run(self, session: int, items: list[RewardItem]) -> Any:
        """A list of results, or a coroutine that gives it. A list that fails as a whole raises."""
        if self.scorer.style == "sample":
            return [self.scorer.score(items[0])]
        return self._awaited(items[0]) if self.scorer.style == "async" else self.scorer.score(items)

    def end(self, session: int) -> None:
        """Nothing is kept."""

    async def _awaited(self, item: RewardItem) -> Any:
        assert self.scorer.style == "async"
        return [await self.scorer.score(item)]

"""A curriculum for `data.sampler`: draws questions of the open levels of each task, and opens further levels.

Rows need extra_info["level"], a whole number from 1. Half of a task's questions come from its highest open level, the
others with equal probability from all open levels. The next level opens when more than BOUND of the responses to the
highest open level were right in the last STEPS steps.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np

from recipes.reasoning_gym.data import WEIGHTS, source
from trainer.data.prompts import PromptDataset
from trainer.rewards.groups import outcomes_of
from verl_lite.config import DataConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto

BOUND, STEPS = 0.7, 3
SHARES = {source(task): weight for task, weight in WEIGHTS.items()}


class Curriculum:
    """A curriculum; see `trainer.data.order.Sampler`. Sources missing in WEIGHTS get its smallest weight.

    Raises UserError for a row without a level, and for a level with fewer questions than a batch.
    """

    def __init__(self, data_source: PromptDataset, data_config: DataConfig) -> None:
        found: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        batches = [batch.non_tensor_batch for batch in data_source.batches(batch_size=1000)]
        rows = [row for batch in batches for row in zip(batch["data_source"], batch["extra_info"], strict=True)]
        for position, (name, info) in enumerate(rows):
            if not isinstance(level := info.get("level"), int):
                raise UserError(
                    f"data.sampler: the curriculum needs a whole number as extra_info['level'] in every row; row "
                    f"{position} of data.train_files has {level!r}"
                )
            found[name, level].append(position)
        self.pools = {key: np.array(places) for key, places in sorted(found.items())}
        self.sources = sorted({name for name, _ in self.pools})
        self.levels_of = {name: [level for other, level in self.pools if other == name] for name in self.sources}
        shares = np.array([SHARES.get(name, min(SHARES.values())) for name in self.sources])
        self.shares = shares / shares.sum()
        self.batch_size = data_config.train_batch_size
        self.length = len(data_source) // self.batch_size * self.batch_size
        self.rng = np.random.default_rng(data_config.seed)
        self.drawn = 0  # in this epoch
        self.levels = {name: self.levels_of[name][0] for name in self.sources}
        self.recent: dict[str, list[tuple[float, int]]] = {name: [] for name in self.sources}
        smallest = min(len(pool) for pool in self.pools.values())
        if smallest < self.batch_size:
            raise UserError(
                f"data.train_batch_size={self.batch_size}: the curriculum has a level of only {smallest} questions, "
                "which cannot fill a batch; lower data.train_batch_size, or make more questions"
            )

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        while self.drawn < len(self):
            taken: set[int] = set()
            for _ in range(self.batch_size):
                taken.add(position := self._draw(taken))
                self.drawn += 1
                yield position
        self.drawn = 0

    def _draw(self, taken: set[int]) -> int:
        """Draws a question that the batch does not contain yet."""
        name = self.sources[self.rng.choice(len(self.sources), p=self.shares)]
        level = self.levels[name]
        if self.rng.random() < 0.5:
            opened = [lower for lower in self.levels_of[name] if lower <= level]
            level = opened[self.rng.integers(len(opened))]
        pool = self.pools[name, level]
        while (position := int(pool[self.rng.integers(len(pool))])) in taken:
            pass
        return position

    def update(self, batch: DataProto) -> dict[str, float]:
        """Counts right responses at the highest open levels and opens further levels; returns accuracies and levels."""
        outcomes, counted = outcomes_of(batch, None)
        columns = batch.non_tensor_batch
        levels = np.array([info["level"] for info in columns["extra_info"]])
        logged = {}
        for name in self.sources:
            rows = (columns["data_source"] == name) & (levels == self.levels[name]) & counted.numpy()
            right, answers = float(outcomes.numpy()[rows].sum()), int(rows.sum())
            if answers:
                self.recent[name] = [*self.recent[name], (right, answers)][-STEPS:]
                logged[f"{name}/accuracy"] = right / answers
            rights, counts = np.sum(self.recent[name], axis=0) if self.recent[name] else (0, 0)
            higher = [level for level in self.levels_of[name] if level > self.levels[name]]
            if higher and len(self.recent[name]) == STEPS and rights > BOUND * counts:
                self.levels[name], self.recent[name] = higher[0], []
            logged[f"{name}/level"] = float(self.levels[name])
        return logged

    def state_dict(self) -> dict[str, Any]:
        random = self.rng.bit_generator.state
        return {"random": random, "drawn": self.drawn, "levels": self.levels, "recent": self.recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["random"]
        self.drawn, self.levels, self.recent = state["drawn"], dict(state["levels"]), dict(state["recent"])

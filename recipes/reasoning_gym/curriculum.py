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
        self.batch_size = data_config.train_batch_size
        self.length = len(data_source) // self.batch_size * self.batch_size

        self.pools = _positions_by_level(data_source)
        smallest = min(len(pool) for pool in self.pools.values())
        if smallest < self.batch_size:
            raise UserError(
                f"data.train_batch_size={self.batch_size}: the curriculum has a level of only {smallest} questions, "
                "which cannot fill a batch; lower data.train_batch_size, or make more questions"
            )

        self.levels_of: defaultdict[str, list[int]] = defaultdict(list)
        for name, level in self.pools:
            self.levels_of[name].append(level)
        self.sources = sorted(self.levels_of)
        shares = np.array([SHARES.get(name, min(SHARES.values())) for name in self.sources])
        self.shares = shares / shares.sum()

        self.rng = np.random.default_rng(data_config.seed)
        self.drawn = 0  # in this epoch
        self.levels = {name: self.levels_of[name][0] for name in self.sources}
        self.recent: dict[str, list[tuple[float, int]]] = {name: [] for name in self.sources}

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        while self.drawn < len(self):
            taken: set[int] = set()
            for _ in range(self.batch_size):
                position = self._draw(taken)
                taken.add(position)
                self.drawn += 1
                yield position
        self.drawn = 0

    def _draw(self, taken: set[int]) -> int:
        """Draws a question that the batch does not contain yet."""
        name = self.sources[self.rng.choice(len(self.sources), p=self.shares)]
        level = self.levels[name]
        if self.rng.random() < 0.5:
            open_levels = [lower for lower in self.levels_of[name] if lower <= level]
            level = open_levels[self.rng.integers(len(open_levels))]

        # this ends, because each pool has at least as many questions as a batch
        pool = self.pools[name, level]
        while True:
            position = int(pool[self.rng.integers(len(pool))])
            if position not in taken:
                return position

    def update(self, batch: DataProto) -> dict[str, float]:
        """Counts right responses at the highest open levels and opens further levels; returns accuracies and levels."""
        outcomes, counted = outcomes_of(batch, None)
        columns = batch.non_tensor_batch
        levels = np.array([info["level"] for info in columns["extra_info"]])
        logged = {}
        for name in self.sources:
            is_counted = (columns["data_source"] == name) & (levels == self.levels[name]) & counted.numpy()
            answers = int(is_counted.sum())
            if answers:
                right = float(outcomes.numpy()[is_counted].sum())
                self.recent[name] = [*self.recent[name], (right, answers)][-STEPS:]
                logged[f"{name}/accuracy"] = right / answers
            self._open_next_level(name)
            logged[f"{name}/level"] = float(self.levels[name])
        return logged

    def _open_next_level(self, name: str) -> None:
        """Opens the next level of a source if enough of the recent responses were right."""
        recent = self.recent[name]
        higher_levels = [level for level in self.levels_of[name] if level > self.levels[name]]
        if not higher_levels or len(recent) < STEPS:
            return
        right_answers, answers = np.sum(recent, axis=0)
        if right_answers > BOUND * answers:
            self.levels[name] = higher_levels[0]
            self.recent[name] = []  # the counts of a lower level say nothing about this one

    def state_dict(self) -> dict[str, Any]:
        return {
            "random": self.rng.bit_generator.state,
            "drawn": self.drawn,
            "levels": self.levels,
            "recent": self.recent,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["random"]
        self.drawn = state["drawn"]
        self.levels = dict(state["levels"])
        self.recent = dict(state["recent"])


def _positions_by_level(data_source: PromptDataset) -> dict[tuple[str, int], np.ndarray]:
    """Returns the positions of the questions of each source and level, in the order of both."""
    positions: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    position = 0
    for batch in data_source.batches(batch_size=1000):
        columns = batch.non_tensor_batch
        for name, info in zip(columns["data_source"], columns["extra_info"], strict=True):
            level = info.get("level")
            if not isinstance(level, int):
                raise UserError(
                    f"data.sampler: the curriculum needs a whole number as extra_info['level'] in every row; row "
                    f"{position} of data.train_files has {level!r}"
                )
            positions[name, level].append(position)
            position += 1
    return {key: np.array(positions[key]) for key in sorted(positions)}

"""A curriculum for `data.sampler`: draws questions of the open levels of each task, and opens further levels.

Rows need extra_info["level"], a whole number from 1. Half of a task's questions come from its highest open level, the
others with equal probability from all open levels. The next level opens when more than BOUND of the responses to the
highest open level were right in the last STEPS steps.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TypedDict

import numpy as np

from recipes.reasoning_gym.data import WEIGHTS, source
from trainer.data.prompts import PromptDataset
from trainer.rewards.groups import outcomes_of
from verl_lite.config import DataConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto

# 0.8 of the answers to letter_counting are 1, so that a constant answer passes this bound and opens all its levels
BOUND = 0.7
STEPS = 3
SHARES = {source(task): weight for task, weight in WEIGHTS.items()}


class CurriculumState(TypedDict):
    """What a checkpoint contains of a curriculum.

    Attributes:
        random: State of the random numbers.
        drawn: Questions that were drawn in this epoch.
        levels: Highest open level of each source.
        recent: Right responses and all responses to the highest open level of each source, in the last steps.
    """

    random: Mapping[str, object]
    drawn: int
    levels: dict[str, int]
    recent: dict[str, list[tuple[float, int]]]


class Curriculum:
    """A curriculum; see `trainer.data.order.Sampler`. Sources missing in WEIGHTS get its smallest weight.

    Raises UserError for a row without a level, and for a level with fewer questions than a batch.
    """

    def __init__(self, data_source: PromptDataset, data_config: DataConfig) -> None:
        self.batch_size = data_config.train_batch_size
        batches = len(data_source) // self.batch_size
        self.length = batches * self.batch_size

        self.pools = _positions_by_level(data_source)
        # a batch contains no question twice, so that `_draw` needs as many questions in each pool
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
        smallest_share = min(SHARES.values())
        shares = np.array([SHARES.get(name, smallest_share) for name in self.sources])
        self.shares = shares / shares.sum()

        # the attributes from here on are the state, see `CurriculumState`
        self.rng = np.random.default_rng(data_config.seed)
        self.drawn = 0
        self.highest_open: dict[str, int] = {}
        self.recent: dict[str, list[tuple[float, int]]] = {}
        for name in self.sources:
            self.highest_open[name] = self.levels_of[name][0]
            self.recent[name] = []

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
        index = int(self.rng.choice(len(self.sources), p=self.shares))
        name = self.sources[index]
        level = self.highest_open[name]
        if self.rng.random() < 0.5:
            open_levels = [lower for lower in self.levels_of[name] if lower <= level]
            index = int(self.rng.integers(len(open_levels)))
            level = open_levels[index]

        # this ends, because each pool has at least as many questions as a batch
        pool = self.pools[name, level]
        while True:
            index = int(self.rng.integers(len(pool)))
            position = int(pool[index])
            if position not in taken:
                return position

    def update(self, batch: DataProto) -> dict[str, float]:
        """Counts right responses at the highest open levels and opens further levels; returns accuracies and levels."""
        # answers whose reward failed do not count
        outcome_tensor, counted_tensor = outcomes_of(batch, None)
        outcomes = outcome_tensor.numpy()
        is_counted = counted_tensor.numpy()
        columns = batch.non_tensor_batch
        levels = np.array([info["level"] for info in columns["extra_info"]])

        logged = {}
        for name in self.sources:
            is_of_source = columns["data_source"] == name
            is_of_level = levels == self.highest_open[name]
            selected = outcomes[is_of_source & is_of_level & is_counted]
            answers = len(selected)
            if answers:
                right = float(selected.sum())
                recent = [*self.recent[name], (right, answers)]
                self.recent[name] = recent[-STEPS:]
                logged[f"{name}/accuracy"] = right / answers
            self._open_next_level(name)
            logged[f"{name}/level"] = float(self.highest_open[name])
        return logged

    def _open_next_level(self, name: str) -> None:
        """Opens the next level of a source if enough of the recent responses were right."""
        recent = self.recent[name]
        higher_levels = [level for level in self.levels_of[name] if level > self.highest_open[name]]
        if not higher_levels or len(recent) < STEPS:
            return

        right_answers, answers = np.sum(recent, axis=0)
        if right_answers > BOUND * answers:
            self.highest_open[name] = higher_levels[0]
            # the counts of a lower level say nothing about this one
            self.recent[name] = []

    def state_dict(self) -> CurriculumState:
        return {
            "random": self.rng.bit_generator.state,
            "drawn": self.drawn,
            "levels": self.highest_open,
            "recent": self.recent,
        }

    def load_state_dict(self, state: CurriculumState) -> None:
        self.rng.bit_generator.state = state["random"]
        self.drawn = state["drawn"]
        self.highest_open = dict(state["levels"])
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

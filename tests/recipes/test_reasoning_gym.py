"""The recipe of reasoning-gym's tasks: its questions, its curriculum, which resumes exactly, and its settings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from recipes.reasoning_gym import data
from recipes.reasoning_gym.curriculum import BOUND, STEPS, Curriculum
from recipes.reasoning_gym.data import LEVELS, WEIGHTS, source
from trainer.data.order import SamplerBatches
from verl_lite.config import DataConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto, as_column

# --------------------------------------------------------------------------------------------------------------- data


def test_every_task_has_every_level_in_reasoning_gyms_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "POOL", 20)
    data.write_data(tmp_path, seed=3)
    levels = {(source(task), level + 1) for task, entries in LEVELS.items() for level in range(len(entries))}
    for split in ("train", "test"):
        rows = pq.read_table(tmp_path / f"{split}.parquet").to_pylist()
        assert {(row["data_source"], row["extra_info"]["level"]) for row in rows} == levels
        for row in rows:
            assert row["prompt"][0]["content"] == json.loads(row["extra_info"]["entry"])["question"]


# --------------------------------------------------------------------------------------------------------- curriculum


class Rows:
    """Thirty rows of each level, as many of them as a `PromptDataset` would serve at once."""

    def __init__(self, level: Any = None) -> None:
        keys = [(source(task), number + 1) for task, levels in LEVELS.items() for number in range(len(levels))]
        self.keys = [(name, number if level is None else level) for name, number in keys for _ in range(30)]

    def __len__(self) -> int:
        return len(self.keys)

    def batch(self, positions: list[int]) -> DataProto:
        keys = [self.keys[position] for position in positions]
        return DataProto.from_dict(
            non_tensors={
                "data_source": as_column([name for name, _ in keys]),
                "extra_info": as_column([{"level": level} for _, level in keys]),
            }
        )

    def batches(self, batch_size: int) -> Iterator[DataProto]:
        for start in range(0, len(self), batch_size):
            yield self.batch(list(range(len(self)))[start : start + batch_size])


def curriculum(batch_size: int = 20) -> Curriculum:
    return Curriculum(data_source=Rows(), data_config=DataConfig(train_batch_size=batch_size, seed=1))  # type: ignore[arg-type]


def answered(positions: list[int], right: dict[tuple[str, int], float], answers: int = 4) -> DataProto:
    """Those questions with `answers` answers each, of which a share is right, by source and level."""
    data_rows = Rows()
    batch = data_rows.batch([position for position in positions for _ in range(answers)])
    keys = [data_rows.keys[position] for position in positions]
    scores = [float(number < right.get(key, 0.0) * answers) for key in keys for number in range(answers)]
    mask = torch.ones(len(scores), 2, dtype=torch.long)
    tensors = {"response_mask": mask, "token_level_scores": torch.tensor(scores)[:, None] * torch.tensor([0.0, 1.0])}
    return DataProto.from_dict(tensors, non_tensors=dict(batch.non_tensor_batch))


def levels_of(positions: list[int]) -> Counter[tuple[str, int]]:
    return Counter(Rows().keys[position] for position in positions)


def test_it_begins_with_the_lowest_levels_and_keeps_the_shares() -> None:
    drawn = list(islice(curriculum(), 20))
    assert len(set(drawn)) == 20 and {level for _, level in levels_of(drawn)} == {1}
    epoch = list(curriculum())
    shares = Counter(name for name, _ in levels_of(epoch).elements())
    for task, weight in WEIGHTS.items():
        assert shares[source(task)] / len(epoch) == pytest.approx(weight, abs=0.08)


def test_a_level_opens_when_the_answers_of_some_steps_were_right_and_not_before() -> None:
    sampler = curriculum()
    batches = SamplerBatches(sampler, len(Rows()), 20, seed=1, fingerprint="")
    sums, spelling = source("chain_sum"), source("spell_backward")
    served = iter(batches)
    for step in range(1, STEPS + 3):
        positions = next(served)
        logged = batches.update(answered(positions, {(sums, 1): 1.0, (spelling, 1): 0.5}))
        assert logged[f"sampler/{sums}/accuracy"] == (1.0 if step <= STEPS else 0.0)
        assert logged[f"sampler/{sums}/level"] == (2 if step >= STEPS else 1)
        assert logged[f"sampler/{spelling}/level"] == 1, f"half is less than {BOUND}"
        opened = {level for name, level in levels_of(positions) if name == sums}
        assert opened == {1} if step <= STEPS else 2 in opened, "half of the questions are of the new level"


def test_it_goes_on_exactly_where_it_was() -> None:
    def step(batches: SamplerBatches, served: Iterator[list[int]]) -> tuple[list[int], dict[str, float]]:
        positions = next(served)
        return positions, batches.update(answered(positions, {(source("chain_sum"), level): 0.75 for level in (1, 2)}))

    def made() -> SamplerBatches:
        return SamplerBatches(curriculum(), len(Rows()), 20, seed=1, fingerprint="")

    def endless(batches: SamplerBatches) -> Iterator[list[int]]:
        while True:
            yield from batches

    whole = made()
    served = endless(whole)
    expected = [step(whole, served) for _ in range(30)]  # more than two epochs of 13 batches
    for interrupted in (1, 5, 13, 20):
        first, second = made(), made()
        served = endless(first)
        for _ in range(interrupted):
            step(first, served)
        second.load_state_dict(first.state_dict())
        served = endless(second)
        assert [step(second, served) for _ in range(30 - interrupted)] == expected[interrupted:]


def test_rows_without_a_level_and_batches_larger_than_a_level_are_refused() -> None:
    with pytest.raises(UserError, match="needs a whole number as extra_info.'level'. in every row; row 0 .* 'easy'"):
        Curriculum(data_source=Rows("easy"), data_config=DataConfig(train_batch_size=4, seed=1))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="data.train_batch_size=31: the curriculum has a level of only 30 questions"):
        curriculum(batch_size=31)

"""Validation in chunks: what is asked, in which order, for how long, and what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.evaluate import chunks
from trainer.evaluate.chunks import (
    Chunks,
    KeptAnswers,
    TimeShare,
    ValSampling,
    chunks_of,
    generate_in_chunks,
    share_scored,
    val_samplings,
)
from trainer.evaluate.sample import Sample
from verl_lite.config import PPOConfig
from verl_lite.protocol import DataProto
from workers.rollout.base import SamplingParams

SAMPLED, GREEDY = (
    ValSampling("", "val0", 2, SamplingParams()),
    ValSampling("greedy/", "val1", 1, SamplingParams(temperature=0.0)),
)


@dataclass(frozen=True)
class Row:
    place: int
    sample: int


class Prompts:
    """A dataset whose prompt is its place."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitems__(self, positions: list[int]) -> DataProto:
        return DataProto.from_dict(tensors={"place": torch.tensor(positions)})


class Policy:
    """Answers and finishes; notes the calls. Time passes only while it answers, a second for each prompt."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.calls: list[str] = []
        self.now = 0.0
        if monkeypatch:
            monkeypatch.setattr(chunks.time, "monotonic", lambda: self.now)

    def answer(self, prompts: DataProto, way: ValSampling) -> DataProto:
        self.now += len(prompts)
        self.calls.append(f"{way.purpose} {prompts.batch['place'].tolist()}")
        rows = prompts.repeat(way.n, interleave=True)
        rows.batch["sample"] = torch.arange(way.n).repeat(len(prompts))
        return rows

    def finish(self, batch: DataProto) -> list[Row]:
        self.calls.append("finish")
        return [Row(*pair) for pair in zip(batch.batch["place"].tolist(), batch.batch["sample"].tolist(), strict=True)]


def test_without_a_budget_the_order_is_that_of_the_dataset_and_each_answer_comes_once() -> None:
    policy = Policy()
    answered = generate_in_chunks(Prompts(5), [SAMPLED, GREEDY], Chunks(2), policy.answer, policy.finish)
    assert answered[SAMPLED] == [Row(place, sample) for place in range(5) for sample in range(2)]
    assert answered[GREEDY] == [Row(place, 0) for place in range(5)]
    asked = [f"{way} {places}" for places in ([0, 1], [2, 3], [4]) for way in ("val0", "val1")]
    assert policy.calls == asked + ["finish"] * 6, "rewards are waited for when all is generated"


def test_what_is_kept_is_finished_one_chunk_behind_and_not_asked_again(tmp_path: Path) -> None:
    policy, kept = Policy(), KeptAnswers(tmp_path, Row)
    first = generate_in_chunks(Prompts(4), [GREEDY], Chunks(2), policy.answer, policy.finish, kept)
    assert policy.calls == ["val1 [0, 1]", "val1 [2, 3]", "finish", "finish"]
    both = generate_in_chunks(Prompts(5), [SAMPLED, GREEDY], Chunks(3), policy.answer, policy.finish, kept)
    assert policy.calls[4:] == ["val0 [0, 1, 2]", "val0 [3, 4]", "finish", "val1 [4]", "finish", "finish"]
    assert both[GREEDY] == [*first[GREEDY], Row(4, 0)] and len(both[SAMPLED]) == 10


def test_a_time_budget_asks_a_random_sample_that_is_always_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, lines = Policy(monkeypatch), []
    chunks = Chunks(10, budget_s=25.0, seed=3)
    found = generate_in_chunks(
        Prompts(100), [GREEDY], chunks, policy.answer, policy.finish, log=lines.append
    )[GREEDY]  # fmt: skip
    assert len(found) == 30, "the chunk that runs when the time is over is finished, and no other begins"
    assert lines == ["trainer.val_time_budget_s=25 is over: 70 prompts are not asked"]
    places = [row.place for row in found]
    assert places == sorted(places), "rows are in the order of the dataset"
    assert set(places) == set(chunks.order(100)[:30].tolist()) and max(places) > 60, "not its beginning"
    assert (chunks.order(100) == Chunks(10, 25.0, 3).order(100)).all()
    assert (chunks.order(100) != Chunks(10, 25.0, 4).order(100)).any()
    assert sorted(chunks.order(100)) == list(range(100))


def test_a_random_order_is_not_biased_to_any_part_of_the_dataset() -> None:
    """Of a dataset sorted by difficulty, what time is left for has the mean of the whole."""
    means = [np.mean(Chunks(1, 1.0, seed).order(400)[:100]) for seed in range(200)]
    standard_error = 400 / 12**0.5 / 100**0.5 / 200**0.5
    assert np.mean(means) == pytest.approx(199.5, abs=4 * standard_error)


def test_at_least_one_chunk_is_asked_and_a_budget_that_suffices_asks_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for budget, asked in ((0.001, 4), (1e6, 12)):
        policy = Policy(monkeypatch)
        found = generate_in_chunks(Prompts(12), [GREEDY], Chunks(4, budget), policy.answer, policy.finish)
        assert len(found[GREEDY]) == asked


@pytest.mark.parametrize(
    ("size", "budget", "are_kept", "expected"),
    [
        (None, None, False, 1000),
        (7, None, False, 7),
        (7, 9.0, True, 7),
        (None, 9.0, False, 63),
        (None, None, True, 192),
    ],
)
def test_the_size_of_a_chunk(size: int | None, budget: float | None, are_kept: bool, expected: int) -> None:
    """All; as asked; with a budget a sixteenth; what fills 3 engines of 256 sequences with 4 answers to each prompt."""
    config = PPOConfig()
    config.data.val_batch_size, config.trainer.val_time_budget_s = size, budget
    config.rollout.val_kwargs.n = 4
    assert chunks_of(config, 1000, 3, are_kept).size == expected


def test_ways_to_answer() -> None:
    config = PPOConfig()
    [greedy] = val_samplings(config)
    assert (greedy.prefix, greedy.n, greedy.params.temperature) == ("", 1, 0.0)
    kwargs = config.rollout.val_kwargs
    kwargs.do_sample, kwargs.temperature, kwargs.top_p, kwargs.n, kwargs.greedy_too = True, 0.7, 0.9, 4, True
    sampled, greedy = val_samplings(config)
    assert (sampled.prefix, sampled.n, sampled.params.temperature, sampled.params.top_p) == ("", 4, 0.7, 0.9)
    assert (greedy.prefix, greedy.n, greedy.params.temperature) == ("greedy/", 1, 0.0)


def sample(uid: str, source: str) -> Sample:
    return Sample(0, uid, source, "", "", "", 1.0, 1, "stop", 0, {})


def test_shares_count_prompts_not_answers() -> None:
    rows = [sample("a", "s"), sample("a", "s"), sample("b", "s"), sample("c", "t")]
    assert share_scored(rows, 12) == {"val/scored_frac": 0.25, "val-aux/s/prompts": 2.0, "val-aux/t/prompts": 1.0}
    assert set(share_scored(rows[:1], 2, "greedy/")) == {"val/greedy/scored_frac", "val-aux/s/greedy/prompts"}


def test_time_share(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(chunks.time, "monotonic", lambda: now[0])
    share = TimeShare()
    assert share.metrics() == {}
    now[0] = 30.0
    with share.spent():
        now[0] = 40.0
    assert share.metrics() == {"timing_share/testing": 0.25}

"""The order of training prompts: epochs, sources mixed by weight, samplers; each resumed as if never stopped."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.prompt_rows import load, make_row, write
from trainer.data.order import BatchOrder, build_order, build_train_loader
from trainer.data.prompts import PromptDataset
from trainer.rollout.group_sources import PromptSource
from verl_lite.config import DataConfig, PPOConfig, SamplerConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto

HERE = Path(__file__)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., PromptDataset]:
    """Rows "0", "1", ... of these sources; a number stands for so many rows."""

    def build(count: int = 10, **sources: int) -> PromptDataset:
        names = [name for name, size in (sources or {"a": count}).items() for _ in range(size)]
        rows = [make_row(str(place), data_source=name) for place, name in enumerate(names)]
        return load(write(tmp_path / "d.jsonl", rows))

    return build


def config_of(**data: Any) -> PPOConfig:
    return PPOConfig(data=DataConfig(**data))


def uids(loader: Any) -> list[list[str]]:
    return [batch.non_tensor_batch["uid"].tolist() for batch in loader]


def walk(
    loader: Any, count: int, learn: Callable[[DataProto], Any] = lambda batch: None
) -> list[tuple[list[str], Any]]:
    """The uids of the next batches and the state after each, once the order has heard of the batch."""
    seen: list[tuple[list[str], Any]] = []
    while len(seen) < count:
        for batch in loader:
            learn(batch)
            seen.append((batch.non_tensor_batch["uid"].tolist(), copy.deepcopy(loader.state_dict())))
            if len(seen) == count:
                break
    return seen


# --- epochs ----------------------------------------------------------------------------------------------------------


def test_an_epoch_has_every_prompt_once_in_a_new_order_each_time(make: Callable) -> None:
    data = make()
    loader = build_train_loader(data, config_of(train_batch_size=4))
    first, second = uids(loader), uids(loader)
    assert [len(batch) for batch in first] == [4, 4, 2] and len(loader) == 3
    for epoch in (first, second):
        assert sorted(sum(epoch, [])) == [f"train-{i}" for i in range(10)]
    assert first != second
    assert first == uids(build_train_loader(data, config_of(train_batch_size=4)))
    assert first != uids(build_train_loader(data, config_of(train_batch_size=4, seed=7)))
    in_order = uids(build_train_loader(data, config_of(train_batch_size=4, shuffle=False)))
    assert sum(in_order, []) == [f"train-{i}" for i in range(10)]


MIXED = {"a": {"weight": 0.7}, "b": {"weight": 0.3}}


@pytest.mark.parametrize("stop", [1, 3, 11])
@pytest.mark.parametrize("sources", [{}, MIXED], ids=["epochs", "mixture"])
def test_a_loader_with_a_loaded_state_continues_as_if_never_interrupted(
    make: Callable, stop: int, sources: dict[str, Any]
) -> None:
    data, config = make(a=10, b=4), config_of(train_batch_size=5, sources=sources)
    whole = walk(build_train_loader(data, config), 12)
    resumed = build_train_loader(data, config)
    resumed.load_state_dict(whole[stop - 1][1])
    assert [uid for uid, _ in walk(resumed, 12 - stop)] == [uid for uid, _ in whole[stop:]]


@pytest.mark.parametrize("sampler", [None, "Learning"])
def test_a_step_that_asks_for_more_prompts_than_an_epoch_has_is_refused(make: Callable, sampler: str | None) -> None:
    config = config_of(train_batch_size=5) if sampler is None else sampled(sampler, train_batch_size=5)
    with pytest.raises(UserError, match="data.train_batch_size=5: an epoch has only 4 prompts.*Set .*=4 or less"):
        build_order(make(4), config)
    assert [len(batch) for batch in build_order(make(5), config)] == [5]
    config.trainer.val_only = True  # then no step is made
    assert build_order(make(4), config).rows == 4


# --- sources by weight -----------------------------------------------------------------------------------------------


def sources_of(data: PromptDataset, batches: list[list[int]]) -> list[Counter[str]]:
    return [Counter(data.row(place)["data_source"] for place in batch) for batch in batches]


def drawn(order: BatchOrder, count: int) -> list[list[int]]:
    found: list[list[int]] = []
    while len(found) < count:
        found += list(order)
    return found[:count]


def test_shares_are_exact_and_what_is_rounded_is_made_up_for(make: Callable) -> None:
    """By hand, 0.7 and 0.3 of 4 are 2.8 and 1.2: 3+1 (a is 0.2 ahead), 2.6 and 1.4: 3+1 (0.4 over, 0.6 of b is owed),
    2.4 and 1.6: 2+2, and so on; ten batches are 28 and 12."""
    data = make(a=12, b=6)
    order = build_order(data, config_of(train_batch_size=4, sources=MIXED))
    counts = sources_of(data, drawn(order, 10))
    assert [count["a"] for count in counts] == [3, 3, 2, 3, 3, 3, 3, 2, 3, 3]
    assert sum(counts, Counter()) == {"a": 28, "b": 12}


@pytest.mark.parametrize("weights", [[1, 1, 1], [5, 3, 2, 1, 1], [1e-3, 1], [0.123456789012345, 0.5, 3]])
def test_no_source_is_ever_a_prompt_ahead_and_all_end_at_their_share(make: Callable, weights: list[float]) -> None:
    names = "abcde"[: len(weights)]
    data = make(**{name: 20 for name in names})
    sources = {name: {"weight": weight} for name, weight in zip(names, weights, strict=True)}
    order = build_order(data, config_of(train_batch_size=7, sources=sources))
    exact = [Fraction(str(weight)) for weight in weights]
    shares = {name: weight / sum(exact) for name, weight in zip(names, exact, strict=True)}
    total: Counter[str] = Counter()
    for step, count in enumerate(sources_of(data, drawn(order, 200)), start=1):
        total += count
        assert sum(count.values()) == 7
        for name, share in shares.items():
            assert -len(weights) + 1 < total[name] - share * 7 * step < 1


def test_a_prompt_twice_in_a_batch_is_two_groups(make: Callable) -> None:
    batch = make(3).__getitems__([2, 0, 2, 2])
    assert batch.non_tensor_batch["uid"].tolist() == ["train-2", "train-0", "train-2+1", "train-2+2"]
    assert batch.non_tensor_batch["index"].tolist() == [2, 0, 2, 2]


def test_other_weights_go_on_from_where_the_sources_are(make: Callable) -> None:
    """As with trainer.resume_allow=[data.sources]: no row of a source comes again before all of it came."""
    data = make(a=8, b=8)
    first = build_order(data, config_of(train_batch_size=4, sources={"a": {"weight": 1}, "b": {"weight": 1}}))
    seen = list(islice(first, 2))
    second = build_order(data, config_of(train_batch_size=4, sources={"a": {"weight": 3}, "b": {"weight": 1}}))
    second.load_state_dict(first.state_dict())
    rest = list(islice(second, 1))
    assert len(set(sum([*seen, *rest], []))) == 12


def test_a_source_without_a_weight_beside_one_that_has_is_explained(make: Callable) -> None:
    with pytest.raises(UserError, match="'b' has no weight: .*0 leaves it out"):
        build_order(make(a=5, b=5), config_of(train_batch_size=4, sources={"a": {"weight": 1}}))


# --- samplers --------------------------------------------------------------------------------------------------------


class Learning:
    """Draws from as many prompts as the sum of all scores so far allows; every row's turn by counts of draws."""

    def __init__(self, data_source: PromptDataset, data_config: DataConfig) -> None:
        self.drawn, self.open = np.zeros(len(data_source), dtype=int), 4

    def __len__(self) -> int:
        return len(self.drawn)

    def __iter__(self) -> Any:
        for _ in range(len(self) - self.drawn.sum() % len(self)):
            place = self.drawn[: self.open].argmin()
            self.drawn[place] += 1
            yield place

    def update(self, batch: DataProto) -> dict[str, float]:
        self.open = min(len(self), self.open + 1)
        return {"open": self.open}

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn, "open": self.open}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drawn, self.open = state["drawn"], state["open"]


class Stateless:
    def __init__(self, data_source: PromptDataset, data_config: DataConfig) -> None:
        self.size = len(data_source)

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Any:
        return iter(range(self.size))


class Short(Stateless):
    state_dict = load_state_dict = Stateless.__len__

    def __iter__(self) -> Any:
        return iter(range(self.size - 1))


class Beyond(Short):
    def __iter__(self) -> Any:
        return iter(range(1, self.size + 1))


class OtherArguments:
    def __init__(self, dataset: PromptDataset) -> None: ...


def sampled(name: str, **data: Any) -> PPOConfig:
    return config_of(**{"train_batch_size": 4, **data}, sampler=SamplerConfig(class_path=str(HERE), class_name=name))


@pytest.mark.parametrize("stop", [1, 3, 6])
@pytest.mark.parametrize("rows", [10, 8])
def test_a_sampler_is_resumed_exactly(make: Callable, stop: int, rows: int) -> None:
    """In the middle of an epoch, at its end, in a later one."""
    data, config = make(rows), sampled("Learning")

    def steps(state: Any = None, count: int = 8) -> list[tuple[list[str], Any]]:
        order = build_order(data, config)
        loader = build_train_loader(data, config, order)
        if state is not None:
            loader.load_state_dict(state)
        return walk(loader, count, order.update)

    whole = steps()
    assert [batch for batch, _ in steps(whole[stop - 1][1], 8 - stop)] == [batch for batch, _ in whole[stop:]]


def test_a_sampler_decides_what_comes_next_when_it_has_heard_of_the_step(make: Callable) -> None:
    data, config = make(), sampled("Learning")
    config.rollout.n = 1
    source, seen = PromptSource(config, data), []
    for step in (1, 2, 3):
        columns = source.draw_batch(step, step)[0].columns
        assert columns is not None
        seen.append(columns.batch.non_tensor_batch["index"].tolist())
        assert source.update(columns.batch) == {"sampler/open": min(10, 4 + step)}
    assert seen == [[0, 1, 2, 3], [4, 0, 1, 2], [5, 3]]  # a fifth prompt is open in the second step, then a sixth


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Stateless", "class_name=Stateless: expected .* with __len__ and __iter__.*state_dict"),
        ("OtherArguments", r"expected OtherArguments\(data_source=..., data_config=...\)"),
        ("Nobody", "data.sampler.class_name='Nobody': .*it defines: .*Short"),
        ("Short", "an epoch of Short yielded 9 positions.*expected 10"),
        ("Beyond", "10.; expected 10 .* from 0 to 9"),
    ],
)
def test_samplers_and_positions_that_are_none_are_explained(make: Callable, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(build_order(make(), sampled(name)))

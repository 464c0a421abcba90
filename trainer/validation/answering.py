"""How the validation prompts are answered: in which ways, in which chunks, for how long, and what is kept of it.

`answer_in_chunks` serves the validation of a run, `main_eval` and `main_generate` alike: they differ in what becomes of
an answered chunk. An answer depends on weights, prompt, sampling and seed alone, so neither the chunks nor the order
matter to it (EVALUATION.md has the measurement).
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trainer.samples.sample import Sample
from trainer.validation.kept_answers import Kept, KeptAnswers, R
from verl_lite.config import PPOConfig
from verl_lite.protocol import DataProto
from workers.rollout.base import SamplingParams

CHUNKS_OF_BUDGET = 16
"""With a time budget the set is cut into so many chunks: the last one may overdraw by a sixteenth of the whole set."""


class Prompts(Protocol):
    """A dataset of prompts, see `trainer.data.prompts.PromptDataset`."""

    def __len__(self) -> int: ...

    def __getitems__(self, positions: Sequence[int]) -> DataProto: ...


@dataclass(frozen=True)
class Way:
    """One way to answer the validation prompts, `n` times each. prefix: of its metrics' names. purpose: begins the
    sample ids."""

    prefix: str
    purpose: str
    n: int
    sampling: SamplingParams


@dataclass(frozen=True)
class Chunks:
    """How a set of prompts is cut. size: prompts at one time. budget_s: no chunk begins after so many seconds. seed: of
    the order, which matters only where time may run out: then the prompts asked are a random sample, the same in every
    validation of the run."""

    size: int
    budget_s: float | None = None
    seed: int = 0

    def order(self, prompts: int) -> np.ndarray:
        """Places in the dataset, in the order in which they are asked."""
        if self.budget_s is None:
            return np.arange(prompts)
        return np.random.default_rng([self.seed, prompts]).permutation(prompts)


def ways_of(config: PPOConfig) -> list[Way]:
    """As rollout.val_kwargs says: sampled or greedy, and greedy besides."""
    kwargs = config.rollout.val_kwargs

    def way(prefix: str, greedy: bool) -> Way:
        sampling = SamplingParams(
            temperature=0.0 if greedy else kwargs.temperature,
            top_p=kwargs.top_p,
            top_k=kwargs.top_k,
            max_tokens=config.data.max_response_length,
        )
        return Way(prefix, f"val{greedy:d}", 1 if greedy else kwargs.n, sampling)

    return [way("", not kwargs.do_sample)] + ([way("greedy/", True)] if kwargs.greedy_too else [])


def chunks_of(config: PPOConfig, prompts: int, engines: int, are_kept: bool) -> Chunks:
    """data.val_batch_size prompts at one time. Where it is null: with a time budget a sixteenth of the set; where
    answers are kept chunk by chunk, as many as fill the engines once; else all."""
    size, budget = config.data.val_batch_size, config.trainer.val_time_budget_s
    if size is None and budget is not None:
        size = math.ceil(prompts / CHUNKS_OF_BUDGET)
    elif size is None and are_kept:
        size = math.ceil(config.rollout.max_num_seqs * engines / config.rollout.val_kwargs.n)
    return Chunks(size or prompts, budget, config.trainer.seed)


def answer_in_chunks(
    prompts: Prompts,
    ways: Sequence[Way],
    chunks: Chunks,
    answer: Callable[[DataProto, Way], DataProto],
    finish: Callable[[DataProto], list[R]],
    kept: KeptAnswers[R] | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[Way, list[R]]:
    """A row for each answer, by way, in the order of the dataset.

    answer: gives `n` rows for each prompt, those of one prompt together. finish: makes rows of what it gave, one for
    each; it may wait for rewards, so that the next chunk is answered before the last one is finished. kept: answers of
    an earlier try, which are not asked again, and where new ones go as soon as their chunk is finished; without it all
    chunks are answered before the first is finished. tell: gets a line about each chunk that is kept.
    """
    rows: list[Kept[R]] = kept.load() if kept is not None else []
    is_done = {way: {each.position for each in rows if each.way == way.prefix} for way in ways}
    left = [place for place in chunks.order(len(prompts)) if any(place not in is_done[way] for way in ways)]
    if len(left) < len(prompts):
        tell(f"{len(prompts) - len(left)} of {len(prompts)} prompts are answered already")
    waiting: deque[tuple[Way, list[int], DataProto]] = deque()

    def finish_first() -> None:
        way, places, batch = waiting.popleft()
        found = [Kept(way.prefix, places[i // way.n], row) for i, row in enumerate(finish(batch))]
        rows.extend(found)
        if kept is not None:
            kept.add(found)

    began = time.monotonic()
    for number, start in enumerate(range(0, len(left), chunks.size)):
        if number and chunks.budget_s is not None and time.monotonic() - began >= chunks.budget_s:
            tell(f"trainer.val_time_budget_s={chunks.budget_s:g} is over: {len(left) - start} prompts are not asked")
            break
        for way in ways:
            places = [int(place) for place in left[start : start + chunks.size] if place not in is_done[way]]
            if places:
                waiting.append((way, places, answer(prompts.__getitems__(places), way)))
            if kept is not None and len(waiting) > 1:
                finish_first()
        if kept is not None:
            tell(f"answered {len(prompts) - len(left) + min(start + chunks.size, len(left))} of {len(prompts)} prompts")
    while waiting:
        finish_first()
    rows.sort(key=lambda each: each.position)  # stable: the answers to one prompt stay as they came
    return {way: [each.row for each in rows if each.way == way.prefix] for way in ways}


def share_scored(samples: Sequence[Sample], prompts: int, prefix: str = "") -> dict[str, float]:
    """How many of the `prompts` were asked, where time may have run out: val/{prefix}scored_frac, and their number by
    source, val-aux/{source}/{prefix}prompts."""
    asked = {sample.uid: sample.data_source for sample in samples}
    by_source = {f"val-aux/{name}/{prefix}prompts": float(n) for name, n in sorted(Counter(asked.values()).items())}
    return {f"val/{prefix}scored_frac": len(asked) / prompts} | by_source


class TimeShare:
    """The part of a run's time that its validations take. The run begins when this is made."""

    def __init__(self) -> None:
        self._began, self._spent = time.monotonic(), 0.0

    @contextmanager
    def spent(self) -> Iterator[None]:
        """The block's time counts."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._spent += time.monotonic() - began

    def metrics(self) -> dict[str, float]:
        """timing_share/testing: 0 to 1, over the time up to now."""
        passed = max(time.monotonic() - self._began, self._spent)
        return {"timing_share/testing": self._spent / passed} if passed else {}

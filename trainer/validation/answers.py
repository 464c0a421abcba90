"""Answers to the validation prompts, generated in chunks or read from a store.

The validation of a run, `main_eval` and `main_generate` share `generate_in_chunks` and differ in their use of a
generated chunk. An answer depends only on weights, prompt, sampling parameters and seed, so chunks and order do not
affect it (measured in EVALUATION.md).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.validation.sample import Sample
from trainer.validation.stored_answers import AnswerStore, StoredAnswer
from verl_lite.config import PPOConfig
from verl_lite.protocol import DataProto
from workers.engines.base import SamplingParams

if TYPE_CHECKING:
    from trainer.data.prompts import PromptDataset


@dataclass(frozen=True)
class ValSampling:
    """Sampling of the validation prompts with `n` answers each.

    Attributes:
        prefix: Prefix of the metric names.
        purpose: Prefix of the sample ids.
        n: Number of answers to each prompt.
        params: Parameters of the sampling.
    """

    prefix: str
    purpose: str
    n: int
    params: SamplingParams


def val_samplings(config: PPOConfig) -> list[ValSampling]:
    """Returns the samplings of rollout.val_kwargs: sampled or greedy answers, and optionally greedy ones as well."""
    options = config.rollout.val_kwargs
    is_greedy = not options.do_sample
    samplings = [_sampling(config, prefix="", is_greedy=is_greedy)]
    if options.greedy_too:
        samplings.append(_sampling(config, prefix="greedy/", is_greedy=True))
    return samplings


def _sampling(config: PPOConfig, prefix: str, is_greedy: bool) -> ValSampling:
    """Returns a sampling; a greedy one has a single answer, because further ones would be equal."""
    options = config.rollout.val_kwargs
    params = SamplingParams(
        temperature=0.0 if is_greedy else options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=config.data.max_response_length,
    )
    # two purposes, because the answers of both samplings can wait for their rewards under their sample ids
    if is_greedy:
        return ValSampling(prefix, "val1", 1, params)
    return ValSampling(prefix, "val0", options.n, params)


def chunk_size(config: PPOConfig, prompts: int, engines: int, are_stored: bool) -> int:
    """Returns the number of prompts per chunk.

    It is data.val_batch_size; if that is null, all prompts, or as many as fill the engines once if answers are stored
    by chunk.

    Args:
        config: Configuration of the run.
        prompts: Number of all prompts.
        engines: Number of rollout engines.
        are_stored: True if chunks are stored, so that smaller ones lose less when the run is killed.
    """
    size = config.data.val_batch_size
    if size is None and are_stored:
        answers_at_a_time = config.rollout.max_num_seqs * engines
        size = math.ceil(answers_at_a_time / config.rollout.val_kwargs.n)
    return size or prompts


def generate_in_chunks(
    prompts: PromptDataset,
    samplings: Sequence[ValSampling],
    size: int,
    generate: Callable[[DataProto, ValSampling], DataProto],
    finish: Callable[[DataProto], list[Sample]],
    store: AnswerStore | None = None,
    log: Callable[[str], None] = lambda text: None,
) -> dict[ValSampling, list[Sample]]:
    """Returns one row per answer, by sampling, in the order of the dataset.

    Args:
        prompts: the validation prompts.
        samplings: how each prompt is answered.
        size: number of prompts per chunk.
        generate: returns `n` rows per prompt; the rows of a prompt are adjacent.
        finish: turns the result of `generate` into one row per answer. It may wait for rewards, so the next chunk is
            generated before the previous one is finished.
        store: store of answers. Stored answers are not generated again, and new ones are added as soon as their chunk
            is finished. Without a store, all chunks are generated before the first one is finished.
        log: receives a line at the start and after each stored chunk.
    """
    answers = _Answers(samplings, finish, store, len(prompts), log)
    unanswered = answers.unanswered()
    if store is not None and unanswered:
        log(f"answering {len(unanswered)} of {len(prompts)} prompts, {min(size, len(unanswered))} at a time")

    for start in range(0, len(unanswered), size):
        for sampling in samplings:
            # a killed run may have stored the chunk of one sampling and not of the other
            positions = answers.missing(sampling, unanswered[start : start + size])
            if positions:
                batch = generate(prompts.__getitems__(positions), sampling)
                answers.unfinished.append(_Chunk(sampling, positions, batch))
            # the rewards of the previous chunk are computed while this one is generated, so at most two chunks are lost
            if store is not None and len(answers.unfinished) > 1:
                answers.finish_first()
    while answers.unfinished:
        answers.finish_first()
    return answers.by_sampling()


@dataclass(frozen=True)
class _Chunk:
    """Generated answers that are not finished.

    Attributes:
        sampling: How they were generated.
        positions: Positions of their prompts in the dataset.
        batch: The answers; those to one prompt are adjacent.
    """

    sampling: ValSampling
    positions: list[int]
    batch: DataProto


class _Answers:
    """The answers of a validation.

    Args:
        samplings, finish, store, log: See `generate_in_chunks`.
        num_prompts: Number of prompts of the dataset.

    Attributes:
        unfinished: Chunks that are generated and not finished, in the order of generation.
    """

    def __init__(
        self,
        samplings: Sequence[ValSampling],
        finish: Callable[[DataProto], list[Sample]],
        store: AnswerStore | None,
        num_prompts: int,
        log: Callable[[str], None],
    ) -> None:
        self._finish = finish
        self._store = store
        self._num_prompts = num_prompts
        self._log = log
        self.unfinished: deque[_Chunk] = deque()
        self._finished: list[StoredAnswer] = []
        if store is not None:
            self._finished = store.load()
        # positions of the prompts whose answers are stored
        self._answered: dict[ValSampling, set[int]] = {}
        for sampling in samplings:
            self._answered[sampling] = set()
            for answer in self._finished:
                if answer.prefix == sampling.prefix:
                    self._answered[sampling].add(answer.position)

    def unanswered(self) -> list[int]:
        """Returns the positions of the prompts that lack the stored answers of a sampling."""
        complete = self._complete()
        return [position for position in range(self._num_prompts) if position not in complete]

    def _complete(self) -> set[int]:
        """Returns the positions of the prompts that have the stored answers of all samplings."""
        return set.intersection(*self._answered.values())

    def missing(self, sampling: ValSampling, positions: Sequence[int]) -> list[int]:
        """Returns those of the positions whose answers of a sampling are not stored."""
        answered = self._answered[sampling]
        return [position for position in positions if position not in answered]

    def finish_first(self) -> None:
        """Finishes the chunk that was generated first, and stores its answers."""
        chunk = self.unfinished.popleft()
        answers = []
        for number, sample in enumerate(self._finish(chunk.batch)):
            # each prompt has n adjacent rows
            position = chunk.positions[number // chunk.sampling.n]
            answers.append(StoredAnswer(chunk.sampling.prefix, position, sample))
        self._finished += answers
        if self._store is None:
            return

        self._store.add(answers)
        self._answered[chunk.sampling].update(chunk.positions)
        complete = self._complete()
        if complete.issuperset(chunk.positions):
            self._log(f"{len(complete)} of {self._num_prompts} prompts are answered")

    def by_sampling(self) -> dict[ValSampling, list[Sample]]:
        """Returns the samples by sampling, in the order of the dataset."""
        samples_by_prefix: dict[str, list[Sample]] = {}
        # the sort is stable, so the answers to one prompt keep their order
        ordered = sorted(self._finished, key=lambda answer: answer.position)
        for answer in ordered:
            samples = samples_by_prefix.setdefault(answer.prefix, [])
            samples.append(answer.row)

        samples_by_sampling = {}
        for sampling in self._answered:
            samples_by_sampling[sampling] = samples_by_prefix.get(sampling.prefix, [])
        return samples_by_sampling

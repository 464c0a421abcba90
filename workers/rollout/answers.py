"""Samples single-turn answers: one request per answer, without a chat template.

Finished answers are reported while others still decode, so that their rewards are computed meanwhile. The sampled token
ids are trained on as they are; they are never decoded and encoded again.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.rewards import READ_BY_REWARDS, RewardItem
from workers.policy.vision import MULTI_MODAL_INPUTS, ImageInputs
from workers.rollout.base import Completion, FinishReason, Request, Sampled, SamplingParams, derive_seed
from workers.rollout.group_run import GroupPlan
from workers.rollout.rows import Response, left_padded, write_rows
from workers.rollout.runner import Runner

EMPTY = Response([], [], [], [], "", {})


@dataclass(frozen=True)
class AnswerSpec:
    """The specification of an answer.

    prompt_length: width P of the columns of its row. is_greedy: True to decode greedily instead of as the sampling
    parameters say. is_padding: True for a row that is not sampled. item: arguments of the reward function, without the
    answer; None = no reward function is called. sampled: tokens that were sampled before, for example before the
    checkpoint from which a run resumes. finish_reason: None unless these are the whole answer. images: of the prompt.
    """

    prompt_ids: tuple[int, ...]
    prompt_length: int
    seed: int
    is_greedy: bool = False
    is_padding: bool = False
    item: RewardItem | None = None
    sampled: Sampled = Sampled()
    finish_reason: FinishReason | None = None
    images: ImageInputs | None = None


torch.serialization.add_safe_globals([AnswerSpec, RewardItem, Sampled, GroupPlan])  # running groups in checkpoints


def answer_plans(
    rows: DataProto, sizes: Iterable[int], keys: Iterable[str], seed: int, step: int
) -> Iterator[GroupPlan]:
    """Yields the plans of groups of answers.

    Args:
        rows: one row per answer: prompts and prompt_mask (B, P), left-padded; uid and sample (B,), which name the
            random numbers of a row together with `seed` and `step`, so that the same row gives the same answer on any
            rank and beside any other rows. Rows marked `is_padding` are not sampled; those marked `is_greedy` are
            decoded greedily. Rewards read sample_id, data_source, reward_model, extra_info and raw_prompt.
        sizes, keys: number of rows and name of each group.
    """
    ids, mask = rows.batch["prompts"], rows.batch["prompt_mask"].bool()
    columns, absent = rows.non_tensor_batch, np.zeros(len(rows), dtype=bool)
    greedy = columns.get("is_greedy", absent)
    images: Any = columns.get(MULTI_MODAL_INPUTS, [None] * len(rows))
    is_scored = "sample_id" in columns and "reward_model" in columns
    padding = rows.batch["is_padding"].numpy() if "is_padding" in rows.batch.keys() else absent

    def spec(row: int) -> AnswerSpec:
        item = None
        if is_scored:
            values = {name: columns[name][row] for name in READ_BY_REWARDS}
            files = () if images[row] is None else images[row].files
            item = RewardItem.of_row(columns["sample_id"][row], values, "", files)
        prompt_ids = tuple(ids[row][mask[row]].tolist())
        number = derive_seed(seed, step, columns["uid"][row], int(columns["sample"][row]))
        shape = ids.shape[1], number, bool(greedy[row]), bool(padding[row])
        return AnswerSpec(prompt_ids, *shape, item, images=images[row])

    start = 0
    for size, key in zip(sizes, keys, strict=True):
        yield GroupPlan(key, tuple(map(spec, range(start, start + size))))
        start += size


class AnswerRunner:
    """Runs groups of answers; see `group_run.SampleRunner`.

    on_finished: receives the reward items of the answers that ended in one engine step, with their token ids.
    """

    def __init__(
        self,
        runner: Runner[tuple[str, int]],
        *,
        response_length: int,
        pad_token_id: int,
        stop_token_ids: tuple[int, ...],
        on_finished: Callable[[list[tuple[RewardItem, list[int]]]], None],
    ) -> None:
        self._runner, self._on_finished = runner, on_finished
        self._response_length, self._pad_token_id = response_length, pad_token_id
        self._stop_token_ids = stop_token_ids
        self._groups: dict[str, tuple[Sequence[AnswerSpec], dict[int, Completion]]] = {}

    def begin(self, key: str, samples: Sequence[AnswerSpec], sampling: SamplingParams) -> None:
        self._groups[key] = samples, {}
        sampled = replace(sampling, stop_token_ids=self._stop_token_ids)
        greedy = replace(sampled, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)
        done: list[tuple[tuple[str, int], Completion]] = []
        for number, spec in enumerate(samples):
            name, chosen = f"{key}/{number}", replace(greedy if spec.is_greedy else sampled, seed=spec.seed)
            if spec.finish_reason is not None:
                tokens, log_probs, versions = spec.sampled.lists()
                done.append(((key, number), Completion(name, tokens, log_probs, spec.finish_reason, versions)))
            elif not spec.is_padding:
                request = Request(name, spec.prompt_ids, chosen, spec.sampled, images=spec.images)
                self._runner.submit(request, (key, number))
        self._store(done)

    def advance(self, wait_s: float = 0.0, until_completion: bool = False) -> None:
        if not self._runner.is_decoding:
            return
        self._store(self._runner.step(until_completion))

    def _store(self, finished: Iterable[tuple[tuple[str, int], Completion]]) -> None:
        """Stores completions and reports those with a reward function."""
        done: list[tuple[RewardItem, list[int]]] = []
        for (key, number), completion in finished:
            samples, completions = self._groups[key]
            completions[number] = completion
            if (item := samples[number].item) is not None:
                done.append((item, completion.token_ids))
        if done:
            self._on_finished(done)

    def is_finished(self, key: str) -> bool:
        samples, completions = self._groups[key]
        return len(completions) == sum(not spec.is_padding for spec in samples)

    def snapshot(self, key: str) -> tuple[AnswerSpec, ...]:
        (samples, completions), running, result = self._groups[key], self._unfinished(key), list[AnswerSpec]()
        for number, spec in enumerate(samples):
            if (done := completions.get(number)) is not None:
                whole = Sampled(tuple(done.token_ids), tuple(done.log_probs), tuple(done.versions))
                result.append(replace(spec, sampled=whole, finish_reason=done.finish_reason))
            else:
                result.append(replace(spec, sampled=running[number].sampled) if number in running else spec)
        return tuple(result)

    def _unfinished(self, key: str) -> dict[int, Request]:
        """Returns requests that continue the running answers of a group, by their number."""
        samples, completions = self._groups[key]
        numbers = [n for n, spec in enumerate(samples) if not (spec.is_padding or n in completions)]
        requests = self._runner.engine.snapshot([f"{key}/{number}" for number in numbers])
        return dict(zip(numbers, requests, strict=True))

    def abort(self, key: str) -> int:
        running = self._unfinished(key).values()
        self._runner.abort([request.request_id for request in running])
        _, completions = self._groups.pop(key)
        lengths = [len(request.sampled.token_ids) for request in running]
        return sum(lengths) + sum(len(done.token_ids) for done in completions.values())

    def take(self, key: str) -> tuple[DataProto, None]:
        samples, completions = self._groups.pop(key)
        prompts, mask = left_padded([spec.prompt_ids for spec in samples], samples[0].prompt_length, self._pad_token_id)
        responses = [_response(completions[n]) if n in completions else EMPTY for n in range(len(samples))]
        outputs = self._runner.engine.extra_outputs
        return write_rows(prompts, mask, responses, self._response_length, self._pad_token_id, outputs), None

    @property
    def is_decoding(self) -> bool:
        return self._runner.is_decoding

    def take_metrics(self, seconds: float) -> dict[str, Metric]:
        return self._runner.take_metrics(seconds)


def _response(done: Completion) -> Response:
    ones = [1] * len(done.token_ids)
    return Response(done.token_ids, ones, done.log_probs, done.versions, done.finish_reason, done.extra)

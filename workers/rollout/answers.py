"""Samples single-turn answers: one request per answer, without a chat template.

Finished answers are reported while others still decode, so that their rewards are computed meanwhile. The sampled token
ids are trained on as they are; they are never decoded and encoded again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.rewards import READ_BY_REWARDS, RewardItem
from workers.engines.base import Completion, Request, Sampled, SamplingParams, derive_seed
from workers.policy.vision import MULTI_MODAL_INPUTS, ImageInputs
from workers.rollout.group_run import CompleteGroup
from workers.rollout.rows import Response, left_padded, write_rows
from workers.rollout.runner import Runner
from workers.rollout.specs import AnswerSpec, GroupPlan

EMPTY = Response(token_ids=[], mask=[], log_probs=[], versions=[], finish_reason="", extra={})
"""The response of a row that is not sampled."""


def answer_plans(
    rows: DataProto, sizes: Iterable[int], keys: Iterable[str], seed: int, step: int
) -> Iterator[GroupPlan]:
    """Yields the plans of groups of answers.

    Args:
        rows: one row per answer, with prompts and prompt_mask (B, P), padded on the left, and the columns (B,)
            uid, sample: with `seed` and `step` they determine the random numbers of the row, so that it has the same
            answer on any rank and among any other rows;
            is_padding, is_greedy (optional): rows that are not sampled, and rows that are decoded greedily;
            sample_id, data_source, reward_model, extra_info, raw_prompt (optional): arguments of the reward function.
        sizes, keys: number of rows and name of each group.
        seed: seed of the run.
        step: step of the batch.
    """
    tensors = {str(name): rows.batch[name] for name in rows.batch.keys()}
    start = 0
    for size, key in zip(sizes, keys, strict=True):
        samples = []
        for row in range(start, start + size):
            samples.append(_answer_spec(tensors, rows.non_tensor_batch, row, seed, step))
        yield GroupPlan(key, tuple(samples))
        start += size


def _answer_spec(
    tensors: Mapping[str, torch.Tensor], columns: Mapping[str, np.ndarray], row: int, seed: int, step: int
) -> AnswerSpec:
    """Returns the specification of one row; see `answer_plans`."""
    images: ImageInputs | None = None
    if MULTI_MODAL_INPUTS in columns:
        images = columns[MULTI_MODAL_INPUTS][row]

    # without these columns, as in a loop of the user, no reward function is called
    item: RewardItem | None = None
    if "sample_id" in columns and "reward_model" in columns:
        values = {name: columns[name][row] for name in READ_BY_REWARDS}
        files = () if images is None else images.files
        item = RewardItem.of_row(columns["sample_id"][row], values, "", files)

    prompt = tensors["prompts"][row]
    is_token = tensors["prompt_mask"][row].bool()
    sample = int(columns["sample"][row])
    return AnswerSpec(
        prompt_ids=tuple(prompt[is_token].tolist()),
        prompt_length=len(prompt),
        seed=derive_seed(seed, step, columns["uid"][row], sample),
        is_greedy="is_greedy" in columns and bool(columns["is_greedy"][row]),
        is_padding="is_padding" in tensors and bool(tensors["is_padding"][row]),
        item=item,
        images=images,
    )


@dataclass(frozen=True)
class _Group:
    """A running group.

    Attributes:
        samples: Specifications of its answers.
        completions: The answers that have ended, by their number in the group.
    """

    samples: tuple[AnswerSpec, ...]
    completions: dict[int, Completion] = field(default_factory=dict)

    def unfinished(self) -> list[int]:
        """Returns the numbers of the answers that the engine is still to sample."""
        numbers = []
        for number, spec in enumerate(self.samples):
            if not spec.is_padding and number not in self.completions:
                numbers.append(number)
        return numbers


class AnswerRunner:
    """Runs groups of answers; see `group_run.SampleRunner`.

    Args:
        runner: the engine; the owner of a request is the key of its group and its number in the group.
        response_length: width R of the columns.
        pad_token_id: token of the padding.
        stop_token_ids: tokens that end an answer.
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
        self._runner = runner
        self._response_length = response_length
        self._pad_token_id = pad_token_id
        self._stop_token_ids = stop_token_ids
        self._on_finished = on_finished
        self._groups: dict[str, _Group] = {}

    def begin(self, plan: GroupPlan, sampling: SamplingParams) -> None:
        """Submits the answers of a group. Those that were complete before the run was resumed are taken as they are."""
        group = _Group(plan.samples_of(AnswerSpec))
        self._groups[plan.key] = group
        random_sampling = replace(sampling, stop_token_ids=self._stop_token_ids)
        greedy_sampling = replace(random_sampling, temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0)

        complete_answers: list[tuple[tuple[str, int], Completion]] = []
        for number, spec in enumerate(group.samples):
            if spec.is_padding:
                continue
            owner = (plan.key, number)
            request_id = _request_id(plan.key, number)
            # complete before the checkpoint from which the run resumes
            if spec.finish_reason is not None:
                tokens, log_probs, versions = spec.sampled.lists()
                completion = Completion(request_id, tokens, log_probs, spec.finish_reason, versions)
                complete_answers.append((owner, completion))
                continue
            params = greedy_sampling if spec.is_greedy else random_sampling
            params = replace(params, seed=spec.seed)
            request = Request(request_id, spec.prompt_ids, params, spec.sampled, images=spec.images)
            self._runner.submit(request, owner)
        # rewards that were not collected have ended with the processes of the earlier run
        self._store(complete_answers)

    def advance(self, wait_s: float = 0.0, until_completion: bool = False) -> None:
        """Makes engine steps and stores the answers that end. There are no other processes to wait for."""
        if not self._runner.is_decoding:
            return
        self._store(self._runner.step(until_completion))

    def _store(self, finished: Iterable[tuple[tuple[str, int], Completion]]) -> None:
        """Stores completions and reports those with a reward function."""
        answers: list[tuple[RewardItem, list[int]]] = []
        for (key, number), completion in finished:
            group = self._groups[key]
            group.completions[number] = completion
            item = group.samples[number].item
            # None without a reward function
            if item is not None:
                answers.append((item, completion.token_ids))
        if answers:
            self._on_finished(answers)

    def is_finished(self, key: str) -> bool:
        return not self._groups[key].unfinished()

    def snapshot(self, key: str) -> GroupPlan:
        """Returns a plan with the tokens that were sampled so far, from which an engine continues the group."""
        group = self._groups[key]
        samples = list(group.samples)
        requests = self._unfinished_requests(key)
        for number, request in zip(group.unfinished(), requests, strict=True):
            samples[number] = replace(samples[number], sampled=request.sampled)
        for number, completion in group.completions.items():
            samples[number] = _complete_spec(samples[number], completion)
        # rows of padding stay as they are
        return GroupPlan(key, tuple(samples))

    def _unfinished_requests(self, key: str) -> list[Request]:
        """Returns requests that continue the running answers of a group, in the order of their numbers."""
        request_ids = [_request_id(key, number) for number in self._groups[key].unfinished()]
        return self._runner.engine.snapshot(request_ids)

    def abort(self, key: str) -> int:
        """Ends a group without rows. Returns the number of tokens that it had sampled, complete answers included."""
        # before the requests are aborted, because the engine then forgets their tokens
        running = self._unfinished_requests(key)
        self._runner.abort([request.request_id for request in running])
        group = self._groups.pop(key)
        num_tokens = 0
        for request in running:
            num_tokens += len(request.sampled.token_ids)
        for completion in group.completions.values():
            num_tokens += len(completion.token_ids)
        return num_tokens

    def take(self, key: str) -> CompleteGroup:
        """Removes a complete group and returns its rows."""
        group = self._groups.pop(key)
        prompt_ids = [spec.prompt_ids for spec in group.samples]
        prompt_length = group.samples[0].prompt_length
        prompts, mask = left_padded(prompt_ids, prompt_length, self._pad_token_id)

        responses = []
        for number in range(len(group.samples)):
            # rows of padding have no completion, but the columns need a row for each sample
            response = EMPTY
            if number in group.completions:
                response = _response(group.completions[number])
            responses.append(response)
        outputs = self._runner.engine.extra_outputs
        rows = write_rows(prompts, mask, responses, self._response_length, self._pad_token_id, outputs)
        return CompleteGroup(rows)

    @property
    def is_decoding(self) -> bool:
        return self._runner.is_decoding

    def take_metrics(self, seconds: float) -> dict[str, Metric]:
        return self._runner.take_metrics(seconds)

    def close(self) -> None:
        """Does nothing: answers need only the engine."""


def _request_id(key: str, number: int) -> str:
    """Returns the name of an answer in the engine: that of its group, and its number in the group."""
    return f"{key}/{number}"


def _complete_spec(spec: AnswerSpec, completion: Completion) -> AnswerSpec:
    """Returns the specification of an answer that has ended, from which a resumed run takes it as it is."""
    tokens = tuple(completion.token_ids)
    log_probs = tuple(completion.log_probs)
    whole_answer = Sampled(tokens, log_probs, tuple(completion.versions))
    return replace(spec, sampled=whole_answer, finish_reason=completion.finish_reason)


def _response(completion: Completion) -> Response:
    """Returns the response of a row in which the policy sampled every token."""
    return Response(
        token_ids=completion.token_ids,
        mask=[1] * len(completion.token_ids),
        log_probs=completion.log_probs,
        versions=completion.versions,
        finish_reason=completion.finish_reason,
        extra=completion.extra,
    )

"""One prompt, one answer: turns a batch of prompts into requests, drives the engine, and lays the answers out as
columns.

Finished samples are handed out while others still decode, so that their rewards are computed meanwhile. Sampled token
ids are never decoded and re-encoded on their way to training.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from verl_lite.protocol import DataProto
from verl_lite.schema import column
from workers.rollout.base import Completion, ExtraOutputs, Request, SamplingParams, derive_seed
from workers.rollout.runner import Runner

FinishedCallback = Callable[[list[tuple[int, Completion]]], None]


def generate(
    runner: Runner[int],
    prompts: DataProto,
    *,
    sampling: SamplingParams,
    seed: int,
    step: int,
    response_length: int,
    pad_token_id: int,
    on_finished: FinishedCallback,
) -> DataProto:
    """Samples one answer for each row.

    prompts: prompts and prompt_mask (B, P); uid and sample (B,), which name the random numbers of a row together with
        `seed` and `step`: the same row gives the same answer on any rank, in any company. Rows marked `is_padding` are
        not run; those marked `is_greedy` are decoded greedily instead of as `sampling` says.
    on_finished: gets (row, completion) of those that ended in one engine step.
    Returns the columns of `lay_out` and the engine's extra outputs.
    """
    ids, mask = prompts.batch["prompts"], prompts.batch["prompt_mask"].bool()
    is_run = torch.ones(len(ids), dtype=torch.bool)
    if "is_padding" in prompts.batch.keys():
        is_run = ~prompts.batch["is_padding"]
    uid, sample = prompts.non_tensor_batch["uid"], prompts.non_tensor_batch["sample"]
    greedy = prompts.non_tensor_batch.get("is_greedy", np.zeros(len(ids), dtype=bool))
    greedy_sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=-1)
    completions: list[Completion | None] = [None] * len(ids)
    for row in is_run.nonzero().flatten().tolist():
        one = replace(
            greedy_sampling if greedy[row] else sampling, seed=derive_seed(seed, step, uid[row], int(sample[row]))
        )
        runner.submit(Request(str(row), tuple(ids[row][mask[row]].tolist()), one), row)
    while runner.is_decoding:
        finished = runner.step(until_completion=True)
        for row, completion in finished:
            completions[row] = completion
        if finished:
            on_finished(finished)
    result = lay_out(ids, mask, completions, response_length=response_length, pad_token_id=pad_token_id)
    extra = [{} if done is None else done.extra for done in completions]
    result.batch.update(extra_columns(runner.engine.extra_outputs, mask, extra, response_length))
    return result


def extra_columns(
    outputs: ExtraOutputs, prompt_mask: torch.Tensor, rows: Sequence[Mapping[str, torch.Tensor]], response_length: int
) -> dict[str, torch.Tensor]:
    """Lays out the columns (B, P+R, ...) of an engine's extra outputs. rows: the `Completion.extra` of each row."""
    starts, result = prompt_mask.shape[1] - prompt_mask.sum(1), {}
    for entry in map(column, outputs):
        shape = (len(rows), prompt_mask.shape[1] + response_length, *outputs[entry.name])
        result[entry.name] = torch.full(shape, entry.absent or 0, dtype=getattr(torch, entry.dtype))
        for row, start, extra in zip(result[entry.name], starts.tolist(), rows, strict=True):
            if entry.name in extra:
                row[start : start + len(extra[entry.name])] = extra[entry.name]
    return result


def lay_out(
    prompts: torch.Tensor,
    prompt_mask: torch.Tensor,
    completions: list[Completion | None],
    *,
    response_length: int,
    pad_token_id: int,
) -> DataProto:
    """Columns of a generated batch: prompts left-padded (B, P), responses right-padded (B, R), and both together (B,
    P+R).

    response_mask is 1 on every token that the policy sampled, the end-of-text token included. A row without a
    completion has an empty response.
    """
    given = [done or Completion("", [], [], "", -1) for done in completions]  # type: ignore[arg-type]
    answers = [Response(done.token_ids, [1] * len(done.token_ids), done.log_probs) for done in given]
    tensors = token_columns(prompts, prompt_mask, answers, response_length, pad_token_id)
    tensors["policy_version"] = torch.tensor([done.policy_version for done in given])
    reasons = np.array([done.finish_reason for done in given], dtype=object)
    return DataProto.from_dict(tensors, {"finish_reason": reasons})


class Response(NamedTuple):
    """What follows a prompt, all equally long. mask: 1 on what the policy sampled."""

    token_ids: Sequence[int]
    mask: Sequence[int]
    log_probs: Sequence[float]


def token_columns(
    prompts: torch.Tensor,
    prompt_mask: torch.Tensor,
    responses: Sequence[Response],
    response_length: int,
    pad_token_id: int,
) -> dict[str, torch.Tensor]:
    """The token columns of a batch, from prompts (B, P), padded on the left, and their responses."""
    attended = [[1] * len(response.token_ids) for response in responses]
    padded = right_padded([response.token_ids for response in responses], response_length, pad_token_id)
    attention_mask = torch.cat([prompt_mask.long(), right_padded(attended, response_length)], dim=1)
    return {
        "prompts": prompts,
        "responses": padded,
        "response_mask": right_padded([response.mask for response in responses], response_length),
        "input_ids": torch.cat([prompts, padded], dim=1),
        "attention_mask": attention_mask,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
        "rollout_log_probs": right_padded([r.log_probs for r in responses], response_length, dtype=torch.float32),
    }


def right_padded(
    rows: Sequence[Sequence[float]], width: int, fill: int = 0, dtype: torch.dtype = torch.long
) -> torch.Tensor:
    """(B, width) from rows of any length up to that."""
    result = torch.full((len(rows), width), fill, dtype=dtype)
    for row, values in enumerate(rows):
        result[row, : len(values)] = torch.tensor(values, dtype=dtype)
    return result

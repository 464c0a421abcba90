"""One prompt, one answer: turns a batch of prompts into requests, drives the engine, and lays the answers out as
columns.

Finished samples are handed out while others still decode, so that their rewards are computed meanwhile. Sampled token
ids are never decoded and re-encoded on their way to training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from verl_lite.protocol import DataProto
from workers.rollout.base import Completion, Request, RolloutEngine, SamplingParams, derive_seed

FinishedCallback = Callable[[list[tuple[int, Completion]]], None]


def generate(
    engine: RolloutEngine,
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
    Returns the token columns of `lay_out`, and policy_version and finish_reason of each row.
    """
    ids, mask = prompts.batch["prompts"], prompts.batch["prompt_mask"].bool()
    skip = (
        prompts.batch["is_padding"] if "is_padding" in prompts.batch.keys() else torch.zeros(len(ids), dtype=torch.bool)
    )
    uid, sample = prompts.non_tensor_batch["uid"], prompts.non_tensor_batch["sample"]
    greedy = prompts.non_tensor_batch.get("is_greedy", np.zeros(len(ids), dtype=bool))
    greedy_sampling = replace(sampling, temperature=0.0, top_p=1.0, top_k=-1)
    completions: list[Completion | None] = [None] * len(ids)
    for row in range(len(ids)):
        if not skip[row]:
            one = greedy_sampling if greedy[row] else sampling
            engine.submit(
                Request(
                    request_id=str(row),
                    prompt_ids=tuple(ids[row][mask[row]].tolist()),
                    sampling=replace(one, seed=derive_seed(seed, step, uid[row], int(sample[row]))),
                )
            )
    while engine.unfinished:
        finished = [(int(done.request_id), done) for done in engine.step()]
        for row, completion in finished:
            completions[row] = completion
        if finished:
            on_finished(finished)
    return lay_out(ids, mask, completions, response_length=response_length, pad_token_id=pad_token_id)


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
    rows = len(completions)
    responses = torch.full((rows, response_length), pad_token_id, dtype=torch.long)
    log_probs = torch.zeros(rows, response_length)
    lengths = torch.zeros(rows, dtype=torch.long)
    for row, done in enumerate(completions):
        if done is not None:
            count = len(done.token_ids)
            lengths[row] = count
            responses[row, :count] = torch.tensor(done.token_ids, dtype=torch.long)
            log_probs[row, :count] = torch.tensor(done.log_probs)
    response_mask = (torch.arange(response_length) < lengths[:, None]).long()
    attention_mask = torch.cat([prompt_mask.long(), response_mask], dim=1)
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "response_mask": response_mask,
            "input_ids": torch.cat([prompts, responses], dim=1),
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
            "rollout_log_probs": log_probs,
            "policy_version": torch.tensor([-1 if done is None else done.policy_version for done in completions]),
        },
        non_tensors={
            "finish_reason": np.array(
                ["" if done is None else done.finish_reason for done in completions], dtype=object
            )
        },
    )

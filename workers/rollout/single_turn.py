"""Samples one answer per prompt: submits the prompts as requests, runs them, and writes the rows.

Finished answers are reported while others still decode, so that their rewards are computed meanwhile. The sampled token
ids are trained on as they are; they are never decoded and encoded again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from verl_lite.protocol import DataProto
from workers.rollout.base import Completion, ExtraOutputs, Request, SamplingParams, derive_seed
from workers.rollout.rows import Response, write_rows
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
    Returns the columns of `rows.write_rows`.
    """
    ids, mask = prompts.batch["prompts"], prompts.batch["prompt_mask"].bool()
    is_run = torch.ones(len(ids), dtype=torch.bool)
    if "is_padding" in prompts.batch.keys():
        is_run = ~prompts.batch["is_padding"]
    uid = prompts.non_tensor_batch["uid"]
    sample = prompts.non_tensor_batch["sample"]
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
    outputs = runner.engine.extra_outputs
    return lay_out(
        ids, mask, completions, response_length=response_length, pad_token_id=pad_token_id, extra_outputs=outputs
    )


def lay_out(
    prompts: torch.Tensor,
    prompt_mask: torch.Tensor,
    completions: Sequence[Completion | None],
    *,
    response_length: int,
    pad_token_id: int,
    extra_outputs: ExtraOutputs,
) -> DataProto:
    """Returns the rows of the completions; see `rows.write_rows`. Rows without a completion have an empty response."""
    empty = Response([], [], [], "", -1, {})
    responses = [
        empty
        if done is None
        else Response(
            done.token_ids,
            [1] * len(done.token_ids),
            done.log_probs,
            done.finish_reason,
            done.policy_version,
            done.extra,
        )
        for done in completions
    ]
    return write_rows(prompts, prompt_mask, responses, response_length, pad_token_id, extra_outputs)

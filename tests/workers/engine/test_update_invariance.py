"""The promise of the update: the gradient of an optimizer step does not depend on how the batch was cut or run.

Here with one simple loss and every option of the engine; every loss stands in test_loss_invariance.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.workers.engine_cases import Batch, Case, gradients_of, loss_fn, ragged_batch, relative_error
from tests.workers.invariance import POLICY, in_fp64, plain_outputs
from tests.workers.ranks import Ranks

CASES = [
    Case(),
    Case(micro_batch_size=1),
    Case(micro_batch_size=2),
    Case(max_token_len=20),
    Case(max_token_len=33, row_order_seed=1),
    Case(packed=False),
    Case(packed=False, micro_batch_size=2, row_order_seed=2),
    Case(checkpointing=True, max_token_len=40),
    Case(checkpointing=True, packed=False),
    Case(checkpointing=True, recomputed=1, offload=True, max_token_len=40),
    Case(min_num_params=10**9, max_token_len=40),
    Case(reshard_after_forward=False, max_token_len=20),
    Case(fsdp_size=1, max_token_len=20),
    Case(max_token_len=20, reduce_every_micro_batch=True),
    Case(max_token_len=20, reduce_every_micro_batch=True, reshard_after_forward=False, checkpointing=True),
    Case(fsdp_size=1, max_token_len=20, reduce_every_micro_batch=True),
    Case(balance=False, micro_batch_size=3, row_order_seed=3),
]


def plain_gradient(path: str, batch: Batch) -> dict[str, np.ndarray]:
    """The same loss by plain transformers: one row at a time, full logits, autograd; nothing of the engine."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    data = in_fp64(ragged_batch(batch))
    mask = data.batch["response_mask"]
    data.meta_info |= {"num_tokens": int(mask.sum()), "num_sequences": int(mask.any(1).sum())}
    loss_fn(data, plain_outputs(model, POLICY, data))[0].backward()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}


BATCHES = [
    Batch(),
    Batch(rows=8, shared_prompts=4, failed_rows=(0, 5)),
    Batch(rows=1, seed=5),  # fewer rows than ranks
    Batch(rows=13, shared_prompts=4, seed=4, failed_rows=(1, 2, 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, *(pytest.param(world, marks=pytest.mark.long) for world in (3, 4))])
def test_any_number_of_ranks_equals_plain_transformers(path: str, ranks: Ranks, world: int) -> None:
    """Every parameter within 1e-5 of the largest entry of its gradient."""
    cases = CASES + ([Case(fsdp_size=2, max_token_len=20)] if world == 4 else [])
    for batch in BATCHES:
        expected = plain_gradient(path, batch)
        for results in ranks.run(gradients_of, path, batch, cases, size=world):
            for case, found in zip(cases, results, strict=True):
                assert relative_error(found, expected) < 1e-5, f"{batch}, {case}"

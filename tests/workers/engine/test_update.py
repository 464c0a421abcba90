"""The loop over mini-batches: one that has no token anywhere is counted and changes nothing."""

from __future__ import annotations

import pytest
import torch

from tests.tiny_model import tiny_qwen2
from tests.workers.engine_cases import Batch, Case, build_engine, loss_fn, planned, ragged_batch
from verl_lite.config import OptimConfig


@pytest.mark.parametrize("failed", [(0, 1, 2, 3), tuple(range(7))], ids=["one mini-batch", "the whole batch"])
def test_a_mini_batch_without_tokens_is_no_step(tmp_path, failed: tuple[int, ...]) -> None:
    """With weight decay and momentum a step of gradient 0 would move the weights; here the step is left out."""
    optim = OptimConfig(lr=1e-2, eps=1e-3, weight_decay=0.5)
    engine = build_engine(tiny_qwen2(tmp_path, hidden=32, heads=4, kv_heads=2), Case(), optim)
    arguments = {"temperature": 1.0, "calculate_entropy": True}
    data, _ = planned(ragged_batch(Batch()), Case(), mini_batch_size=4)
    metrics = engine.train(data, loss_fn, **arguments)
    assert metrics["empty_mini_batch_frac"].value == 0 and engine.optimizer.steps_taken == 2

    before = {name: value.clone() for name, value in engine.full_params()}
    moments = [moment.clone() for moment in engine.optimizer.exp_avg]
    data, _ = planned(ragged_batch(Batch(failed_rows=failed)), Case(), mini_batch_size=4)
    metrics = engine.train(data, loss_fn, **arguments)
    taken = 0 if len(failed) == 7 else 1
    assert metrics["empty_mini_batch_frac"].value == 1 - taken / 2
    assert engine.optimizer.steps_taken == 2 + taken
    unchanged = all(torch.equal(value, before[name]) for name, value in engine.full_params())
    assert unchanged == (taken == 0)
    if not taken:
        assert all(torch.equal(a, b) for a, b in zip(engine.optimizer.exp_avg, moments, strict=True))
        assert "grad_norm" not in metrics and "lr" in metrics

"""Engines of bf16 weights draw from logits in fp32, as the trainer takes its log-probs of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2
from tests.workers.engines.test_engines import load, make_engine, mixed_requests, run, vllm_missing
from workers.engines import hf_engine
from workers.policy.output_layer import token_log_probs


@torch.no_grad()
def trainer_log_probs(model: Any, prompt_ids: tuple[int, ...], token_ids: list[int]) -> torch.Tensor:
    hidden = model.model(torch.tensor([[*prompt_ids, *token_ids]])).last_hidden_state[0, len(prompt_ids) - 1 : -1]
    weight, targets = model.lm_head.weight, torch.tensor(token_ids)
    options: Any = {"temperature": 1.0, "chunk_tokens": 64, "calculate_entropy": False}
    return token_log_probs(hidden, weight, None, targets, **options).log_probs


def head_dtype(worker: Any) -> torch.dtype:
    """Runs in vLLM's worker: what its output layer gives."""
    return worker.model_runner.get_model().logits_processor.head_dtype


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["hf", pytest.param("vllm", marks=[pytest.mark.slow, vllm_missing])])
def test_a_bf16_engine_has_the_trainer_s_logits(
    name: str, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_qwen2(tmp_path, heads=4, hidden=128, kv_heads=2, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)  # logits so large that bf16 would round them visibly
    drawn_from: list[torch.Tensor] = []
    sample = hf_engine.sample
    monkeypatch.setattr(hf_engine, "sample", lambda logits, **more: drawn_from.append(logits) or sample(logits, **more))
    engine: Any = make_engine(name, path, 64, dtype=torch.bfloat16, max_num_seqs=8)
    try:
        load(engine, model, 1)
        requests = mixed_requests(4, max_tokens=8)
        done = run(engine, requests)
        gaps = []
        for request in requests:
            result = done[request.request_id]
            expected = trainer_log_probs(model, request.prompt_ids, result.token_ids)
            gaps.append((torch.tensor(result.log_probs) - expected).abs().mean().item())
        assert sum(gaps) / len(gaps) < 0.05  # the layers before the last compute in bf16
        if name == "vllm":
            assert engine._engine.collective_rpc(head_dtype) == [torch.float32]
    finally:
        engine.close()
    for logits in drawn_from:
        assert logits.dtype == torch.float32 and not torch.equal(logits, logits.bfloat16().float())

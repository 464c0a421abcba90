"""Slots that keep finished requests for those that continue them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2
from verl_lite.config import RolloutConfig
from workers.rollout.base import Request, SamplingParams
from workers.rollout.hf_engine import HFEngine


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    root: Path = tmp_path_factory.mktemp("model")
    return tiny_qwen2(root)


@pytest.mark.parametrize("slots", [5, 8])
def test_conversations_go_on_and_encode_only_what_is_new(folder: str, slots: int) -> None:
    """Seven conversations in random order, with room for all of them and without, against a plain forward."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    engine = HFEngine(
        folder,
        RolloutConfig(kv_cache_memory_mb=32, max_num_seqs=slots, max_num_batched_tokens=40),
        max_model_len=96,
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=0,
        override_config={},
        trust_remote_code=False,
    )
    engine.load_weights(iter(model.named_parameters()), 1)
    encoded: list[int] = []
    forward = engine._model.base_model.forward

    def counting(**given: Any) -> Any:
        encoded.append(given["input_ids"].numel())
        return forward(**given)

    engine._model.base_model.forward = counting  # type: ignore[method-assign]
    rng = random.Random(1)
    talks = {str(number): tuple(rng.randrange(3, 60) for _ in range(8)) for number in range(7)}
    waiting, sent, again = list(talks), 0, 0
    while waiting or engine.unfinished:
        while waiting and rng.random() < 0.6:
            name = waiting.pop(rng.randrange(len(waiting)))
            sent += 1
            again += len(talks[name])
            engine.submit(Request(name, talks[name], SamplingParams(max_tokens=rng.randrange(1, 6), seed=sent)))
        for done in engine.step():
            ids = torch.tensor([[*talks[done.request_id], *done.token_ids]])
            with torch.no_grad():
                log_probs = torch.log_softmax(model(ids).logits[0].float(), -1)
            count = len(done.token_ids)
            expected = log_probs[-count - 1 : -1].gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(done.log_probs), expected, atol=1e-4, rtol=0)
            talks[done.request_id] = (*ids[0].tolist(), *(rng.randrange(3, 60) for _ in range(rng.randrange(4))))
            if len(talks[done.request_id]) < 85:
                waiting.append(done.request_id)
    if slots == 8:
        assert sum(encoded) < 1.5 * sum(map(len, talks.values()))  # each token once, and padding
    assert sum(encoded) < 0.6 * again
    engine.reset_cache()
    assert len(engine._kept) == 0
    engine.close()

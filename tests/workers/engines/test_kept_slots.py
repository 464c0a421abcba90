"""Slots that keep finished requests for those that continue them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2
from tests.workers.engines.test_engines import load, make_engine, plain_log_probs
from workers.engines.base import Request, SamplingParams


@pytest.mark.parametrize("slots", [5, 8])
def test_conversations_go_on_and_encode_only_what_is_new(tmp_path: Path, slots: int) -> None:
    """Seven conversations in random order, with room for all of them and without, against a plain forward."""
    folder = tiny_qwen2(tmp_path)
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    engine: Any = make_engine("hf", folder, 96, max_num_seqs=slots, max_num_batched_tokens=40)
    load(engine, model, 1)
    encoded: list[int] = []
    forward = engine._model.base_model.forward

    def counting(**given: Any) -> Any:
        encoded.append(given["input_ids"].numel())
        return forward(**given)

    engine._model.base_model.forward = counting
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
            ids = talks[done.request_id]
            expected = plain_log_probs(model, ids, done.token_ids, 1.0)
            torch.testing.assert_close(torch.tensor(done.log_probs), expected, atol=1e-4, rtol=0)
            more = (rng.randrange(3, 60) for _ in range(rng.randrange(4)))
            talks[done.request_id] = (*ids, *done.token_ids, *more)
            if len(talks[done.request_id]) < 85:
                waiting.append(done.request_id)
    if slots == 8:
        assert sum(encoded) < 1.5 * sum(map(len, talks.values()))  # each token once, and padding
    assert sum(encoded) < 0.6 * again
    engine.reset_cache()
    assert len(engine._kept) == 0
    engine.close()

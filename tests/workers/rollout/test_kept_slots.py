"""Slots that keep finished requests for those that continue them: the bookkeeping, and that the hf engine uses it."""

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
from workers.rollout.kept_slots import KeptSlots


def test_the_longest_whole_prefix_is_found() -> None:
    kept = KeptSlots(8)
    for slot, encoded in enumerate([(1, 2), (1, 2, 3), (1, 2, 3, 9), (2,), ()]):
        kept.keep(slot, encoded)
    assert len(kept) == 4
    assert kept.longest_prefix((1, 2, 3, 4, 5)) == 1 and kept.length(1) == 3
    assert kept.longest_prefix((1, 2, 3)) == 1
    assert kept.longest_prefix((1, 2)) == 0
    assert kept.longest_prefix((1,)) is None and kept.longest_prefix(()) is None


def test_a_claimed_slot_changes_places_with_what_is_in_its_way() -> None:
    kept = KeptSlots(8)
    kept.keep(3, (1, 2))
    kept.keep(5, (7, 8, 9))
    assert kept.claim(5, 3) == 2
    assert kept.longest_prefix((1, 2, 5)) == 5 and kept.longest_prefix((7, 8, 9)) is None
    assert kept.claim(5, 5) is None and len(kept) == 0


def test_the_oldest_makes_room() -> None:
    kept = KeptSlots(4)
    for slot, token in ((3, 30), (0, 31), (2, 32), (1, 33)):
        kept.keep(slot, (token, 0))
    # 0 and 1 are needed and nothing is free: 33 is newer than 30, which goes; 31 is older than 32 and 33, and goes
    assert kept.vacate(0, 2) == [(3, 1, 2)]
    assert kept.longest_prefix((33, 0)) == 3 and kept.longest_prefix((32, 0)) == 2 and len(kept) == 2
    kept.keep(1, (34, 0))
    assert kept.vacate(1, 2) == [(2, 1, 2)]  # 32 is the oldest now
    assert kept.vacate(0, 4) == [] and len(kept) == 0


def test_moves_never_overwrite_what_is_kept_or_needed() -> None:
    """Against an array that holds what each slot would hold."""
    rng = random.Random(0)
    for _ in range(300):
        slots = rng.randrange(1, 9)
        kept, content = KeptSlots(slots), [(-1,)] * slots
        for slot in rng.sample(range(slots), rng.randrange(slots + 1)):
            content[slot] = (slot, rng.randrange(9))
            kept.keep(slot, content[slot])
        known = [one for one in content if one != (-1,)]
        start = rng.randrange(slots)
        end = rng.randrange(start, slots) + 1
        for destination, source, length in kept.vacate(start, end):
            assert start <= source < end <= destination and length == 2
            content[destination] = content[source]
        found = [one for one in known if kept.longest_prefix(one) is not None]
        assert len(found) == len(kept)
        for one in found:
            place = kept.longest_prefix(one)
            assert place is not None and content[place] == one and not start <= place < end


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

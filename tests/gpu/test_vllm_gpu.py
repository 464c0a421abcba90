"""Both rollout engines on CUDA: log-probs against a plain forward, weight updates, sleep and wake."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2
from tests.workers.engines.test_engines import load, mixed_requests, prompt, run
from verl_lite.config import RolloutConfig
from workers.engines.base import Completion, Request, RolloutEngine, SamplingParams, build_rollout_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
vllm_missing = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root: Path = tmp_path_factory.mktemp("models")
    return [tiny_qwen2(root / name, vocab=512, hidden=256, layers=4, heads=4, seed=i) for i, name in enumerate("ab")]


@pytest.fixture(scope="module")
def models(folders: list[str]) -> list[Any]:
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval() for folder in folders]


@pytest.fixture(scope="module", params=["hf", pytest.param("vllm", marks=vllm_missing)])
def engine(request: pytest.FixtureRequest, folders: list[str]) -> Iterator[RolloutEngine]:
    engine = build_rollout_engine(
        request.param,
        folders[0],
        RolloutConfig(gpu_memory_utilization=0.1, max_num_seqs=64),
        max_model_len=320,
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
        seed=0,
    )
    yield engine
    engine.close()


@torch.no_grad()
def plain_log_probs(model: Any, request: Request, result: Completion) -> torch.Tensor:
    """Returns the log-probs (n,) of a response from one ordinary forward."""
    ids = torch.tensor([[*request.prompt_ids, *result.token_ids]], device="cuda")
    logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
    expected = torch.log_softmax(logits / (request.sampling.temperature or 1.0), dim=-1)
    return expected.gather(1, torch.tensor(result.token_ids, device="cuda")[:, None])[:, 0].cpu()


def distances(model: Any, request: Request, result: Completion) -> tuple[float, float]:
    """Returns the mean distance of the engine's log-probs and of transformers' bf16 log-probs to those of an fp32
    forward with the same weights. The weights of these models are spread widely, so that bf16 costs 0.05 nats."""
    exact = plain_log_probs(copy.deepcopy(model).float(), request, result)
    found = torch.tensor(result.log_probs), plain_log_probs(model, request, result)
    engine, plain = ((each - exact).abs().mean().item() for each in found)
    return engine, plain


@pytest.mark.parametrize("temperature", [0.7, 1.0, 0.0])
def test_log_probs_equal_a_plain_forward(engine: RolloutEngine, models: list[Any], temperature: float) -> None:
    load(engine, models[0], 1)
    requests = mixed_requests(40, temperature=temperature, max_tokens=24)
    done = run(engine, requests)
    pairs = [distances(models[0], request, done[request.request_id]) for request in requests]
    engine, plain = (sum(each) / len(pairs) for each in zip(*pairs, strict=True))
    assert engine < 1.25 * plain  # measured on an H200: 0.052 and 0.059


def test_weights_survive_neither_sleep_nor_an_update(engine: RolloutEngine, models: list[Any]) -> None:
    load(engine, models[0], 1)
    request = Request("r", prompt(290), SamplingParams(max_tokens=16, seed=3, ignore_eos=True))
    run(engine, [request])
    torch.cuda.empty_cache()
    free_awake = torch.cuda.mem_get_info()[0]
    engine.sleep()
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free_awake + (32 << 20)  # at least the KV cache
    with pytest.raises(RuntimeError, match="load_weights"):
        engine.submit(request)
    engine.move_in()
    load(engine, models[1], 2)
    result = run(engine, [request])["r"]
    assert set(result.versions) == {2}
    (right, plain), (wrong, _) = (distances(model, request, result) for model in (models[1], models[0]))
    assert right < 2 * plain and wrong > 1.0  # other weights are nats away


def test_memory_does_not_grow_over_sleep_and_wake(engine: RolloutEngine, models: list[Any]) -> None:
    free = []
    for version in range(8):
        engine.move_in()
        load(engine, models[version % 2], version)
        run(engine, mixed_requests(16, max_tokens=8))
        engine.move_out()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[2] - free[-1] < (64 << 20)

"""The experts that vLLM returns, with a stand-in for vLLM: each request gets four tokens, and the experts that a plain
forward chose, as vLLM gives them: of all layers, in bytes."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_experts import tiny_experts
from tests.workers.engines.test_engines import ask, run
from tests.workers.policy.test_router_replay import plain_experts, share_of_other_experts
from tests.workers.rollout.scripted import answer
from verl_lite.config import RolloutConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.engines import vllm_engine
from workers.engines.base import RolloutEngine, SamplingParams, build_rollout_engine
from workers.engines.vllm_process import check_replay
from workers.engines.vllm_worker import disable_expert_recording

FAMILIES: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "all layers": ("mixtral", {}, [0, 1, 2]),
    "mlp_only_layers": ("qwen3_moe", {"mlp_only_layers": [1]}, [0, 2]),
    "decoder_sparse_step": ("qwen3_moe", {"decoder_sparse_step": 2}, [1]),
    "first_k_dense_replace": (
        "deepseek_v3",
        {"first_k_dense_replace": 1, "head_dim": 64, "n_group": 4, "topk_group": 2},
        [1, 2],
    ),
}
ANSWER = [7, 9, 11, 2]


class FakeVLLM:
    """`vllm.LLMEngine`. spoil: changes what a request's experts are given as."""

    def __init__(self, path: str, layers: list[int], spoil: Callable[[Any], Any]) -> None:
        self.model, self.layers, self.spoil = AutoModelForCausalLM.from_pretrained(path), layers, spoil
        self.requests: list[tuple[str, list[int]]] = []
        self.engine_core, self.arguments = MagicMock(), dict[str, Any]()

    def add_request(self, request_id: str, prompt: list[int], params: Any) -> str:
        self.requests.append((request_id, prompt))
        return request_id

    def step(self) -> list[Any]:
        outputs = [self.output(*request) for request in self.requests]
        self.requests = []
        return outputs

    def output(self, request_id: str, prompt: list[int]) -> Any:
        chosen = plain_experts(self.model, (*prompt, *ANSWER[:-1])).numpy()
        experts = np.zeros((len(chosen), 3, chosen.shape[2]), np.uint8)
        experts[:, self.layers] = chosen
        answer = SimpleNamespace(
            token_ids=ANSWER, logprobs=SimpleNamespace(logprobs=[-1.0] * 4), finish_reason="stop",
            routed_experts=self.spoil(experts),
        )  # fmt: skip
        return SimpleNamespace(request_id=request_id, prompt_token_ids=prompt, outputs=[answer], finished=True)

    def collective_rpc(self, method: Any, kwargs: Any = None) -> list[Any]:
        list((kwargs or {}).get("weights_iterator", ()))
        return [""]

    def reset_prefix_cache(self, reset_running_requests: bool) -> bool:
        return not self.requests


def engine_on(fake: FakeVLLM, path: str, monkeypatch: pytest.MonkeyPatch) -> RolloutEngine:
    module: Any = MagicMock(__version__="0.32.0")
    module.ModelRegistry.get_supported_archs.return_value = ()
    module.EngineArgs = lambda **arguments: fake.arguments.update(arguments)
    module.LLMEngine.from_engine_args.return_value = fake
    monkeypatch.setitem(sys.modules, "vllm", module)
    inputs = MagicMock(tokens_input=lambda ids, cache_salt: list(ids))
    monkeypatch.setitem(sys.modules, "vllm.inputs", inputs)
    monkeypatch.setattr(vllm_engine, "_open_engines", 0)  # it is not closed
    has("0.32.0", monkeypatch)
    how: Any = {"device": torch.device("cuda", 0), "dtype": torch.float32, "seed": 0}
    engine = build_rollout_engine("vllm", path, RolloutConfig(router_replay=True), max_model_len=64, **how)
    engine.load_weights(fake.model.state_dict().items(), 0)
    return engine


def has(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This version of vLLM is installed."""
    installed = importlib.metadata.distributions

    def distributions(**which: Any) -> Any:
        # other packages, such as pydantic, search for plugins
        return [SimpleNamespace(version=version)] if which.get("name") == "vllm" else installed(**which)

    monkeypatch.setattr(importlib.metadata, "distributions", distributions)


@pytest.mark.parametrize("case", FAMILIES)
def test_experts_come_from_the_layers_that_have_some(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, entries, layers = FAMILIES[case]
    path = tiny_experts(tmp_path, family, num_hidden_layers=3, **entries)
    fake = FakeVLLM(path, layers, spoil=lambda experts: experts)
    engine = engine_on(fake, path, monkeypatch)
    assert fake.arguments["enable_return_routed_experts"] and not fake.arguments["async_scheduling"]
    prompts, mask = torch.tensor([[0, 5, 6, 7], [8, 9, 10, 11]]), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    names = {"uid": np.array(["a", "b"], dtype=object), "sample": np.zeros(2, dtype=int)}
    rows = DataProto.from_dict({"prompts": prompts, "prompt_mask": mask}, names)
    data = answer(engine, rows, SamplingParams(max_tokens=4), 6)
    routed = data.batch["routed_experts"]
    assert routed.dtype == torch.int16 and routed.shape == (2, 10, len(layers), 2)
    assert (routed >= 0).all(-1).all(-1).int().tolist() == [[0, *[1] * 6, 0, 0, 0], [*[1] * 7, 0, 0, 0]]
    assert share_of_other_experts(path, data, routed, True) == (0.0, 0.0), "what the update's routers would choose"


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda experts: None, "gave none"),
        (lambda experts: experts[:-1], r"expected .*\(6, 3, 2\)|gave \(5, 3, 2\)"),
        (lambda experts: experts[:, 1:], r"gave \(6, 2, 2\)"),
        (lambda experts: experts * (np.arange(3) != 2)[:, None], "an expert twice"),
    ],
    ids=["none", "a token less", "a layer less", "a layer that was not recorded"],
)
def test_what_is_not_the_experts_of_each_token_is_refused(
    spoil: Callable[[Any], Any], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_experts(tmp_path, num_hidden_layers=3)
    engine = engine_on(FakeVLLM(path, [0, 1, 2], spoil), path, monkeypatch)
    with pytest.raises(UserError, match=f"rollout.router_replay=true with rollout.name=vllm.*{told}.*rollout.name=hf"):
        run(engine, [ask("r", (5, 6, 8), max_tokens=4)])


@pytest.mark.parametrize(
    ("version", "device", "options", "told"),
    [
        ("0.31.0", "cuda", {}, "vLLM 0.31.0: 0.32 or later is needed"),
        ("0.32.0", "cpu", {}, "trainer.device=cpu: .* set rollout.name=hf"),
        ("0.32.0", "cuda", {"enable_prefix_caching": False}, "rollout.enable_prefix_caching=false: .* set it to true"),
        ("0.33.0+cu130", "cuda", {"tensor_model_parallel_size": 2}, None),
    ],
)
def test_where_vllm_returns_no_experts_the_replay_is_refused(
    version: str, device: str, options: dict[str, Any], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    has(version, monkeypatch)
    problem = ""
    try:
        check_replay(RolloutConfig(router_replay=True, **options), device)
    except UserError as error:
        problem = str(error)
    assert re.search(told, problem) if told else not problem


def test_the_scheduler_of_another_rank_does_not_ask_for_experts() -> None:
    """vLLM's raises where the worker recorded none, as all but the first rank's do."""
    connector = MagicMock(take_output=MagicMock(side_effect=AssertionError("worker output is missing")))
    scheduler = SimpleNamespace(aux_output_connector=connector)
    disable_expert_recording(SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler)))
    assert connector.take_output("request", None) is None

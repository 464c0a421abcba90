"""vLLM on a CPU, family by family: it samples with the log-probs of transformers' own forward, or does not run.

The networks are as wide as its kernels need, and it is built from other weights than it is given. Each family has a
process of its own: an engine that does not start leaves vLLM half made.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from transformers import PreTrainedModel

from tests.workers.engines.test_engines import ask, make_engine, plain_log_probs, run, vllm_missing
from tests.workers.model_families import FAMILIES, tiny_config, tiny_network
from verl_lite.config import RolloutConfig
from verl_lite.errors import UserError
from workers.engines.base import HF_ONLY_ON_CPU, Request, SamplingParams
from workers.engines.vllm_engine import VLLMEngine, _Unfinished

pytestmark = [pytest.mark.slow, vllm_missing]

QUICK = ("cohere2", "olmo2")
NOT_ON_CPU = {
    "gpt_oss": "No Unquantized MoE backend",
    "minimax_m2": "has no attribute '__name__'",
    "deepseek_v3": "not supported by MLA",
    "deepseek_v32": "Sparse Attention is not supported",
    "qwen3_next": "requires BF16",
    "qwen3_5_text": "torchvision",
    "qwen3_5_moe_text": "torchvision",
    "lfm2": "nats away",
    "olmo_hybrid": "triton",
    "kimi_linear": "_lib_fn_wrapper",
    "bamba": "does not dispatch through",
    "jamba": "selective_scan_fwd",
    "minimax": "does not dispatch through",
    "recurrent_gemma": "does not dispatch through",
    "mamba": "selective_scan_fwd",
    "diffllama": "does not dispatch through",
    "zamba2": "nats away",
}
"""Families that the installed build does not run, and a part of what it says."""

STARTS = {"minimax_m2": "load the weights of"} | dict.fromkeys(
    ("deepseek_v3", "qwen3_next", "jamba", "mamba"), "generate with"
)
"""Those of them whose engine starts, and what it does not do."""

WIDE = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 32, "intermediate_size": 96}
TIED = ("gemma", "cohere", "gpt2", "bloom")
MORE: dict[str, dict[str, Any]] = {
    "gemma4_text": {"global_head_dim": 32},
    "granitemoehybrid": {"mamba_d_head": 32},
    "bamba": {"mamba_d_head": 32},
    "mamba2": {"head_dim": 32},
    "minimax_m2": {"rotary_dim": 32, "scoring_func": "sigmoid", "use_routing_bias": True},
    "glm4_moe": {"num_key_value_heads": 2, "head_dim": 32},
    "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
}


def wide_network(family: str) -> PreTrainedModel:
    config, more = tiny_config(family), MORE.get(family, {})
    known = {name for name in WIDE if name in vars(config) or name in type(config).attribute_map}
    sizes = {name: WIDE[name] for name in known - FAMILIES[family].keys()}
    if family.startswith(TIED):
        sizes["tie_word_embeddings"] = True
    return tiny_network(family, **sizes | more)


def gap(family: str, folder: str) -> float:
    """Of log-probs of sampled tokens to a plain forward, in nats."""
    network: Any = wide_network(family)
    engine = make_engine("vllm", folder, 32, max_num_seqs=4)
    buffers = [(name, buffer) for name, buffer in network.named_buffers() if name in network.state_dict()]
    engine.load_weights(iter([*network.named_parameters(), *buffers]), 1)
    network.config.use_cache = False
    network.set_attn_implementation("eager")
    requests = [ask(length, tuple(range(3, 3 + length)), max_tokens=8) for length in (2, 5, 7)]
    done = run(engine, requests)
    expected = [plain_log_probs(network, one.prompt_ids, done[one.request_id].token_ids, 1.0) for one in requests]
    found = [torch.tensor(done[one.request_id].log_probs) for one in requests]
    engine.close()
    return float((torch.cat(found) - torch.cat(expected)).abs().max())


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in FAMILIES]
)
def test_it_samples_with_the_log_probs_of_transformers_or_is_refused(family: str, tmp_path: Path) -> None:
    network = wide_network(family)
    for parameter in network.parameters():
        parameter.data.zero_()
    network.save_pretrained(tmp_path)
    import vllm

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm", __name__])
    with ProcessPoolExecutor(1, context) as process:
        result = process.submit(gap, family, str(tmp_path))
    if family not in NOT_ON_CPU:
        assert result.result() < (1e-3 if family == "bloom" else 1e-4)  # its GELU is an approximation there
        return
    with pytest.raises(UserError, match=NOT_ON_CPU[family]) as error:
        result.result()
    told = f"vLLM {vllm.__version__} could not {STARTS.get(family, 'start with')} {network.config.model_type} on cpu: "
    assert told in str(error.value) and error.value.__cause__ is not None
    remedy = "rollout.name=hf" if family in HF_ONLY_ON_CPU else "model.path to a model of another family"
    assert f"If this error names no setting to change, set {remedy}" in str(error.value)


class Failing:
    """Stands for vLLM's own engine, which raises what it is given, or what the weights raise."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def step(self) -> NoReturn:
        raise self.error

    def collective_rpc(self, name: object, kwargs: Mapping[str, Any] | None = None) -> None:
        list((kwargs or {}).get("weights_iterator", ()))
        if kwargs:
            raise self.error


@pytest.mark.parametrize("act", ["generate with", "load the weights of"])
def test_only_an_error_of_vllm_s_own_before_its_first_answer_names_the_family(act: str) -> None:
    engine = VLLMEngine.__new__(VLLMEngine)
    engine._config, engine._model = RolloutConfig(engine_kwargs={"vllm": {"block_size": 7}}), tiny_network("qwen2")
    engine._device, engine._max_model_len, engine._has_answered = torch.device("cpu"), 8, False
    engine._unconverted = set()
    engine._running = {"0": _Unfinished(Request("0", (1,), SamplingParams()), id="0")}
    own, memory, theirs = RuntimeError("no such kernel"), torch.OutOfMemoryError("CUDA out of memory"), KeyError("rank")

    def weights(error: Exception | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        yield "model.norm.weight", torch.ones(64)
        if error is not None:
            raise error

    def fail(error: Exception, given: Iterable[tuple[str, torch.Tensor]]) -> Exception:
        vars(engine)["_engine"] = Failing(error)
        with pytest.raises(Exception) as raised:
            engine.step() if act == "generate with" else engine.load_weights(given, 1)
        return raised.value

    told = fail(own, weights())
    assert isinstance(told, UserError) and told.__cause__ is own
    assert f"could not {act} qwen2 on cpu: RuntimeError: no such kernel" in str(told)
    assert "remove rollout.engine_kwargs.vllm={'block_size': 7}, or set rollout.name=hf" in str(told)
    assert fail(memory, weights()) is memory
    assert act == "generate with" or fail(own, weights(theirs)) is theirs, "of who gives the weights"
    engine._has_answered = True
    assert fail(own, weights()) is own

"""vLLM on a CPU, family by family: it samples with the log-probs of transformers' own forward, or does not run.

The networks are as wide as its kernels need, and it is built from other weights than it is given. Each family has a
process of its own: an engine that does not start leaves vLLM half made.
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.workers.model_families import FAMILIES, tiny_config, tiny_network
from tests.workers.rollout.test_engines import ask, make_engine, plain_log_probs, run, vllm_missing

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

STARTS = ("minimax_m2", "deepseek_v3", "qwen3_next", "jamba", "mamba")
"""Those of them whose engine fails with its first weights or answers."""

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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vllm", __name__])
    with ProcessPoolExecutor(1, context) as process:
        result = process.submit(gap, family, str(tmp_path))
    if family not in NOT_ON_CPU:
        assert result.result() < (1e-3 if family == "bloom" else 1e-4)  # its GELU is an approximation there
        return
    with pytest.raises(Exception, match=NOT_ON_CPU[family]) as error:
        result.result()
    if family not in STARTS:
        assert f"did not start with {network.config.model_type} on cpu: " in str(error.value)

"""Tiny random networks of the families that people train: one table of what each config has to say beside its size.

Each has a layer of every kind that its family has, and weights large enough that a token which sees what it should not
see changes its log-probs by far more than rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCAB = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
DEEPSEEK: dict[str, Any] = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
LINEAR: dict[str, Any] = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
WINDOWED: dict[str, Any] = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 4},
    "ministral3": {},
    "phi3": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
    "olmo3": WINDOWED,
    "granite": {
        "logits_scaling": 4.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    },
    "glm4": {},
    "gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **WINDOWED},
    "gemma3_text": {"query_pre_attn_scalar": 8, **WINDOWED},
    "gemma4_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 0,
        "global_head_dim": 8,
        **WINDOWED,
    },
    "cohere2": {"logit_scale": 0.25, **WINDOWED},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "gpt_neox": {},
    "gpt_oss": {**LOCAL_EXPERTS, "intermediate_size": 16, **WINDOWED},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3_moe": EXPERTS,
    "mixtral": LOCAL_EXPERTS,
    "glm4_moe": {
        name: DEEPSEEK[name] for name in DEEPSEEK if "rank" not in name and not name.startswith(("qk_", "v_"))
    },
    "minimax_m2": {**LOCAL_EXPERTS, "rotary_dim": 8},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": {**DEEPSEEK, "index_topk": 4, "index_n_heads": 16, "index_head_dim": 16},
    "qwen3_next": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {**EXPERTS, **LINEAR, "shared_expert_intermediate_size": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5, "num_key_value_heads": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8, "expand": 2},
    "olmo_hybrid": LINEAR,
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "kimi_linear": {
        **LOCAL_EXPERTS,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "moe_intermediate_size": 16,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "granitemoehybrid": {
        **MAMBA,
        **LOCAL_EXPERTS,
        "shared_intermediate_size": 16,
        "layer_types": ["mamba", "attention"],
        "logits_scaling": 4.0,
    },
    "minimax": {**LOCAL_EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": 4, "block_types": ["recurrent", "attention"]},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "stablelm": {},
    "bloom": {"n_head": 4, "n_layer": 2},
    "exaone4": WINDOWED,
    "diffllama": {},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
    },
}

"""The families that `workers/policy/README.md` lists with what is supported."""

ALL_EXPERTS: dict[str, Any] = {"n_group": 1, "topk_group": 1, **EXPERTS}
GROUPED_EXPERTS = {name: DEEPSEEK[name] for name in DEEPSEEK if "rank" not in name and "_head_dim" not in name}
LATENT = {name: DEEPSEEK[name] for name in DEEPSEEK if "expert" not in name}
FURTHER: dict[str, dict[str, Any]] = {
    "afmoe": {**EXPERTS, "num_dense_layers": 1, **WINDOWED},
    "apertus": {},
    "arcee": {},
    "aria_text": {"moe_num_experts": 4, "moe_topk": 2},
    "axk1": DEEPSEEK,
    "bitnet": {},
    "cohere": {},
    "cohere2_moe": {"num_experts": 4, "num_experts_per_tok": 2, **WINDOWED},
    "cwm": {"bos_token_id": 0, **WINDOWED},
    "deepseek_v2": {**DEEPSEEK, "topk_method": "greedy"},
    "dots1": {**GROUPED_EXPERTS, **WINDOWED},
    "ernie4_5": {},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 16,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0,
    },
    "exaone_moe": {**ALL_EXPERTS, "num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"], **WINDOWED},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "laurel_rank": 8,
        "activation_sparsity_pattern": None,
        "intermediate_size": [48, 48],
        **WINDOWED,
    },
    "gemma4_unified_text": {
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 0,
        "global_head_dim": 8,
        **WINDOWED,
    },
    "glm": {},
    "glm4_moe_lite": DEEPSEEK,
    "gpt_bigcode": {},
    "granite_swa": WINDOWED,
    "granitemoe": LOCAL_EXPERTS,
    "granitemoe_swa": {**LOCAL_EXPERTS, **WINDOWED},
    "granitemoeshared": {**LOCAL_EXPERTS, "shared_intermediate_size": 16},
    "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 16},
    "hy_v3": {**EXPERTS, "expert_hidden_dim": 16, "num_shared_experts": 1, "first_k_dense_replace": 1},
    "hyperclovax": {},
    "jais2": {},
    "jetmoe": {"kv_channels": 8, **LOCAL_EXPERTS},
    "laguna": {**EXPERTS, "shared_expert_intermediate_size": 16, **WINDOWED},
    "lfm2_moe": {**EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {
        **DEEPSEEK,
        "num_layers": 1,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
        "zero_expert_num": 1,
        "moe_topk": 2,
    },
    "mellum": {**EXPERTS, **WINDOWED},
    "mimo_v2_flash": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "v_head_dim": 8,
        "swa_head_dim": 8,
        "swa_v_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        **WINDOWED,
    },
    "minimax_m3_vl_text": LOCAL_EXPERTS,
    "ministral": WINDOWED,
    "nanochat": {},
    "olmo": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "persimmon": {},
    "phi": {},
    "phimoe": LOCAL_EXPERTS,
    "seed_oss": {},
    "solar_open": GROUPED_EXPERTS,
    "starcoder2": {"sliding_window": 4},
    "vaultgemma": WINDOWED,
    "youtu": LATENT,
}
"""Further families that are packed."""

WITH_WINDOWS: dict[str, dict[str, Any]] = {
    "minimax": {"sliding_window": 4},
    "ministral3": {"sliding_window": 4},
    "mixtral": {"sliding_window": 4},
    "phi3": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, **WINDOWED},
    "qwen3": {"use_sliding_window": True, **WINDOWED},
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 4},
    "smollm3": {"use_sliding_window": True, **WINDOWED},
}
"""Families that can have windows, and what is added to their configs above to give them some."""


def tiny_config(family: str, **more: Any) -> PretrainedConfig:
    """The config of a tiny network of a family."""
    kind = CONFIG_MAPPING[family]
    known = vars(kind())
    sizes = {name: value for name, value in SIZES.items() if name in known or name in kind.attribute_map}
    config = kind(**(sizes | (FAMILIES | FURTHER)[family] | more))
    config.architectures = None
    return config


def tiny_network(family: str, **more: Any) -> PreTrainedModel:
    """A causal language model of a family with random weights, in fp32; same arguments, same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = AutoModelForCausalLM.from_config(tiny_config(family, **more), dtype=torch.float32)
        for parameter in network.parameters():  # norms, biases and states are 1 or 0 by default
            if parameter.dim() < 2:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return network.eval()


Kernels = dict[str, tuple[str, int]]
CONVOLUTION: Kernels = {"causal_conv1d_fn": ("seq_idx", 2)}
DELTA_RULE = CONVOLUTION | {"torch_chunk_gated_delta_rule": ("cu_seqlens", 1)}
KERNELS = {
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid"), DELTA_RULE),
    "kimi_linear": CONVOLUTION | {"chunk_kimi_delta_attention": ("cu_seqlens", 1)},
    "lfm2": CONVOLUTION,
    **dict.fromkeys(
        ("mamba2", "falcon_h1", "nemotron_h", "bamba", "granitemoehybrid", "zamba2"),
        CONVOLUTION | {"mamba2_chunk_scan": ("seq_idx", 1)},
    ),
}
"""Families all of whose CUDA kernels take borders: the functions in whose place they come, by what name, and the axis
of the tokens."""


def give_kernels(family: str, names: Kernels, monkeypatch: pytest.MonkeyPatch, late: int = 0) -> None:
    """Has functions of a family's module keep to the borders that they are told, or to that many tokens after them."""
    home = sys.modules[type(tiny_network(family)).__module__]
    for name, (keyword, axis) in names.items():
        monkeypatch.setattr(home, name, _kept_apart(getattr(home, name), keyword, axis, late))


def _kept_apart(kernel: Callable[..., Any], keyword: str, axis: int, late: int) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        total, told = args[0].shape[axis], kwargs.pop(keyword, None)
        if told is None:
            return kernel(*args, **kwargs)
        cuts = (told[0].diff().nonzero()[:, 0] + 1 if keyword == "seq_idx" else told[1:-1].long()) + late

        def parts(value: Any) -> Sequence[Any]:
            has_tokens = isinstance(value, torch.Tensor) and value.dim() > axis and value.shape[axis] == total
            return value.tensor_split(cuts, dim=axis) if has_tokens else [value] * (len(cuts) + 1)

        calls = zip(*map(parts, (*args, *kwargs.values())), strict=True)
        results = [kernel(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True))) for given in calls]
        if isinstance(results[0], tuple):
            return torch.cat([result[0] for result in results], axis), None
        return torch.cat(results, axis)

    return called

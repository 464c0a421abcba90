"""Random mixtures of experts, small enough for any test, as Hugging Face folders with the tokenizer of `tiny_model`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from tests.tiny_model import tiny_tokenizer

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def tiny_experts(folder: str | Path, family: str = "qwen3_moe", seed: int = 0, **entries: Any) -> str:
    """Writes a model of `family` and its tokenizer into `folder`, and returns its path. entries: of its config, beside
    SHAPE."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SHAPE | entries), dtype=torch.float32)
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:  # zero in a new model, and what training balances in a real one
                buffer.normal_(std=0.1)
    model.save_pretrained(folder)
    GenerationConfig(eos_token_id=[2, 0], pad_token_id=0).save_pretrained(folder)
    tiny_tokenizer(64).save_pretrained(folder)
    return str(folder)

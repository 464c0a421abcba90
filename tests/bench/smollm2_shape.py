"""The shape of SmolLM2-135M for benchmarks: its own weights where they are installed, otherwise random ones.

Time and memory of a step depend on the shape and the vocabulary, hardly on the weights. A random model ends its
answers nowhere near where the pretrained one does, so benchmarks that use it fix the length of answers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from recipes.smollm2 import model
from tests.tiny_model import tiny_tokenizer

VOCABULARY = 49_152


def llama_135m_config() -> dict[str, Any]:
    """Returns the fields of the model's `LlamaConfig`."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100_000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
        "dtype": "float32",
    }


def write_random_model(folder: str | Path, seed: int = 0) -> str:
    """Writes a model of this shape with random fp32 weights and a tokenizer of one token a character.

    Token ids of the tokenizer are those of `tests.tiny_model.tiny_tokenizer`, so tokens 0 and 2 end an answer. Returns
    the folder.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = LlamaForCausalLM(LlamaConfig(**llama_135m_config()))
    network.save_pretrained(folder)

    GenerationConfig(eos_token_id=[2, 0], pad_token_id=0).save_pretrained(folder)
    tiny_tokenizer(VOCABULARY).save_pretrained(folder)
    return str(folder)


def installed_model() -> str | None:
    """Returns the folder of the pretrained model, or None if no earlier run of `recipe=smollm2` has written it."""
    folder = model.folder()
    return str(folder) if (folder / "config.json").is_file() else None


def model_135m(folder: str | Path) -> str:
    """Returns the folder of the pretrained model if it is installed, otherwise of a random one, written to `folder`."""
    return installed_model() or write_random_model(folder)

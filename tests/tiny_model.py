"""A random Qwen2 with a character tokenizer, small enough for any test: a Hugging Face folder made on the spot.

Same arguments, same bytes. Logits are spread widely enough (standard deviation above 1) that greedy decoding has no
ties and that two sets of weights give clearly different log-probs.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import (
    GenerationConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    Qwen2Tokenizer,
)

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHARACTERS = "0123456789 \n+-*/=?.,:()<>abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ!;'\"[]{}_#%&@$^|~`\\"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_qwen2(
    folder: str | Path,
    vocab: int = 64,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 2,
    seed: int = 0,
    *,
    kv_heads: int | None = None,
    max_positions: int = 512,
    tie_word_embeddings: bool = False,
    initializer_range: float = 0.15,
) -> str:
    """Writes config, fp32 weights, generation config and tokenizer into `folder`, and returns its path.

    vocab: tokens of the model and of the tokenizer, at least 64: 3 special tokens (0 = <|endoftext|>, the pad token;
        1 = <|im_start|>; 2 = <|im_end|>, the end of a turn), then one token a character (digits, space, newline, signs
        and small letters come first), then unused ones. Both 0 and 2 end a generation.
    hidden / heads is the head dimension; vLLM needs it to be 32 or 64.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads or heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=initializer_range,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        dtype="float32",
        architectures=["Qwen2ForCausalLM"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(folder)
    GenerationConfig(eos_token_id=[2, 0], pad_token_id=0).save_pretrained(folder)
    tiny_tokenizer(vocab).save_pretrained(folder)
    return str(folder)


def tiny_tokenizer(vocab: int = 64) -> Qwen2Tokenizer:
    """A byte-level BPE with an empty merge list, so that one character is one token."""
    if vocab < 64:
        raise ValueError(f"vocab={vocab}: expected at least 64 tokens (3 special ones, digits, signs, small letters)")
    byte_level = {" ": "Ġ", "\n": "Ċ"}
    tokens = [*SPECIAL, *(byte_level.get(character, character) for character in CHARACTERS)][:vocab]
    tokens += [f"<unused_{index}>" for index in range(vocab - len(tokens))]
    return Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
    )


def tiny_reward_model(folder: str | Path, *, labels: int = 1, vocab: int = 64, seed: int = 1, **sizes: int) -> str:
    """Writes a random Qwen2 sequence-classification model with its tokenizer into `folder`, and returns its path.

    sizes: hidden, layers, heads. The pad token is 0, so that the score is read at the last token that is not 0.
    """
    folder = Path(folder)
    shape = {"hidden": 32, "layers": 2, "heads": 4} | sizes
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=shape["hidden"],
        intermediate_size=4 * shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["heads"],
        max_position_embeddings=512,
        initializer_range=0.15,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        num_labels=labels,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForSequenceClassification(config).save_pretrained(folder)
    tiny_tokenizer(vocab).save_pretrained(folder)
    return str(folder)

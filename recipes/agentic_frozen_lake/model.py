"""The model of the agentic recipes: a random Qwen2 of 230,000 parameters, whose words are moves and cells.

A token is a cell of the grid, a line end, a move or one of the two marks around a move, so that a turn of the agent,
<answer>Right</answer>, has three tokens and its end. Other texts go in as bytes. An ordinary Hugging Face folder; same
seed, same bytes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import ByteLevel
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils.logging import disable_progress_bar

PAD, END, USER, ASSISTANT = SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|user|>", "<|assistant|>")
WORDS = ("<answer>", "</answer>", "Left", "Down", "Right", "Up", "√")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|im_end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def grid_tokenizer() -> Qwen2Tokenizer:
    """One token for each of WORDS, one a byte for any other text: nothing is lost."""
    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        unk_token=None,  # type: ignore[arg-type]  # there is nothing unknown: all bytes are tokens
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in WORDS])
    return tokenizer


def write_model(folder: Path, seed: int, *, layers: int = 4, hidden: int = 128, max_length: int = 512) -> None:
    """Writes config, random fp32 weights, generation config and tokenizer into `folder`."""
    tokenizer = grid_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,  # of 32 dimensions, the smallest that vLLM takes
        num_key_value_heads=hidden // 32,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        initializer_range=0.06,  # as in the quickstart: learns twice as fast as from the usual 0.02
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        dtype="float32",
        architectures=["Qwen2ForCausalLM"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Qwen2ForCausalLM(config)
    disable_progress_bar()
    network.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id).save_pretrained(folder)
    tokenizer.save_pretrained(folder)

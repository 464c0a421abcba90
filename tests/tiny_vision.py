"""Random vision-language models with a character tokenizer and an image processor, and images for them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, GenerationConfig, Qwen2VLImageProcessorPil

from tests.tiny_model import tiny_tokenizer

IMAGE, VIDEO, START, END = 120, 121, 122, 123  # ids of <|image_pad|> ...
VOCAB = 128
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
_VISION: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"fullatt_block_indexes": [1], "window_size": 16, "intermediate_size": 48},
    "qwen3_vl": {"deepstack_visual_indexes": [0], "num_position_embeddings": 64, "intermediate_size": 48},
}


def tiny_vision_model(
    folder: Path,
    family: str = "qwen2_5_vl",
    seed: int = 0,
    hidden: int = 64,
    heads: int = 2,
    kv_heads: int = 2,
    **tower: Any,
) -> str:
    """Writes a model, its tokenizer and its image processor into `folder`, and returns its path. Patches have 4 x 4
    pixels, and 2 x 2 patches are one token. tower: other entries of the vision config."""
    head_dim = hidden // heads
    sections = [head_dim // 2 - 2 * (head_dim // 6), head_dim // 6, head_dim // 6]
    text: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    if family == "qwen3_vl":  # its checkpoints tell vLLM that M-RoPE is interleaved; transformers always interleaves it
        text["head_dim"], text["rope_parameters"]["mrope_interleaved"] = head_dim, True
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": hidden,
        "initializer_range": 0.15,
        **_VISION[family],
        **tower,
    }
    ids = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
    config = CONFIG_MAPPING[family](text_config=text, vision_config=vision, tie_word_embeddings=False, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        network.save_pretrained(folder)
    GenerationConfig(eos_token_id=[2, 0], pad_token_id=0).save_pretrained(folder)
    tokenizer = tiny_tokenizer(VOCAB)
    names = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>", START: "<|vision_start|>", END: "<|vision_end|>"}
    vocab = {names.get(number, token): number for token, number in tokenizer.get_vocab().items()}
    tokenizer = type(tokenizer)(
        vocab=vocab, merges=[], pad_token=tokenizer.pad_token, eos_token=tokenizer.eos_token, unk_token=None
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [*names.values(), "<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    side = vision["patch_size"]
    size = {"shortest_edge": (2 * side) ** 2, "longest_edge": (16 * side) ** 2}
    Qwen2VLImageProcessorPil(patch_size=side, merge_size=2, temporal_patch_size=2, size=size).save_pretrained(folder)
    return str(folder)


def image_file(seed: int, height: int = 16, width: int = 24, kind: str = "PNG") -> bytes:
    """Returns an encoded image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()

"""A small Qwen2.5-VL, and its warm start on demonstrated answers, which trains the vision tower too.

A picture of 24 x 24 pixels has 9 tokens of 2 x 2 patches.
"""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import torch

from recipes.embedded import END, HEAD_DIMENSIONS, INITIALIZER_RANGE, byte_tokenizer
from recipes.vision.data import SIZE, WORDS

HIDDEN = 128
LAYERS = 4
VISION_HIDDEN = 64
VISION_LAYERS = 3
PATCH = 4
# of the warm start
STEPS = 240
ROWS = 64
LR = 2e-3
IMAGE, VIDEO, START, STOP = VISION_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|im_end|>"
    "{% else %}<|user|>{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Example(NamedTuple):
    """A demonstrated answer as token ids, with the processed image of its prompt."""

    prompt: list[int]
    answer: list[int]
    image: Mapping[str, torch.Tensor] | None


def write_random_model(folder: Path, seed: int) -> None:
    """Writes config, random fp32 weights, generation config, tokenizer and image processor into `folder`."""
    from transformers import (
        GenerationConfig,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2VLImageProcessorPil,
    )
    from transformers.utils.logging import disable_progress_bar

    tokenizer = byte_tokenizer(WORDS)
    # in addition to the tokens of the roles, which the default would replace
    vision_tokens = {"additional_special_tokens": list(VISION_TOKENS)}
    tokenizer.add_special_tokens(vision_tokens, replace_extra_special_tokens=False)
    tokenizer.chat_template = CHAT_TEMPLATE
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}

    heads = HIDDEN // HEAD_DIMENSIONS
    # pairs of rotary dimensions, which mrope_section divides among time, height and width
    pairs = HEAD_DIMENSIONS // 2
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": HIDDEN,
            "intermediate_size": 4 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": 512,
            "initializer_range": INITIALIZER_RANGE,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [pairs - 10, 5, 5]},
            "bos_token_id": None,
            "tie_word_embeddings": True,
            **special,
        },
        vision_config={
            "depth": VISION_LAYERS,
            "hidden_size": VISION_HIDDEN,
            "intermediate_size": 4 * VISION_HIDDEN,
            "num_heads": VISION_HIDDEN // HEAD_DIMENSIONS,
            "patch_size": PATCH,
            # the tower's outputs take the place of token embeddings
            "out_hidden_size": HIDDEN,
            # one window of attention is the whole picture
            "window_size": SIZE,
            "fullatt_block_indexes": [VISION_LAYERS - 1],
            "initializer_range": INITIALIZER_RANGE,
        },
        tie_word_embeddings=True,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        video_token_id=tokenizer.convert_tokens_to_ids(VIDEO),
        vision_start_token_id=tokenizer.convert_tokens_to_ids(START),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(STOP),
    )
    # the caller's random state stays as it is
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Qwen2_5_VLForConditionalGeneration(config)
    # in spite of their names, these limits are numbers of pixels
    size_limits = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": SIZE**2}
    processor = Qwen2VLImageProcessorPil(patch_size=PATCH, size=size_limits)
    disable_progress_bar()
    for part in (network, GenerationConfig(**special), tokenizer, processor):
        part.save_pretrained(folder)


def warm_start(folder: Path, demonstrations: Path, seed: int) -> None:
    """Trains the model in `folder` on demonstrated answers, in place. Prints the progress."""
    from transformers import Qwen2_5_VLForConditionalGeneration

    network = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    examples = read_examples(demonstrations, folder)
    rng = random.Random(seed)
    threads = torch.get_num_threads()
    # its operations are too small for several threads
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=LR, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, total_steps=STEPS, pct_start=0.1)
    for step in range(1, STEPS + 1):
        batch = batch_of(rng.sample(examples, ROWS), network.config.image_token_id)
        loss = network(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 40 == 0:
            print(f"vision: warm start, step {step}/{STEPS}  loss {loss.item():.3f}", flush=True)
    torch.set_num_threads(threads)
    network.save_pretrained(folder)


def read_examples(demonstrations: Path, model: Path) -> list[Example]:
    """Reads demonstrated answers.

    Args:
        demonstrations: Parquet file with the columns prompt, images and answer.
        model: Folder of the tokenizer and the image processor.
    """
    from transformers import AutoImageProcessor, AutoTokenizer

    from trainer.data.images import message_parts
    from verl_lite.images import open_image

    tokenizer = AutoTokenizer.from_pretrained(model)
    processor = AutoImageProcessor.from_pretrained(model)
    patches = (SIZE // PATCH) ** 2
    image_tokens = patches // processor.merge_size**2
    examples = []
    for row in pq.read_table(demonstrations).to_pylist():
        messages = row["prompt"]
        image = None
        # at most one in a row of this recipe
        if row["images"]:
            messages = message_parts(messages)
            picture = open_image(row["images"][0]["bytes"])
            image = processor(picture, return_tensors="pt")
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # the template writes one token for an image, the network expects one for each of its features
        text = text.replace(IMAGE, IMAGE * image_tokens)
        prompt = tokenizer(text)["input_ids"]
        answer = tokenizer(row["answer"] + END)["input_ids"]
        examples.append(Example(prompt, answer, image))
    return examples


def batch_of(examples: Sequence[Example], image_token_id: int) -> dict[str, torch.Tensor]:
    """Returns the arguments of a transformers network, with the loss on the answers."""
    width = max(len(example.prompt) + len(example.answer) for example in examples)
    ids = torch.zeros(len(examples), width, dtype=torch.long)
    # transformers excludes -100 from the loss
    labels = torch.full((len(examples), width), -100)
    mask = torch.zeros_like(ids)
    pixel_values = []
    grids = []
    for row, example in enumerate(examples):
        start = len(example.prompt)
        end = start + len(example.answer)
        ids[row, :end] = torch.tensor(example.prompt + example.answer)
        labels[row, start:end] = torch.tensor(example.answer)
        mask[row, :end] = 1
        if example.image is not None:
            pixel_values.append(example.image["pixel_values"])
            grids.append(example.image["image_grid_thw"])

    # transformers expects the patches of all images in one tensor, in the order of the rows
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": labels,
        "mm_token_type_ids": (ids == image_token_id).int(),
        "pixel_values": torch.cat(pixel_values),
        "image_grid_thw": torch.cat(grids),
    }

"""The job of `bench step`, the same for all sides: a model, prompts, the number and the lengths of answers, a reward.

1M and 12M: a random Qwen2, prompts of 16 tokens, 8 answers each.
Uniform: every answer has exactly 32 (12M: 64) tokens. Skewed: the vocabulary has 32 tokens and the weights are nearly
uniform, so each token is the end of text with probability 1/32: lengths are geometric, at most 96 (12M: 128). The
learning rate is small enough that the lengths stay what they are. The reward depends on the text in a way that varies
in every group.

135M: SmolLM2-135M, or a random model of its shape. Addition: the questions of `recipe=smollm2` with 8 answers each;
the pretrained model ends its answers itself, a random one is made to write 13 tokens. Equal: prompts of 2 tokens, 2
answers of exactly 24 tokens each, where a shared prompt would save less than packing requires (`MIN_SHARED`).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

LEARNING_RATE = 1e-6
LETTERS = "abcdefghijklmnopqrstuvwxyz0123"
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Lengths:
    """The lengths of a step.

    Attributes:
        maximum: Number of tokens after which an answer is cut.
        exact: True if every answer has exactly `maximum` tokens.
        prompts: Prompts of a step.
        samples: Answers to each prompt.
        prompt_tokens: Tokens of each prompt, with its chat template.
    """

    name: str
    maximum: int
    exact: bool
    prompts: int
    samples: int = 8
    prompt_tokens: int = 16


@dataclass(frozen=True)
class Size:
    """A model and its steps.

    Attributes:
        vocabulary: Number of rows of the output layer.
        layer_parameters: Parameters of one layer's matrices.
        is_recipe: True trains with the settings of `recipe=smollm2`: gradient checkpointing follows the plan, and each
            layer is an FSDP group. False: without checkpointing, and all layers are one group.
    """

    name: str
    hidden: int
    layers: int
    vocabulary: int
    layer_parameters: int
    lengths: tuple[Lengths, ...]
    is_recipe: bool = False

    def update_flops(self, tokens: int, predicted: int) -> float:
        """Returns the FLOPs of the matrix products of an update: one forward and two of its size in the backward pass.

        Recomputation and the products of attention, which are below 2% here, are not counted.

        Args:
            tokens: Different tokens; answers to one prompt share its tokens.
            predicted: Tokens of answers.
        """
        return 3.0 * self.forward_flops(tokens, predicted)

    def forward_flops(self, tokens: int, predicted: int) -> float:
        """Returns the FLOPs of the matrix products of a forward pass, or of the generation of `predicted` tokens."""
        layers = 2.0 * self.layers * self.layer_parameters * tokens
        head = 2.0 * self.hidden * self.vocabulary * predicted
        return layers + head


def _qwen2_layer(hidden: int) -> int:
    """Returns the parameters of a layer's matrices: four of attention, three of the MLP of width 4 * hidden."""
    return 4 * hidden * hidden + 3 * hidden * 4 * hidden


def _smollm2_layer() -> int:
    """Returns the parameters of a layer's matrices of SmolLM2-135M: 9 query heads and 3 of keys and values of 64."""
    attention = 576 * 576 * 2 + 576 * 192 * 2
    return attention + 3 * 576 * 1536


SIZES = (
    Size(
        "1M",
        128,
        4,
        32,
        _qwen2_layer(128),
        (Lengths("uniform", 32, True, 16), Lengths("skewed", 96, False, 16)),
    ),
    Size(
        "12M",
        384,
        5,
        32,
        _qwen2_layer(384),
        (Lengths("uniform", 64, True, 8), Lengths("skewed", 128, False, 8)),
    ),
    Size(
        "135M",
        576,
        30,
        49_152,
        _smollm2_layer(),
        (
            Lengths("addition", 16, False, 16, prompt_tokens=47),
            Lengths("equal", 24, True, 32, samples=2, prompt_tokens=2),
        ),
        is_recipe=True,
    ),
)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """A number in [0, 1) that depends on every character."""
    return (zlib.crc32(solution_str.encode()) % 1000) / 1000


def arguments(folder: Path, lengths: Lengths, own: dict[str, object]) -> list[str]:
    """Our command line on the task, with a run's own options."""
    usual: dict[str, object] = {
        "model.path": folder / "model",
        "data.train_files": folder / "train.parquet",
        "data.train_batch_size": lengths.prompts,
        "data.max_prompt_length": lengths.prompt_tokens,
        "data.max_response_length": lengths.maximum,
        "actor.ppo_mini_batch_size": lengths.prompts,
        "actor.optim.lr": LEARNING_RATE,
        "rollout.n": lengths.samples,
        "trainer.save_freq": 0,
        "trainer.logger": "[jsonl]",
    }
    return [f"{key}={value}" for key, value in (usual | own).items()]


def begun() -> tuple[Path, Lengths, Callable[..., None]]:
    """What a side is told by sys.argv: the folder of the task, the lengths as JSON, and the number of the file that it
    reports each step to, which is a function here."""
    answers = os.fdopen(int(sys.argv[3]), "w")

    def report(**row: object) -> None:
        answers.write(json.dumps(row) + "\n")
        answers.flush()

    return Path(sys.argv[1]), Lengths(**json.loads(sys.argv[2])), report


def make_task(folder: Path, size: Size, lengths: Lengths) -> Lengths:
    """Writes model/, train.parquet (our row schema) and prompts.json (for the peers) into `folder`.

    Returns `lengths`, or for a random model of SmolLM2's shape lengths that do not depend on when it ends an answer.
    """
    if size.is_recipe:
        return _make_smollm2_task(folder, lengths)
    _write_qwen2(folder / "model", size)

    import torch

    random = torch.Generator().manual_seed(1)
    letters = [torch.randint(len(LETTERS), (lengths.prompt_tokens,), generator=random).tolist() for _ in range(2048)]
    _write_prompts(folder, ["".join(LETTERS[letter] for letter in row) for row in letters])
    return lengths


def _write_qwen2(model: Path, size: Size) -> None:
    """Writes a random Qwen2 whose tokens are letters."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    vocab = ["<|endoftext|>", "<|im_end|>", *LETTERS]
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(vocab)},
        merges=[],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=PLAIN_TEMPLATE,
    )
    config = Qwen2Config(
        vocab_size=len(vocab),
        hidden_size=size.hidden,
        intermediate_size=4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(model)
    GenerationConfig(eos_token_id=1, pad_token_id=0, do_sample=True).save_pretrained(model)
    tokenizer.save_pretrained(model)


def _make_smollm2_task(folder: Path, lengths: Lengths) -> Lengths:
    """Writes the task of size 135M, see `make_task`."""
    from transformers import AutoTokenizer

    from recipes.smollm2.tasks import addition_questions
    from tests.bench.smollm2_shape import installed_model, write_random_model

    model = folder / "model"
    pretrained = installed_model()
    if pretrained is None:
        write_random_model(model)
    else:
        shutil.copytree(pretrained, model)
    tokenizer = AutoTokenizer.from_pretrained(str(model))
    random = Random(1)

    if lengths.name == "addition":
        questions = islice(addition_questions(random), 2048)
        texts = [question.prompt for question in questions]
        _write_prompts(folder, texts)
        if pretrained is not None:
            return lengths
        # the tokenizer of the random model has one token a character, and its answers would end anywhere
        first = tokenizer.apply_chat_template([{"role": "user", "content": texts[0]}], add_generation_prompt=True)
        return replace(lengths, exact=True, maximum=13, prompt_tokens=len(first["input_ids"]))

    # plain texts, because a chat template alone is longer than these prompts
    tokenizer.chat_template = PLAIN_TEMPLATE
    tokenizer.save_pretrained(model)
    _write_prompts(folder, _texts_of_length(tokenizer, lengths.prompt_tokens, random))
    return lengths


def _texts_of_length(tokenizer: Any, tokens: int, random: Random) -> list[str]:
    """Returns 512 different texts that the tokenizer encodes in this number of tokens."""
    texts: set[str] = set()
    while len(texts) < 512:
        text = "".join(random.choices(LETTERS[:26], k=random.randint(tokens, 4 * tokens)))
        if len(tokenizer(text, add_special_tokens=False)["input_ids"]) == tokens:
            texts.add(text)
    return sorted(texts)


def _write_prompts(folder: Path, prompts: list[str]) -> None:
    """Writes train.parquet and prompts.json, with each prompt as the only message of a conversation."""
    from datasets import Dataset

    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    (folder / "prompts.json").write_text(json.dumps(messages))
    rows = []
    for index, prompt in enumerate(messages):
        rows.append(
            {
                "data_source": "bench",
                "prompt": prompt,
                "ability": "none",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index, "split": "train"},
            }
        )
    Dataset.from_list(rows).to_parquet(str(folder / "train.parquet"))

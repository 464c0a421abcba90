"""The job of `bench step`, the same for both sides: a random Qwen2 of 1.06M or 12M parameters, prompts of 16 tokens, 8
answers each, a reward.

Uniform: every answer has exactly 32 (12M: 64) tokens. Skewed: the vocabulary has 32 tokens and the weights are nearly
uniform, so each token is the end of text with probability 1/32: lengths are geometric, at most 96 (12M: 128). The
learning rate is small enough that the lengths stay what they are. The reward depends on the text in a way that varies
in every group.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SAMPLES = 8
PROMPT_TOKENS = 16
LEARNING_RATE = 1e-6
LETTERS = "abcdefghijklmnopqrstuvwxyz0123"


@dataclass(frozen=True)
class Lengths:
    """How long answers are: exactly `maximum` tokens (uniform) or geometric up to it (skewed). prompts: of a step."""

    name: str
    maximum: int
    exact: bool
    prompts: int


@dataclass(frozen=True)
class Size:
    """A model and its steps."""

    name: str
    hidden: int
    layers: int
    lengths: tuple[Lengths, ...]


SIZES = (
    Size("1M", 128, 4, (Lengths("uniform", 32, True, 16), Lengths("skewed", 96, False, 16))),
    Size("12M", 384, 5, (Lengths("uniform", 64, True, 8), Lengths("skewed", 128, False, 8))),
)


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """A number in [0, 1) that depends on every character."""
    return (zlib.crc32(solution_str.encode()) % 1000) / 1000


def arguments(folder: Path, lengths: Lengths, own: dict[str, object]) -> list[str]:
    """Our command line on the task, with a run's own options."""
    usual: dict[str, object] = {
        "model.path": folder / "model",
        "model.enable_gradient_checkpointing": False,
        "data.train_files": folder / "train.parquet",
        "data.train_batch_size": lengths.prompts,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": lengths.maximum,
        "actor.ppo_mini_batch_size": lengths.prompts,
        "actor.optim.lr": LEARNING_RATE,
        "rollout.n": SAMPLES,
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


def make_task(folder: Path, size: Size) -> None:
    """Writes model/, train.parquet (our row schema) and prompts.json (for the peer) into `folder`."""
    import torch
    from datasets import Dataset
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    vocab = ["<|endoftext|>", "<|im_end|>", *LETTERS]
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(vocab)},
        merges=[],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
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
    model = folder / "model"
    Qwen2ForCausalLM(config).save_pretrained(model)
    GenerationConfig(eos_token_id=1, pad_token_id=0, do_sample=True).save_pretrained(model)
    tokenizer.save_pretrained(model)
    random = torch.Generator().manual_seed(1)
    letters = [torch.randint(len(LETTERS), (PROMPT_TOKENS,), generator=random).tolist() for _ in range(2048)]
    prompts = ["".join(LETTERS[letter] for letter in row) for row in letters]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    Dataset.from_list(
        [
            {
                "data_source": "bench",
                "prompt": [{"role": "user", "content": prompt}],
                "ability": "none",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index, "split": "train"},
            }
            for index, prompt in enumerate(prompts)
        ]
    ).to_parquet(str(folder / "train.parquet"))

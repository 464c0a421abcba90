"""What recipes that bring their own model share: a small Qwen2, its supervised warm start, and the cache for both.

A recipe's files are made once and kept under VERL_LITE_CACHE (or ~/.cache/verl_lite), in a folder named after the
content of the code that decides them. It is there whole or not at all, whoever is interrupted, and however many runs
begin at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

    from verl_lite.config import PPOConfig

PAD, END, USER, ASSISTANT = SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|im_end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Two tokens around a question: with prompts of a dozen characters every marker counts."""

INITIALIZER_RANGE = 0.06
"""Of all weight matrices. A supervised start of 120 steps learns twice as much from it as from the usual 0.02."""

HEAD_DIMENSIONS = 32
"""The smallest that vLLM takes."""

ONE_GROUP = 10_000_000
"""wrap_policy.min_num_params above any model here: on one this small a collective for each layer costs more than it
saves."""


@dataclass(frozen=True)
class Made:
    """What a recipe makes once and keeps. name: of the recipe. build: writes it into a folder. files: the code that
    decides it; this file and `sizes` count too."""

    name: str
    build: Callable[[Path], None]
    files: Sequence[Path]
    sizes: str = ""

    @property
    def folder(self) -> Path:
        """Where this version is kept; what decides it is part of its name."""
        digest = hashlib.sha256(self.sizes.encode())
        for file in [*self.files, Path(__file__)]:
            digest.update(file.read_bytes())
        root = os.environ.get("VERL_LITE_CACHE") or "~/.cache/verl_lite"
        return Path(root).expanduser().absolute() / f"{self.name}-{digest.hexdigest()[:12]}"

    def prepare(self, config: Any) -> None:
        """Makes what the run needs and the cache does not hold; a model or data of the user's own are left alone."""
        wanted = [config.model.path or "", *config.data.train_files, *config.data.val_files]
        if any(Path(path).is_relative_to(self.folder) for path in wanted):
            self.make()

    def make(self) -> None:
        """Makes it if it is not there."""
        folder = self.folder
        if folder.is_dir():
            return
        started = time.perf_counter()
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f"{folder.name}.building-", dir=folder.parent))
        try:
            print(f"{self.name}: first run here, making the model", flush=True)
            self.build(building)
            building.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, and its folder stays
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
        print(f"{self.name}: ready after {time.perf_counter() - started:.0f} s, kept in {folder}", flush=True)


@dataclass(frozen=True)
class Start:
    """Where a recipe begins without a model and data of the user's own: data made by rule, and a random model after a
    supervised warm start on their demonstrations, because a model that is never right has nothing to be reinforced for.

    name: of the recipe. data: the module that makes the data, by `write_data(folder, seed)`: test.parquet,
    train.parquet and demonstrations.parquet. words: that are one token each. hidden: size of the model. steps: of the
    warm start, each of `rows` conversations of at most `max_length` tokens, at the learning rate `lr`.
    """

    name: str
    data: ModuleType
    hidden: int
    steps: int
    max_length: int
    lr: float
    words: tuple[str, ...] = ()
    rows: int = 64
    layers: int = 4
    seed: int = 1

    @property
    def made(self) -> Made:
        """This version of model, data and warm start."""
        sizes = [getattr(self, field.name) for field in fields(self) if field.name != "data"]
        code = [Path(self.data.__file__ or ""), Path(__file__).with_name("made_data.py")]
        return Made(self.name, self.build, code, str(sizes))

    @property
    def folder(self) -> Path:
        return self.made.folder

    def settings(self) -> dict[str, object]:
        """Options that name the model and the data, by dotted key."""
        return {
            "model.path": str(self.folder / "model"),
            "data.train_files": [str(self.folder / "data" / "train.parquet")],
            "data.val_files": [str(self.folder / "data" / "test.parquet")],
        }

    def prepare(self, config: PPOConfig) -> None:
        """See `Made.prepare`."""
        self.made.prepare(config)

    def build(self, folder: Path) -> None:
        """Writes model/ (after the warm start) and data/ into `folder`."""
        self.write_random_model(folder / "random")
        self.data.write_data(folder / "data", self.seed)
        shutil.move(folder / "data" / "demonstrations.parquet", folder)
        warm_start(folder, self.name, steps=self.steps, rows=self.rows, max_length=self.max_length, lr=self.lr)

    def write_random_model(self, folder: Path) -> None:
        """The model before its warm start, and its tokenizer."""
        write_qwen2(folder, byte_tokenizer(self.words), self.seed, layers=self.layers, hidden=self.hidden)


def byte_tokenizer(words: Sequence[str] = ()) -> Qwen2Tokenizer:
    """One token for each of `words`, one a byte for any other text: a byte-level BPE with an empty merge list, so any
    text goes in and comes out unchanged.

    transformers loads Qwen2Tokenizer for every Qwen2 model, whatever the folder says, and that one is a byte-level BPE.
    """
    from tokenizers import AddedToken
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[],
        unk_token=None,  # there is nothing unknown: all bytes are tokens
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    return tokenizer


def write_qwen2(
    folder: Path, tokenizer: Qwen2Tokenizer, seed: int, *, layers: int, hidden: int, widening: int = 4
) -> None:
    """Writes config, random fp32 weights, generation config and tokenizer into `folder`: an ordinary Hugging Face
    folder, so it loads through the code that loads any model. Same seed, same bytes."""
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    special: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=widening * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD_DIMENSIONS,
        num_key_value_heads=hidden // HEAD_DIMENSIONS,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=None,
        dtype="float32",
        architectures=["Qwen2ForCausalLM"],
        max_position_embeddings=512,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Qwen2ForCausalLM(config)
    disable_progress_bar()
    for part in (network, GenerationConfig(**special), tokenizer):
        part.save_pretrained(folder)


def warm_start(folder: Path, name: str, *, steps: int, rows: int, max_length: int, lr: float) -> None:
    """From folder/random and folder/demonstrations.parquet to folder/model, by `steps` optimizer steps of `rows`
    conversations of at most `max_length` tokens."""
    from trainer.supervised.sft import SFTJob
    from verl_lite.config import SFTConfig

    print(f"{name}: supervised warm start, so that rewards are not all zero at first", flush=True)
    settings = {
        "data.train_files": [str(folder / "demonstrations.parquet")],
        "data.train_batch_size": rows,
        "data.max_length": max_length,
        "model.path": str(folder / "random"),
        "optim.lr": lr,
        "trainer.total_training_steps": steps,
        "trainer.log_freq": 50,
    }
    train_small(SFTJob, SFTConfig, folder, f"{name}: warm start", settings)
    shutil.rmtree(folder / "random")


def train_small(job: Any, options: Any, folder: Path, what: str, settings: Mapping[str, object]) -> None:
    """Trains a model this small under supervision, inside this process, and moves it to folder/model.

    job, options: the kind of training and the class of its options. settings: by dotted key, beside what suits all.
    """
    from trainer.supervised.loop import train_within
    from verl_lite.config import load_schema

    usual = {
        "model.enable_gradient_checkpointing": False,
        "optim.betas": [0.9, 0.99],
        "optim.lr_warmup_steps": 10,
        "optim.lr_scheduler_type": "cosine",
        "optim.min_lr_ratio": 0.1,
        "fsdp_config.wrap_policy.min_num_params": ONE_GROUP,
        "fsdp_config.reshard_after_forward": False,
        "trainer.default_local_dir": str(folder / "training"),
        "trainer.logger": ["console", "jsonl"],
        "trainer.save_freq": 0,
        "trainer.device": "cpu",
    }
    config = load_schema([f"{key}={json.dumps(value)}" for key, value in {**usual, **settings}.items()], options).config
    trained, _ = train_within(job, config, lambda line: print(f"{what}, {line}", flush=True))
    shutil.move(trained, folder / "model")

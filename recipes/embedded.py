"""Shared code of recipes with their own model: builds a small Qwen2, its supervised warm start, and the cache for both.

The files of a recipe are built once and cached under VERL_LITE_CACHE (or ~/.cache/verl_lite), in a folder whose name
contains a hash of the code that builds them. The folder only appears when it is complete, even if a build is stopped or
several runs start at the same time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer

    from trainer.supervised.loop import Options, SupervisedJob
    from verl_lite.config import PPOConfig, SFTConfig
    from verl_lite.config.diffusion import RewardFlowConfig

PAD, END, USER, ASSISTANT = SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}<|im_end|>"
    "{% else %}<|user|>{{ message['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Puts only two tokens around a question, because the prompts have only about a dozen characters."""

INITIALIZER_RANGE = 0.06
"""Standard deviation of all weight matrices. A warm start of 120 steps learns twice as much with it as with 0.02."""

HEAD_DIMENSIONS = 32
"""Size of an attention head, the smallest that vLLM supports."""

ONE_GROUP = 10_000_000
"""wrap_policy.min_num_params above the size of every model here: in small models, one collective per layer costs more
time than sharding saves."""


class CachedFiles:
    """A folder in the cache that is built at its first use. The subclasses `Made` and `Start` define its content.

    Attributes:
        name: Name of the recipe, with which the name of the folder begins.
    """

    name: str

    def write_files(self, folder: Path) -> None:
        """Writes the files into `folder`."""
        raise NotImplementedError

    def origins(self) -> Iterator[bytes]:
        """Yields everything that determines the files, such as the code that writes them."""
        raise NotImplementedError

    @property
    def folder(self) -> Path:
        """The cache folder of this version; its name contains a hash of `origins` and of this file."""
        digest = hashlib.sha256()
        for content in self.origins():
            digest.update(content)
        # this file writes the models
        digest.update(Path(__file__).read_bytes())
        root = os.environ.get("VERL_LITE_CACHE") or "~/.cache/verl_lite"
        return Path(root).expanduser().absolute() / f"{self.name}-{digest.hexdigest()[:12]}"

    def prepare(self, config: PPOConfig | SFTConfig | RewardFlowConfig) -> None:
        """Builds the files if the run uses them. The user's own model and data are not changed."""
        folder = self.folder
        used_paths = [config.model.path or "", *config.data.train_files, *config.data.val_files]
        is_used = any(Path(path).is_relative_to(folder) for path in used_paths)
        if is_used:
            self.make()

    def make(self) -> None:
        """Builds the folder if it does not exist."""
        folder = self.folder
        if folder.is_dir():
            return
        started = time.perf_counter()
        folder.parent.mkdir(parents=True, exist_ok=True)
        # beside the final folder, so that the renaming is atomic
        building = Path(tempfile.mkdtemp(prefix=f"{folder.name}.building-", dir=folder.parent))
        try:
            print(f"{self.name}: first run here, making the files", flush=True)
            self.write_files(building)
            building.rename(folder)
        except OSError:
            # if the folder exists, another process was faster, and its files are used
            if not folder.is_dir():
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
        seconds = time.perf_counter() - started
        print(f"{self.name}: ready after {seconds:.0f} s, kept in {folder}", flush=True)


@dataclass(frozen=True)
class Made(CachedFiles):
    """Cached files that a function writes.

    Attributes:
        name: Name of the recipe.
        build: Writes the files into a folder.
        files: Source files that determine the result. A change of them, of this file or of `sizes` causes a new build.
        sizes: Constants that determine the result and are not in `files`.
    """

    name: str
    build: Callable[[Path], None]
    files: Sequence[Path]
    sizes: str = ""

    def write_files(self, folder: Path) -> None:
        self.build(folder)

    def origins(self) -> Iterator[bytes]:
        yield self.sizes.encode()
        for file in self.files:
            yield file.read_bytes()


@dataclass(frozen=True)
class Start(CachedFiles):
    """The default model and data of a recipe: generated data, and a random model after a supervised warm start.

    The warm start trains on demonstrations, because RL cannot improve a model that never gets a reward.

    Attributes:
        name: Name of the recipe.
        data: Module whose `write_data(folder, seed)` writes test.parquet, train.parquet and demonstrations.parquet.
        hidden: Width of the model.
        steps: Optimizer steps of the warm start.
        max_length: Maximum number of tokens of a demonstrated conversation.
        lr: Learning rate of the warm start.
        words: Words that are one token each.
        rows: Conversations per step of the warm start.
        layers: Number of layers of the model.
        seed: Seed of the data and of the random model.
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

    def origins(self) -> Iterator[bytes]:
        # every option counts, so that a new option cannot be forgotten here; the module counts by its source text
        names = [field.name for field in fields(self) if field.name != "data"]
        sizes = [getattr(self, name) for name in names]
        yield str(sizes).encode()

        data_file = Path(self.data.__file__ or "")
        yield data_file.read_bytes()
        yield Path(__file__).with_name("made_data.py").read_bytes()

    def settings(self) -> dict[str, object]:
        """Returns the options of the model and data paths by dotted key."""
        data_folder = self.folder / "data"
        return {
            "model.path": str(self.folder / "model"),
            "data.train_files": [str(data_folder / "train.parquet")],
            "data.val_files": [str(data_folder / "test.parquet")],
        }

    def write_files(self, folder: Path) -> None:
        """Writes model/ (after the warm start) and data/ into `folder`."""
        self.write_random_model(folder / "random")
        self.data.write_data(folder / "data", self.seed)
        # to the place where `warm_start` reads it
        shutil.move(folder / "data" / "demonstrations.parquet", folder)
        warm_start(
            folder,
            self.name,
            steps=self.steps,
            rows=self.rows,
            max_length=self.max_length,
            lr=self.lr,
        )

    def write_random_model(self, folder: Path) -> None:
        """Writes the model before its warm start, and its tokenizer, into `folder`."""
        tokenizer = byte_tokenizer(self.words)
        write_qwen2(folder, tokenizer, self.seed, layers=self.layers, hidden=self.hidden)


def byte_tokenizer(words: Sequence[str] = ()) -> Qwen2Tokenizer:
    """Builds a tokenizer with one token for each of `words` and one per byte of other text; any text round-trips.

    It is a byte-level BPE with an empty merge list, because transformers loads Qwen2Tokenizer, a byte-level BPE, for
    every Qwen2 model.
    """
    from tokenizers import AddedToken
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    tokens = [*SPECIAL, *sorted(ByteLevel.alphabet())]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        # not needed, because every byte is a token
        unk_token=None,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
    )
    # not special, because decoding leaves out special tokens
    added_tokens = [AddedToken(word, special=False, normalized=False) for word in words]
    tokenizer.add_tokens(added_tokens)
    return tokenizer


def write_qwen2(
    folder: Path, tokenizer: Qwen2Tokenizer, seed: int, *, layers: int, hidden: int, widening: int = 4
) -> None:
    """Writes a model folder in Hugging Face format: config, random fp32 weights, generation config and tokenizer.

    The same seed gives the same bytes.

    Args:
        folder: The model folder.
        tokenizer: Tokenizer of the model, which determines the size of the vocabulary.
        seed: Seed of the weights.
        layers: Number of layers.
        hidden: Width of the model, a multiple of HEAD_DIMENSIONS.
        widening: Width of the MLP as a multiple of `hidden`.
    """
    import torch
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    pad = tokenizer.pad_token_id
    eos = tokenizer.eos_token_id
    heads = hidden // HEAD_DIMENSIONS
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=widening * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        # chats begin with the token of a role
        bos_token_id=None,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
        architectures=["Qwen2ForCausalLM"],
        # longer than all conversations of the recipes
        max_position_embeddings=512,
    )
    # the caller's random state stays as it is
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = Qwen2ForCausalLM(config)
    disable_progress_bar()
    generation = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    for part in (network, generation, tokenizer):
        part.save_pretrained(folder)


def warm_start(folder: Path, name: str, *, steps: int, rows: int, max_length: int, lr: float) -> None:
    """Trains folder/random on folder/demonstrations.parquet and writes folder/model.

    Args:
        folder: Folder of the models and the demonstrations.
        name: Name of the recipe in the printed lines.
        steps: Number of optimizer steps.
        rows: Conversations per step.
        max_length: Maximum number of tokens of a conversation.
        lr: Learning rate.
    """
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
    # the cache keeps only what a run uses
    shutil.rmtree(folder / "random")


def train_small(
    job: type[SupervisedJob[Options]],
    options: type[Options],
    folder: Path,
    prefix: str,
    settings: Mapping[str, object],
) -> None:
    """Trains a small model with supervision in this process and moves it to folder/model.

    Args:
        job: Class of the training job.
        options: Class of its configuration.
        folder: Parent folder of the model.
        prefix: Prefix of the printed progress lines.
        settings: Options by dotted key, in addition to defaults for small models.
    """
    from trainer.supervised.loop import train_within
    from verl_lite.config import load_schema

    defaults = {
        # a small model fits into memory without recomputing activations, and with all parameters in place
        "model.enable_gradient_checkpointing": False,
        "optim.betas": [0.9, 0.99],
        "optim.lr_warmup_steps": 10,
        "optim.lr_scheduler_type": "cosine",
        "optim.min_lr_ratio": 0.1,
        "fsdp_config.wrap_policy.min_num_params": ONE_GROUP,
        "fsdp_config.reshard_after_forward": False,
        "trainer.default_local_dir": str(folder / "training"),
        "trainer.logger": ["console", "jsonl"],
        # a stopped warm start begins again, so that checkpoints would have no use
        "trainer.save_freq": 0,
        "trainer.device": "cpu",
    }
    values = defaults | dict(settings)
    words = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    config = load_schema(words, options).config

    def tell(line: str) -> None:
        print(f"{prefix}, {line}", flush=True)

    trained, _ = train_within(job, config, tell)
    shutil.move(trained, folder / "model")

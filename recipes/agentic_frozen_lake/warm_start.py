"""The warm start of the agentic recipes: a random model learns the notation, and a little of the game, from a clumsy
player.

`make_once` keeps the result under VERL_LITE_CACHE (or ~/.cache/verl_lite), in a folder named after the content of the
files that it is made from: a change there makes a new one, a change of other settings does not.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.quickstart.recipe import publish

if TYPE_CHECKING:
    from verl_lite.config import SFTConfig


def make_once(folder: Path, name: str, build: Callable[[Path], None]) -> None:
    """Calls `build` for a folder that is not there, so that it is there whole or not at all. name: of the recipe."""
    if folder.is_dir():
        return
    started = time.perf_counter()
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{folder.name}.building-", dir=folder.parent))
    try:
        print(f"{name}: first run here, making the model", flush=True)
        build(building)
        publish(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    print(f"{name}: ready after {time.perf_counter() - started:.0f} s, kept in {folder}", flush=True)


def imitate(folder: Path, name: str, *, steps: int, rows: int, max_length: int) -> None:
    """From folder/random and folder/demonstrations.parquet to folder/model: `steps` optimizer steps of `rows`
    conversations of at most `max_length` tokens."""
    from trainer.sft import run_sft

    print(f"{name}: learning the notation from a clumsy player", flush=True)
    config = settings(folder, steps=steps, rows=rows, max_length=max_length)
    result = run_sft(config, report=lambda line: print(f"{name}: warm start, {line}", flush=True))
    shutil.move(result.folder, folder / "model")
    shutil.rmtree(folder / "random")


def settings(folder: Path, *, steps: int, rows: int, max_length: int) -> SFTConfig:
    """Of the supervised training; it writes folder/sft."""
    from verl_lite.config import (
        FSDPConfig,
        ModelConfig,
        OptimConfig,
        SFTConfig,
        SFTDataConfig,
        SFTTrainerConfig,
        WrapPolicyConfig,
    )

    return SFTConfig(
        data=SFTDataConfig(
            train_files=[str(folder / "demonstrations.parquet")], train_batch_size=rows, max_length=max_length
        ),
        model=ModelConfig(path=str(folder / "random"), enable_gradient_checkpointing=False),
        optim=OptimConfig(lr=3e-3, betas=[0.9, 0.99], lr_warmup_steps=10, lr_scheduler_type="cosine", min_lr_ratio=0.1),
        fsdp_config=FSDPConfig(wrap_policy=WrapPolicyConfig(min_num_params=10_000_000), reshard_after_forward=False),
        trainer=SFTTrainerConfig(
            total_training_steps=steps, default_local_dir=str(folder / "sft"), log_freq=25, device="cpu"
        ),
    )


def folder_of(name: str, files: list[Path]) -> Path:
    """A folder of the cache, named after the content of these files and of this one."""
    digest = hashlib.sha256()
    for file in [*files, Path(__file__)]:
        digest.update(file.read_bytes())
    root = os.environ.get("VERL_LITE_CACHE") or "~/.cache/verl_lite"
    return Path(root).expanduser().absolute() / f"{name}-{digest.hexdigest()[:12]}"

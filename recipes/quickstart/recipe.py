"""The embedded default: what `python -m trainer.main_ppo` does when it is given neither model nor data.

A model of 1.2 million parameters learns to sort digits, to add and to subtract. `overrides` gives the
settings; `prepare` makes the model, the data and the supervised warm start where the cache does not hold them yet. They
are kept under VERL_LITE_CACHE (or ~/.cache/verl_lite), in a folder named after the content of this recipe: a changed
recipe makes a new one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl_lite.config import PPOConfig, SFTConfig

MODEL_SEED = DATA_SEED = 1
WARM_START_STEPS = 390
RL_STEPS = 190


def overrides() -> dict[str, object]:
    """The settings of the run, by dotted key; whatever the command line says wins over them."""
    folder = cache_folder()
    return {
        "model.path": str(folder / "model"),
        "model.enable_gradient_checkpointing": False,
        "data.train_files": [str(folder / "data" / "train.parquet")],
        "data.val_files": [str(folder / "data" / "test.parquet")],
        "data.train_batch_size": 128,
        "data.max_prompt_length": 16,
        "data.max_response_length": 10,
        "rollout.n": 8,
        "rollout.kv_cache_memory_mb": 128,
        "rollout.max_num_seqs": 512,
        "rollout.val_kwargs.do_sample": True,
        "rollout.val_kwargs.temperature": 1.0,
        "rollout.val_kwargs.greedy_too": True,
        "actor.ppo_mini_batch_size": 128,
        "actor.calculate_entropy": True,
        "actor.optim.lr": 3e-4,
        "actor.optim.lr_warmup_steps": 10,
        "actor.optim.betas": [0.9, 0.95],
        # one FSDP group: on a model this small a collective for each layer costs more than it saves
        "actor.fsdp_config.wrap_policy.min_num_params": 10_000_000,
        "actor.fsdp_config.reshard_after_forward": False,
        "trainer.total_epochs": 100,
        "trainer.total_training_steps": RL_STEPS,
        "trainer.val_before_train": True,
        "trainer.test_freq": 25,
    }


def prepare(config: PPOConfig) -> None:
    """Makes what the run needs and the cache does not hold; a model or data of the user's own are left alone."""
    folder = cache_folder()
    wanted = [config.model.path or "", *config.data.train_files, *config.data.val_files]
    if folder.is_dir() or not any(Path(path).is_relative_to(folder) for path in wanted):
        return
    started = time.perf_counter()
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f"{folder.name}.building-", dir=folder.parent))
    try:
        build(building)
        publish(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    print(f"quickstart: ready after {time.perf_counter() - started:.0f} s, kept in {folder}", flush=True)


def build(folder: Path) -> None:
    """Writes model/ (after the warm start) and data/ into `folder`."""
    from recipes.quickstart.data import write_data
    from recipes.quickstart.model import write_model
    from trainer.sft import run_sft

    print("quickstart: first run here, making model and data", flush=True)
    write_model(folder / "random", MODEL_SEED)
    write_data(folder / "data", DATA_SEED)
    print("quickstart: supervised warm start, so that rewards are not all zero at first", flush=True)
    result = run_sft(warm_start(folder), report=lambda line: print(f"quickstart: warm start, {line}", flush=True))
    shutil.move(result.folder, folder / "model")
    shutil.rmtree(folder / "random")


def warm_start(folder: Path) -> SFTConfig:
    """The settings of the warm start, from folder/random and folder/data to folder/sft."""
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
            train_files=[str(folder / "data" / "demonstrations.parquet")], train_batch_size=64, max_length=32
        ),
        model=ModelConfig(path=str(folder / "random"), enable_gradient_checkpointing=False),
        optim=OptimConfig(lr=2e-3, betas=[0.9, 0.99], lr_warmup_steps=10, lr_scheduler_type="cosine", min_lr_ratio=0.1),
        fsdp_config=FSDPConfig(wrap_policy=WrapPolicyConfig(min_num_params=10_000_000), reshard_after_forward=False),
        trainer=SFTTrainerConfig(
            total_training_steps=WARM_START_STEPS, default_local_dir=str(folder / "sft"), log_freq=50, device="cpu"
        ),
    )


@cache
def cache_folder() -> Path:
    """The folder of this version of the recipe."""
    digest = hashlib.sha256()
    for name in ("model.py", "data.py", "recipe.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    root = os.environ.get("VERL_LITE_CACHE") or "~/.cache/verl_lite"
    return Path(root).expanduser().absolute() / f"quickstart-{digest.hexdigest()[:12]}"


def publish(building: Path, folder: Path) -> None:
    """Gives a finished folder its name; if another process was faster, its folder stays."""
    try:
        building.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise

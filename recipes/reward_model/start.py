"""Where the recipe begins: pairs of answers, and a reward model trained from them on top of the quickstart's policy."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from recipes.quickstart import start as quickstart

if TYPE_CHECKING:
    from verl_lite.config import RewardTrainingConfig

NAME = "reward_model"
PAIRS_SEED = 1
EPOCHS, PAIRS_PER_STEP = 2, 64
LONGEST_TEXT = 32


def build(folder: Path, policy: Path) -> None:
    """Writes pairs.parquet, held_out_pairs.parquet and model/, the reward model, into `folder`.

    policy: the quickstart's folder.
    """
    from recipes.reward_model.pairs import write_pairs
    from trainer.supervised.reward_training import run_reward_training

    write_pairs(policy / "data", folder, PAIRS_SEED)
    print(f"{NAME}: training the reward model from pairs of answers", flush=True)
    config = training_settings(folder, policy)
    result = run_reward_training(config, report=lambda line: print(f"{NAME}: reward model, {line}", flush=True))
    shutil.move(result.folder, folder / "model")


def training_settings(folder: Path, policy: Path) -> RewardTrainingConfig:
    """Of the reward model's training, which writes folder/training."""
    from recipes.embedded import ONE_GROUP
    from verl_lite.config import (
        FSDPConfig,
        NetworkConfig,
        OptimConfig,
        PreferenceDataConfig,
        RewardLossConfig,
        RewardTrainerConfig,
        RewardTrainingConfig,
        WrapPolicyConfig,
    )

    return RewardTrainingConfig(
        data=PreferenceDataConfig(
            train_files=[str(folder / "pairs.parquet")],
            val_files=[str(folder / "held_out_pairs.parquet")],
            train_batch_size=PAIRS_PER_STEP,
            max_length=LONGEST_TEXT,
        ),
        model=NetworkConfig(path=str(policy / "model"), enable_gradient_checkpointing=False),
        optim=OptimConfig(lr=1e-3, betas=[0.9, 0.99], lr_warmup_steps=10, lr_scheduler_type="cosine", min_lr_ratio=0.1),
        fsdp_config=FSDPConfig(wrap_policy=WrapPolicyConfig(min_num_params=ONE_GROUP), reshard_after_forward=False),
        loss=RewardLossConfig(center_rewards_coefficient=0.01),
        trainer=RewardTrainerConfig(
            total_epochs=EPOCHS, default_local_dir=str(folder / "training"), log_freq=64, device="cpu"
        ),
    )


def made_from() -> list[Path]:
    """The files that decide what `build` writes."""
    return [*(Path(__file__).with_name(name) for name in ("start.py", "pairs.py")), *quickstart.made_from()]

"""A reward model is trained from pairs of answers, and a policy by it: what the model likes, and what is right.

The policy, the questions and the warm start are the quickstart's. The score is the reward model's alone; the true rule
is called too, with weight 0, so that `acc` says what the model does not know. `prepare` makes policy, pairs and reward
model where the cache does not hold them yet.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recipes import embedded
from recipes.quickstart import recipe as quickstart

if TYPE_CHECKING:
    from verl_lite.config import PPOConfig

NAME = "reward_model"
PAIRS_SEED = 1
EPOCHS, PAIRS_PER_STEP = 2, 64
LONGEST_TEXT = 32
RL_STEPS = 40
KL_COEFFICIENT = 1.0
"""Smaller ones let the policy find what the reward model likes and is not right: README.md has the curves."""


def overrides() -> dict[str, object]:
    """The settings of the run, by dotted key; whatever the command line says wins over them."""
    return quickstart.overrides() | {
        "data.train_batch_size": 64,
        "actor.ppo_mini_batch_size": 64,
        "actor.use_kl_loss": True,
        "actor.kl_loss_coef": KL_COEFFICIENT,
        "actor.kl_loss_type": "low_var_kl",
        "reward.functions.truth": {"weight": 0.0},
        "reward_model.enable": True,
        "reward_model.model.path": str(made().folder / "model"),
        "reward_model.fsdp_config.wrap_policy.min_num_params": embedded.ONE_GROUP,
        "trainer.total_training_steps": RL_STEPS,
        "trainer.test_freq": 10,
    }


def prepare(config: PPOConfig) -> None:
    """Makes what the run needs and the cache does not hold; models and data of the user's own are left alone."""
    quickstart.prepare(config)
    if Path(config.reward_model.model.path or "").is_relative_to(made().folder):
        quickstart.START.made.make()
        made().make()


def made() -> embedded.Made:
    """This version of pairs and reward model."""
    code = [Path(__file__).with_name("pairs.py"), Path(__file__).parents[1] / "made_data.py"]
    sizes = f"{quickstart.START.folder.name} {EPOCHS} {PAIRS_PER_STEP} {LONGEST_TEXT}"
    return embedded.Made(NAME, build, code, sizes)


def build(folder: Path) -> None:
    """Writes pairs.parquet, held_out_pairs.parquet and model/, the reward model, into `folder`."""
    from recipes.reward_model.pairs import write_pairs
    from trainer.supervised.reward_training import RewardTrainingJob
    from verl_lite.config import RewardTrainingConfig

    start = quickstart.START.folder
    write_pairs(start / "data", folder, PAIRS_SEED)
    print(f"{NAME}: training the reward model from pairs of answers", flush=True)
    settings = {
        "data.train_files": [str(folder / "pairs.parquet")],
        "data.val_files": [str(folder / "held_out_pairs.parquet")],
        "data.train_batch_size": PAIRS_PER_STEP,
        "data.max_length": LONGEST_TEXT,
        "model.path": str(start / "model"),
        "loss.center_rewards_coefficient": 0.01,
        "optim.lr": 1e-3,
        "trainer.total_epochs": EPOCHS,
        "trainer.log_freq": 64,
        "trainer.val_before_train": False,
    }
    embedded.train_small(RewardTrainingJob, RewardTrainingConfig, folder, f"{NAME}: reward model", settings)

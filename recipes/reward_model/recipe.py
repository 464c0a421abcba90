"""Trains a reward model from preference pairs, and a policy with its scores.

The policy, the questions and the warm start are those of the quickstart. The reward is the reward model's score. The
rule-based reward has weight 0 and only logs `acc`, which shows how far the two differ. `prepare` builds policy, pairs
and reward model unless they are in the cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recipes import embedded, made_data
from recipes.quickstart import recipe as quickstart

if TYPE_CHECKING:
    from verl_lite.config import PPOConfig

NAME = "reward_model"
PAIRS_SEED = 1
EPOCHS = 2
PAIRS_PER_STEP = 64
LONGEST_TEXT = 32
RL_STEPS = 40
KL_COEFFICIENT = 1.0
"""Weight of the KL; with smaller values the policy exploits errors of the reward model (README.md has the curves)."""


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return quickstart.overrides() | {
        "data.train_batch_size": 64,
        "actor.ppo_mini_batch_size": 64,
        "actor.use_kl_loss": True,
        "actor.kl_loss_coef": KL_COEFFICIENT,
        "actor.kl_loss_type": "low_var_kl",
        # only logs `acc`
        "reward.functions.truth": {"weight": 0.0},
        "reward_model.enable": True,
        "reward_model.model.path": str(made().folder / "model"),
        "reward_model.fsdp_config.wrap_policy.min_num_params": embedded.ONE_GROUP,
        "trainer.total_training_steps": RL_STEPS,
        "trainer.test_freq": 10,
    }


def prepare(config: PPOConfig) -> None:
    """Builds the missing files of the run in the cache. The user's own models and data are not changed."""
    quickstart.prepare(config)
    path = Path(config.reward_model.model.path or "")
    if path.is_relative_to(made().folder):
        # also if the policy is the user's: the reward model starts from the quickstart's model
        quickstart.START.make()
        made().make()


def made() -> embedded.Made:
    """Returns the cached files of this version of pairs and reward model."""
    code = [Path(__file__).with_name("pairs.py"), Path(made_data.__file__)]
    # the name of the folder stands for the quickstart's model and data, of which the reward model is made
    sizes = f"{quickstart.START.folder.name} {EPOCHS} {PAIRS_PER_STEP} {LONGEST_TEXT}"
    return embedded.Made(NAME, build, code, sizes)


def build(folder: Path) -> None:
    """Writes pairs.parquet, held_out_pairs.parquet and the reward model as model/ into `folder`."""
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
        # keeps the mean score near 0, which the loss of a pair leaves open
        "loss.center_rewards_coefficient": 0.01,
        "optim.lr": 1e-3,
        "trainer.total_epochs": EPOCHS,
        "trainer.log_freq": 64,
        "trainer.val_before_train": False,
    }
    embedded.train_small(RewardTrainingJob, RewardTrainingConfig, folder, f"{NAME}: reward model", settings)

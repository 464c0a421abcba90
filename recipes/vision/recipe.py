"""A small Qwen2.5-VL learns to name the color of drawn shapes, to count them, and beside that to sort digits.

`overrides` returns the settings; `prepare` draws the pictures and builds the model with its warm start unless they are
in the cache. The vision tower is frozen during RL, as it is by default.
"""

from pathlib import Path

from recipes.embedded import ONE_GROUP, Made
from recipes.vision import data

SEED = 1
RL_STEPS = 100


def build(folder: Path) -> None:
    """Writes model/ and data/ into `folder`."""
    from recipes.vision.model import warm_start, write_random_model

    data.write_data(folder / "data", SEED)
    write_random_model(folder / "model", SEED)
    warm_start(folder / "model", folder / "data" / "demonstrations.parquet", SEED)


_HERE = Path(__file__).parent
MADE = Made("vision", build, [_HERE / "data.py", _HERE / "model.py", _HERE.with_name("made_data.py")])


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    folder = MADE.folder
    return {
        "model.path": str(folder / "model"),
        # a small model fits into memory without recomputing activations
        "model.enable_gradient_checkpointing": False,
        "data.train_files": [str(folder / "data" / "train.parquet")],
        "data.val_files": [str(folder / "data" / "test.parquet")],
        "data.train_batch_size": 96,
        "data.max_prompt_length": 40,
        "data.max_response_length": 8,
        "rollout.n": 8,
        "rollout.kv_cache_memory_mb": 256,
        "rollout.max_num_seqs": 384,
        # as in training, so that the accuracy is that of the policy that learns
        "rollout.val_kwargs.do_sample": True,
        "rollout.val_kwargs.temperature": 1.0,
        "rollout.val_kwargs.greedy_too": True,
        # the whole batch: one optimizer step, in which every ratio is 1
        "actor.ppo_mini_batch_size": 96,
        "actor.calculate_entropy": True,
        "actor.optim.lr": 3e-4,
        "actor.optim.lr_warmup_steps": 10,
        "actor.optim.betas": [0.9, 0.95],
        "actor.fsdp_config.wrap_policy.min_num_params": ONE_GROUP,
        "actor.fsdp_config.reshard_after_forward": False,
        # more than enough, so that the number of steps ends the run
        "trainer.total_epochs": 100,
        "trainer.total_training_steps": RL_STEPS,
        "trainer.val_before_train": True,
        "trainer.test_freq": 20,
    }


prepare = MADE.prepare

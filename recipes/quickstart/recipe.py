"""The quickstart, which `python -m trainer.main_ppo` runs without options for a model and data.

A model of 1.1 million parameters learns to sort digits, to add and to spell backward. `overrides` returns the settings;
`prepare` builds the data and the model with its supervised warm start unless they are in the cache.
"""

from recipes.embedded import ONE_GROUP, Start
from recipes.quickstart import data

START = Start(
    "quickstart",
    data,
    hidden=128,
    steps=390,
    max_length=32,
    lr=2e-3,
)
RL_STEPS = 190


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return START.settings() | {
        # a small model fits into memory without recomputing activations
        "model.enable_gradient_checkpointing": False,
        "data.train_batch_size": 128,
        # the longest question, `reverse crane`, has 15 tokens
        "data.max_prompt_length": 16,
        "data.max_response_length": 10,
        "rollout.n": 8,
        "rollout.kv_cache_memory_mb": 128,
        "rollout.max_num_seqs": 512,
        # as in training, so that the accuracy is that of the policy that learns
        "rollout.val_kwargs.do_sample": True,
        "rollout.val_kwargs.temperature": 1.0,
        "rollout.val_kwargs.greedy_too": True,
        # the whole batch: one optimizer step, in which every ratio is 1
        "actor.ppo_mini_batch_size": 128,
        "actor.calculate_entropy": True,
        # with 64 questions instead of 128, 4e-4 made the model worse
        "actor.optim.lr": 3e-4,
        "actor.optim.lr_warmup_steps": 10,
        "actor.optim.betas": [0.9, 0.95],
        "actor.fsdp_config.wrap_policy.min_num_params": ONE_GROUP,
        "actor.fsdp_config.reshard_after_forward": False,
        # more than enough, so that the number of steps ends the run
        "trainer.total_epochs": 100,
        "trainer.total_training_steps": RL_STEPS,
        "trainer.val_before_train": True,
        "trainer.test_freq": 25,
    }


prepare = START.prepare

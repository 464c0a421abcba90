"""PPO with a critic (GAE) on the quickstart's task, with its model, data and warm start.

There is one response per question: the critic takes the role of GRPO's comparison within a group. The number of samples
per step equals that of the quickstart, so that the runs are comparable.
"""

from recipes.embedded import ONE_GROUP
from recipes.quickstart import recipe as quickstart

RL_STEPS = 130


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return quickstart.overrides() | {
        "algorithm.adv_estimator": "gae",
        # no discount: responses have at most ten tokens, and the score is at the end
        "algorithm.gamma": 1.0,
        "algorithm.lam": 1.0,
        # as many samples per step as the quickstart, which has 8 responses to each of 128 questions
        "data.train_batch_size": 1024,
        "rollout.n": 1,
        # two optimizer steps, because with a single one PPO's ratio is always 1
        "actor.ppo_mini_batch_size": 512,
        "actor.optim.lr": 2e-4,
        # four optimizer steps
        "critic.ppo_mini_batch_size": 256,
        "critic.optim.lr": 1e-3,
        "critic.optim.betas": [0.9, 0.95],
        "critic.model.enable_gradient_checkpointing": False,
        "critic.fsdp_config.wrap_policy.min_num_params": ONE_GROUP,
        "critic.fsdp_config.reshard_after_forward": False,
        "trainer.total_training_steps": RL_STEPS,
    }


prepare = quickstart.prepare

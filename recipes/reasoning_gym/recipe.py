"""Three tasks of reasoning-gym at three levels each, mixed by weight, with a curriculum that opens levels as the model
learns.

`curriculum.py` is the sampler. With `mixed.yaml` there is no curriculum, and all levels are drawn from the first step.
"""

from recipes.embedded import Start
from recipes.quickstart import recipe as quickstart
from recipes.reasoning_gym import data

START = Start(
    "reasoning_gym",
    data,
    hidden=64,
    steps=450,
    max_length=96,
    lr=3e-3,
    words=data.TOKENS,
)
RL_STEPS = 100


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return (
        quickstart.overrides()
        | START.settings()
        | {
            # verl's syntax for a class of an installed module
            "data.sampler.class_path": "pkg://recipes.reasoning_gym.curriculum",
            "data.sampler.class_name": "Curriculum",
            "data.train_batch_size": 64,
            "data.max_prompt_length": 80,
            "data.max_response_length": 12,
            "actor.ppo_mini_batch_size": 64,
            "actor.optim.lr_warmup_steps": 5,
            "trainer.total_training_steps": RL_STEPS,
            "trainer.test_freq": 20,
        }
    )


prepare = START.prepare

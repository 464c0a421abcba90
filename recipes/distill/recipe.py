"""A student of 1.1 million parameters, the quickstart's model, learns from a teacher of 3.2 million on its own samples.

`overrides` returns the settings, which train with the teacher alone;
distillation.distillation_loss.use_task_rewards=true adds the rewards. `prepare` builds student, data and teacher unless
they are in the cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recipes.distill import data
from recipes.embedded import ONE_GROUP, Start
from recipes.quickstart import recipe as quickstart

if TYPE_CHECKING:
    from verl_lite.config import PPOConfig

TEACHER = Start(
    "distill",
    data,
    hidden=224,
    steps=450,
    max_length=32,
    lr=1e-3,
)
STEPS = 40
PROMPTS = 64
ANSWERS = 4


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return quickstart.overrides() | {
        "data.train_batch_size": PROMPTS,
        "rollout.n": ANSWERS,
        "actor.ppo_mini_batch_size": PROMPTS,
        # a teacher is sharded with the options of the reference model
        "ref.fsdp_config.wrap_policy.min_num_params": ONE_GROUP,
        "distillation.teachers.big.path": str(TEACHER.folder / "model"),
        "distillation.distillation_loss.loss_mode": "reverse_kl_topk",
        "distillation.distillation_loss.topk": 16,
        # with the teacher alone; True adds the rewards
        "distillation.distillation_loss.use_task_rewards": False,
        "trainer.total_training_steps": STEPS,
        "trainer.test_freq": 10,
    }


def prepare(config: PPOConfig) -> None:
    """Builds the missing files of the run in the cache. The user's own models and data are not changed."""
    quickstart.prepare(config)
    for teacher in config.distillation.named_teachers():
        path = Path(str(teacher.path))
        if path.is_relative_to(TEACHER.folder):
            TEACHER.make()

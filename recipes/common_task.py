"""The task on which algorithms are compared: the quickstart's model, data and warm start, with one budget for all.

The recipe of an algorithm is `settings()` plus the options of the algorithm, so that runs differ only in the algorithm;
`comparison.yaml` runs all of them.
"""

from recipes.quickstart import recipe as quickstart

SAMPLES = 512
"""Responses sampled per step, including the greedy responses of a baseline."""

MINI_BATCHES = 4
"""Optimizer steps per step: with only one, every ratio is 1 and no clipping occurs."""


def settings(answers: int = 8, baselines: int = 0) -> dict[str, object]:
    """Returns the settings of all algorithms by dotted key: those of the quickstart, with the common budget.

    Args:
        answers: Sampled responses per question.
        baselines: Additional greedy responses per question, which count like sampled ones.
    """
    questions = SAMPLES // (answers + baselines)
    return quickstart.overrides() | {
        "data.train_batch_size": questions,
        "rollout.n": answers,
        "actor.ppo_mini_batch_size": questions // MINI_BATCHES,
        # chosen with GRPO: 1e-4 learns more slowly, and 4e-4 loses greedy accuracy from the start
        "actor.optim.lr": 2e-4,
        "actor.optim.lr_warmup_steps": 5,
        "trainer.total_training_steps": 40,
        "trainer.test_freq": 10,
    }


prepare = quickstart.prepare

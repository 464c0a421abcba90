"""The task on which algorithms are compared: the quickstart's model, data and warm start, with one budget for all.

Recipes of single algorithms are `settings()` and what makes the algorithm. What they share is said here once, so that
nothing but the algorithm differs; `comparison.yaml` runs them all.
"""

from recipes.quickstart import recipe as quickstart

SAMPLES = 512
"""Answers that a step samples, greedy ones of a baseline included."""

MINI_BATCHES = 4
"""Optimizer steps on the samples of a step: with a single one every ratio is 1, and no clip takes part."""


def settings(answers: int = 8, baselines: int = 0) -> dict[str, object]:
    """Settings that all algorithms share, by dotted key: what the quickstart has, and one budget, which makes runs
    comparable.

    answers: to each question; baselines: greedy answers beside them.
    """
    questions = SAMPLES // (answers + baselines)
    return quickstart.overrides() | {
        "data.train_batch_size": questions,
        "rollout.n": answers,
        "actor.ppo_mini_batch_size": questions // MINI_BATCHES,
        "actor.optim.lr": 2e-4,
        "actor.optim.lr_warmup_steps": 5,
        "trainer.total_training_steps": 40,
        "trainer.test_freq": 10,
    }


prepare = quickstart.prepare

"""GRPO (2402.03300): the baseline of an answer is the mean score of the answers to the same question."""

from recipes import common_task


def overrides() -> dict[str, object]:
    """The settings of the run, by dotted key; whatever the command line says wins over them."""
    return common_task.settings() | {
        "algorithm.adv_estimator": "grpo",
        "actor.loss_agg_mode": "seq-mean-token-mean",  # as in the paper: each answer weighs the same
    }


prepare = common_task.prepare

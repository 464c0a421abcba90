"""GRPO (2402.03300): the baseline of a response is the mean score of the responses to the same question."""

from recipes import common_task


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return common_task.settings() | {
        "algorithm.adv_estimator": "grpo",
        # as in the paper: equal weight of all responses
        "actor.loss_agg_mode": "seq-mean-token-mean",
    }


prepare = common_task.prepare

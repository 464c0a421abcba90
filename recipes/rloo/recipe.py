"""RLOO (2402.14740): the baseline of a response is the mean score of the others, so the gradient is unbiased."""

from recipes import common_task


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return common_task.settings() | {
        "algorithm.adv_estimator": "rloo",
        "actor.loss_agg_mode": "seq-mean-token-sum",  # the paper's action is the response; its log-prob is a sum
    }


prepare = common_task.prepare

"""RLOO (2402.14740): the baseline of a response is the mean score of the others, so the gradient is unbiased."""

from recipes import common_task


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return common_task.settings() | {
        "algorithm.adv_estimator": "rloo",
        # the paper's action is the whole response, whose log-prob is a sum over its tokens
        "actor.loss_agg_mode": "seq-mean-token-sum",
    }


prepare = common_task.prepare

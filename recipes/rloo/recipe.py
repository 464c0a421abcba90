"""RLOO (2402.14740): the baseline of an answer is the mean score of the others, so the gradient has no bias."""

from recipes import common_task


def overrides() -> dict[str, object]:
    """The settings of the run, by dotted key; whatever the command line says wins over them."""
    return common_task.settings() | {
        "algorithm.adv_estimator": "rloo",
        "actor.loss_agg_mode": "seq-mean-token-sum",  # the paper's action is the whole answer: its log-prob is a sum
    }


prepare = common_task.prepare

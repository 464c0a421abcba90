"""ReMax (2310.10505): one sampled answer to a question, and the score of a greedy one as its baseline."""

from recipes import common_task


def overrides() -> dict[str, object]:
    """The settings of the run, by dotted key; whatever the command line says wins over them."""
    return common_task.settings(answers=1, baselines=1) | {
        "algorithm.adv_estimator": "remax",
        "actor.loss_agg_mode": "seq-mean-token-sum",  # the paper's action is the whole answer
    }


prepare = common_task.prepare

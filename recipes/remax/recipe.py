"""ReMax (2310.10505): one sampled response per question, whose baseline is the score of a greedy response."""

from recipes import common_task


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return common_task.settings(answers=1, baselines=1) | {
        "algorithm.adv_estimator": "remax",
        "actor.loss_agg_mode": "seq-mean-token-sum",  # the paper's action is the whole response
    }


prepare = common_task.prepare

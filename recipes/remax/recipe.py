"""ReMax (2310.10505): one sampled response per question, whose baseline is the score of a greedy response."""

from recipes import common_task


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    # a step generates 512 responses and trains on 256 of them; the others are the greedy baselines
    return common_task.settings(answers=1, baselines=1) | {
        "algorithm.adv_estimator": "remax",
        # the paper's action is the whole response, whose log-prob is a sum over its tokens
        "actor.loss_agg_mode": "seq-mean-token-sum",
    }


prepare = common_task.prepare

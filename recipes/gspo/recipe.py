"""GSPO (2507.18071): ratio and clipping per response, because the score also belongs to the whole response."""

from recipes import common_task


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return common_task.settings() | {
        "algorithm.adv_estimator": "grpo",
        "actor.policy_loss.loss_mode": "gspo",
        "actor.loss_agg_mode": "seq-mean-token-mean",
        # the paper's range, for responses of thousands of tokens; wide.yaml has one for this task
        "actor.clip_ratio_low": 3e-4,
        "actor.clip_ratio_high": 4e-4,
    }


prepare = common_task.prepare

"""Dr.GRPO (2503.20783): GRPO without division by the group's standard deviation and by the response length."""

from recipes import common_task


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return common_task.settings() | {
        "algorithm.adv_estimator": "grpo",
        # a division would give more weight to questions that are nearly always right or wrong
        "algorithm.norm_adv_by_std_in_grpo": False,
        # divides all responses by the maximum length, and not by their own
        "actor.loss_agg_mode": "seq-mean-token-sum-norm",
    }


prepare = common_task.prepare

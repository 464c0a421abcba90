"""Dr.GRPO (2503.20783): GRPO without its two divisions, by the group's deviation and by an answer's length."""

from recipes import common_task


def overrides() -> dict[str, object]:
    """The settings of the run, by dotted key; whatever the command line says wins over them."""
    return common_task.settings() | {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        "actor.loss_agg_mode": "seq-mean-token-sum-norm",  # divided by the response width, the same for all answers
    }


prepare = common_task.prepare

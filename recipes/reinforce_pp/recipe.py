"""REINFORCE++ (2501.03262): one answer to a question, and the whole batch instead of a group as its baseline."""

from recipes import common_task


def overrides() -> dict[str, object]:
    """The settings of the run, by dotted key; whatever the command line says wins over them."""
    return common_task.settings(answers=1) | {
        "algorithm.adv_estimator": "reinforce_plus_plus",
        "actor.loss_agg_mode": "token-mean",
    }


prepare = common_task.prepare

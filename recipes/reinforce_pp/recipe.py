"""REINFORCE++ (2501.03262): one response per question, with a baseline from the whole batch instead of a group."""

from recipes import common_task


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    # one answer each, because the normalisation is meant for a batch of different questions
    return common_task.settings(answers=1) | {
        "algorithm.adv_estimator": "reinforce_plus_plus",
        # as in the authors' implementation
        "actor.loss_agg_mode": "token-mean",
    }


prepare = common_task.prepare

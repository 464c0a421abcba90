"""DAPO (2503.14476): GRPO with DAPO's four changes, on the task on which all algorithms are compared.

The changes are clip-higher, a token-mean loss, a penalty of long responses, and dynamic sampling, which replaces groups
whose responses are all right or all wrong by groups of further questions. There is no KL to a reference.
"""

from recipes import common_task


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return common_task.settings() | {
        "algorithm.adv_estimator": "grpo",
        # the higher upper bound lets the probability of unlikely tokens grow faster
        "actor.clip_ratio_low": 0.2,
        "actor.clip_ratio_high": 0.28,
        # as in the paper's runs, so that the dual clip rarely applies
        "actor.clip_ratio_c": 10.0,
        # equal weight of all tokens, so that long responses have more
        "actor.loss_agg_mode": "token-mean",
        # dynamic sampling: groups that are all right or all wrong are replaced
        "algorithm.filter_groups.enable": True,
        # correct responses have four to seven tokens of at most ten; each of the last three tokens costs 1/3
        "reward.overlong_buffer.enable": True,
        "reward.overlong_buffer.len": 3,
        "reward.overlong_buffer.penalty_factor": 1.0,
        "reward.overlong_buffer.log": True,
    }


prepare = common_task.prepare

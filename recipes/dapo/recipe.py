"""DAPO (2503.14476): GRPO with its four changes, on the task that all algorithms are compared on.

Clip-higher, a mean over tokens, a penalty of long answers, and dynamic sampling: groups of answers that are all right
or all wrong are replaced by those to further questions. No KL to a reference.
"""

from recipes import common_task


def overrides() -> dict[str, object]:
    """The settings of the run, by dotted key; whatever the command line says wins over them."""
    return common_task.settings() | {
        "algorithm.adv_estimator": "grpo",
        "actor.clip_ratio_low": 0.2,
        "actor.clip_ratio_high": 0.28,
        "actor.clip_ratio_c": 10.0,  # as in the paper's runs: the dual clip hardly takes part
        "actor.loss_agg_mode": "token-mean",
        "algorithm.filter_groups.enable": True,
        # right answers have four to seven tokens, of ten; each of the last three costs a third
        "reward.overlong_buffer.enable": True,
        "reward.overlong_buffer.len": 3,
        "reward.overlong_buffer.penalty_factor": 1.0,
        "reward.overlong_buffer.log": True,
    }


prepare = common_task.prepare

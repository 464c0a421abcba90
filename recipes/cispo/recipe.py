"""CISPO (2506.13585): clips the ratio as a weight of the gradient, so that no token loses its gradient."""

from recipes import common_task


def overrides() -> dict[str, object]:
    """Returns the settings of the run by dotted key; options on the command line override them."""
    return common_task.settings() | {
        "algorithm.adv_estimator": "grpo",
        # PPO's clip removes the gradient of a token, this one bounds its weight
        "actor.policy_loss.loss_mode": "cispo",
        "actor.loss_agg_mode": "token-mean",
        # no lower bound, as in the paper
        "actor.clip_ratio_low": 1.0,
        # weights are at most 1.28; the paper does not report its bound
        "actor.clip_ratio_high": 0.28,
    }


prepare = common_task.prepare

"""Leaks on purpose, to see that the soak finds them; a soak without `--leak` does not import this."""

from __future__ import annotations

import functools
from typing import Any

from verl_lite.core_algos import get_adv_estimator_fn, get_policy_loss_fn

_kept: list[Any] = []
REWARD = """
import os
kept = []

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    kept.append(os.urandom(64 << 10))
    return sum(map(ord, solution_str)) % 7 / 7
"""
OPTIONS = {
    "driver": [f"algorithm.adv_estimator={__name__}:leaking_estimator"],
    "rank": [f"actor.policy_loss.loss_mode={__name__}:leaking_loss"],
    "reward": [],
}
"""By the process that leaks: a MiB at each call of the driver's estimator or a rank's loss, 64 KiB for each sample."""


@functools.wraps(get_adv_estimator_fn("grpo"))
def leaking_estimator(*args: Any, **kwargs: Any) -> Any:
    """GRPO that keeps something in the driver at each step."""
    _kept.append(bytearray(b"x") * (1 << 20))
    return get_adv_estimator_fn("grpo")(*args, **kwargs)


@functools.wraps(get_policy_loss_fn("vanilla"))
def leaking_loss(*args: Any, **kwargs: Any) -> Any:
    """The plain loss that keeps something in the rank at each call."""
    _kept.append(bytearray(b"x") * (1 << 20))
    return get_policy_loss_fn("vanilla")(*args, **kwargs)

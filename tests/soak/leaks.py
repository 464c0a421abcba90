"""Leaks on purpose, to see that the soak finds them: an estimator that leaks in the driver, a loss that leaks in every
rank, a reward that leaks in its process. How much, the environment says; a soak without `--leak` does not import this.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from verl_lite.core_algos import get_adv_estimator_fn, get_policy_loss_fn

VARIABLE = "VERL_LITE_SOAK_LEAK"
_kept: list[Any] = []

REWARD = f"""
import os
kept = []

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    kept.append(bytearray(os.urandom(1)) * int(os.environ["{VARIABLE}"]))
    return sum(map(ord, solution_str)) % 7 / 7
"""
"""A reward function that keeps some bytes of each sample."""


def keep() -> None:
    """Keeps as many bytes as the environment says, or, where it says 0, an open file."""
    size = int(os.environ[VARIABLE])
    _kept.append(bytearray(b"x") * size if size else open(os.devnull))


@functools.wraps(get_adv_estimator_fn("grpo"))
def leaking_estimator(*args: Any, **kwargs: Any) -> Any:
    """GRPO that keeps something in the driver at each step."""
    keep()
    return get_adv_estimator_fn("grpo")(*args, **kwargs)


@functools.wraps(get_policy_loss_fn("vanilla"))
def leaking_loss(*args: Any, **kwargs: Any) -> Any:
    """The plain loss that keeps something in the rank at each call."""
    keep()
    return get_policy_loss_fn("vanilla")(*args, **kwargs)

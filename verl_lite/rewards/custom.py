"""The user's own reward function, from a file or an installed module."""

from __future__ import annotations

import inspect
from types import ModuleType

from verl_lite.errors import UserError
from verl_lite.rewards.dispatch import RewardFunction
from verl_lite.user_code import load_module


def load_reward_function(path: str, name: str, option: str = "reward.custom_reward_function") -> RewardFunction:
    """The function `name` of `path`.

    path: a Python file, or pkg://package.module. The code runs once, here; what it raises is raised.
    option: the group of keys that names it. Raises UserError if there is no such file, or no such function (with those
    found).
    """
    return function_of(load_module(path, f"{option}.path"), path, name, option)


def function_of(module: ModuleType, path: str, name: str, option: str) -> RewardFunction:
    """The function `name` of a module that came from `path`. Raises UserError if there is none, with those found."""
    function = getattr(module, name, None)
    if not callable(function):
        found = sorted(key for key, value in vars(module).items() if inspect.isroutine(value) and key[0] != "_")
        raise UserError(
            f"{option}.name={name!r}: {path} defines no such function; "
            f"functions found: {', '.join(found) or 'none'}. Set {option}.name to one of them."
        )
    return function

"""Checks of the arguments that the configuration gives to reward functions (`kwargs`)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from types import NoneType, UnionType
from typing import get_args, get_origin, get_type_hints

from verl_lite.json_types import KeywordArguments
from verl_lite.registry import accepts, did_you_mean, is_own
from verl_lite.rewards.registry import RewardFunction

_FROM_THE_SAMPLE = ("data_source", "solution_str", "extra_info", "prompt", "images")
"""Parameters that a message does not suggest for kwargs. A constant ground truth can be useful."""
_TYPE_WORDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Sequence: "a list",
    dict: "a mapping",
    NoneType: "null",
}
"""Types of the parameters of registered rewards, in the words of a message."""


def kwargs_problems(function: RewardFunction, kwargs: KeywordArguments, option: str) -> Iterator[str]:
    """Yields a message for each argument that the function does not accept, or that has another type.

    Args:
        function: the reward.
        kwargs: the arguments.
        option: key of the arguments in the configuration.
    """
    for name, value in kwargs.items():
        if accepts(function, name):
            yield from _type_problems(function, name, value, option)
            continue
        parameters = list(inspect.signature(function).parameters)
        settable = [parameter for parameter in parameters if parameter not in _FROM_THE_SAMPLE]
        hint = did_you_mean(name, parameters)
        yield f"{option}.{name}: the function has no such parameter{hint}. Its parameters: {', '.join(settable)}"


def _type_problems(function: RewardFunction, name: str, value: object, option: str) -> Iterator[str]:
    """Yields a message if an argument of a reward of this project has another type than its parameter.

    Functions of users convert their arguments themselves, whatever their annotations are.
    """
    if not is_own(function):
        return
    annotation = get_type_hints(function).get(name, object)
    # a parameter has a plain type, or `type | None`
    members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    types = [get_origin(member) or member for member in members]
    # a type without words, such as that of the ground truth, accepts any value
    if not all(member in _TYPE_WORDS for member in types):
        return
    if not any(_has_type(value, member) for member in types):
        expected = " or ".join(_TYPE_WORDS[member] for member in types)
        yield f"{option}.{name}={value!r}: expected {expected}"


def _has_type(value: object, expected: type) -> bool:
    """Returns True if a value of the configuration can be passed to a parameter of a type in `_TYPE_WORDS`."""
    # true is an int of Python, and a text a sequence of letters
    if isinstance(value, bool):
        return expected is bool
    if isinstance(value, str):
        return expected is str
    if expected is float:
        return isinstance(value, int | float)
    return isinstance(value, expected)

"""Rubrics: a list of small functions with weights, in the shape that the verifiers library has them, as one reward.

In a file of your own, `compute_score = Rubric(funcs=[right, polite], weights=[1.0, 0.1])` is a reward function like any
other; of a verifiers rubric, `Rubric(rubric.funcs, rubric.weights)`. Each function names what it wants to see:

    prompt       the chat messages that were answered
    completion   the answer as chat messages: [{"role": "assistant", "content": ...}]
    answer       the ground truth
    info         the row's extra_info, a dict
    task         the row's data_source
    state        a dict with all of these, new for each sample; functions run in order and may leave things in it
    parser       what was given to the rubric
    solution_str, ground_truth, extra_info, data_source    the names of other rewards

Functions with **kwargs get all of them. Other than in verifiers, a function that raises fails the sample (there it
counts as 0), and functions over a group of answers (prompts, completions ...) are refused, because samples are scored
as they finish.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from verl_lite.errors import UserError
from verl_lite.rewards.registry import awaits
from verl_lite.rewards.scoring import read_score

_OF_A_GROUP = ("prompts", "completions", "answers", "states", "infos", "tasks")
_NAMES = "prompt completion answer info task state parser solution_str ground_truth extra_info data_source".split()


class Rubric:
    """Weighted functions as one reward function.

    funcs: plain or async, each returns a finite number or a bool. weights: one for each, 1 without; 0 = only logged.
    parser: handed to functions that name it. is_async: whether one of them is.
    Raises UserError for wrong weights, two functions of one name, or a function that asks for what there is not.
    """

    def __init__(
        self, funcs: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None, parser: Any = None
    ) -> None:
        if not funcs:
            raise UserError("Rubric(funcs=[]): at least one function is expected")
        self.funcs, self.parser = tuple(funcs), parser
        self.weights = (1.0,) * len(funcs) if weights is None else tuple(float(weight) for weight in weights)
        if len(self.weights) != len(self.funcs) or not all(math.isfinite(weight) for weight in self.weights):
            raise UserError(
                f"Rubric(weights={list(weights or [])}): a finite number for each of the {len(funcs)} functions is "
                "expected"
            )
        self._names = [_name_of(function) for function in self.funcs]
        twice = {name for name in self._names if self._names.count(name) > 1}
        if twice:
            raise UserError(
                f"Rubric: several functions are called {min(twice)}; metrics have their names, so rename one"
            )
        self._wanted = [_wanted(function, name) for function, name in zip(self.funcs, self._names, strict=True)]
        self.is_async = any(map(awaits, self.funcs))

    def __call__(
        self,
        data_source: str,
        solution_str: str,
        ground_truth: Any,
        extra_info: dict[str, Any] | None = None,
        prompt: list[dict[str, str]] | None = None,
    ) -> dict[str, float] | Awaitable[dict[str, float]]:
        """score: the weighted sum; the value of each function under its name; acc: the value of the first one. With an
        async function among them an awaitable of that."""
        known: dict[str, Any] = {
            "prompt": prompt,
            "completion": [{"role": "assistant", "content": solution_str}],
            "answer": ground_truth,
            "info": extra_info or {},
            "task": data_source,
        }
        known["state"] = dict(known)
        known |= {"parser": self.parser, "solution_str": solution_str, "ground_truth": ground_truth}
        known |= {"extra_info": extra_info, "data_source": data_source}
        return self._await_all(known) if self.is_async else self._sum([self._call(i, known) for i in self._places])

    @property
    def _places(self) -> range:
        return range(len(self.funcs))

    async def _await_all(self, known: dict[str, Any]) -> dict[str, float]:
        values = []
        for place in self._places:  # in order: they share `state`
            value = self._call(place, known)
            values.append(await value if inspect.isawaitable(value) else value)
        return self._sum(values)

    def _call(self, place: int, known: dict[str, Any]) -> Any:
        wanted = self._wanted[place]
        return self.funcs[place](**(known if wanted is None else {name: known[name] for name in wanted}))

    def _sum(self, returned: Sequence[Any]) -> dict[str, float]:
        values = {name: _number(name, value) for name, value in zip(self._names, returned, strict=True)}
        score = sum(weight * value for weight, value in zip(self.weights, values.values(), strict=True))
        return {"acc": values[self._names[0]], **values, "score": score}


def _number(name: str, value: Any) -> float:
    if isinstance(value, dict):
        raise ValueError(f"The function {name!r} of the rubric returned a dict; expected a finite number")
    try:
        return read_score(value)[0]
    except ValueError as error:
        raise ValueError(f"Function {name!r} of the rubric: {error}") from error


def _name_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", None)
    if not isinstance(name, str) or not name.isidentifier() or name == "score":
        raise UserError(
            f"Rubric: {function!r} has no name of its own that a metric could have; write it as a function with `def` "
            "(not called score)"
        )
    return name


def _wanted(function: Callable[..., Any], name: str) -> tuple[str, ...] | None:
    """What to hand to a function; None = everything."""
    parameters = [
        each for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_POSITIONAL
    ]
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
    named = {each.name: each for each in parameters if each.kind is not each.VAR_KEYWORD}
    group = [each for each in named if each in _OF_A_GROUP]
    if group:
        raise UserError(
            f"Rubric: {name} asks for {group[0]}, the answers of a whole group; samples are scored one by one, as they "
            f"finish. It can ask for {', '.join(_NAMES)}"
        )
    missing = [each for each, parameter in named.items() if each not in _NAMES and parameter.default is parameter.empty]
    if missing:
        raise UserError(f"Rubric: {name} asks for {missing[0]}, which there is not. Known: {', '.join(_NAMES)}")
    return None if takes_all else tuple(each for each in named if each in _NAMES)

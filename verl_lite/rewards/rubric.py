"""Rubrics: a list of small functions with weights, in the shape that the verifiers library has them, as one reward.

Other than in verifiers, a function that raises fails the sample (there it counts as 0), and functions over a group of
answers (prompts, completions ...) are refused, because samples are scored as they finish.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from verl_lite.errors import UserError
from verl_lite.registry import accepts
from verl_lite.rewards.registry import awaits
from verl_lite.rewards.scoring import read_score

_NAMES = "prompt completion answer info task state parser solution_str ground_truth extra_info data_source".split()


class Rubric:
    """Weighted functions as one reward function, such as `compute_score = Rubric([right, polite], [1.0, 0.1])`.

    Each function names what it wants to see, or **kwargs: the chat messages `prompt` and `completion`, `answer` (the
    ground truth), `info` (extra_info), `task` (data_source), `state` (a dict with all of these, new for each sample, in
    which functions, which run in order, may leave things), `parser`, or the names of other rewards.

    Args:
        funcs: plain or async, each returns a finite number or a bool.
        weights: one for each, 1 without; 0 = only logged.
        parser: handed to functions that name it.
    Raises:
        UserError: for wrong weights, two functions of one name, or a function that asks for what there is not.
    """

    def __init__(
        self, funcs: Sequence[Callable[..., Any]], weights: Sequence[float] | None = None, parser: Any = None
    ) -> None:
        self.parser = parser
        self.weights = (1.0,) * len(funcs) if weights is None else tuple(float(weight) for weight in weights)
        if not funcs or len(self.weights) != len(funcs) or not all(map(math.isfinite, self.weights)):
            raise UserError(
                f"Rubric: {len(funcs)} functions with weights {list(self.weights)}; expected a function or more, and a "
                "finite number for each"
            )
        names = [getattr(function, "__name__", "") for function in funcs]
        if len(set(names)) < len(names) or not all(name.isidentifier() and name != "score" for name in names):
            told = ", ".join(names)
            raise UserError(f"Rubric: metrics have the names of the functions ({told}): each needs its own, by `def`")
        self.funcs = dict(zip(names, funcs, strict=True))
        self._wanted = {name: _wanted(function, name) for name, function in self.funcs.items()}
        self.is_async = any(map(awaits, funcs))

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
        completion = [{"role": "assistant", "content": solution_str}]
        state: dict[str, Any] = {"prompt": prompt, "completion": completion, "answer": ground_truth}
        state |= {"info": extra_info or {}, "task": data_source}
        known = {**state, "state": state, "parser": self.parser, "solution_str": solution_str}
        known |= {"ground_truth": ground_truth, "extra_info": extra_info, "data_source": data_source}
        calls = (self.funcs[name](**{each: known[each] for each in wanted}) for name, wanted in self._wanted.items())
        if not self.is_async:
            return self._sum(list(calls))

        async def awaited() -> dict[str, float]:  # in order: they share `state`
            return self._sum([await value if inspect.isawaitable(value) else value for value in calls])

        return awaited()

    def _sum(self, returned: Sequence[Any]) -> dict[str, float]:
        values: dict[str, float] = {}
        for name, value in zip(self.funcs, returned, strict=True):
            try:
                values[name] = read_score(None if isinstance(value, dict) else value)[0]
            except ValueError as error:
                raise ValueError(f"Function {name!r} of the rubric: {error}") from error
        score = sum(weight * value for weight, value in zip(self.weights, values.values(), strict=True))
        return {"acc": next(iter(values.values())), **values, "score": score}


def _wanted(function: Callable[..., Any], name: str) -> list[str]:
    """What to hand to a function."""
    parameters = inspect.signature(function).parameters.values()
    needed = {
        each.name
        for each in parameters
        if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD) and each.default is each.empty
    }
    for each in sorted(needed.difference(_NAMES)):
        raise UserError(
            f"Rubric: {name} asks for {each}, which there is not (samples are scored one by one, not as groups). "
            f"Known: {', '.join(_NAMES)}"
        )
    return [each for each in _NAMES if accepts(function, each)]

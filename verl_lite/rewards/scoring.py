"""Builds the reward of a run from its configuration: its parts, the calls of each part, and their weighted sum.

A single reward is one part without a name; `reward.functions` names several parts. Parts are untrusted code, so their
exceptions and results are caught and become a `RewardResult`: a score, or a failure with its error, never a substitute
0. A failed part fails the sample, because a sum without one of its terms would be a different reward.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType, NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from verl_lite.config.reward import RewardConfig
from verl_lite.errors import UserError, user_traceback
from verl_lite.images import open_image
from verl_lite.json_types import ChatMessage, JsonMapping, JsonObject, JsonValue, KeywordArguments
from verl_lite.machine.event_loop import run_async
from verl_lite.registry import accepts, did_you_mean, load_module, object_of, require_call, takes
from verl_lite.rewards.argument_checks import kwargs_problems
from verl_lite.rewards.judge import JudgeServer
from verl_lite.rewards.registry import (
    NAMED,
    REWARDS,
    RewardFunction,
    default_compute_score,
    find_named_reward,
    find_reward,
)
from verl_lite.rewards.results import RewardItem, RewardResult, number_of, read_score

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")

OPTION = "reward.functions"
RAISED_BY_REWARDS = (Exception, SystemExit)
"""What a reward function can raise: it fails a sample and never ends the run. KeyboardInterrupt is the user's."""
_TAKEN = (
    "score",
    "model",
    "function",
    "error_rate",
    "timeout_rate",
    "processes_replaced",
    "overlong",
    "overlong_reward",
)
"""Names that other columns and metrics use: reward/model, reward/error_rate ..."""
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


# --------------------------------------------------------------------------------------------------------- the parts


@dataclass(frozen=True)
class RewardPart:
    """One part of the reward: an entry of `reward.functions`, or the single reward of a run.

    Without `reward` and `path`, the row's data_source selects the function.

    Attributes:
        label: name of the part in columns and metrics; "" for a single reward.
        reward: name of a registered reward.
        path, name, style: the user's function, as in reward.custom_reward_function.
        weight: factor of the part's score in the sum.
        kwargs: further arguments of each call.
        outcome: True for the one part whose `acc` and `pred` become those of the sample.
        function: the loaded function.
    """

    label: str = ""
    reward: str | None = None
    path: str | None = None
    name: str = "compute_score"
    style: str = "sample"
    weight: float = 1.0
    kwargs: KeywordArguments = field(default_factory=dict)
    outcome: bool = True
    function: RewardFunction = default_compute_score

    @property
    def option(self) -> str:
        """The part's key in the configuration."""
        return f"{OPTION}.{self.label}" if self.label else "reward.custom_reward_function"

    @property
    def takes_lists(self) -> bool:
        return self.style in _LISTS

    @functools.cached_property
    def is_async(self) -> bool:
        """True if calls of the function have to be awaited."""
        return not self.takes_lists and _is_async(self.function)

    def call(self, item: RewardItem) -> object:
        """Calls the function with one sample. The result of an async function is an awaitable."""
        arguments = {name: getattr(item, name) for name in _ARGUMENTS}
        # verl's functions do not have these parameters
        if takes(self.function, "prompt"):
            arguments["prompt"] = item.prompt
        if takes(self.function, "images"):
            arguments["images"] = _open_images(item)
        # the user's arguments last, so that they can replace those of the sample
        arguments |= self.kwargs
        return self.function(**arguments)

    async def score_async(self, item: RewardItem) -> RewardResult:
        """Scores one sample and awaits the function's result if it is an awaitable."""
        try:
            returned = self.call(item)
            # in a run with an async part, the other parts return their results at once
            if inspect.isawaitable(returned):
                returned = await returned
            score, extra = read_score(returned)
            return RewardResult(score, extra)
        except RAISED_BY_REWARDS as error:
            return _failure(error)

    def score_list(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples in one call of a function that takes lists. An invalid entry fails only its own sample.

        Raises the function's exceptions, and UserError if the function does not return one result per sample: the
        sample that caused such an error is unknown.
        """
        arguments: JsonObject = {**_LISTS[self.style](items)}
        has_images = any(item.images for item in items)
        # a function that has only **kwargs gets the argument if there are images
        if takes(self.function, "images") or (has_images and accepts(self.function, "images")):
            arguments["images"] = [_open_images(item) for item in items]
        arguments |= self.kwargs
        returned = _awaited(self.function(**arguments))

        # a list, a tuple, an array or a tensor; a text or a dict has a length, too, but is one result
        is_list = hasattr(returned, "__len__") and not isinstance(returned, str | dict)
        if not is_list or len(returned) != len(items):
            description = f"{len(returned)} results" if is_list else f"{returned!r:.200}"
            raise UserError(
                f"The reward function returned {description} for {len(items)} samples; expected one result each"
            )
        return [_guarded(_unchanged, result) for result in returned]

    def score_all(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples in this process, without raising exceptions.

        Async calls run concurrently, other calls one after the other. If a call with a list fails, each of its samples
        is scored alone.
        """
        if self.is_async:
            return run_async(_all_of(map(self.score_async, items)))
        if not self.takes_lists:
            return [_guarded(self.call, item) for item in items]
        try:
            return self.score_list(items)
        except RAISED_BY_REWARDS as error:
            if len(items) == 1:
                return [_failure(error)]
            # alone, so that only the samples that cause the error fail
            results = []
            for item in items:
                results += self.score_all([item])
            return results


def _open_images(item: RewardItem) -> list[Image]:
    """Decodes the images of a prompt."""
    return [open_image(file) for file in item.images]


_ENTRIES: dict[str, tuple[tuple[type, ...], str]] = {
    "reward": ((str, NoneType), "text"),
    "path": ((str, NoneType), "text"),
    "name": ((str,), "text"),
    "style": ((str,), "text"),
    "weight": ((int, float), "a finite number"),
    "kwargs": ((Mapping, NoneType), "a mapping"),
    "outcome": ((bool,), "true or false"),
}
"""Types of a part's entries, with their description in messages."""


def reward_parts(functions: JsonMapping) -> list[RewardPart]:
    """Returns the parts of `reward.functions`, in their order. Raises UserError, which lists every problem."""
    problems = list(part_problems(functions))
    if problems:
        raise UserError("; ".join(problems))

    # the first part, unless another one is marked
    outcome_label = next(iter(functions), None)
    for label, entry in functions.items():
        if entry and entry.get("outcome"):
            outcome_label = label

    parts = []
    for label, entry in functions.items():
        # None for a part without options, whose function is selected by the row's data_source
        options = dict(entry or {})
        options["kwargs"] = dict(options.get("kwargs") or {})
        options["outcome"] = label == outcome_label
        parts.append(RewardPart(label, **options))
    return parts


def part_problems(functions: JsonMapping) -> Iterator[str]:
    """Yields the problems of `reward.functions` that can be detected without running the user's files."""
    outcomes = []
    for label, entry in functions.items():
        option = f"{OPTION}.{label}"
        # the label becomes a part of columns, metrics and keys of the command line
        if not re.fullmatch(r"[A-Za-z][\w-]*", label):
            yield f"{option}: a part's name has to consist of letters, digits, _ and -, and to begin with a letter"
        elif label in _TAKEN:
            yield f"{option}: reward/{label} is already the name of another column or metric; rename the part"
        if not isinstance(entry, Mapping | None):
            yield f"{option}={entry!r}: expected a mapping, such as {{reward: format, weight: 0.1}}"
            continue
        entries = entry or {}
        yield from _entry_problems(option, entries)
        if entries.get("outcome"):
            outcomes.append(label)
    if len(outcomes) > 1:
        yield f"{OPTION}: {' and '.join(outcomes)} have outcome: true; only one part can be the outcome"


def _entry_problems(option: str, entry: JsonMapping) -> Iterator[str]:
    """Yields the problems of one entry of `reward.functions`.

    Args:
        option: key of the entry in the configuration.
        entry: the entry.
    """
    for key, value in entry.items():
        if key not in _ENTRIES:
            hint = did_you_mean(str(key), _ENTRIES)
            yield f"{option}.{key}: unknown entry{hint}. Known: {', '.join(_ENTRIES)}"
            continue
        types, expected = _ENTRIES[key]
        is_valid = isinstance(value, types)
        if key == "weight" and is_valid:
            # true is an int of Python
            is_valid = not isinstance(value, bool) and math.isfinite(number_of(value))
        if not is_valid:
            yield f"{option}.{key}={value!r}: expected {expected}"

    reward = entry.get("reward")
    path = entry.get("path")
    style = entry.get("style", "sample")
    if style not in ("sample", *_LISTS):
        yield f"{option}.style={style!r}: expected one of sample, {', '.join(_LISTS)}"
    keys_of_own_function = sorted({"name", "style"} & set(entry))
    if path is None and keys_of_own_function:
        key = keys_of_own_function[0]
        yield f"{option}.{key}={entry[key]} applies only to a function of your own: set {option}.path"
    if reward is not None and path is not None:
        yield f"{option}: reward={reward} and path={path} are both set, but a part has one function; remove one of them"
        return
    # a function in a file is checked by `_function`, because a check of the options does not run files of the user
    if not isinstance(reward, str):
        return
    try:
        function = find_named_reward(reward)
    except UserError as error:
        yield f"{option}.reward={reward}: {error}"
        return
    kwargs = entry.get("kwargs")
    if isinstance(kwargs, Mapping):
        yield from kwargs_problems(function, kwargs, f"{option}.kwargs")


# ------------------------------------------------------------------------------------------------- calls of the parts


def lists_of_verl(items: Sequence[RewardItem]) -> dict[str, list[object]]:
    """Returns the arguments of a function for verl's batch reward manager."""
    arguments: dict[str, list[object]] = {}
    for name in _ARGUMENTS:
        # data_sources, solution_strs, ground_truths, extra_infos
        arguments[f"{name}s"] = [getattr(item, name) for item in items]
    return arguments


def lists_of_trl(items: Sequence[RewardItem]) -> dict[str, list[object]]:
    """Returns the arguments of a TRL reward function: prompts and completions as chat messages, and the data columns.

    The columns are ground_truth, data_source and the entries of extra_info, with None for rows without an entry.
    """
    infos = [item.extra_info or {} for item in items]
    names: set[str] = set().union(*infos)
    arguments: dict[str, list[object]] = {}
    for name in sorted(names):
        arguments[name] = [info.get(name) for info in infos]

    # the names of TRL last, so that an entry of extra_info cannot replace them
    arguments["data_source"] = [item.data_source for item in items]
    arguments["ground_truth"] = [item.ground_truth for item in items]
    arguments["prompts"] = [item.prompt for item in items]
    completions: list[object] = []
    for item in items:
        message = {"role": "assistant", "content": item.solution_str}
        completions.append([message])
    arguments["completions"] = completions
    return arguments


_LISTS = {"batch": lists_of_verl, "trl": lists_of_trl}
"""By style, the function that builds the arguments of a reward function that takes lists of samples."""


@dataclass(frozen=True)
class Scorer:
    """The reward of a run.

    Attributes:
        parts: one part without a name, or several parts whose weighted sum is the score.
    """

    parts: tuple[RewardPart, ...]

    @property
    def style(self) -> Literal["sample", "async", "batch"]:
        """The way samples are scored.

        "sample": one after the other; "async": concurrently in an event loop, because a part is async; "batch": in
        lists, because a part takes lists.
        """
        if any(part.takes_lists for part in self.parts):
            return "batch"
        if any(part.is_async for part in self.parts):
            return "async"
        return "sample"

    def score_all(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples in this process, without raising exceptions."""
        results_by_part = [part.score_all(items) for part in self.parts]
        results_by_item = zip(*results_by_part, strict=True)
        return [self.combined(results) for results in results_by_item]

    def score_list(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples as `score_all` does, but raises the exceptions of a single part that takes lists."""
        first_part = self.parts[0]
        is_single = not first_part.label
        if is_single:
            return first_part.score_list(items)
        return self.score_all(items)

    async def score(self, item: RewardItem) -> RewardResult:
        """Scores one sample, with all parts concurrently."""
        results = await _all_of(part.score_async(item) for part in self.parts)
        return self.combined(results)

    def combined(self, results: Sequence[RewardResult]) -> RewardResult:
        """Combines the results of all parts for one sample.

        The extra entries of the combined result contain the score of each part before its weight, under the part's
        name. Other entries of the outcome part keep their names, unless a part has the same name; all others are named
        <part>.<entry>. `acc` is the outcome part's `acc`, or its score if it returned none.
        """
        labels = {part.label for part in self.parts}
        is_single = labels == {""}
        if is_single:
            return results[0]

        weighted_scores = []
        outcome = 0.0
        extra: dict[str, float | str] = {}
        for part, result in zip(self.parts, results, strict=True):
            if result.failed:
                error = f"The part {part.label!r} of reward.functions failed.\n{result.error}"
                return RewardResult.failure(error, timed_out=result.timed_out)
            weighted_scores.append(part.weight * result.score)
            if part.outcome:
                outcome = result.score
            extra[part.label] = result.score
            for name, value in result.extra.items():
                keeps_name = part.outcome and name not in labels
                combined_name = name if keeps_name else f"{part.label}.{name}"
                extra[combined_name] = value

        extra.setdefault("acc", outcome)
        # finite scores can have a sum that is not
        return RewardResult.scored("The weighted sum of reward.functions", sum(weighted_scores), extra)


def _guarded(work: Callable[..., object], *args: object) -> RewardResult:
    """Returns the result of a call, or a failure if it raises or returns no score."""
    try:
        returned = _awaited(work(*args))
        score, extra = read_score(returned)
        return RewardResult(score, extra)
    except RAISED_BY_REWARDS as error:
        return _failure(error)


def _unchanged(returned: object) -> object:
    return returned


def _failure(error: BaseException) -> RewardResult:
    """Returns the failure of a sample: the message of wrong input, and the traceback of any other error."""
    if isinstance(error, UserError):
        return RewardResult.failure(str(error))
    return RewardResult.failure(user_traceback(error))


async def _all_of(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    return await asyncio.gather(*awaitables)


# Any: the result of a function of the user
def _awaited(returned: object) -> Any:
    """Returns the result of an awaitable, run in a new event loop; returns other values unchanged."""
    if not inspect.isawaitable(returned):
        return returned
    # inside a coroutine, because an event loop runs no other awaitables
    [result] = run_async(_all_of([returned]))
    return result


def _is_async(function: RewardFunction) -> bool:
    """Returns True if calls of the function have to be awaited.

    `default_compute_score` counts as async if any function registered for a data_source is async. Functions registered
    as rule/NAME do not count, since few runs call them.
    """
    if function is default_compute_score:
        by_source = [registered for name, registered in REWARDS.items() if not name.startswith(NAMED)]
        return any(map(_is_async, by_source))
    # a callable object whose __call__ is async is not a coroutine function itself
    call = type(function).__call__
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


# ------------------------------------------------------------------------------------------------------ configuration


def load_scorer(config: RewardConfig) -> Scorer:
    """Returns the reward of a run.

    The reward is, in this order of precedence, the server at reward.remote.url, the parts of reward.functions, the
    user's function in reward.custom_reward_function, or the registered functions by data_source. The entries of
    reward.reward_kwargs are passed to every call of a single reward and take precedence over the other arguments.

    Raises UserError if a part of reward.functions does not exist or does not accept its kwargs.
    """
    if config.remote.url is not None:
        remote_part = RewardPart(kwargs=config.reward_kwargs, function=_remote(config))
        return Scorer((remote_part,))

    # a file with several parts is loaded once
    modules: dict[str, ModuleType] = {}
    parts = []
    for part in _parts(config):
        function = _function(part, modules)
        parts.append(replace(part, function=function))
    return Scorer(tuple(parts))


def asks_by_source(config: RewardConfig) -> bool:
    """Returns True if a row's data_source selects its reward, or one of the parts."""
    if config.remote.url is not None:
        return False
    return any(part.reward is None and part.path is None for part in _parts(config))


def check_source(config: RewardConfig, data_source: str) -> None:
    """Raises UserError if no reward is registered for a data_source, or if it does not accept the configured kwargs.

    It may be called only if `asks_by_source`.
    """
    function = find_reward(data_source)
    for part in _parts(config):
        is_by_source = part.reward is None and part.path is None
        if not is_by_source:
            continue
        # a single reward has no label, and an option of its own for its kwargs
        option = f"{part.option}.kwargs" if part.label else "reward.reward_kwargs"
        for problem in kwargs_problems(function, part.kwargs, option):
            raise UserError(f"{problem} (the reward of data_source={data_source!r})")


def _parts(config: RewardConfig) -> list[RewardPart]:
    """Returns the parts of reward.functions, or the single reward; their functions are not loaded."""
    parts = reward_parts(config.functions)
    if parts:
        return parts
    own = config.custom_reward_function
    # without a path, `style` describes no function: the registered functions take one sample
    style = "sample" if own.path is None else own.style
    return [RewardPart(path=own.path, name=own.name, style=style, kwargs=config.reward_kwargs)]


def _function(part: RewardPart, modules: dict[str, ModuleType]) -> RewardFunction:
    """Returns the function of a part.

    Args:
        part: the part.
        modules: loaded modules by path, to which a new one is added.

    Raises:
        UserError: if the function does not exist or cannot be called with the arguments of the part.
    """
    if part.path is None:
        if part.reward:
            return find_named_reward(part.reward)
        return default_compute_score

    if part.path not in modules:
        modules[part.path] = load_module(part.path, f"{part.option}.path")
    function: RewardFunction = object_of(modules[part.path], part.path, part.name, f"{part.option}.name")
    if part.label:
        for problem in kwargs_problems(function, part.kwargs, f"{part.option}.kwargs"):
            raise UserError(problem)
    _require_signature(function, part)
    return function


def _require_signature(function: RewardFunction, part: RewardPart) -> None:
    """Raises UserError if a function of the user cannot be called in its style."""
    # the columns are those of the data, so that only a call with rows can check their names
    if part.style == "trl":
        return
    names = list(_ARGUMENTS)
    if part.style != "sample":
        names = [f"{name}s" for name in _ARGUMENTS]
    optional = [name for name in ("prompt", "images") if takes(function, name)]
    arguments = dict.fromkeys([*names, *optional, *part.kwargs])
    try:
        require_call(function, f"f({', '.join(names)}), as {part.option}.style={part.style} calls it", **arguments)
    except UserError as error:
        raise UserError(f"{part.option}.name={part.name!r}: {error}") from None


def _remote(config: RewardConfig) -> RewardFunction:
    """Returns a reward function that posts each sample as JSON to the server and returns the server's reply."""
    remote = config.remote
    endpoint = JudgeServer(
        str(remote.url),
        max_retries=remote.max_retries,
        api_key_env=remote.api_key_env,
        option="reward.remote.api_key_env",
    )

    async def post_sample(*, prompt: list[ChatMessage] | None, **sample: object) -> JsonValue:
        return await endpoint.post({**sample, "prompt": prompt})

    return post_sample

"""From the configuration of a run to scores: the parts of a reward, how each is called, and their weighted sum.

A single reward is one part without a name; `reward.functions` names several. Each part is a guarded door to untrusted
code: whatever it raises or returns becomes the outcome of the sample. An outcome is a score or no score (`failed`, with
the reason), never a made-up 0. A part that fails fails the sample: a sum without one of its terms would be another
reward.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import re
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, Literal

from verl_lite.config.reward import RewardConfig
from verl_lite.errors import UserError, user_traceback
from verl_lite.registry import accepts, did_you_mean, load_module, object_of, takes
from verl_lite.rewards.judge import Endpoint
from verl_lite.rewards.registry import NAMED, REWARDS, RewardFunction, default_compute_score, find_named_reward

OPTION = "reward.functions"
_EXTRA_CHARACTERS = 10_000
_ERROR_CHARACTERS = 20_000
_FLOAT32_MAX = 3.4028234663852886e38
_TAKEN = "score model function error_rate timeout_rate processes_replaced overlong overlong_reward".split()
"""What other columns and metrics are called: reward/model, reward/error_rate ..."""
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass(frozen=True)
class RewardItem:
    """One answer to be scored.

    key: any name that is unique among the samples in flight. solution_str: the decoded answer, without the prompt.
    ground_truth: `reward_model["ground_truth"]` of the row. prompt: the chat messages that were answered.
    """

    key: Hashable
    data_source: str
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any] | None = None
    prompt: list[dict[str, str]] | None = None


@dataclass(frozen=True)
class RewardResult:
    """score: nan if failed. extra: the other numbers and strings that the function returned. error: why it failed, with
    the traceback. timed_out: it failed because it took longer than reward.timeout_s."""

    score: float
    extra: dict[str, float | str] = field(default_factory=dict)
    failed: bool = False
    error: str | None = None
    timed_out: bool = False

    @classmethod
    def scored(cls, giver: str, score: float, extra: dict[str, float | str] | None = None) -> RewardResult:
        """A sample with this score; a failure if the score is not `is_score`. giver: names the source in the error."""
        if is_score(score):
            return cls(score, extra or {})
        return cls.failure(f"{giver} gave {score:g}; expected {SCORE}")

    @classmethod
    def failure(cls, error: str, *, timed_out: bool = False) -> RewardResult:
        """A sample without a score. The middle of a very long error is left out."""
        if (excess := len(error) - _ERROR_CHARACTERS) > 0:
            half = _ERROR_CHARACTERS // 2
            error = f"{error[:half]}\n[{excess} characters left out]\n{error[-half:]}"
        return cls(score=math.nan, failed=True, error=error, timed_out=timed_out)


SCORE = "a finite number in the range of float32"


def is_score(number: float) -> bool:
    """True for a number that tensors of scores, which are float32, can hold: not NaN, and at most 3.4e38 in size."""
    return abs(number) <= _FLOAT32_MAX


def read_score(returned: Any) -> tuple[float, dict[str, float | str]]:
    """The score and the extras in what a reward function returned.

    A number in the range of float32 or a bool, or a dict with one under "score". Of the dict's other entries such
    numbers, bools and strings are kept, a string up to 10,000 characters. Raises ValueError for anything else.
    """
    entries = returned if isinstance(returned, dict) else {"score": returned}
    if "score" not in entries:
        raise ValueError(f"The reward function returned a dict without 'score': {returned!r:.200}")
    if not is_score(score := _number(entries["score"])):
        what = "a dict whose 'score' is " if isinstance(returned, dict) else ""
        found = f"{entries['score']!r:.200} ({type(entries['score']).__name__})"
        raise ValueError(f"The reward function returned {what}{found}; expected {SCORE}")
    extra: dict[str, float | str] = {}
    for key, value in entries.items():
        if isinstance(value, str):
            extra[str(key)] = value[:_EXTRA_CHARACTERS]
        elif key != "score" and is_score(number := _number(value)):
            extra[str(key)] = number
    return score, extra


def _number(value: Any) -> float:
    """Numbers of Python, numpy and torch alike, without importing either; nan for what is no number."""
    try:
        return math.nan if isinstance(value, str | bytes | bytearray) else float(value)  # float("3") would read texts
    except (TypeError, ValueError, OverflowError):
        return math.nan


# --------------------------------------------------------------------------------------------------------- the parts


@dataclass(frozen=True)
class RewardPart:
    """One of several rewards, as `reward.functions` names it. label: its name in the score, in columns and metrics; ""
    for a single reward.

    reward: a registered one; path, name, style: a function of your own, as in reward.custom_reward_function; neither
    reward nor path: by data_source. weight: its score is multiplied by it. outcome: its `acc` and `pred` are those of
    the sample; exactly one part says so. function: what all that stands for, once it is loaded.
    """

    label: str = ""
    reward: str | None = None
    path: str | None = None
    name: str = "compute_score"
    style: str = "sample"
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)
    outcome: bool = True
    function: RewardFunction = default_compute_score

    @property
    def option(self) -> str:
        """Its key in the configuration."""
        return f"{OPTION}.{self.label}" if self.label else "reward.custom_reward_function"

    @property
    def takes_lists(self) -> bool:
        return self.style in _LISTS

    @functools.cached_property
    def is_async(self) -> bool:
        """Whether its calls are awaited."""
        return not self.takes_lists and _is_async(self.function)

    def call(self, item: RewardItem) -> Any:
        """Calls the function with one sample; an async one gives an awaitable."""
        names = (*_ARGUMENTS, "prompt") if takes(self.function, "prompt") else _ARGUMENTS
        return self.function(**{**{name: getattr(item, name) for name in names}, **self.kwargs})

    async def score_async(self, item: RewardItem) -> RewardResult:
        """Scores one sample, awaiting what the function returns if that is to be awaited."""
        try:
            returned = self.call(item)
            return RewardResult(*read_score(await returned if inspect.isawaitable(returned) else returned))
        except Exception as error:  # the door to untrusted code: what it raises is this sample's outcome, not the run's
            return RewardResult.failure(user_traceback(error))

    def score_list(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples in one call of a function that takes lists. A bad entry fails its own sample only.

        Raises whatever the function raises, and ValueError if it does not return one result for each sample: then
        nobody knows which of them is to blame.
        """
        returned = _awaited(self.function(**{**_LISTS[self.style](items), **self.kwargs}))
        count = len(returned) if hasattr(returned, "__len__") and not isinstance(returned, str | dict) else None
        if count != len(items):
            what = f"{returned!r:.200}" if count is None else f"{count} results"
            raise ValueError(f"The reward function returned {what} for {len(items)} samples; expected a list of them")
        return [_guarded(lambda result=result: result) for result in returned]

    def score_all(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples here and now: awaits all at once, or one after the other; those of a list that fails as a
        whole each alone. Nothing is raised."""
        if self.is_async:
            return asyncio.run(_all_of(map(self.score_async, items)))
        if not self.takes_lists:
            return [_guarded(self.call, item) for item in items]
        try:
            return self.score_list(items)
        except Exception as error:  # the door to untrusted code, as above
            if len(items) == 1:
                return [RewardResult.failure(user_traceback(error))]
            return [result for item in items for result in self.score_all([item])]


_ENTRIES: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("reward", "path"), (str | None, "text")),
    **dict.fromkeys(("name", "style"), (str, "text")),
    "weight": (int | float, "a finite number"),
    "kwargs": (Mapping | None, "a mapping"),
    "outcome": (bool, "true or false"),
}
"""The entries of a part: what each may be."""


def reward_parts(functions: Mapping[str, Any]) -> list[RewardPart]:
    """The parts of `reward.functions`, in their order. Raises UserError with every problem."""
    if problems := list(part_problems(functions)):
        raise UserError("; ".join(problems))
    entries = {label: {**(entry or {})} for label, entry in functions.items()}
    chosen = next((label for label, entry in entries.items() if entry.get("outcome")), next(iter(entries), None))
    return [
        RewardPart(label, **{**entry, "kwargs": dict(entry.get("kwargs") or {}), "outcome": label == chosen})
        for label, entry in entries.items()
    ]


def part_problems(functions: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with `reward.functions`, as far as it can be seen without running the user's files."""
    for label, entry in functions.items():
        option = f"{OPTION}.{label}"
        if not re.fullmatch(r"[A-Za-z][\w-]*", label):
            yield f"{option}: the name of a part consists of letters, digits, _ and -, and begins with a letter"
        elif label in _TAKEN:
            yield f"{option}: reward/{label} is the name of something else; call the part otherwise"
        if isinstance(entry, Mapping | None):
            yield from _entry_problems(option, entry or {})
        else:
            yield f"{option}={entry!r}: a mapping is expected, such as {{reward: format, weight: 0.1}}"
    outcomes = [label for label, entry in functions.items() if isinstance(entry, Mapping) and entry.get("outcome")]
    if len(outcomes) > 1:
        yield f"{OPTION}: {' and '.join(outcomes)} have outcome: true; only one part says whether an answer is right"


def _entry_problems(option: str, entry: Mapping[str, Any]) -> Iterator[str]:
    for key, value in entry.items():
        kind, expected = _ENTRIES.get(key, (object, ""))
        is_number = key != "weight" or (not isinstance(value, bool) and math.isfinite(_number(value)))
        if key not in _ENTRIES:
            hint = did_you_mean(str(key), _ENTRIES)
            yield f"{option}.{key}: there is no such entry{hint}. Known: {', '.join(_ENTRIES)}"
        elif not isinstance(value, kind) or not is_number:
            yield f"{option}.{key}={value!r}: {expected} is expected"
    reward, path, style = entry.get("reward"), entry.get("path"), entry.get("style", "sample")
    if style not in ("sample", *_LISTS):
        yield f"{option}.style={style!r}: one of sample, {', '.join(_LISTS)} is expected"
    if path is None and (own := {"name", "style"} & set(entry)):
        yield f"{option}.{min(own)}={entry[min(own)]} is for a function of your own: give its {option}.path"
    if reward is not None and path is not None:
        yield f"{option}: reward={reward} and path={path}: one of them can be the function; leave the other out"
    elif isinstance(reward, str):
        kwargs = entry.get("kwargs")
        try:
            yield from _kwargs_problems(
                find_named_reward(reward), kwargs if isinstance(kwargs, Mapping) else {}, option
            )
        except UserError as error:
            yield f"{option}.reward={reward}: {error}"


def _kwargs_problems(function: RewardFunction, kwargs: Mapping[str, Any], option: str) -> Iterator[str]:
    for name in kwargs:
        if not accepts(function, name):
            names = list(inspect.signature(function).parameters)
            taken = ", ".join(each for each in names if each not in (*_ARGUMENTS, "prompt") or each == "ground_truth")
            hint = did_you_mean(name, names)
            yield f"{option}.kwargs.{name}: the function has no such argument{hint}. It takes {taken}"


# ------------------------------------------------------------------------------------------------- how they are called


def lists_of_verl(items: Sequence[RewardItem]) -> dict[str, Any]:
    """The arguments of a function for verl's batch reward manager."""
    return {f"{name}s": [getattr(item, name) for item in items] for name in _ARGUMENTS}


def lists_of_trl(items: Sequence[RewardItem]) -> dict[str, Any]:
    """The arguments of a TRL reward function: prompts and completions as chat messages, and each column of the data.

    Columns are ground_truth, data_source and the entries of extra_info, None for a row without that entry.
    """
    infos = [item.extra_info or {} for item in items]
    columns = {name: [info.get(name) for info in infos] for name in sorted({name for info in infos for name in info})}
    return {
        **columns,
        "data_source": [item.data_source for item in items],
        "ground_truth": [item.ground_truth for item in items],
        "prompts": [item.prompt for item in items],
        "completions": [[{"role": "assistant", "content": item.solution_str}] for item in items],
    }


_LISTS = {"batch": lists_of_verl, "trl": lists_of_trl}
"""By style: the arguments of a function that takes lists of samples."""


@dataclass(frozen=True)
class Scorer:
    """parts: one without a name, or several whose weighted sum is the score."""

    parts: tuple[RewardPart, ...]

    @property
    def style(self) -> Literal["sample", "async", "batch"]:
        """How samples are taken: one after the other, many at once in an event loop because some part awaits, or as
        lists, with which each part is called that takes them."""
        if any(part.takes_lists for part in self.parts):
            return "batch"
        return "async" if any(part.is_async for part in self.parts) else "sample"

    def score_all(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples here and now; nothing is raised."""
        columns = [part.score_all(items) for part in self.parts]
        return [self.combined(results) for results in zip(*columns, strict=True)]

    def score_list(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """As `score_all`, but raises what a single function of lists raises."""
        return self.score_all(items) if self.parts[0].label else self.parts[0].score_list(items)

    async def score(self, item: RewardItem) -> RewardResult:
        """Scores one sample, all parts of it at once."""
        return self.combined(await _all_of(part.score_async(item) for part in self.parts))

    def combined(self, results: Sequence[RewardResult]) -> RewardResult:
        """The result of one sample, of which `results` has one from each part.

        extra: under the name of each part its score before the weight. The other entries of the part that is the
        outcome keep their names; those of another part, and one that has the name of a part, are called part.entry.
        `acc` is that of the outcome, or its score where it returned none.
        """
        pairs = list(zip(self.parts, results, strict=True))
        names, extra = {part.label for part, _ in pairs}, dict[str, float | str]()
        if names == {""}:
            return results[0]
        for part, result in pairs:
            if result.failed:
                error = f"The part {part.label!r} of reward.functions failed.\n{result.error}"
                return RewardResult.failure(error, timed_out=result.timed_out)
            extra[part.label] = result.score
            for name, value in result.extra.items():
                extra[name if part.outcome and name not in names else f"{part.label}.{name}"] = value
        extra.setdefault("acc", next(result.score for part, result in pairs if part.outcome))
        total = sum(part.weight * result.score for part, result in pairs)
        return RewardResult.scored("The weighted sum of reward.functions", total, extra)


def _guarded(work: Callable[..., Any], *args: Any) -> RewardResult:
    try:
        return RewardResult(*read_score(_awaited(work(*args))))
    except Exception as error:  # the door to untrusted code, as above
        return RewardResult.failure(user_traceback(error))


async def _all_of(awaitables: Iterable[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*awaitables)


def _awaited(returned: Any) -> Any:
    """Of an awaitable what it gives, in an event loop of its own; a function that does not await is called in none."""
    return asyncio.run(_all_of([returned]))[0] if inspect.isawaitable(returned) else returned


def _is_async(function: RewardFunction) -> bool:
    """Of the functions by data_source one that awaits makes all of them so, but not those that are there to be named,
    which most runs never ask."""
    if function is default_compute_score:
        return any(_is_async(each) for name, each in REWARDS.items() if not name.startswith(NAMED))
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


# --------------------------------------------------------------------------------------------- from the configuration


def load_scorer(config: RewardConfig) -> Scorer:
    """The reward of a run: several rewards if reward.functions names them, a server if reward.remote.url names one, the
    user's own function if reward.custom_reward_function names one, else the registered functions by data_source.

    reward.reward_kwargs are added to every call of a single reward; they win over the call's own arguments.
    Raises UserError for a part of reward.functions that does not exist or does not take its kwargs.
    """
    if config.remote.url is not None:
        return Scorer((RewardPart(kwargs=config.reward_kwargs, function=_remote(config)),))
    modules: dict[str, ModuleType] = {}  # a file that has several parts is run once
    return Scorer(tuple(replace(part, function=_function(part, modules)) for part in _parts(config)))


def asks_by_source(config: RewardConfig) -> bool:
    """Whether a row's data_source picks its reward, or one of its parts."""
    return config.remote.url is None and any(part.reward is None and part.path is None for part in _parts(config))


def _parts(config: RewardConfig) -> list[RewardPart]:
    own = config.custom_reward_function
    style = "sample" if own.path is None else own.style
    single = RewardPart(path=own.path, name=own.name, style=style, kwargs=config.reward_kwargs)
    return reward_parts(config.functions) or [single]


def _function(part: RewardPart, modules: dict[str, ModuleType]) -> RewardFunction:
    if part.path is not None:
        if part.path not in modules:
            modules[part.path] = load_module(part.path, f"{part.option}.path")
        function: RewardFunction = object_of(modules[part.path], part.path, part.name, f"{part.option}.name")
        for problem in _kwargs_problems(function, part.kwargs, part.option) if part.label else ():
            raise UserError(problem)
        return function
    return find_named_reward(part.reward) if part.reward else default_compute_score


def _remote(config: RewardConfig) -> RewardFunction:
    """A reward that a server computes: each sample, with its prompt, is posted as JSON; the answer is a score."""
    remote, option = config.remote, "reward.remote.api_key_env"
    endpoint = Endpoint(str(remote.url), max_retries=remote.max_retries, api_key_env=remote.api_key_env, option=option)

    async def ask(*, prompt: list[dict[str, str]] | None, **sample: Any) -> Any:
        return await endpoint.post({**sample, "prompt": prompt})

    return ask

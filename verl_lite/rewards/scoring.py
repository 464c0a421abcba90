"""From the configuration of a run to scores: the parts of a reward, how each is called, and their weighted sum.

A single reward is one part without a name; `reward.functions` names several. Each part is a guarded door to untrusted
code: whatever it raises or returns becomes the outcome of the sample. An outcome is a score or no score (`failed`, with
the reason), never a made-up 0. A part that fails fails the sample: a sum without one of its terms would be another
reward.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import traceback
from collections.abc import Awaitable, Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Literal

from verl_lite.config.reward import RewardConfig
from verl_lite.errors import UserError
from verl_lite.registry import accepts, did_you_mean, takes
from verl_lite.rewards.judge import Endpoint
from verl_lite.rewards.registry import NAMED, REWARDS, RewardFunction, awaits, default_compute_score, find_named_reward
from verl_lite.user_code import load_module, load_object, object_of

OPTION = "reward.functions"
_EXTRA_CHARACTERS = 10_000
_ERROR_CHARACTERS = 20_000
_TAKEN = "score model function error_rate timeout_rate processes_replaced overlong overlong_reward".split()
"""What other columns and metrics are called: reward/model, reward/error_rate ..."""


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
    def failure(cls, error: str, *, timed_out: bool = False) -> RewardResult:
        """A sample without a score. The middle of a very long error is left out."""
        if len(error) > _ERROR_CHARACTERS:
            half = _ERROR_CHARACTERS // 2
            error = f"{error[:half]}\n[{len(error) - 2 * half} characters left out]\n{error[-half:]}"
        return cls(score=math.nan, failed=True, error=error, timed_out=timed_out)


def read_score(returned: Any) -> tuple[float, dict[str, float | str]]:
    """The score and the extras in what a reward function returned.

    A finite number or bool, or a dict with one under "score". Of the dict's other entries finite numbers, bools and
    strings are kept, a string up to 10,000 characters. Raises ValueError for anything else.
    """
    if not isinstance(returned, dict):
        return _finite(returned, "The reward function returned"), {}
    if "score" not in returned:
        raise ValueError(f"The reward function returned a dict without 'score': {_short(returned)}")
    extra: dict[str, float | str] = {}
    for key, value in returned.items():
        if isinstance(value, str):
            extra[str(key)] = value[:_EXTRA_CHARACTERS]
        elif key != "score" and (number := _number(value)) is not None and math.isfinite(number):
            extra[str(key)] = number
    return _finite(returned["score"], "The reward function returned a dict whose 'score' is"), extra


# --------------------------------------------------------------------------------------------------------- the parts


@dataclass(frozen=True)
class RewardPart:
    """One of several rewards, as `reward.functions` names it. label: its name in the score, in columns and metrics.

    reward: a registered one; path, name, style: a function of your own, as in reward.custom_reward_function; neither
    reward nor path: by data_source. weight: its score is multiplied by it. outcome: its `acc` and `pred` are those of
    the sample; exactly one part says so.
    """

    label: str
    reward: str | None = None
    path: str | None = None
    name: str = "compute_score"
    style: str = "sample"
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)
    outcome: bool = False

    @property
    def option(self) -> str:
        """Its key in the configuration."""
        return f"{OPTION}.{self.label}"

    @property
    def is_by_source(self) -> bool:
        """Whether the row's data_source picks its function."""
        return self.reward is None and self.path is None


_ENTRIES: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(("reward", "path"), ((str, type(None)), "text")),
    **dict.fromkeys(("name", "style"), (str, "text")),
    "weight": ((int, float), "a finite number"),
    "kwargs": ((Mapping, type(None)), "a mapping"),
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
    outcomes = []
    for label, entry in functions.items():
        option, entry = f"{OPTION}.{label}", {} if entry is None else entry
        if not re.fullmatch(r"[A-Za-z][\w-]*", label):
            yield f"{option}: the name of a part consists of letters, digits, _ and -, and begins with a letter"
        elif label in _TAKEN:
            yield f"{option}: reward/{label} is the name of something else; call the part otherwise"
        if not isinstance(entry, Mapping):
            yield f"{option}={entry!r}: a mapping is expected, such as {{reward: format, weight: 0.1}}"
            continue
        yield from _entry_problems(option, entry)
        outcomes += [label] if entry.get("outcome") else []
    if len(outcomes) > 1:
        yield f"{OPTION}: {' and '.join(outcomes)} have outcome: true; only one part says whether an answer is right"


def _entry_problems(option: str, entry: Mapping[str, Any]) -> Iterator[str]:
    for key, value in entry.items():
        kind, expected = _ENTRIES.get(key, (object, ""))
        if key not in _ENTRIES:
            hint = did_you_mean(str(key), _ENTRIES)
            yield f"{option}.{key}: there is no such entry{hint}. Known: {', '.join(_ENTRIES)}"
        elif not isinstance(value, kind) or (key == "weight" and not _is_weight(value)):
            yield f"{option}.{key}={value!r}: {expected} is expected"
    reward, path, style = entry.get("reward"), entry.get("path"), entry.get("style", "sample")
    if style not in ("sample", "batch", "trl"):
        yield f"{option}.style={style!r}: one of sample, batch, trl is expected"
    if path is None and (own := {"name", "style"} & set(entry)):
        yield f"{option}.{min(own)}={entry[min(own)]} is for a function of your own: give its {option}.path"
    if reward is not None and path is not None:
        yield f"{option}: reward={reward} and path={path}: one of them can be the function; leave the other out"
    elif isinstance(reward, str):
        kwargs = entry.get("kwargs")
        try:
            function = find_named_reward(reward)
            yield from _kwargs_problems(function, kwargs if isinstance(kwargs, Mapping) else {}, option)
        except UserError as error:
            yield f"{option}.reward={reward}: {error}"


def _is_weight(value: Any) -> bool:
    return not isinstance(value, bool) and math.isfinite(value)


def _kwargs_problems(function: RewardFunction, kwargs: Mapping[str, Any], option: str) -> Iterator[str]:
    """One sentence for each argument that the function does not take."""
    for name in kwargs:
        if not accepts(function, name):
            names = list(inspect.signature(function).parameters)
            taken = [each for each in names if each not in ("data_source", "solution_str", "extra_info", "prompt")]
            hint = did_you_mean(name, names)
            yield f"{option}.kwargs.{name}: the function has no such argument{hint}. It takes {', '.join(taken)}"


# ------------------------------------------------------------------------------------------------- how they are called


@dataclass(frozen=True)
class Caller:
    """A part with its function. label: "" for a single reward. as_lists: makes the arguments of a function that takes
    lists; None = it takes one sample. is_async: whether it is awaited."""

    function: RewardFunction
    label: str = ""
    weight: float = 1.0
    outcome: bool = True
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    as_lists: Callable[[Sequence[RewardItem]], dict[str, Any]] | None = None
    is_async: bool = False

    def call(self, item: RewardItem) -> Any:
        """Calls the function with one sample; an async one gives an awaitable."""
        names = ("data_source", "solution_str", "ground_truth", "extra_info")
        arguments = {name: getattr(item, name) for name in names}
        if takes(self.function, "prompt"):
            arguments["prompt"] = item.prompt
        return self.function(**{**arguments, **self.kwargs})

    async def score_async(self, item: RewardItem) -> RewardResult:
        """Scores one sample, awaiting what the function returns if that is to be awaited."""
        if not self.is_async:
            return self.score_all([item])[0]
        try:
            returned = self.call(item)
            return RewardResult(*read_score(await returned if inspect.isawaitable(returned) else returned))
        except Exception:  # the one door to untrusted code: what it raises is this sample's outcome, not the run's
            return RewardResult.failure(traceback.format_exc())

    def score_list(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples in one call of a function that takes lists. A bad entry fails its own sample only.

        Raises whatever the function raises, and ValueError if it does not return one result for each sample: then
        nobody knows which of them is to blame.
        """
        assert self.as_lists is not None
        returned = _awaited(self.function(**{**self.as_lists(items), **self.kwargs}))
        found = list(returned) if hasattr(returned, "__len__") and not isinstance(returned, str | dict) else None
        if found is None or len(found) != len(items):
            what = f"{_short(returned) if found is None else f'{len(found)} results'} for {len(items)} samples"
            raise ValueError(f"The reward function returned {what}; expected a list of so many")
        return [_guarded(lambda result=result: result) for result in found]

    def score_all(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples here and now: awaits all at once, or one after the other; those of a list that fails as a
        whole each alone. Nothing is raised."""
        if self.is_async:
            return list(_awaited(_all_of(map(self.score_async, items))))
        if self.as_lists is None:
            return [_guarded(self.call, item) for item in items]
        try:
            return self.score_list(items)
        except Exception:  # the door to untrusted code, as above
            if len(items) == 1:
                return [RewardResult.failure(traceback.format_exc())]
            return [result for item in items for result in self.score_all([item])]


@dataclass(frozen=True)
class Scorer:
    """parts: one without a name, or several whose weighted sum is the score."""

    parts: tuple[Caller, ...]

    @property
    def style(self) -> Literal["sample", "async", "batch"]:
        """How samples are taken: one after the other, many at once in an event loop because some part awaits, or as
        lists, with which each part is called that takes them."""
        if any(part.as_lists for part in self.parts):
            return "batch"
        return "async" if any(part.is_async for part in self.parts) else "sample"

    def score_all(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """Scores samples here and now; nothing is raised."""
        columns = [part.score_all(items) for part in self.parts]
        return [self._combined(results) for results in zip(*columns, strict=True)]

    def score_list(self, items: Sequence[RewardItem]) -> list[RewardResult]:
        """As `score_all`, but raises what a single function of lists raises."""
        return self.score_all(items) if self.parts[0].label else self.parts[0].score_list(items)

    async def score(self, item: RewardItem) -> RewardResult:
        """Scores one sample, all parts of it at once."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(part.score_async(item)) for part in self.parts]
        return self._combined([task.result() for task in tasks])

    def _combined(self, results: Sequence[RewardResult]) -> RewardResult:
        return weighted_sum(self.parts, results) if self.parts[0].label else results[0]


def weighted_sum(parts: Sequence[Caller], results: Sequence[RewardResult]) -> RewardResult:
    """The result of one sample, of which `results` has one from each part.

    extra: under the name of each part its score before the weight. The other entries of the part that is the outcome
    keep their names; those of another part, and one that has the name of a part, are called part.entry. `acc` is that
    of the outcome, or its score where it returned none.
    """
    pairs = list(zip(parts, results, strict=True))
    for part, result in pairs:
        if result.failed:
            error = f"The part {part.label!r} of reward.functions failed.\n{result.error}"
            return RewardResult.failure(error, timed_out=result.timed_out)
    extra: dict[str, float | str] = {}
    names = {part.label for part in parts}
    for part, result in pairs:
        extra[part.label] = result.score
        for name, value in result.extra.items():
            extra[name if part.outcome and name not in names else f"{part.label}.{name}"] = value
    extra.setdefault("acc", next(result.score for part, result in pairs if part.outcome))
    return RewardResult(sum(part.weight * result.score for part, result in pairs), extra)


def lists_of_verl(items: Sequence[RewardItem]) -> dict[str, Any]:
    """The arguments of a function for verl's batch reward manager."""
    names = ("data_source", "solution_str", "ground_truth", "extra_info")
    return {f"{name}s": [getattr(item, name) for item in items] for name in names}


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


# --------------------------------------------------------------------------------------------- from the configuration


def load_scorer(config: RewardConfig) -> Scorer:
    """The reward of a run: several rewards if reward.functions names them, a server if reward.remote.url names one, the
    user's own function if reward.custom_reward_function names one, else the registered functions by data_source.

    reward.reward_kwargs are added to every call of a single reward; they win over the call's own arguments.
    Raises UserError for a part of reward.functions that does not exist or does not take its kwargs.
    """
    custom, kwargs = config.custom_reward_function, dict(config.reward_kwargs)
    if config.functions:
        modules: dict[str, ModuleType] = {}  # a file that has several parts is run once
        return Scorer(tuple(_part_caller(part, modules) for part in reward_parts(config.functions)))
    function: RewardFunction = default_compute_score
    if config.remote.url is not None:
        function = _remote(config)
    elif custom.path is not None:
        option = "reward.custom_reward_function"
        function = load_object(custom.path, custom.name, f"{option}.path", f"{option}.name")
        return Scorer((_caller(function, custom.style, kwargs=kwargs),))
    return Scorer((_caller(function, "sample", kwargs=kwargs),))


def asks_by_source(config: RewardConfig) -> bool:
    """Whether a row's data_source picks its reward, or one of its parts."""
    if config.functions:
        return any(part.is_by_source for part in reward_parts(config.functions))
    return config.custom_reward_function.path is None and config.remote.url is None


def _part_caller(part: RewardPart, modules: dict[str, ModuleType]) -> Caller:
    if part.path is not None:
        if part.path not in modules:
            modules[part.path] = load_module(part.path, f"{part.option}.path")
        function = object_of(modules[part.path], part.path, part.name, f"{part.option}.name")
    else:
        function = find_named_reward(part.reward) if part.reward else default_compute_score
    for problem in () if part.is_by_source else _kwargs_problems(function, part.kwargs, part.option):
        raise UserError(problem)
    return _caller(function, part.style, label=part.label, weight=part.weight, outcome=part.outcome, kwargs=part.kwargs)


def _caller(function: RewardFunction, style: str, **known: Any) -> Caller:
    if style == "sample":
        return Caller(function, is_async=_is_async(function), **known)
    return Caller(function, as_lists={"batch": lists_of_verl, "trl": lists_of_trl}[style], **known)


def _is_async(function: RewardFunction) -> bool:
    """Whether calls of it are awaited. Of the functions by data_source one that awaits makes all of them so, but not
    those that are there to be named, which most runs never ask."""
    if function is default_compute_score:
        return any(_is_async(each) for name, each in REWARDS.items() if not name.startswith(NAMED))
    return bool(getattr(function, "is_async", False)) or awaits(function)


def _remote(config: RewardConfig) -> RewardFunction:
    """A reward that a server computes: each sample, with its prompt, is posted as JSON; the answer is a score."""
    remote, option = config.remote, "reward.remote.api_key_env"
    key = remote.api_key_env
    endpoint = Endpoint(str(remote.url), max_retries=remote.max_retries, api_key_env=key, option=option)

    async def ask(*, prompt: list[dict[str, str]] | None, **sample: Any) -> Any:
        return await endpoint.post({**sample, "prompt": prompt})

    return ask


def _guarded(work: Callable[..., Any], *args: Any) -> RewardResult:
    try:
        return RewardResult(*read_score(_awaited(work(*args))))
    except Exception:  # the door to untrusted code, as above
        return RewardResult.failure(traceback.format_exc())


async def _all_of(awaitables: Iterable[Awaitable[Any]]) -> list[Any]:
    return await asyncio.gather(*awaitables)


def _awaited(returned: Any) -> Any:
    """Of an awaitable what it gives, in an event loop of its own; a function that does not await is called in none."""

    async def result() -> Any:
        return await returned

    return asyncio.run(result()) if inspect.isawaitable(returned) else returned


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


def _finite(value: Any, what: str) -> float:
    number = _number(value)
    if number is None or not math.isfinite(number):
        raise ValueError(f"{what} {_short(value)} ({type(value).__name__}); expected a finite number")
    return number


def _number(value: Any) -> float | None:
    """Numbers of Python, numpy and torch alike, without importing either; None for what is no number."""
    if isinstance(value, str | bytes | bytearray):  # float("3") would read these
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None

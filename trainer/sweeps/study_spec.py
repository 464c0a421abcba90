"""The specification of a sweep: its command line, an optional sweep file in YAML, and the parameters to search.

A word `key=value` is a setting or a parameter. A word `@name={"a": {"key": 1, "other": 2}, "b": {"key": 3}}`, which a
sweep file produces, is a parameter whose choices set several keys at once. SWEEPS.md describes both.
"""

import argparse
import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import NoReturn, TypeGuard

import yaml
from optuna.distributions import (
    CategoricalChoiceType,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from verl_lite.config import misread_numbers, parse_value, repeated_keys, split_choices, written_value
from verl_lite.errors import UserError

STOP = "stop"
"""Name of a file that asks runs to end: in the study's folder all runs, in a trial's folder the runs of the trial."""

_REMOVED = {
    **dict.fromkeys(("--command", "--options"), "a trial is one run of trainer.main_ppo; give its key=value words"),
    "--take": "the last value of a run always counts",
    "--again": "to repeat failed trials, choose another name for the study: --study NAME",
    "--skip-invalid": "remove the values that the command would refuse",
    "--share": "--slots N sets the number of simultaneous runs, --per-trial N the GPUs of each run",
    "--threads": "write OMP_NUM_THREADS=N before the command",
    "--wait": "start when a device is free, or choose others: CUDA_VISIBLE_DEVICES=0,1 before the command",
}
"""Removed options, and what to use instead."""
_ASHA_KEYS = ("grace_period", "reduction_factor", "brackets")

Value = str | int | float
"""Value of a parameter in a trial: the label of a choice, or a number from a range."""

MOST_LISTED = 100_000
"""Maximum number of combinations in a grid."""

_CALL = re.compile(r"([a-z_]+)\((.*)\)", re.DOTALL)


@dataclass(frozen=True)
class Parameter:
    """A parameter of the search.

    Attributes:
        name: Its key, or the name of its choices.
        distribution: Its values.
        settings: For choices that set several keys, the words of the command by label; empty for other parameters.
    """

    name: str
    distribution: CategoricalDistribution | FloatDistribution | IntDistribution
    settings: Mapping[str, list[str]] = field(default_factory=dict)

    def words(self, value: Value) -> list[str]:
        """Returns the words of the command for a value."""
        word = f"{self.name}={value}"
        return self.settings.get(str(value), [word])

    def values(self, *, ends: bool = False) -> list[CategoricalChoiceType] | None:
        """Returns all values in order, with `ends=True` only the two ends of a range; None for an infinite range."""
        distribution = self.distribution
        if isinstance(distribution, CategoricalDistribution):
            return list(distribution.choices)
        if ends:
            return [distribution.low, distribution.high]
        if isinstance(distribution, IntDistribution) and distribution.high - distribution.low < MOST_LISTED:
            return list(range(distribution.low, distribution.high + 1))
        return None


@dataclass(frozen=True)
class StudySpec:
    """The specification of a study, which never changes.

    Args:
        words: settings and parameters as `key=value`.
        files: text of each `--config` file by name.
        seeds: seeds of each trial's runs; None = one run with the seed of the settings.
        metric: name of the compared metric.
        mode: max or min, whichever is better.
    """

    words: list[str]
    files: dict[str, str]
    seeds: list[int] | None
    metric: str
    mode: str

    @cached_property
    def space(self) -> tuple[Parameter, ...]:
        """The parameters among the words.

        Raises:
            UserError: For an invalid word.
        """
        parameters = []
        for word in self.words:
            parameter = read_parameter(word)
            if parameter is not None:
                parameters.append(parameter)
        return tuple(parameters)

    def command(self, values: Mapping[str, Value], seed: int | None = None) -> list[str]:
        """Returns the arguments of `trainer.main_ppo` for a run."""
        words = []
        for file in self.files:
            words += ["--config", file]
        for word in self.words:
            if read_parameter(word) is None:
                words.append(word)
        for parameter in self.space:
            words += parameter.words(values[parameter.name])
        if seed is not None:
            words.append(f"trainer.seed={seed}")
        return words


@dataclass(frozen=True)
class Search:
    """How trials are chosen. It can change when a study continues.

    Args:
        kind: grid | random | optuna.
        trials: number of trials; None = the whole grid.
        asha: parameters of Ray Tune's pruner; None = no pruning.
    """

    kind: str = "grid"
    trials: int | None = None
    asha: dict[str, float] | None = None


@dataclass(frozen=True)
class StudyOptions:
    """The options of a sweep's command.

    Args:
        spec, search: None = those of the existing study.
        folder: folder of the study.
        slots: runs at the same time.
        per_trial: GPUs of each run.
        address: address of a Ray cluster; None = this machine.
        retries: how often a run is repeated after failures of its machine.
    """

    spec: StudySpec | None
    search: Search | None
    folder: Path
    slots: int | None = None
    per_trial: int = 1
    address: str | None = None
    retries: int = 3


def read_options(argv: Sequence[str]) -> StudyOptions:
    """Returns the options of a command line. Raises UserError for a command line that no sweep can use."""
    parser = _parser()
    # intermixed, so that words can stand before, between and after the options
    line = parser.parse_intermixed_args(list(argv))
    # the command line comes second and overrides the file
    if line.file is not None:
        words_of_file = list(_file_words(line.file))
        line = parser.parse_intermixed_args([*words_of_file, *argv])

    spec = None
    if line.words or line.config or line.metric:
        spec = _study_spec(line)
    if line.study is not None:
        study = line.study
    elif spec is not None:
        study = _usual_name(spec)
    else:
        raise UserError(
            "nothing to search: give KEY=A,B and --metric, or --file YAML, or --study NAME to continue a study"
        )
    # a name without a slash is one of runs/sweeps, unless such a folder exists here
    folder = Path(study).expanduser()
    if len(folder.parts) == 1 and not folder.is_dir():
        folder = Path("runs/sweeps") / folder

    search = None
    if spec is not None or line.search is not None:
        kind, trials = line.search or ("grid", None)
        search = Search(kind, trials, _read_pruner(line.pruner))
    return StudyOptions(
        spec=spec,
        search=search,
        folder=folder.absolute(),
        slots=line.slots,
        per_trial=line.per_trial,
        address=line.ray_address,
        retries=line.retries,
    )


def _usual_name(spec: StudySpec) -> str:
    """Returns the name of a study that the user does not name; one for each working directory and specification."""
    # the same words in another folder can name other files
    study = [os.getcwd(), asdict(spec)]
    described = json.dumps(study, sort_keys=True)
    digest = hashlib.sha256(described.encode()).hexdigest()
    return f"main_ppo-{digest[:8]}"


def combinations(space: Sequence[Parameter], *, corners: bool = False) -> Iterator[dict[str, Value]]:
    """Yields all combinations of the values of parameters. The last parameter varies fastest.

    Args:
        space: The parameters.
        corners: True to take only the two ends of a range.

    Raises:
        UserError: For an infinite range without `corners`, and for more than `MOST_LISTED` combinations.
    """
    names = [parameter.name for parameter in space]
    value_lists = []
    count = 1
    for parameter in space:
        values = parameter.values(ends=corners)
        if values is not None:
            value_lists.append(values)
            count *= len(values)

    is_infinite = len(value_lists) < len(space)
    # the corners of a large space are drawn one by one, as many as are checked
    is_too_large = not corners and count > MOST_LISTED
    if is_infinite or is_too_large:
        raise UserError(
            f"a grid needs lists of values with at most {MOST_LISTED:,} combinations: give choices (KEY=A,B,C), or "
            "search with --random N or --optuna N"
        )
    products = itertools.product(*value_lists)
    return (dict(zip(names, values, strict=True)) for values in products)


def read_parameter(word: str) -> Parameter | None:
    """Returns the parameter that a word describes, or None if the word has a single value.

    Raises:
        UserError: For an invalid range, and for an empty or repeated choice.
    """
    key, _, text = word.partition("=")
    if key.startswith("@"):
        return _parameter_of_settings(key[1:], json.loads(text))

    text = text.strip()
    call = _CALL.fullmatch(text)
    if call is not None:
        kind, ends = call.groups()
        distribution = _range(kind, ends.split(","), word)
        return Parameter(key, distribution)

    labels = split_choices(text)
    if len(labels) < 2:
        return None
    has_repetitions = len(set(labels)) < len(labels)
    if "" in labels or has_repetitions:
        raise UserError(f"{word}: a choice is empty or occurs twice; for repetitions use --seeds 3")
    return Parameter(key, CategoricalDistribution(labels))


def _parameter_of_settings(name: str, values_by_label: Mapping[str, Mapping[str, object]]) -> Parameter:
    """Returns the parameter of a word `@name={...}`, whose choices set several keys at once."""
    settings = {}
    for label, values_by_key in values_by_label.items():
        words = [f"{key}={as_text(value)}" for key, value in values_by_key.items()]
        settings[label] = words
    labels = list(settings)
    return Parameter(name, CategoricalDistribution(labels), settings)


def as_text(value: object) -> str:
    """Formats a value of a YAML file for the command line, where it stays one value: no comma in it divides choices."""
    if isinstance(value, list):
        text = f"[{_joined(value)}]"
        return text if parse_value(text) == value else written_value(value)
    if isinstance(value, str):
        is_one_value = split_choices(value) == [value] and not _CALL.fullmatch(value)
        return value if is_one_value else written_value(value)
    if value is None or isinstance(value, bool | dict):
        return written_value(value)
    return str(value)


def _as_written(value: object) -> str:
    """Formats a value of a YAML file that the command line reads as a user has written it, such as a range."""
    return value if isinstance(value, str) else as_text(value)


def _joined(values: Iterable[object]) -> str:
    return ",".join(map(as_text, values))


def _range(kind: str, ends: list[str], word: str) -> IntDistribution | FloatDistribution:
    """Returns the range of a parameter.

    Args:
        kind: log, uniform or int.
        ends: The two ends as text.
        word: The word of the parameter, such as `key=log(1e-7,1e-5)`, for messages.

    Raises:
        UserError: If the kind is unknown, or the ends are no range of this kind.
    """
    number_type = int if kind == "int" else float
    try:
        low, high = map(number_type, ends)
        is_range = kind in ("log", "uniform", "int") and low != high
        if not is_range or not math.isfinite(high - low):
            raise ValueError("expected a range with two different, finite numbers")
        if kind == "int":
            return IntDistribution(int(low), int(high))
        return FloatDistribution(low, high, log=kind == "log")
    # Optuna's message, for example about reversed ends or a logarithm of 0
    except ValueError as error:
        raise UserError(f"{word}: {error}; ranges are log(1e-7,1e-5), uniform(0,1), int(1,8)") from None


def read_files(names: Iterable[str]) -> dict[str, str]:
    """Returns the texts of files by name. Raises UserError for a file that cannot be read."""
    texts = {}
    for name in names:
        file = Path(name).expanduser()
        try:
            texts[name] = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--config, --file: cannot be read: {error}") from None
    return texts


def metric_by_step(steps: Mapping[int, Mapping[str, float]], metric: str) -> dict[int, float]:
    """Returns the metric's values by step. For a name with `*`, the mean of all matching metrics."""
    means = {}
    for step, metrics in steps.items():
        values = []
        for name, value in metrics.items():
            # equal names first: a name such as `val-core/[a]/...` is also a pattern, which does not match itself
            if name == metric or fnmatchcase(name, metric):
                values.append(value)
        if values:
            means[step] = fmean(values)
    return means


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raises UserError with the message of argparse, and for a removed option with what to use instead."""
        for option, replacement in _REMOVED.items():
            if re.search(rf"{option}(?![\w-])", message):
                raise UserError(f"{option} was removed: {replacement}")
        raise UserError(f"{message}; `python -m trainer.sweep --help` lists the options")


def _at_least(least: int) -> Callable[[str], int]:
    """Returns the type of an option with a whole number."""

    def read(text: str) -> int:
        # int alone also accepts 1_000 and digits of other scripts
        if not re.fullmatch("[0-9]+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {least}")
        return int(text)

    return read


def _count(kind: str) -> Callable[[str], tuple[str, int]]:
    """Returns the type of an option that chooses the kind of search by its number of trials."""
    read_trials = _at_least(1)
    return lambda text: (kind, read_trials(text))


def _parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line of `trainer.sweep`."""
    parser = _Parser(
        prog="python -m trainer.sweep",
        description="Many runs of trainer.main_ppo: grid, random or Optuna, seeds as replicas, on Ray Tune.",
        epilog="Guide: trainer/SWEEPS.md",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("words", nargs="*", metavar="key=value", help="key=a,b  key=log(1e-7,1e-5)  key=int(1,8)  key=value")
    add("--file", metavar="YAML", help="a sweep file; the command line overrides it")
    add("--config", action="append", default=[], metavar="YAML", help="configuration of each run")
    add("--random", dest="search", type=_count("random"), metavar="N", help="N random trials instead of the whole grid")
    add("--optuna", dest="search", type=_count("optuna"), metavar="N", help="N trials chosen by Optuna's TPE")
    add("--pruner", default="none", help="asha, or asha:grace_period=20,reduction_factor=3,brackets=1; default none")
    add("--metric", default="", help="metric to compare, such as val-core/gsm8k/acc/mean@1")
    add("--mode", choices=("max", "min"), default="max", help="whether higher or lower is better; default max")
    add("--seeds", metavar="N", help="N runs of each trial, with trainer.seed 1 to N; [1,5,9] lists the seeds")
    add("--study", help="folder of the study, or a name in runs/sweeps; alone, it continues an interrupted study")
    add("--slots", type=_at_least(1), metavar="N", help="simultaneous runs; default 1 on a CPU, else all that fit")
    add("--per-trial", type=_at_least(1), default=1, metavar="N", help="GPUs of each run; default 1")
    add("--ray-address", metavar="HOST:PORT", help="run on the machines of this Ray cluster")
    add("--retries", type=_at_least(0), default=3, metavar="N", help="retries of a run after machine faults; default 3")
    return parser


def _file_words(name: str) -> Iterator[str]:
    """Yields the content of a sweep file as words of a command line."""
    text = read_files([name])[name]
    try:
        problems = [*misread_numbers(text), *repeated_keys(text)]
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"--file {name}: is not valid YAML: {error}") from None
    if problems:
        raise UserError(f"--file {name}: {'; '.join(problems)}")
    if not isinstance(content, dict):
        raise UserError(f"--file {name}: expected a mapping with settings, space, metric and other options")

    for entry, value in content.items():
        if entry == "settings" and isinstance(value, dict):
            for key, setting in value.items():
                yield f"{key}={as_text(setting)}"
        elif entry == "space" and isinstance(value, dict):
            for key, choices in value.items():
                yield _word_of_space(key, choices)
        else:
            option = str(entry).replace("_", "-")
            # --config is repeated for several files; other lists, such as the seeds, are one value
            repetitions = [value]
            if entry == "config" and isinstance(value, list):
                repetitions = value
            for repetition in repetitions:
                yield f"--{option}={_as_written(repetition)}"


def _word_of_space(key: str, value: object) -> str:
    """Returns the word of a parameter in a sweep file: a list of choices, or choices that set several keys at once."""
    if isinstance(value, dict) and all(isinstance(settings, dict) for settings in value.values()):
        return f"@{key}={json.dumps(value)}"
    if isinstance(value, list):
        return f"{key}={_joined(value)}"
    return f"{key}={_as_written(value)}"


def _study_spec(line: argparse.Namespace) -> StudySpec:
    """Returns the specification that a parsed command line contains. Raises UserError for an invalid word or file."""
    words: dict[str, str] = {}
    for word in line.words:
        key, equals_sign, _ = word.partition("=")
        is_setting = bool(equals_sign) or word.startswith("~")
        if word.startswith("--") or not is_setting:
            raise UserError(f"{word!r} is not key=value; write it without spaces around the equals sign")
        # later words override earlier ones
        name = key.lstrip("+~@")
        words[name] = _select_choices(words.get(name, ""), word)

    return StudySpec(
        words=list(words.values()),
        # their texts, because a study does not continue with a file that has changed
        files=read_files(line.config),
        seeds=None if line.seeds is None else _read_seeds(line.seeds),
        metric=line.metric,
        mode=line.mode,
    )


def _read_seeds(text: str) -> list[int]:
    """Returns the seeds of --seeds, which is a number or a list of different numbers.

    Raises:
        UserError: For any other text.
    """
    value = parse_value(text)
    seeds: list[int] = []
    # `type`, because True is an instance of int
    if type(value) is int:
        seeds = list(range(1, value + 1))
    elif isinstance(value, list) and all(type(seed) is int for seed in value):
        seeds = value
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"--seeds {text}: expected a number (3 runs the seeds 1, 2, 3) or a list: [1,5,9]")
    return seeds


def _select_choices(before: str, word: str) -> str:
    """Returns the word that replaces an earlier one of the same name. `name=a,b` selects choices of a `@name` word."""
    if not before.startswith("@") or word.startswith("@"):
        return word
    # the settings of the choices, of which the command line names some
    name, _, settings_text = before.partition("=")
    settings = json.loads(settings_text)
    selected = {}
    unknown_labels = []
    for label in split_choices(word.partition("=")[2]):
        if label in settings:
            selected[label] = settings[label]
        else:
            unknown_labels.append(label)
    if unknown_labels:
        raise UserError(f"{word}: there is no {', '.join(unknown_labels)}; --file has {', '.join(settings)}")
    return f"{name}={json.dumps(selected)}"


def _read_pruner(text: str) -> dict[str, float] | None:
    """Returns the parameters of `--pruner`, or None for no pruning. Raises UserError for an invalid parameter."""
    name, _, options = text.partition(":")
    values: dict[str, float] = {}
    is_valid = name in ("none", "asha")
    for word in options.split(","):
        if not word:
            continue
        key, _, number = word.partition("=")
        value = parse_value(number)
        if _is_pruner_value(value, key):
            values[key] = value
        else:
            is_valid = False
    if not is_valid:
        raise UserError(
            f"--pruner {text}: expected none, or asha:KEY=NUMBER,... with KEY {', '.join(_ASHA_KEYS)}. "
            "reduction_factor is above 1; the others are whole numbers of at least 1"
        )
    return None if name == "none" else values


def _is_pruner_value(value: object, key: str) -> TypeGuard[float]:
    """Returns True if Tune's ASHA accepts the value of a parameter; its own check is an assertion."""
    if key not in _ASHA_KEYS or isinstance(value, bool):
        return False
    if key == "reduction_factor":
        return isinstance(value, int | float) and 1 < value < math.inf
    return isinstance(value, int) and value >= 1

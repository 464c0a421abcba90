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

from verl_lite.config import parse_value, split_choices
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
    """A parameter of the search. settings: words of the command by label, for choices that set several keys."""

    name: str
    distribution: CategoricalDistribution | FloatDistribution | IntDistribution
    settings: Mapping[str, list[str]] = field(default_factory=dict)

    def words(self, value: Value) -> list[str]:
        """Returns the words of the command for a value."""
        return self.settings.get(str(value), [f"{self.name}={value}"])

    def values(self, *, ends: bool = False) -> list[CategoricalChoiceType] | None:
        """Returns all values in order; None for an infinite range. ends: True = only the two ends of a range."""
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
        """The parameters. Raises UserError for an invalid word."""
        parameters = [read_parameter(word) for word in self.words]
        return tuple(parameter for parameter in parameters if parameter is not None)

    def command(self, values: Mapping[str, Value], seed: int | None = None) -> list[str]:
        """Returns the arguments of `trainer.main_ppo` for a run."""
        words = []
        for file in self.files:
            words += ["--config", file]
        words += [word for word in self.words if read_parameter(word) is None]
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
    """Parses a command line. Raises UserError."""
    parser = _parser()
    line = parser.parse_intermixed_args(list(argv))
    if line.file is not None:  # the command line comes second and overrides the file
        line = parser.parse_intermixed_args([*_file_words(line.file), *argv])
    spec = _study_spec(line) if line.words or line.config or line.metric else None
    if spec is None and line.study is None:
        raise UserError(
            "nothing to search: give KEY=A,B and --metric, or --file YAML, or --study NAME to continue a study"
        )
    folder = Path(_usual_name(spec) if line.study is None else line.study).expanduser()
    if len(folder.parts) == 1 and not folder.is_dir():
        folder = Path("runs/sweeps") / folder

    search = None
    if spec is not None or line.search is not None:
        kind, trials = line.search or ("grid", None)
        search = Search(kind, trials, _read_pruner(line.pruner))
    return StudyOptions(spec, search, folder.absolute(), line.slots, line.per_trial, line.ray_address, line.retries)


def _usual_name(spec: StudySpec | None) -> str:
    """Returns the name of a study in this folder whose name the user does not give; one for each specification."""
    described = json.dumps([os.getcwd(), spec and asdict(spec)], sort_keys=True)
    return f"main_ppo-{hashlib.sha256(described.encode()).hexdigest()[:8]}"


def combinations(space: Sequence[Parameter], *, corners: bool = False) -> Iterator[dict[str, Value]]:
    """Yields all combinations; the last parameter varies fastest. corners: True = only the ends of ranges.

    Raises UserError for a grid with an infinite range or with more than `MOST_LISTED` combinations.
    """
    names = [parameter.name for parameter in space]
    lists = []
    for parameter in space:
        values = parameter.values(ends=corners)
        if values is not None:
            lists.append(values)
    if len(lists) < len(space) or (not corners and math.prod(map(len, lists)) > MOST_LISTED):
        raise UserError(
            f"a grid needs lists of values with at most {MOST_LISTED:,} combinations: give choices (KEY=A,B,C), or "
            "search with --random N or --optuna N"
        )
    return (dict(zip(names, values, strict=True)) for values in itertools.product(*lists))


def read_parameter(word: str) -> Parameter | None:
    """Parses a word as a parameter; None if it has a single value. Raises UserError."""
    key, _, text = word.partition("=")
    if key.startswith("@"):
        settings = {}
        for label, values_by_key in json.loads(text).items():
            settings[label] = [f"{name}={as_text(value)}" for name, value in values_by_key.items()]
        return Parameter(key[1:], CategoricalDistribution(list(settings)), settings)

    call = _CALL.fullmatch(text.strip())
    if call is not None:
        return Parameter(key, _range(call[1], call[2].split(","), word))

    labels = split_choices(text.strip())
    if len(labels) < 2:
        return None
    if "" in labels or len(set(labels)) < len(labels):
        raise UserError(f"{word}: a choice is empty or occurs twice; for repetitions use --seeds 3")
    return Parameter(key, CategoricalDistribution(labels))


def as_text(value: object) -> str:
    """Formats a value of a YAML file for the command line."""
    if isinstance(value, list):
        return "[" + ",".join(as_text(item) for item in value) + "]"
    if value is None or isinstance(value, bool | dict):
        return json.dumps(value)
    return str(value)


def _range(kind: str, ends: list[str], word: str) -> IntDistribution | FloatDistribution:
    try:
        low, high = (int(end) if kind == "int" else float(end) for end in ends)
        if kind not in ("log", "uniform", "int") or not math.isfinite(high - low) or low == high:
            raise ValueError("expected a range with two different, finite numbers")
        if kind == "int":
            return IntDistribution(int(low), int(high))
        return FloatDistribution(low, high, log=kind == "log")
    except ValueError as error:  # Optuna's message, for example about reversed ends or a logarithm of 0
        raise UserError(f"{word}: {error}; ranges are log(1e-7,1e-5), uniform(0,1), int(1,8)") from None


def read_files(names: Iterable[str]) -> dict[str, str]:
    """Reads text files by name. Raises UserError."""
    try:
        return {name: Path(name).expanduser().read_text(encoding="utf-8") for name in names}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config, --file: cannot be read: {error}") from None


def metric_by_step(steps: Mapping[int, Mapping[str, float]], metric: str) -> dict[int, float]:
    """Returns the metric's values by step. For a name with `*`, the mean of all matching metrics."""
    means = {}
    for step, metrics in steps.items():
        values = [value for name, value in metrics.items() if name == metric or fnmatchcase(name, metric)]
        if values:
            means[step] = fmean(values)
    return means


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        removed = next((option for option in _REMOVED if re.search(rf"{option}(?![\w-])", message)), None)
        if removed is not None:
            raise UserError(f"{removed} was removed: {_REMOVED[removed]}")
        raise UserError(f"{message}; `python -m trainer.sweep --help` lists the options")


def _at_least(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not re.fullmatch("[0-9]+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {least}")
        return int(text)

    return read


def _count(kind: str) -> Callable[[str], tuple[str, int]]:
    return lambda text: (kind, _at_least(1)(text))


def _parser() -> argparse.ArgumentParser:
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
    try:
        content = yaml.safe_load(read_files([name])[name])
    except yaml.YAMLError as error:
        raise UserError(f"--file {name}: is not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"--file {name}: expected a mapping with settings, space, metric and other options")
    for entry, content_of_entry in content.items():
        if entry == "settings" and isinstance(content_of_entry, dict):
            yield from (f"{key}={as_text(value)}" for key, value in content_of_entry.items())
        elif entry == "space" and isinstance(content_of_entry, dict):
            yield from (_word_of_space(key, value) for key, value in content_of_entry.items())
        else:
            values = [content_of_entry]
            if isinstance(content_of_entry, list) and entry == "config":
                values = content_of_entry
            for value in values:
                yield f"--{str(entry).replace('_', '-')}={as_text(value)}"


def _word_of_space(key: str, value: object) -> str:
    """Returns the word of a parameter in a sweep file: a list of choices, or choices that set several keys at once."""
    if isinstance(value, dict) and all(isinstance(settings, dict) for settings in value.values()):
        return f"@{key}={json.dumps(value)}"
    if isinstance(value, list):
        return f"{key}={','.join(map(as_text, value))}"
    return f"{key}={as_text(value)}"


def _study_spec(line: argparse.Namespace) -> StudySpec:
    for word in line.words:
        if word.startswith("--") or ("=" not in word and not word.startswith("~")):
            raise UserError(f"{word!r} is not key=value; write it without spaces around the equals sign")
    words: dict[str, str] = {}
    for word in line.words:  # later words override earlier ones
        name = word.partition("=")[0].lstrip("+~@")
        words[name] = _select_choices(words.get(name, ""), word)
    seeds = None if line.seeds is None else _read_seeds(line.seeds)
    return StudySpec(list(words.values()), read_files(line.config), seeds, line.metric, line.mode)


def _read_seeds(text: str) -> list[int]:
    """Parses --seeds: a number, or a list of different numbers. Raises UserError."""
    value = parse_value(text)
    seeds: list[int] = []
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
    settings = json.loads(before.partition("=")[2])
    labels = split_choices(word.partition("=")[2])
    unknown = [label for label in labels if label not in settings]
    if unknown:
        raise UserError(f"{word}: there is no {', '.join(unknown)}; --file has {', '.join(settings)}")
    selected = {label: settings[label] for label in labels}
    return f"{before.partition('=')[0]}={json.dumps(selected)}"


def _read_pruner(text: str) -> dict[str, float] | None:
    """Parses the parameters of the pruner."""
    name, _, options = text.partition(":")
    values: dict[str, float] = {}
    is_valid = name in ("none", "asha")
    for word in filter(None, options.split(",")):
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

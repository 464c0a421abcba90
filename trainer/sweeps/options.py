"""What a sweep is asked: its command line and, under it, a sweep file in YAML (`SWEEPS.md` shows one)."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from trainer.sweeps.space import Space, as_text, read_parameter, read_space
from verl_lite.config import did_you_mean, parse_value
from verl_lite.errors import UserError

ASHA = ("grace_period", "reduction_factor", "brackets")
"""Parameters of `--pruner asha`, as Ray Tune names them."""

_GONE = {
    "ray": "is --ray-address HOST:PORT now",
    "devices": "is gone: name the GPUs with CUDA_VISIBLE_DEVICES=0,1 python -m trainer.sweep ...",
    "add": "is gone: say how many there shall be, such as --optuna 50 where it was --optuna 40",
    "storage": "is gone: a study is one folder with a log, on any file system; leave it out",
    "stale": "is gone: one sweep at a time works on a study; --ray-address gives it several machines",
}


@dataclass(frozen=True)
class Question:
    """What decides a study: the same for its whole life.

    Args:
        command, options: of the runs. files: `--config` of each. settings: words of each.
        seeds: of each trial's runs; None = one run with the seed that the settings have.
        metric, mode, take: what is compared; `last` or `best` value of a run.
    """

    command: str = "trainer.main_ppo"
    options: str | None = None
    files: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    space: Space = ()
    seeds: tuple[int, ...] | None = None
    metric: str = ""
    mode: str = "max"
    take: str = "last"


@dataclass(frozen=True)
class Search:
    """How trials are chosen, which may change while a study lives.

    Args:
        kind: grid | random | optuna. trials: None = the whole grid.
        asha: parameters of the pruner; None = nothing is pruned. seed: of the choice.
    """

    kind: str = "grid"
    trials: int | None = None
    asha: dict[str, float] | None = None
    seed: int = 0


@dataclass(frozen=True)
class Resources:
    """What runs may use, and how often one is tried again.

    Args:
        slots: runs at a time. per_trial: GPUs of a run. share: of a GPU, for a run. threads: of a process.
        address: of a Ray cluster on whose machines they run. wait: for devices that are all in use at the start.
        retries: of a run that the machine failed. grace_s: that a run has to end by itself.
    """

    slots: int | None = None
    per_trial: int = 1
    share: float = 1.0
    threads: int = 1
    address: str | None = None
    wait: bool = False
    retries: int = 3
    grace_s: float = 120.0

    def words(self) -> list[str]:
        """Of a command line that says the same."""
        words = []
        for entry in dataclasses.fields(self):
            name = {"address": "ray-address", "grace_s": "grace"}.get(entry.name, entry.name.replace("_", "-"))
            if (value := getattr(self, entry.name)) != entry.default:
                words += [f"--{name}"] if value is True else [f"--{name}", f"{value}"]
        return words


@dataclass(frozen=True)
class Options:
    """A sweep's command. question, search: None where the study says it. folder: None = named after the question.

    again: failed trials once more. skip_invalid: combinations that the checks refuse are left out.
    """

    question: Question | None
    search: Search | None
    resources: Resources
    folder: Path | None
    again: bool = False
    skip_invalid: bool = False


def study_folder(name: str) -> Path:
    """Where a study of that name, or at that path, is."""
    path = Path(name).expanduser()
    return (Path("runs/sweeps") / path if len(path.parts) == 1 and not path.is_dir() else path).absolute()


def read_options(argv: Sequence[str]) -> Options:
    """The options of a command line. Raises UserError."""
    parser = _parser()
    line = parser.parse_intermixed_args(list(argv))
    if line.file is not None:  # what the command line says comes second, and wins
        entries = _read_file(Path(line.file), parser)
        if line.random is not None or line.optuna is not None:
            entries = {name: value for name, value in entries.items() if name not in ("random", "optuna")}
        parser.set_defaults(**entries)
        line = parser.parse_intermixed_args(list(argv))
    asks = bool(line.words or line.file or line.config or line.metric)
    if not asks and line.study is None:
        raise UserError(
            "nothing to search: give keys with values (actor.optim.lr=1e-6,3e-6) and --metric, or --file sweep.yaml, "
            "or --study NAME to go on with one"
        )
    resources = Resources(
        *(line.slots, line.per_trial, line.share, line.threads),
        *(line.ray_address, line.wait, line.retries, line.grace),
    )
    if line.share < 1 and line.per_trial > 1:
        raise UserError(f"--share {line.share:g} with --per-trial {line.per_trial}: runs that share have one device")
    is_new = asks or line.random is not None or line.optuna is not None or line.pruner is not None
    return Options(
        question=_question(line) if asks else None,
        search=_search(line) if is_new else None,
        resources=resources,
        folder=None if line.study is None else study_folder(line.study),
        again=line.again,
        skip_invalid=line.skip_invalid,
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `python -m trainer.sweep --help` lists the options")


class _Gone(argparse.Action):
    def __call__(self, parser: Any, line: Any, values: Any, option: str | None = None) -> None:
        raise UserError(f"{option} {_GONE[self.dest]}")


def _number(kind: type, least: float, most: float = math.inf) -> Callable[[str], float]:
    def read(text: str) -> float:
        number: float = kind(text)
        if not least <= number <= most:
            raise ValueError
        return number

    read.__name__ = f"{'whole ' if kind is int else ''}number of at least {least:g}"
    return read


def _parser() -> argparse.ArgumentParser:
    found = _Parser(
        prog="python -m trainer.sweep",
        description="Many runs of a command over settings: grid, random or Optuna, seeds as replicas, on Ray Tune.",
        epilog="Guide: trainer/SWEEPS.md",
        allow_abbrev=False,
    )
    add = found.add_argument
    add("words", nargs="*", metavar="key=value", help="key=a,b  key=log(1e-7,1e-5)  key=int(1,8)  key=value")
    add("--file", metavar="YAML", help="a sweep file; the command line wins over it")
    add("--config", action="append", metavar="YAML", help="configuration of each run")
    add("--command", default="trainer.main_ppo", metavar="MODULE", help="what is run: a module, or FILE.py")
    add("--options", metavar="NAME", help="whose options it takes: ppo | sft | rm | reward_flow | none")
    add("--random", type=_number(int, 1), metavar="N", help="N trials at random, instead of the grid")
    add("--optuna", type=_number(int, 1), metavar="N", help="N trials chosen by Optuna's TPE")
    add("--pruner", metavar="asha", help="asha, or asha:grace_period=20,reduction_factor=3,brackets=1; default none")
    add("--metric", default="", help="what is compared, such as val-core/gsm8k/acc/mean@1")
    add("--mode", choices=("max", "min"), default="max", help="which is better; default max")
    add("--take", choices=("last", "best"), default="last", help="which value of a run counts; default last")
    add("--seeds", metavar="N", help="runs of each trial, with trainer.seed 1 to N; [1,5,9] names them")
    add("--study", help="folder of the study, or a name in runs/sweeps; with it alone an interrupted study goes on")
    add("--again", action="store_true", help="trials that failed are run once more")
    add("--skip-invalid", action="store_true", help="leave out combinations that the checks refuse")
    add("--slots", type=_number(int, 1), metavar="N", help="runs at a time; default 1 on a CPU, else all that fit")
    add("--per-trial", type=_number(int, 1), default=1, metavar="N", help="GPUs of each run; default 1")
    add("--share", type=_number(float, 0.01, 1), default=1.0, metavar="S", help="of a GPU for a run: 0.5 = two on each")
    add("--ray-address", metavar="HOST:PORT", help="runs on the machines of this Ray cluster")
    add("--wait", action="store_true", help="wait while all devices are in use by others")
    add("--threads", type=_number(int, 1), default=1, metavar="N", help="OMP_NUM_THREADS of a run; default 1")
    add("--retries", type=_number(int, 0), default=3, metavar="N", help="of a run that the machine failed; default 3")
    add("--grace", type=_number(float, 0), default=120.0, metavar="S", help="seconds that a run has to end by itself")
    add("--sampler-seed", type=_number(int, 0), default=0, metavar="N", help="of the choice of trials; default 0")
    for name in _GONE:
        add(f"--{name}", nargs="?", action=_Gone, help=argparse.SUPPRESS)
    found.set_defaults(settings={}, space={})
    return found


def _read_file(path: Path, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Entries of a sweep file; numbers as text, which the parser reads as it reads the command line's."""
    try:
        content = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--file {path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--file {path}: is no YAML: {error}") from None
    known = sorted(
        {"settings", "space"} | {action.dest for action in parser._actions} - {"help", "words", "file", *_GONE}
    )
    if not isinstance(content, dict):
        raise UserError(f"--file {path}: a mapping is expected, with {', '.join(known)}")
    for name, value in content.items():
        if name in _GONE:
            raise UserError(f"--file {path}: {name} {_GONE[name]}")
        if name not in known:
            raise UserError(f"--file {path}: {name}: there is no such entry{did_you_mean(str(name), known)}")
        if (name in ("settings", "space")) != isinstance(value, dict) and name != "pruner":
            raise UserError(
                f"--file {path}: {name}: {value!r} is {'no' if name in ('settings', 'space') else 'a'} mapping"
            )
        if name == "config":
            content[name] = value if isinstance(value, list) else [str(value)]
        elif not isinstance(value, dict | bool):
            content[name] = as_text(value)
    return content


def _question(line: argparse.Namespace) -> Question:
    space, fixed = read_space(line.space)
    settings = [f"{key}={as_text(value)}" for key, value in line.settings.items()] + fixed
    parameters = {parameter.name: parameter for parameter in space}
    seeds, given = line.seeds, set[str]()
    for word in line.words:
        key, equals, raw = word.partition("=")
        if not equals and not key.startswith("~"):
            raise UserError(f"{word!r} is not key=value, written without blanks around the equals sign")
        if key == "seeds":
            seeds = raw
            continue
        parameter, name = read_parameter(word), key.lstrip("+~")
        if parameter is not None and name in given:
            raise UserError(f"{name} gets several values twice on the command line: say it once")
        given |= set() if parameter is None else {name}
        parameters.pop(name, None)  # what comes later wins
        settings = [other for other in settings if other.partition("=")[0].lstrip("+~") != name]
        if parameter is None:
            settings.append(word)
        else:
            parameters[name] = parameter
    return Question(
        command=line.command,
        options=line.options,
        files=tuple(os.path.expanduser(name) for name in line.config or ()),
        settings=tuple(settings),
        space=tuple(parameters.values()),
        seeds=_seeds(seeds),
        metric=line.metric,
        mode=line.mode,
        take=line.take,
    )


def _seeds(given: str | None) -> tuple[int, ...] | None:
    value = None if given is None else parse_value(given)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return tuple(range(1, value + 1))
    if isinstance(value, list) and value and all(isinstance(seed, int) for seed in value):
        if len(set(value)) == len(value):
            return tuple(value)
    raise UserError(f"--seeds {given}: expected how many (3 runs the seeds 1, 2, 3), or which: [1,5,9]")


def _search(line: argparse.Namespace) -> Search:
    if line.random is not None and line.optuna is not None:
        raise UserError("--random and --optuna: choose one of them")
    kind = "random" if line.random is not None else "optuna" if line.optuna is not None else "grid"
    return Search(kind, line.random or line.optuna, _asha(line.pruner), line.sampler_seed)


def _asha(given: Any) -> dict[str, float] | None:
    """Parameters of the pruner, from a text, or a mapping of a sweep file."""
    if isinstance(given, dict):
        given = dict(given)
        name, values = str(given.pop("name", given)), given
    else:
        name, _, rest = str(given or "none").partition(":")
        values = {
            key: parse_value(value) for key, _, value in (word.partition("=") for word in rest.split(",") if word)
        }
    if name in ("hyperband", "median"):
        raise UserError(f"--pruner {name} is gone: asha ends trials as they go; asha:brackets=3 is hyperband so")
    if name not in ("none", "asha"):
        raise UserError(f"--pruner {name}: expected none or asha")
    for key, value in values.items():
        if key not in ASHA:
            meant = "; it is grace_period" if key == "min_resource" else did_you_mean(str(key), ASHA)
            raise UserError(f"--pruner {name}: {key} is none of its parameters, {', '.join(ASHA)}{meant}")
        if not isinstance(value, int | float) or isinstance(value, bool) or value < 1:
            raise UserError(f"--pruner {name}:{key}={value}: a number of at least 1 is expected")
    return None if name == "none" else dict(values)

"""What a sweep is asked: its command line and, under it, a sweep file.

    python -m trainer.sweep --config base.yaml actor.optim.lr=1e-6,3e-6 rollout.n=4,8 seeds=3 \
        --metric val-core/gsm8k/acc/mean@1

Takes arguments; gives `Options`. A sweep file says the same in YAML (`SWEEPS.md` shows one); the command line wins.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from trainer.sweeps.space import Space, as_word, read_parameter, read_space
from verl_lite.config import did_you_mean, parse_value
from verl_lite.errors import UserError

PRUNERS = ("none", "asha", "hyperband", "median")
_FROM_FILE = (
    *("command", "options", "config", "settings", "space", "seeds", "metric", "mode", "take", "random", "optuna"),
    *("pruner", "sampler_seed", "study", "devices", "slots", "per_trial", "share", "threads", "retries"),
)


@dataclass(frozen=True)
class Question:
    """What decides a study: the same for its whole life.

    command, options: of the runs. files: `--config` of each. settings: words of each. seeds: of each trial's runs; None
    = one run with the seed that the settings have. metric, mode, take: what is compared (`last` or `best` of a run).
    """

    command: str = "trainer.main_ppo"
    options: str | None = None
    files: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    space: Space = Space(())
    seeds: tuple[int, ...] | None = None
    metric: str = ""
    mode: str = "max"
    take: str = "last"


@dataclass(frozen=True)
class Plan:
    """How trials are chosen, which may change later. kind: grid | random | optuna. trials: None = the whole grid.

    pruner: its name, with parameters as Optuna has them. seed: of the choice.
    """

    kind: str = "grid"
    trials: int | None = None
    pruner: str = "none"
    pruner_arguments: dict[str, float] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Means:
    """What the runs may use here.

    devices: words of CUDA_VISIBLE_DEVICES; None = those that are visible. slots: runs at a time on a CPU. per_trial:
    GPUs of a run. share: of a GPU's memory, for a run. wait: for busy devices. threads: of a process. retries: of a
    run, at most. grace_s: that a run has to end by itself. ray: address of a cluster on whose machines they run.
    """

    devices: tuple[str, ...] | None = None
    slots: int | None = None
    per_trial: int = 1
    share: float = 1.0
    wait: bool = False
    threads: int = 1
    retries: int = 3
    grace_s: float = 120.0
    ray: str | None = None

    def words(self) -> list[str]:
        """Of a command line that says the same."""
        words = []
        for entry in dataclasses.fields(self):
            value = getattr(self, entry.name)
            if value == entry.default:
                continue
            words.append("--" + entry.name.removesuffix("_s").replace("_", "-"))
            if value is not True:
                words.append(
                    ",".join(value)
                    if isinstance(value, tuple)
                    else f"{value:g}"
                    if isinstance(value, float)
                    else str(value)
                )
        return words


@dataclass(frozen=True)
class Options:
    """A sweep's command. question: None where the study says it. plan: None = as the study has it. add: more trials.

    study: its folder; None = named after the question. again: run failed trials once more. skip_invalid: leave out
    combinations that the checks refuse. stale_s: a sweep elsewhere that is silent for so long is dead.
    """

    question: Question | None
    plan: Plan | None
    means: Means
    study: Path | None
    add: int = 0
    again: bool = False
    skip_invalid: bool = False
    storage: str = "auto"
    stale_s: float = 120.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; `python -m trainer.sweep --help` lists the options")


def parser() -> argparse.ArgumentParser:
    """The options of the command."""
    found = _Parser(
        prog="python -m trainer.sweep",
        description="Many runs of a command over settings: grid, random or Optuna, on devices that others use too.",
        epilog="Guide: trainer/SWEEPS.md",
        allow_abbrev=False,
    )
    add = found.add_argument
    add("words", nargs="*", metavar="key=value", help="key=a,b  key=log(1e-7,1e-5)  key=int(1,8)  key=value  seeds=3")
    add("--file", metavar="YAML", help="a sweep file; the command line wins over it")
    add("--config", action="append", metavar="YAML", help="configuration of each run")
    add("--command", metavar="MODULE", help="what is run; default trainer.main_ppo. A module, or FILE.py")
    add("--options", metavar="NAME", help="whose options it takes: ppo | sft | rm | reward_flow | none")
    add("--random", type=int, metavar="N", help="N trials at random, instead of the grid")
    add("--optuna", type=int, metavar="N", help="N trials chosen by Optuna's TPE")
    add("--pruner", metavar="NAME", help="asha | hyperband | median | none; asha:reduction_factor=3,min_resource=10")
    add("--metric", help="what is compared, such as val-core/gsm8k/acc/mean@1")
    add("--mode", help="max | min; default max")
    add("--take", help="which value of a run counts: last | best; default last")
    add("--study", help="folder of the study, or a name in runs/sweeps; with it alone an interrupted study goes on")
    add("--add", type=int, default=0, metavar="N", help="N trials more than the study has")
    add("--again", action="store_true", help="trials that failed are run once more")
    add("--skip-invalid", action="store_true", help="leave out combinations that the checks refuse")
    add("--devices", metavar="0,1", help="GPUs that may be used; default those of CUDA_VISIBLE_DEVICES")
    add("--slots", type=int, metavar="N", help="runs at a time where there is no GPU, or with trainer.device=cpu")
    add("--per-trial", type=int, metavar="N", help="GPUs of each run; default 1")
    add("--share", type=float, metavar="S", help="share of a GPU's memory for a run: 0.5 = two runs on each")
    add("--ray", metavar="HOST:PORT", help="runs on the machines of this Ray cluster; --slots says how many at most")
    add("--wait", action="store_true", help="wait while all devices are in use by others")
    add("--threads", type=int, metavar="N", help="OMP_NUM_THREADS of a run; default 1")
    add("--retries", type=int, metavar="N", help="of a run that failed, by cause, at most; default 3")
    add("--grace", type=float, default=120.0, metavar="S", help="seconds that a run has to end by itself")
    add("--sampler-seed", type=int, metavar="N", help="of the choice of trials; default 0")
    add("--storage", default="auto", choices=("auto", "sqlite", "journal"), help="auto = by the file system")
    add("--stale", type=float, default=120.0, metavar="S", help="another sweep of the study, silent so long, is dead")
    return found


def read_options(argv: Sequence[str]) -> Options:
    """The options of a command line. Raises UserError."""
    line = parser().parse_intermixed_args(list(argv))
    asks = bool(line.words or line.file or line.config or line.command or line.metric)
    file = _read_file(Path(line.file)) if line.file else {}
    for name in ("add", "grace", "stale"):
        if getattr(line, name) < 0:
            raise UserError(f"--{name} {getattr(line, name)}: expected 0 or more")
    if line.random is not None or line.optuna is not None:
        file = {name: value for name, value in file.items() if name not in ("random", "optuna")}
    for name in _FROM_FILE:
        if getattr(line, name, None) is None:
            setattr(line, name, file.get(name))
    if not asks and line.study is None:
        raise UserError(
            "nothing to search: give keys with values (actor.optim.lr=1e-6,3e-6) and --metric, or --file sweep.yaml, "
            "or --study NAME to go on with one"
        )
    return Options(
        question=_question(line) if asks else None,
        plan=_plan(line, asks),
        means=_means(line),
        study=None if line.study is None else study_folder(str(line.study)),
        add=line.add,
        again=line.again,
        skip_invalid=line.skip_invalid,
        storage=line.storage,
        stale_s=line.stale,
    )


def study_folder(name: str) -> Path:
    """Where a study of that name, or at that path, is."""
    path = Path(name).expanduser()
    return (Path("runs/sweeps") / path if len(path.parts) == 1 and not path.is_dir() else path).absolute()


def _read_file(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--file {path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--file {path}: is no YAML: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"--file {path}: a mapping is expected, with {', '.join(_FROM_FILE)}")
    for name in content:
        if name not in _FROM_FILE:
            known = did_you_mean(str(name), _FROM_FILE) or f"; known: {', '.join(_FROM_FILE)}"
            raise UserError(f"--file {path}: {name}: there is no such entry{known}")
    return content


def _question(line: argparse.Namespace) -> Question:
    space, settings = read_space(_mapping(line, "space"))
    settings = [f"{key}={as_word(value)}" for key, value in _mapping(line, "settings").items()] + settings
    parameters = {parameter.name: parameter for parameter in space.parameters}
    seeds = line.seeds
    given: set[str] = set()
    for word in line.words:
        key, equals, raw = word.partition("=")
        if not equals and not key.startswith("~"):
            raise UserError(f"{word!r} is not key=value, written without blanks around the equals sign")
        if key == "seeds":
            seeds = parse_value(raw)
            continue
        parameter, name = read_parameter(word), key.lstrip("+~")
        if parameter is not None and name in given:
            raise UserError(f"{name} gets several values twice on the command line: say it once")
        parameters.pop(name, None)  # what comes later wins
        settings = [other for other in settings if other.partition("=")[0].lstrip("+~") != name]
        if parameter is None:
            settings.append(word)
        else:
            parameters[name] = parameter
            given.add(name)
    files = [line.config] if isinstance(line.config, str) else line.config or ()
    if not isinstance(files, list | tuple) or not all(isinstance(name, str) for name in files):
        raise UserError(f"config: {files!r} is no file name, nor a list of them")
    usual = Question()
    return Question(
        command=str(line.command or usual.command),
        options=line.options,
        files=tuple(str(Path(name).expanduser()) for name in files),
        settings=tuple(settings),
        space=Space(tuple(parameters.values())),
        seeds=_seeds(seeds),
        metric=str(line.metric or ""),
        mode=_one_of("mode", line.mode or usual.mode, ("max", "min")),
        take=_one_of("take", line.take or usual.take, ("last", "best")),
    )


def _mapping(line: argparse.Namespace, name: str) -> dict[str, Any]:
    value = getattr(line, name) or {}
    if not isinstance(value, dict):
        raise UserError(f"{name}: {value!r} is no mapping of keys to values")
    return value


def _seeds(given: Any) -> tuple[int, ...] | None:
    if given is None:
        return None
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return tuple(range(1, given + 1))
    if isinstance(given, list) and given and all(isinstance(seed, int) for seed in given):
        if len(set(given)) == len(given):
            return tuple(given)
    raise UserError(f"seeds={given}: expected how many (seeds=3 runs the seeds 1, 2, 3), or which: seeds=[1,5,9]")


def _one_of(name: str, value: Any, known: Sequence[str]) -> str:
    if value not in known:
        raise UserError(f"--{name} {value}: expected {' or '.join(known)}")
    return str(value)


def _plan(line: argparse.Namespace, asks: bool) -> Plan | None:
    chosen = [(kind, getattr(line, kind)) for kind in ("random", "optuna") if getattr(line, kind) is not None]
    if len(chosen) > 1:
        raise UserError("random and optuna: choose one of them")
    if not asks and not chosen and line.pruner is None:
        return None
    kind, trials = (chosen[0][0], _whole(*chosen[0], 1)) if chosen else ("grid", None)
    name, arguments = _pruner(line.pruner or "none")
    return Plan(kind, trials, name, arguments, _whole("sampler-seed", line.sampler_seed or 0, 0))


def _whole(name: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UserError(f"--{name} {value}: a whole number of at least {least} is expected")
    return value


def _pruner(given: Any) -> tuple[str, dict[str, float]]:
    if isinstance(given, dict):
        arguments = {str(name): value for name, value in given.items() if name != "name"}
        given = given.get("name", f"{given}, without a name")
    else:
        given, _, rest = str(given).partition(":")
        words = [word.partition("=") for word in rest.split(",") if word]
        arguments = {name: parse_value(value) for name, _, value in words}
    _one_of("pruner", given, PRUNERS)
    for name, value in arguments.items():
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise UserError(f"--pruner {given}:{name}={value}: a number is expected")
    return str(given), arguments


def _means(line: argparse.Namespace) -> Means:
    found: dict[str, Any] = {"wait": line.wait, "grace_s": line.grace, "ray": line.ray}
    for name, least in (("slots", 1), ("per_trial", 1), ("threads", 1), ("retries", 0)):
        if getattr(line, name) is not None:
            found[name] = _whole(name.replace("_", "-"), getattr(line, name), least)
    if line.devices is not None:
        if not isinstance(line.devices, list | str | int):
            raise UserError(f"devices: {line.devices!r} is no list of devices, such as 0,1")
        words = line.devices if isinstance(line.devices, list) else str(line.devices).split(",")
        found["devices"] = tuple(str(word).strip() for word in words)
    if line.share is not None:
        if not isinstance(line.share, int | float) or not 0 < line.share <= 1:
            raise UserError(f"--share {line.share}: a share of a device's memory is above 0 and at most 1, such as 0.5")
        found["share"] = float(line.share)
    means = Means(**found)
    if means.share < 1 and means.per_trial > 1:
        raise UserError(f"--share {means.share:g} with --per-trial {means.per_trial}: runs that share have one device")
    if means.ray and (means.share < 1 or means.devices is not None):
        given = "--share" if means.share < 1 else "--devices"
        raise UserError(f"--ray with {given}: Ray chooses the devices, whole ones; leave {given} out")
    return means

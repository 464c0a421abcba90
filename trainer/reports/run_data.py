"""A run folder read for people: its numbers by step, its configuration with the source of each value, and its state.

Takes the folder of a run that is alive, was killed or has ended (any command that leaves metrics.jsonl); gives a `Run`.
Reads files only: nothing is locked, no model is loaded, and the run does not notice. Samples: `run_samples`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from trainer.tracking import read_metrics
from verl_lite.errors import UserError

METRICS, CONFIG, IN_USE, PICTURE = "metrics.jsonl", "config.yaml", "in_use", "curve.png"

Points = list[tuple[int, float]]
Steps = Mapping[int, Mapping[str, float]]

_LINE = re.compile(r"(?P<indent> *)(?P<key>[^\s#:][^:]*):(?: (?P<rest>.*))?")
_SOURCE = " # "
_RUNS_NAMED = 5
_LOG_SHOWN = 3000


@dataclass(frozen=True)
class ConfigValue:
    """One option as the run used it. value: as in the file. source: `default`, `command line`, a recipe or file."""

    value: str
    source: str

    @property
    def is_default(self) -> bool:
        return self.source.startswith("default")


@dataclass(frozen=True)
class Run:
    """What a run folder holds. modified: when its numbers were last written, in seconds since the epoch; total_steps:
    how many there are to be, None where the configuration does not say; notes: those of the configuration."""

    folder: Path
    name: str
    steps: Steps
    config: Mapping[str, ConfigValue] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    total_steps: int | None = None
    is_running: bool = False
    modified: float = 0.0

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    @property
    def state(self) -> str:
        """`running`, `finished`, or `stopped`: ended before its last step, by its user or by a failure; `not running`
        where its last step is not known."""
        if self.is_running:
            return "running"
        if self.total_steps is not None and self.last_step >= self.total_steps:
            return "finished"
        drawn = self.folder / PICTURE  # the last thing that a run leaves
        if self.total_steps is not None:
            return "stopped"
        return "finished" if drawn.exists() and drawn.stat().st_mtime >= self.modified else "not running"

    @property
    def names(self) -> list[str]:
        """Of all metrics, in the order in which they first appear."""
        return list(dict.fromkeys(name for metrics in self.steps.values() for name in metrics))

    def series(self, name: str) -> Points:
        """(step, value) where the metric was logged, in the order of steps."""
        return [(step, metrics[name]) for step, metrics in self.steps.items() if name in metrics]

    def all_series(self) -> dict[str, Points]:
        """The series of all metrics."""
        found: dict[str, Points] = {}
        for step, metrics in self.steps.items():
            for name, value in metrics.items():
                found.setdefault(name, []).append((step, value))
        return found

    def seconds(self) -> float:
        """Time of all steps, validation and saving included, as the steps logged it."""
        parts = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
        return sum(metrics.get(name, 0.0) for metrics in self.steps.values() for name in parts)


def read_run(folder: Path) -> Run:
    """Reads a run folder. Raises UserError where there are no metrics, naming the runs below the folder if any."""
    folder = Path(folder).expanduser().absolute()
    source = folder / METRICS
    if not source.is_file():
        raise UserError(_not_a_run(folder))
    metrics = read_metrics(source)
    steps = {step: {name: float(x) for name, x in metrics[step].items() if _is_number(x)} for step in sorted(metrics)}
    config, notes = read_config(folder / CONFIG)
    return Run(
        folder,
        folder.name,
        steps,
        config,
        notes,
        total_steps=_whole(config.get("trainer.total_training_steps")),
        is_running=_is_held(folder / IN_USE),
        modified=source.stat().st_mtime,
    )


@dataclass(frozen=True)
class Failure:
    """The error that ended a run. message: its last line. log: as it was printed. replay: the command that runs the
    failed step again."""

    step: int
    message: str
    log: str
    replay: str


def read_failure(run: Run) -> Failure | None:
    """What the crash dump says; None where there is none, or the run has gone on since."""
    files = sorted(run.folder.glob("crash/step_*/error.txt"), key=lambda file: file.stat().st_mtime)
    if not files or run.is_running or files[-1].stat().st_mtime < run.modified - 1.0:
        return None
    text = files[-1].read_text(encoding="utf-8", errors="replace").strip()
    lines = [line for line in text.splitlines() if line.strip() and not line[0].isspace()]
    message = next(
        (line for line in reversed(lines) if re.match(r"[\w.]+(Error|Exception|Interrupt|:)", line)), text[-200:]
    )
    folder = files[-1].parent
    replay = shlex.join(["python", "-m", "trainer.replay", str(folder)])
    return Failure(int(folder.name.removeprefix("step_")), message, text[-_LOG_SHOWN:], replay)


def read_config(path: Path) -> tuple[dict[str, ConfigValue], tuple[str, ...]]:
    """The options of a saved configuration (`config.save_config`) by dotted key, and its notes; nothing
    of both where the file is missing."""
    if not path.is_file():
        return {}, ()
    lines = path.read_text(encoding="utf-8").splitlines()
    return dict(_options(lines)), tuple(line.removeprefix("# ") for line in lines if line.startswith("# "))


def run_titles(runs: list[Run]) -> list[str]:
    """What to call the runs: the name of the folder, with as many folders above as tell them apart."""
    depth = 1
    while True:
        titles = ["/".join(run.folder.parts[-depth:]) for run in runs]
        if len(set(titles)) == len(titles) or depth > max(len(run.folder.parts) for run in runs):
            return titles
        depth += 1


def _options(lines: list[str]) -> Iterator[tuple[str, ConfigValue]]:
    path: list[str] = []
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        del path[len(match["indent"]) // 2 :]
        path.append(match["key"])
        if match["rest"] is not None:
            value, _, source = (
                match["rest"].rpartition(_SOURCE) if _SOURCE in match["rest"] else (match["rest"], "", "")
            )
            yield ".".join(path), ConfigValue(value.strip(), source.strip())


def _whole(value: ConfigValue | None) -> int | None:
    return int(value.value) if value is not None and value.value.isdigit() else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def _is_held(path: Path) -> bool:
    """Whether the process that wrote its name into the folder still is on this machine; a later one may have its
    number. The lock is not asked: that would take it for a moment."""
    try:
        process = psutil.Process(int(path.read_text(encoding="utf-8").split()[1]))
        return process.create_time() <= path.stat().st_mtime + 1.0
    except (OSError, ValueError, IndexError, psutil.Error):
        return False


def _not_a_run(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder}: there is no such folder; give the folder of a run"
    found = sorted(path.parent for path in folder.glob(f"*/**/{METRICS}"))
    if found:
        named = "\n".join(f"  {path}" for path in found[:_RUNS_NAMED])
        more = f"\n  and {len(found) - _RUNS_NAMED} more" if len(found) > _RUNS_NAMED else ""
        return f"{folder}: no {METRICS} in it; these folders below it hold one:\n{named}{more}"
    return f"{folder}: no {METRICS} in it. It is no run folder, or the run has not finished a step"

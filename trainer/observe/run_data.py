"""Reads a run folder: metrics by step, the configuration with the source of each value, and the run's state.

The run may be active, killed or finished, of any command that writes metrics.jsonl. This module only reads files: it
takes no lock, loads no model, and does not disturb the run. `recorded_answers.py` reads the run's samples.
"""

import contextlib
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from trainer.observe.final_report import read_early_end
from trainer.observe.tracking import METRICS, read_metrics
from verl_lite.errors import UserError

Point = tuple[int, float]
"""A step, and the value of a metric."""
Points = list[Point]
Steps = Mapping[int, Mapping[str, float]]

STAGES = (
    "gen",
    "reward",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
)
"""The stages of a training step, in order."""
OUTSIDE = ("testing", "save_checkpoint")
"""Stages that timing_s/step does not include."""
# the source stands after the last #, because a value can contain others
_OPTION = re.compile(r"(?P<indent> *)(?P<key>[^\s#:][^:]*):(?: (?P<value>.*?)(?: +# (?P<source>[^#]*))?)?")


@dataclass(frozen=True)
class ConfigValue:
    """The value of one option in a run.

    Attributes:
        value: Text in the file.
        source: `default`, `command line`, or the recipe or file that sets the option.
    """

    value: str
    source: str


@dataclass(frozen=True)
class RecordedRun:
    """The contents of a run folder.

    Attributes:
        folder: The run folder.
        steps: Metrics by step, in order of steps.
        config: The options of the run by dotted key.
        notes: Notes in the saved configuration.
        total_steps: Number of training steps, or None if it is not configured.
        is_running: True if the process of the run still exists.
        modified: Time of the last metrics, in seconds since the epoch.
        early_end: Step after which a callback ended the run, or None.
    """

    folder: Path
    steps: Steps
    config: Mapping[str, ConfigValue] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    total_steps: int | None = None
    is_running: bool = False
    modified: float = 0.0
    early_end: int | None = None

    @property
    def last_step(self) -> int:
        return max(self.steps, default=0)

    @property
    def state(self) -> str:
        """`running`, `finished`, `ended early` (by a callback, such as early stopping), `stopped` (by the user or a
        failure), or `not running` if total_steps is unknown."""
        if self.is_running:
            return "running"
        # after a later step, the run has continued since
        if self.early_end is not None and self.last_step == self.early_end:
            return "ended early"
        if self.total_steps is None:
            return "not running"
        return "finished" if self.last_step >= self.total_steps else "stopped"

    def series(self) -> dict[str, Points]:
        """Returns the (step, value) points of all metrics, in order of first appearance."""
        points_by_metric: dict[str, Points] = {}
        for step, metrics in self.steps.items():
            for name, value in metrics.items():
                points = points_by_metric.setdefault(name, [])
                points.append((step, value))
        return points_by_metric

    def seconds(self) -> float:
        """Returns the logged time of all steps in seconds, including validation and saving."""
        times = []
        for metrics in self.steps.values():
            for stage in ("step", *OUTSIDE):
                times.append(metrics.get(f"timing_s/{stage}", 0.0))
        return sum(times)


def read_run(folder: Path) -> RecordedRun:
    """Reads a run folder.

    Raises:
        UserError: If the folder has no metrics. The message names runs below the folder.
    """
    # resolved, because the parts of the path are the run's title
    folder = Path(folder).expanduser().resolve()
    metrics_file = folder / METRICS
    try:
        has_metrics = metrics_file.is_file()
        if has_metrics:
            metrics_file.open().close()
    except PermissionError as error:
        raise UserError(
            f"{folder}: you may not read this run ({error.strerror}: {error.filename}). Only its user can open a run "
            "folder, unless the run is started with trainer.umask=027 (the group) or 022 (everybody); for an existing "
            f"one, its user can execute: chmod -R g+rX {shlex.quote(str(folder))}"
        ) from None
    if not has_metrics:
        runs_below = _runs_below(folder)
        message = f"{folder}: no {METRICS} in it"
        if runs_below:
            message += "; these subfolders have one:"
        for run_folder in runs_below[:5]:
            message += f"\n  {run_folder}"
        raise UserError(message)

    config, notes = read_config(folder / "config.yaml")
    total_steps = None
    total_steps_option = config.get("trainer.total_training_steps")
    if total_steps_option is not None and total_steps_option.value.isdecimal():
        total_steps = int(total_steps_option.value)

    return RecordedRun(
        folder=folder,
        steps=read_metrics(metrics_file),
        config=config,
        notes=notes,
        total_steps=total_steps,
        is_running=_is_held(folder / "in_use"),
        modified=metrics_file.stat().st_mtime,
        early_end=read_early_end(folder),
    )


def _runs_below(folder: Path) -> list[Path]:
    """Returns the runs at most three levels below a folder, which may be a home folder with millions of files."""
    runs: list[Path] = []
    for levels in ("*", "*/*", "*/*/*"):
        # such as a folder of another user
        with contextlib.suppress(OSError):
            runs += [path.parent for path in folder.glob(f"{levels}/{METRICS}")]
    return sorted(runs)


def read_config(path: Path) -> tuple[dict[str, ConfigValue], tuple[str, ...]]:
    """Returns the options of a saved configuration (`config.save_config`) by dotted key, and its notes. Both are empty
    if the file is missing."""
    if not path.is_file():
        return {}, ()

    options: dict[str, ConfigValue] = {}
    notes = []
    keys_above: list[str] = []
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        # the comments at the beginning of a line are the loader's notes
        if line.startswith("# "):
            notes.append(line.removeprefix("# "))
            continue
        match = _OPTION.fullmatch(line)
        if match is None:
            continue

        # two spaces of indentation for each level; a key ends the deeper levels of the lines before it
        depth = len(match["indent"]) // 2
        keys_above[depth:] = [match["key"]]
        # a line without value is the name of a section
        if match["value"] is not None:
            key = ".".join(keys_above)
            value = match["value"].strip()
            source = (match["source"] or "").strip()
            options[key] = ConfigValue(value, source)
    return options, tuple(notes)


def run_titles(runs: Sequence[RecordedRun]) -> list[str]:
    """Returns a title for each run: its folder name, with as many parent folders as needed to distinguish the runs.

    Folders of a sweep's runs are named after their seeds, so their titles always include the number of the trial.
    """
    folders = {run.folder for run in runs}
    depth = 1
    for folder in folders:
        sweep_dir = folder.parent.parent.parent
        if (sweep_dir / "study.json").is_file():
            depth = 2

    # ends at the latest with the complete paths, which differ
    while True:
        titles = ["/".join(run.folder.parts[-depth:]) for run in runs]
        if len(set(titles)) == len(folders):
            return titles
        depth += 1


def stage_seconds(steps: Steps, most: int) -> tuple[list[float], dict[str, list[float]]]:
    """Returns the time of the steps by stage, for a bar chart.

    Args:
        steps: Metrics by step. Steps without a time are left out.
        most: Maximum number of bars. If there are more steps, each bar is a mean over adjacent steps.

    Returns:
        The positions of the bars, and the seconds at each position for each stage and for `other`. Stages with a
        negligible time are left out.
    """
    timed_steps = {}
    for step, metrics in steps.items():
        if "timing_s/step" in metrics:
            timed_steps[step] = metrics
    if not timed_steps:
        return [], {}

    step_seconds = _timings("step", timed_steps)
    measured_seconds = np.zeros(len(timed_steps))
    seconds_by_stage = {}
    for stage in _timed_stages(timed_steps):
        seconds = _timings(stage, timed_steps)
        seconds_by_stage[stage] = seconds
        if stage not in OUTSIDE:
            measured_seconds += seconds
    seconds_by_stage["other"] = (step_seconds - measured_seconds).clip(min=0.0)

    bar_count = min(most, len(timed_steps))
    step_numbers = np.array(list(timed_steps), dtype=float)
    positions = _means_of_parts(step_numbers, bar_count)
    bars = {}
    for stage, seconds in seconds_by_stage.items():
        if seconds.sum() > 0.005 * step_seconds.sum():
            bars[stage] = _means_of_parts(seconds, bar_count)
    return positions, bars


def _timings(stage: str, steps: Steps) -> np.ndarray:
    """Returns the seconds of a stage in each step, 0 if the step does not have it."""
    seconds = []
    for metrics in steps.values():
        seconds.append(metrics.get(f"timing_s/{stage}", 0.0))
    return np.array(seconds)


def _timed_stages(steps: Steps) -> list[str]:
    """Returns the stages whose time was logged: those of `STAGES` in their order, then the others by name."""
    stages: set[str] = set()
    for metrics in steps.values():
        for name in metrics:
            if "timing_s/" in name:
                stages.add(name.removeprefix("timing_s/"))
    stages.discard("step")

    known_stages = [stage for stage in STAGES if stage in stages]
    other_stages = sorted(stages.difference(STAGES))
    return known_stages + other_stages


def _means_of_parts(values: np.ndarray, count: int) -> list[float]:
    """Returns the means of `count` adjacent parts of almost equal length."""
    means = []
    for part in np.array_split(values, count):
        means.append(float(part.mean()))
    return means


def _is_held(path: Path) -> bool:
    """Returns True if the process recorded in the lock file still exists on this machine.

    The lock itself is not tested, because that would take it for a moment.
    """
    try:
        owner = path.read_text(encoding="utf-8").split()
        process = psutil.Process(int(owner[1]))
        # a process that started after the file was written only reuses the id
        return process.create_time() <= path.stat().st_mtime + 1.0
    except (OSError, ValueError, IndexError, psutil.Error):
        return False

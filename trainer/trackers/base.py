"""What a tracker is, what it may know of a run, and which there are.

`@register_tracker(name)` adds one; a factory takes the `TrackedRun` and gives a `Tracker`. Those of other packages are
adapters in this folder, each in the file of its name.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from trainer.console import Console
from trainer.evaluate.sample import Sample
from verl_lite.config import RunOptions
from verl_lite.errors import UserError
from verl_lite.registry import Registry

IMMEDIATE = ("console", "jsonl")
"""Trackers that work in the driver's thread: they need nothing but this machine."""


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker may know of the run. options: the whole configuration, nested."""

    run_dir: Path
    project: str
    name: str
    options: Mapping[str, Any]
    console: Console

    @classmethod
    def of(cls, run_dir: Path, config: RunOptions, console: Console) -> TrackedRun:
        """The run of a configuration."""
        trainer = config.trainer
        options = dataclasses.asdict(config)
        return cls(Path(run_dir), trainer.project_name, trainer.experiment_name or Path(run_dir).name, options, console)

    @classmethod
    def saved(cls, run_dir: Path, console: Console) -> TrackedRun:
        """The run of a folder. Raises UserError if there is no config.yaml in it."""
        file = run_dir / "config.yaml"
        if not file.is_file():
            raise UserError(f"{run_dir}: expected the folder of a run, with config.yaml in it")
        options = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        trainer = options.get("trainer", {})
        return cls(
            run_dir,
            trainer.get("project_name") or "verl_lite",
            trainer.get("experiment_name") or run_dir.name,
            options,
            console,
        )

    def kept_id(self, tracker: str) -> str | None:
        """The id under which the tracker knows the run, where it was started before."""
        file = self._id_file(tracker)
        return file.read_text(encoding="utf-8").strip() or None if file.is_file() else None

    def keep_id(self, tracker: str, run_id: str | None = None) -> str:
        """Keeps the id in the run folder, {tracker}_id.txt, so that a resumed run continues there. None makes one."""
        run_id = run_id or uuid.uuid4().hex[:8]
        self._id_file(tracker).write_text(run_id, encoding="utf-8")
        return run_id

    def _id_file(self, tracker: str) -> Path:
        return self.run_dir / f"{tracker}_id.txt"


class Tracker(Protocol):
    """A place for numbers and samples.

    Steps never fall, except in a tracker with an attribute `forgets` that is true: there a resumed run begins with the
    step that it repeats, and the tracker replaces what it had of that and later ones.
    """

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_samples(self, samples: Sequence[Sample], step: int) -> None: ...

    def finish(self) -> None: ...


TrackerFactory = Callable[[TrackedRun], Tracker]

TRACKERS: Registry[TrackerFactory] = Registry("tracker")


def register_tracker(name: str) -> Callable[[TrackerFactory], TrackerFactory]:
    """Decorator: the class, or a function of `TrackedRun`, makes the tracker that `trainer.logger` calls `name`."""
    return TRACKERS.register(name)


PACKAGES = {name: name for name in ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")}
"""Adapters, and the package that each needs; its name is the same for pip."""


def _adapter(name: str) -> TrackerFactory:
    """Makes the tracker of `trainer/trackers/{name}.py`, which is imported then."""

    def make(run: TrackedRun) -> Tracker:
        return importlib.import_module(f"trainer.trackers.{name}").Adapter(run)

    return make


for _name in PACKAGES:
    register_tracker(_name)(_adapter(_name))


def check_trackers(names: Iterable[str], asked: str | None = None) -> None:
    """Raises UserError for a name that is not known, and for one whose package is missing. asked: how the user named
    them; None = by `trainer.logger`."""
    names = list(names)
    asked = asked or f"trainer.logger={names}"
    for name in names:
        try:
            TRACKERS.get_fn(name)
        except ValueError:
            raise UserError(f"{asked}: no tracker {name!r}; known: {', '.join(TRACKERS)}") from None
        package = PACKAGES.get(name)
        if package is not None and importlib.util.find_spec(package) is None:
            raise UserError(
                f"{asked}: the tracker {name} needs the package {package}, which is not installed in "
                f"this environment. Install it: pip install {package}; or leave {name} out"
            )

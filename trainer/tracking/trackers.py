"""What a tracker is, what it may know of a run, and which there are: an adapter for each package, which is imported
where `trainer.logger` asks for it. `@register_tracker(name)` adds one: a factory of `Tracker` from a `TrackedRun`."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import netrc
import os
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import yaml

from trainer.console import Console
from trainer.evaluate.sample import Sample
from verl_lite.config import RunOptions, uncounted
from verl_lite.errors import UserError
from verl_lite.registry import Registry

OWN = ("console", "jsonl")
"""Names in `trainer.logger` that need no tracker: lines on the console, and the record that is always written."""
PACKAGES = {name: name for name in ("tensorboard", "wandb", "mlflow", "swanlab", "trackio")}
"""Adapters, and the package that each needs; its name is the same for pip."""

Numbers = Mapping[str, float]


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
        with uncounted():
            trainer, options = config.trainer, dataclasses.asdict(config)
        return cls(Path(run_dir), trainer.project_name, trainer.experiment_name or Path(run_dir).name, options, console)

    @classmethod
    def saved(cls, run_dir: Path, console: Console) -> TrackedRun:
        """The run of a folder. Raises UserError if there is no config.yaml in it."""
        file = run_dir / "config.yaml"
        if not file.is_file():
            raise UserError(f"{run_dir}: expected the folder of a run, with config.yaml in it")
        options = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        trainer = options.get("trainer", {})
        project, name = trainer.get("project_name") or "verl_lite", trainer.get("experiment_name") or run_dir.name
        return cls(run_dir, project, name, options, console)

    def kept_id(self, tracker: str, new: Callable[[], str] = lambda: uuid.uuid4().hex[:8]) -> str:
        """The id under which the tracker knows the run, kept in RUN/{tracker}_id.txt, so that a resumed run continues
        there. new: makes it."""
        file = self.run_dir / f"{tracker}_id.txt"
        known = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        if not known:
            known = new()
            file.write_text(known, encoding="utf-8")
        return known


class Tracker(Protocol):
    """A place for numbers and samples.

    Steps never fall, except in a tracker with an attribute `forgets` that is true: there a resumed run begins with the
    step that it repeats, and the tracker replaces what it had of that and later ones.
    """

    def log(self, metrics: Numbers, step: int) -> None: ...

    def log_samples(self, samples: Sequence[Sample], step: int) -> None: ...

    def finish(self) -> None: ...


TrackerFactory = Callable[[TrackedRun], Tracker]
TRACKERS: Registry[TrackerFactory] = Registry("tracker")


def register_tracker(name: str) -> Callable[[TrackerFactory], TrackerFactory]:
    """Decorator: the class, or a function of `TrackedRun`, makes the tracker that `trainer.logger` calls `name`."""
    return TRACKERS.register(name)


@register_tracker("console")
@register_tracker("jsonl")
def _own(run: TrackedRun) -> Tracker:
    raise UserError("trainer.logger's console and jsonl are no trackers of their own")


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


_COLUMNS = ("step", "data_source", "input", "output", "gts", "score")


def _rows(samples: Sequence[Sample]) -> list[list[Any]]:
    return [[getattr(sample, name) for name in _COLUMNS] for sample in samples]


@register_tracker("tensorboard")
class TensorBoard:
    """Event files in RUN/tensorboard. A resumed run hides the events of the steps that it repeats."""

    forgets = True

    def __init__(self, run: TrackedRun) -> None:
        self._folder = run.run_dir / "tensorboard"
        self._writer: Any = None

    def log(self, metrics: Numbers, step: int) -> None:
        # a resumed run may validate first: that adds to its step, whose training was not repeated
        writer = self._open(step if "training/global_step" in metrics else step + 1)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        lines = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in _rows(samples)]
        table = [_COLUMNS, ["---"] * len(_COLUMNS), *lines]
        self._open(step + 1).add_text("samples", "\n".join(f"| {' | '.join(row)} |" for row in table), step)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, first_repeated: int) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            purge = first_repeated if self._folder.exists() else None
            self._writer = SummaryWriter(str(self._folder), purge_step=purge)
        return self._writer


@register_tracker("wandb")
class Wandb:
    """Weights & Biases. Without an account it writes RUN/wandb, which `wandb sync` uploads; WANDB_MODE decides where it
    is set. Numbers over training/global_step, and samples as the table val/generations."""

    STEP = "training/global_step"

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_account() else "offline")
        self._wandb = wandb
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.kept_id("wandb"),
            resume="allow" if mode == "online" else None,
            dir=str(run.run_dir),
            config=dict(run.options),
            mode=cast(Any, mode),
            settings=wandb.Settings(console="off", silent=True, init_timeout=30.0),
        )
        self._run.define_metric("*", step_metric=self.STEP)  # its own counter goes on in a resumed run

    def log(self, metrics: Numbers, step: int) -> None:
        self._run.log({**metrics, self.STEP: step})

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        self._run.log({"val/generations": self._wandb.Table(list(_COLUMNS), _rows(samples)), self.STEP: step})

    def finish(self) -> None:
        self._run.finish()
        if self._wandb.run is None:  # nobody else's: its service ends here in good order, not killed with the run
            self._wandb.teardown()


def _has_wandb_account() -> bool:
    """Whether wandb would find an API key, so that it need not ask for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


@register_tracker("mlflow")
class MLflow:
    """MLflow. Without MLFLOW_TRACKING_URI it writes RUN/mlflow.db, for `mlflow ui --backend-store-uri sqlite:///...`.

    Numbers by step, options as parameters, samples as the artifact generations/step_N.json. `@` is written `_at_`,
    since MLflow refuses it.
    """

    REFUSED = re.compile(r"[^\w\-. :/]")  # in names; what it takes beside letters, digits and _
    MOST_METRICS, MOST_PARAMS, LONGEST_PARAM = 1000, 100, 6000  # of one call

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):  # which tell of every table that they make
            logging.getLogger(name).setLevel(logging.WARNING)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        place = None if uri else (run.run_dir.absolute() / "mlflow_artifacts").as_uri()
        client = MlflowClient(tracking_uri=uri or f"sqlite:///{run.run_dir.absolute() / 'mlflow.db'}")
        self._metric, self._client, self._is_new = Metric, client, False

        def create() -> str:
            self._is_new = True
            experiment = client.get_experiment_by_name(run.project)
            experiment_id = experiment.experiment_id if experiment else client.create_experiment(run.project, place)
            return str(client.create_run(experiment_id, run_name=run.name).info.run_id)

        # a server knows nothing of the run in the local store, so that has an id of its own
        self._run_id = run.kept_id("mlflow_server" if uri else "mlflow", create)
        if not self._is_new:
            client.update_run(self._run_id, status="RUNNING")
            return
        params = [Param(name, value[: self.LONGEST_PARAM]) for name, value in self._flat(run.options)]
        for start in range(0, len(params), self.MOST_PARAMS):
            client.log_batch(self._run_id, params=params[start : start + self.MOST_PARAMS])

    def log(self, metrics: Numbers, step: int) -> None:
        now, names = int(time.time() * 1000), {self.REFUSED.sub("_", x.replace("@", "_at_")): x for x in metrics}
        rows = [self._metric(name, float(metrics[own]), now, step) for name, own in names.items()]
        for start in range(0, len(rows), self.MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=rows[start : start + self.MOST_METRICS])

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        rows = {"step": step, "samples": [dataclasses.asdict(sample) for sample in samples]}
        self._client.log_dict(self._run_id, rows, f"generations/step_{step}.json")

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)

    def _flat(self, options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
        for name, value in options.items():
            if isinstance(value, Mapping) and value:
                yield from self._flat(value, f"{prefix}{name}.")
            else:
                yield self.REFUSED.sub("_", f"{prefix}{name}"), str(value)


@register_tracker("swanlab")
class SwanLab:
    """SwanLab. Without SWANLAB_API_KEY it writes RUN/swanlab, which `swanlab sync` uploads; SWANLAB_MODE decides where
    it is set. Numbers by step, and samples as texts."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        mode = os.environ.get("SWANLAB_MODE") or ("online" if os.environ.get("SWANLAB_API_KEY") else "offline")
        online: dict[str, Any] = {"id": run.kept_id("swanlab"), "resume": "allow"} if mode == "online" else {}
        folder = run.run_dir / "swanlab"
        folder.mkdir(exist_ok=True)
        self._swanlab, config = swanlab, dict(run.options)
        self._run = swanlab.init(
            project=run.project, name=run.name, config=config, mode=cast(Any, mode), log_dir=str(folder), **online
        )

    def log(self, metrics: Numbers, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        texts = [
            self._swanlab.Text(f"{x.input}\n---\n{x.output}", caption=f"{x.data_source} {x.score}") for x in samples
        ]
        self._run.log({"val/generations": texts}, step=step)

    def finish(self) -> None:
        self._run.finish()


@register_tracker("trackio")
class Trackio:
    """Trackio: a folder of its own (TRACKIO_DIR; else in the user's cache), for `trackio show`; or the Space or server
    that TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names. Numbers by step, and samples as the table val/generations."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trackio = trackio
        # it knows runs by name, and two runs may have the same one
        name = run.kept_id("trackio", lambda: f"{run.name}-{uuid.uuid4().hex[:4]}")
        self._run = trackio.init(
            project=run.project, name=name, config=dict(run.options), resume="allow", embed=False, auto_log_gpu=False
        )

    def log(self, metrics: Numbers, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        self._run.log({"val/generations": self._trackio.Table(columns=list(_COLUMNS), data=_rows(samples))}, step=step)

    def finish(self) -> None:
        self._run.finish()

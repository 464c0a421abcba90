"""The `Tracker` protocol and an adapter for each supported package.

A package is imported only if `trainer.logger` names it, and writes to disk if it has no account or server.
`@register_tracker(name)` registers a factory that makes a `Tracker` from a `TrackedRun`.
"""

import atexit
import importlib.util
import os
import re
import shlex
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.observe.console import Console
from trainer.validation.sample import Sample, record_of
from verl_lite.config.user_calls import TRACKER_CALL, registered_problems
from verl_lite.errors import UserError
from verl_lite.json_types import JsonObject
from verl_lite.registry import Registry

OWN = ("console", "jsonl")
"""Names in `trainer.logger` that need no tracker: console lines, and metrics.jsonl, which is always written."""

_COLUMNS = ("step", "data_source", "input", "output", "gts", "score")
_GENERATIONS = "val/generations"
_REFUSED_BY_MLFLOW = re.compile(r"[^\w\-. :/]")
_REFUSED_BY_WANDB = re.compile(r"[/\\#?%:]")
_WANDB_LONGEST = 128  # characters of the name of a project
_MLFLOW_BATCH = 1000
"""Largest number of metrics that MLflow takes in one call."""


@dataclass(frozen=True)
class TrackedRun:
    """The run as a tracker sees it.

    Attributes:
        run_dir: The run folder.
        project, name: Names for the tracker's page.
        options: The complete configuration as nested dicts.
        console: Shows notes to the user.
    """

    run_dir: Path
    project: str
    name: str
    options: Mapping[str, object]
    console: Console

    def kept_id(self, tracker: str, new: Callable[[], str] = lambda: uuid.uuid4().hex[:8]) -> str:
        """Returns the tracker's id of the run. RUN/{tracker}_id.txt keeps it, so a resumed run continues the same
        entry.

        Args:
            tracker: name of the tracker, for the name of the file.
            new: creates the id if the file has none.
        """
        file = self.run_dir / f"{tracker}_id.txt"
        stored_id = ""
        if file.is_file():
            stored_id = file.read_text(encoding="utf-8").strip()
        if not stored_id:
            stored_id = new().strip()
            file.write_text(stored_id, encoding="utf-8")
        return stored_id


class Tracker(Protocol):
    """Receives metrics and samples. Steps never decrease; a step that a resumed run repeats is sent only the first
    time."""

    def log(self, metrics: Mapping[str, float], step: int, /) -> object: ...

    def log_samples(self, samples: Sequence[Sample], step: int, /) -> object: ...

    def finish(self) -> object: ...


@dataclass(frozen=True)
class Adapter:
    """A tracker built from three functions."""

    log: Callable[[Mapping[str, float], int], object]
    log_samples: Callable[[Sequence[Sample], int], object]
    finish: Callable[[], object]


TRACKERS: Registry[Callable[[TrackedRun], Tracker]] = Registry("tracker")
register_tracker = TRACKERS.register
"""Decorator that registers a tracker under a name for `trainer.logger`: a class or function that takes a
`TrackedRun`."""


@register_tracker("console")
@register_tracker("jsonl")
def _own(run: TrackedRun) -> Tracker:
    raise AssertionError("console and jsonl are written without a tracker")


def check_trackers(names: Iterable[str], project: str = "") -> None:
    """Checks the names in `trainer.logger`.

    Args:
        names: the names.
        project: the name of the run's project.

    Raises:
        UserError: for an unknown name, if the package of that name is not installed, or if it refuses the project.
    """
    for name in names:
        if name in OWN:
            continue
        problems = list(registered_problems("trainer.logger", name, TRACKERS, "function", TRACKER_CALL))
        if problems:
            raise UserError(problems[0])
        factory = TRACKERS.get_fn(name)
        # a tracker of this file is named after its package; a user's can have any name
        is_package = factory.__module__ == __name__
        if is_package and importlib.util.find_spec(name) is None:
            raise UserError(f"trainer.logger={name}: needs the package {name}: pip install {name}; or leave {name} out")
        if name == "wandb":
            _check_wandb_project(project)


def _check_wandb_project(project: str) -> None:
    """Raises UserError for a name that wandb refuses, which it would do only after the start of the run."""
    key = "trainer.project_name"
    from_environment = os.environ.get("WANDB_PROJECT")
    if from_environment:
        key, project = "WANDB_PROJECT", from_environment
    if len(project) > _WANDB_LONGEST or _REFUSED_BY_WANDB.search(project):
        raise UserError(
            f"{key}={project}: wandb refuses this name of a project: choose one of at most {_WANDB_LONGEST} characters "
            "without / \\ # ? % and :, or leave wandb out of trainer.logger"
        )


def _tell_offline(run: TrackedRun, name: str, sync: str, folder: Path) -> None:
    """Notes that a tracker without an account writes to disk, and the command that uploads it."""
    command = f"{sync} {shlex.quote(str(folder))}"
    run.console.note(f"{name} is offline and writes to disk; to upload the run: {command}")


@register_tracker("tensorboard")
def _tensorboard(run: TrackedRun) -> Tracker:
    """Writes event files to RUN/tensorboard."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run.run_dir / "tensorboard"))

    def log(metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        # otherwise the writer waits up to two minutes
        writer.flush()

    def log_samples(samples: Sequence[Sample], step: int) -> None:
        texts = []
        for sample in samples:
            title = f"{sample.data_source}, score {sample.score}"
            texts.append(f"{title}: {sample.input}\n---\n{sample.output}")
        writer.add_text("samples", "\n\n".join(texts), step)

    return Adapter(log, log_samples, writer.close)


@register_tracker("mlflow")
def _mlflow(run: TrackedRun) -> Tracker:
    """Logs to MLflow: metrics by step, the options as config.json, and samples as generations/step_N.json.

    Without MLFLOW_TRACKING_URI it writes RUN/mlflow.db, for `mlflow ui --backend-store-uri sqlite:///...`. MLflow
    refuses `@` in names of metrics, so it is written as `_at_`.
    """
    from mlflow.entities import Metric
    from mlflow.tracking import MlflowClient

    folder = run.run_dir.absolute()
    uri = os.environ.get("MLFLOW_TRACKING_URI")
    # a server does not know the run of the local store, so the two have separate ids
    id_name = "mlflow_server"
    artifacts = None
    if not uri:
        uri = f"sqlite:///{folder / 'mlflow.db'}"
        id_name = "mlflow"
        artifacts = (folder / "mlflow_artifacts").as_uri()
    client = MlflowClient(tracking_uri=uri)

    def create_run() -> str:
        experiment = client.get_experiment_by_name(run.project)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = client.create_experiment(run.project, artifacts)
        mlflow_run = client.create_run(experiment_id, run_name=run.name)
        return str(mlflow_run.info.run_id)

    run_id = run.kept_id(id_name, create_run)
    # a resumed run has ended before
    client.update_run(run_id, status="RUNNING")
    client.log_dict(run_id, dict(run.options), "config.json")

    def log(metrics: Mapping[str, float], step: int) -> None:
        milliseconds = int(time.time() * 1000)
        entries = []
        for name, value in metrics.items():
            readable_name = name.replace("@", "_at_")
            # MLflow refuses all other characters, which names of data sources can contain
            allowed_name = _REFUSED_BY_MLFLOW.sub("_", readable_name)
            entry = Metric(allowed_name, float(value), milliseconds, step)
            entries.append(entry)
        for start in range(0, len(entries), _MLFLOW_BATCH):
            batch = entries[start : start + _MLFLOW_BATCH]
            client.log_batch(run_id, metrics=batch)

    def log_samples(samples: Sequence[Sample], step: int) -> None:
        records = [record_of(sample) for sample in samples]
        content = {"step": step, "samples": records}
        client.log_dict(run_id, content, f"generations/step_{step}.json")

    def finish() -> None:
        client.set_terminated(run_id)

    return Adapter(log, log_samples, finish)


def _end_wandb() -> None:
    """Ends wandb's service."""
    import wandb

    # a service whose process was killed, for example with the run, closes its connection
    with suppress(OSError):
        wandb.teardown()


def _name_from_environment(run: TrackedRun, variable: str, key: str, name: str) -> str:
    """Returns the name in a variable of the tracker's package, or `name` of the option `key` without such a variable.

    The variable counts, and a note says so, because the option has a default: nobody may have chosen its value.
    """
    chosen_name = os.environ.get(variable)
    if not chosen_name or chosen_name == name:
        return name
    run.console.note(f"{variable}={chosen_name} is the name for wandb, instead of {key}={name}")
    return chosen_name


@register_tracker("wandb")
def _wandb(run: TrackedRun) -> Tracker:
    """Logs to Weights & Biases, with training/global_step as the x-axis.

    Without an account it writes RUN/wandb, which `wandb sync` uploads. WANDB_MODE overrides this choice, and
    WANDB_PROJECT and WANDB_NAME override the names.
    """
    import wandb

    project = _name_from_environment(run, "WANDB_PROJECT", "trainer.project_name", run.project)
    name = _name_from_environment(run, "WANDB_NAME", "trainer.experiment_name", run.name)

    # wandb.setup registers wandb's own exit handler, which prints an error if the end of the run had to kill the
    # service. The handler that is registered after it runs before it.
    wandb.setup()
    atexit.register(_end_wandb)

    mode = os.environ.get("WANDB_MODE")
    if mode is None:
        # without a question to the user, and without asking the server whether the key is valid
        has_account = wandb.login(prompt=False, verify=False)
        mode = "online" if has_account else "offline"
    # console: wandb would otherwise copy what the run prints, the progress bar included
    settings = wandb.Settings(console="off", silent=True, init_timeout=30.0)
    options: JsonObject = {
        "project": project,
        "name": name,
        "config": dict(run.options),
        "settings": settings,
        "mode": mode,
        "id": run.kept_id("wandb"),
        "dir": str(run.run_dir),
    }
    # offline, wandb ignores `resume` with a warning
    if mode == "online":
        options["resume"] = "allow"
    wandb_run = wandb.init(**options)
    if mode == "offline":
        _tell_offline(run, "wandb", "wandb sync", Path(wandb_run.dir).parent)
    # wandb's own step counter continues in a resumed run, so it is not the x-axis
    wandb_run.define_metric("*", step_metric="training/global_step")

    def log(data: Mapping[str, object], step: int) -> None:
        wandb_run.log({**data, "training/global_step": step})

    def finish() -> None:
        wandb_run.finish()
        # no other wandb run is open, so end the service before the run's end kills it
        if wandb.run is None:
            _end_wandb()
            # The user may start another service, which has an exit handler of its own.
            atexit.unregister(_end_wandb)

    def log_samples(samples: Sequence[Sample], step: int) -> None:
        rows = []
        for sample in samples:
            rows.append([getattr(sample, name) for name in _COLUMNS])
        table = wandb.Table(list(_COLUMNS), rows)
        log({_GENERATIONS: table}, step)

    return Adapter(log, log_samples, finish)


@register_tracker("swanlab")
def _swanlab(run: TrackedRun) -> Tracker:
    """Logs to SwanLab. Without SWANLAB_API_KEY it writes RUN/swanlab, which `swanlab sync` uploads. SWANLAB_MODE
    overrides this choice."""
    import swanlab

    mode = os.environ.get("SWANLAB_MODE")
    if not mode:
        mode = "offline"
        if os.environ.get("SWANLAB_API_KEY"):
            mode = "online"
    folder = run.run_dir / "swanlab"
    folder.mkdir(exist_ok=True)
    options: JsonObject = {
        "project": run.project,
        "name": run.name,
        "config": dict(run.options),
        "mode": mode,
        "log_dir": str(folder),
    }
    # SwanLab continues runs on its server only
    if mode == "online":
        options["id"] = run.kept_id("swanlab")
        options["resume"] = "allow"
    swanlab_run = swanlab.init(**options)
    if mode == "offline":
        # the names of the folders contain the time of their start
        newest_log = max(folder.iterdir(), default=folder)
        _tell_offline(run, "swanlab", "swanlab sync", newest_log)

    def log(metrics: Mapping[str, float], step: int) -> None:
        swanlab_run.log(dict(metrics), step=step)

    def log_samples(samples: Sequence[Sample], step: int) -> None:
        texts = []
        for sample in samples:
            text = f"{sample.input}\n---\n{sample.output}"
            caption = f"score {sample.score}"
            texts.append(swanlab.Text(text, caption=caption))
        swanlab_run.log({_GENERATIONS: texts}, step=step)

    return Adapter(log, log_samples, swanlab_run.finish)

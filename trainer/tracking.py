"""Where the numbers of a run go: the console, files, dashboards. No tracker stops or slows the training.

`trainer.logger` names the trackers; `@register_tracker(name)` adds one. All but the console and the files work behind a
thread and a queue of limited length: what raises or hangs there costs one warning and its own data, and metrics.jsonl
has everything anyway.
"""

from __future__ import annotations

import dataclasses
import json
import math
import netrc
import os
import queue
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from trainer.console import Console
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.registry import Registry

if TYPE_CHECKING:
    from trainer.samples import Sample

_QUEUE_LENGTH = 200
_FINISH_TIMEOUT_S = 15.0
_WANDB_INIT_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker may know of the run."""

    run_dir: Path
    config: PPOConfig
    console: Console


class Tracker(Protocol):
    """A place for numbers and samples. Steps never fall, except where a run was resumed."""

    def log(self, metrics: Mapping[str, float], step: int) -> None: ...

    def log_samples(self, samples: Sequence[Sample], step: int) -> None: ...

    def finish(self) -> None: ...


TrackerFactory = Callable[[TrackedRun], Tracker]

TRACKERS: Registry[TrackerFactory] = Registry("tracker")
_IMMEDIATE = ("console", "jsonl")


def register_tracker(name: str) -> Callable[[TrackerFactory], TrackerFactory]:
    """Decorator: the class, or a function of `TrackedRun`, makes the tracker that `trainer.logger` calls `name`."""
    return TRACKERS.register(name)


class Tracking:
    """All trackers of a run as one; a context that ends them, and the console's progress bar, when it is left.

    Raises UserError for a name in `trainer.logger` that is not registered.
    """

    def __init__(self, run_dir: Path, config: PPOConfig, console: Console) -> None:
        run = TrackedRun(Path(run_dir), config, console)
        self._console, self._shows = console, "console" in config.trainer.logger
        unknown = [name for name in config.trainer.logger if name not in TRACKERS]
        if unknown:
            raise UserError(
                f"trainer.logger={list(config.trainer.logger)}: no tracker {unknown[0]!r}; known: {', '.join(TRACKERS)}"
            )
        self._trackers: list[Tracker] = [
            TRACKERS[name](run) if name in _IMMEDIATE else _Background(name, TRACKERS[name], run)
            for name in config.trainer.logger
        ]

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends numbers of one step. step: training steps done; 0 = before the first."""
        self._console.advance(step)
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def note(self, text: str) -> None:
        """Shows a sentence to the user."""
        self._console.note(text)

    def show(self, text: str) -> None:
        """Prints text of several lines, where the console is a tracker."""
        if self._shows:
            self._console.print(text)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Sends what the policy wrote, with its scores."""
        for tracker in self._trackers:
            tracker.log_samples(samples, step)

    def finish(self) -> None:
        """Ends all trackers; waits a little for those that are behind."""
        self._console.stop()
        for tracker in self._trackers:
            tracker.finish()


class _Background:
    """A tracker behind a thread. The thread makes it, so that even its start may fail or hang."""

    def __init__(self, name: str, factory: TrackerFactory, run: TrackedRun) -> None:
        self._name, self._console = name, run.console
        self._warned = False
        self._calls: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_QUEUE_LENGTH)
        self._thread = threading.Thread(target=self._work, args=(factory, run), name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        kept = dict(metrics)
        self._send(lambda tracker: tracker.log(kept, step))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        kept = list(samples)
        self._send(lambda tracker: tracker.log_samples(kept, step))

    def finish(self) -> None:
        try:
            self._calls.put(None, timeout=_FINISH_TIMEOUT_S)
        except queue.Full:
            pass  # it hangs: `_send` has said so
        self._thread.join(_FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            self._warn("does not finish; the run ends without it")

    def _send(self, call: Callable[[Tracker], None]) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._warn(f"is more than {_QUEUE_LENGTH} messages behind; newer ones are dropped")

    def _work(self, factory: TrackerFactory, run: TrackedRun) -> None:
        try:
            tracker = factory(run)
        except Exception as error:  # the one door to code of others, which may raise anything and must not stop a run
            self._warn(f"does not start ({type(error).__name__}: {error}); the run goes on without it")
            return
        while True:
            call = self._calls.get()
            try:
                if call is None:
                    tracker.finish()
                    return
                call(tracker)
            except Exception as error:  # as above
                self._warn(f"raises {type(error).__name__}: {error}; the run goes on")
                if call is None:
                    return

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            self._console.note(f"tracker {self._name} {what}. metrics.jsonl in the run folder has the numbers.")


@register_tracker("console")
class ConsoleTracker:
    """One line per training step, and one per data source where something was validated."""

    def __init__(self, run: TrackedRun) -> None:
        self._console = run.console

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if "training/global_step" in metrics:
            self._console.step(metrics, step)
        self._console.validation(metrics, step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """The console shows samples at the end of the run."""

    def finish(self) -> None:
        """Nothing to end."""


@register_tracker("jsonl")
class JsonlTracker:
    """metrics.jsonl, a line {"step", "data"} per call, and samples.jsonl, a line per sample. A resumed run appends.

    A number that is not finite is written as null. A full disk costs a warning, not the run.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._console, self._run_dir, self._warned = run.console, run.run_dir, False

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._append("metrics.jsonl", [{"step": step, "data": _finite(metrics)}])

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        self._append("samples.jsonl", [_finite({**dataclasses.asdict(sample), "step": step}) for sample in samples])

    def finish(self) -> None:
        """Each line is in the file already."""

    def _append(self, name: str, rows: list[dict[str, Any]]) -> None:
        try:
            with (self._run_dir / name).open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, default=float) + "\n" for row in rows)
        except OSError as error:
            if not self._warned:
                self._warned = True
                self._console.note(f"tracker jsonl cannot write {self._run_dir / name}: {error}; the run goes on")


@register_tracker("tensorboard")
class TensorboardTracker:
    """Event files in RUN/tensorboard. A resumed run hides the events of steps that it repeats."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make = SummaryWriter
        self._folder = run.run_dir / "tensorboard"
        self._writer: Any = None

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        writer = self._open(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        rows = ["| source | prompt | answer | expected | score |", "|---|---|---|---|---|"]
        for sample in samples:
            cells = (sample.data_source, sample.input, sample.output, sample.gts, sample.score)
            rows.append("| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
        self._open(step).add_text("samples", "\n".join(rows), step)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> Any:
        if self._writer is None:
            resumed = self._folder.exists()
            self._writer = self._make(str(self._folder), purge_step=step + 1 if resumed else None)
        return self._writer


@register_tracker("wandb")
class WandbTracker:
    """Weights & Biases. Without an account it writes RUN/wandb, which `wandb sync` uploads later; WANDB_MODE decides
    where it is set. The run's id is kept in RUN/wandb_id.txt: a resumed run continues there."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_account() else "offline")
        id_file = run.run_dir / "wandb_id.txt"
        run_id = id_file.read_text().strip() if id_file.exists() else uuid.uuid4().hex[:8]
        id_file.write_text(run_id)
        self._wandb = wandb
        self._run = wandb.init(
            project=run.config.trainer.project_name,
            name=run.config.trainer.experiment_name,
            id=run_id,
            resume="allow" if mode == "online" else None,
            dir=str(run.run_dir),
            config=dataclasses.asdict(run.config),
            mode=cast(Any, mode),
            settings=wandb.Settings(console="off", silent=True, init_timeout=_WANDB_INIT_TIMEOUT_S),
        )
        # its own counter refuses steps that a resumed run repeats
        self._run.define_metric("*", step_metric="training/global_step")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, "training/global_step": step})

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        columns: list[str | int] = ["step", "data_source", "input", "output", "gts", "score"]
        rows = [[getattr(sample, str(name)) for name in columns] for sample in samples]
        self._run.log({"val/generations": self._wandb.Table(columns, rows), "training/global_step": step})

    def finish(self) -> None:
        self._run.finish()


def _has_wandb_account() -> bool:
    """Whether wandb would find an API key, so that it need not ask for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].split("/")[0]
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with null in place of numbers that json has no word for."""
    return {name: None if isinstance(x, float) and not math.isfinite(x) else x for name, x in row.items()}


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Metrics by step, as `JsonlTracker` wrote them, in order of steps.

    Where a resumed run went back, what was written of later steps before is left out; several lines of one step are
    joined. A last line that was cut off by a crash is ignored.
    """
    steps: dict[int, dict[str, float]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        step = int(row["step"])
        for later in [known for known in steps if known > step]:
            del steps[later]
        steps.setdefault(step, {}).update({name: value for name, value in row["data"].items() if value is not None})
    return steps

"""Where the numbers of a run go: the console, the run's own record, dashboards. No tracker stops or slows the training.

metrics.jsonl is always written; `trainer.logger` adds the console's lines and trackers, each of which is given what the
record says by a thread of its own (`trainer.tracking.follower`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainer.console import Console, following
from trainer.evaluate.sample import Sample
from trainer.tracking.follower import Follower
from trainer.tracking.record import Record, read_metrics
from trainer.tracking.trackers import OWN, TRACKERS, TrackedRun, check_trackers, register_tracker
from verl_lite.config import RunOptions, uncounted

__all__ = ["TRACKERS", "TrackedRun", "Tracking", "check_trackers", "read_metrics", "register_tracker"]
FINISH_TIMEOUT_S = 15.0


class Tracking:
    """The record and all trackers of a run as one; a context that ends them, and the console's progress bar, when it is
    left. Inside, what workers print is shown where the console is verbose.

    Raises UserError for a name in `trainer.logger` that is not known, and for one whose package is missing.
    """

    after_first_step: Callable[[], None] | None = None

    def __init__(self, run_dir: Path, config: RunOptions, console: Console) -> None:
        names = list(config.trainer.logger)
        check_trackers(names)
        with uncounted():
            trainer, options = config.trainer, dataclasses.asdict(config)
            name = trainer.experiment_name or Path(run_dir).name
            run = TrackedRun(Path(run_dir), trainer.project_name, name, options, console)
        self.note = console.note
        self._console, self._shows = console, "console" in names
        self._following = following(run.run_dir / "logs", console)
        self._record = Record(run.run_dir, console.note)
        self._trackers = [Follower(name, TRACKERS.get_fn(name), run) for name in names if name not in OWN]

    def __enter__(self) -> Tracking:
        self._following.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.finish()
        self._following.__exit__(None, None, None)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Sends numbers of one step. step: training steps done; 0 = before the first."""
        self._console.advance(step)
        if self._shows:
            self._console.log(metrics, step)
        self._record.log(metrics, step)
        self._wake()
        if step > 0 and (callback := self.after_first_step) is not None:
            self.after_first_step = None
            callback()

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Sends what the policy wrote, with its scores."""
        self._record.log_samples(samples, step)
        self._wake()

    def show(self, text: str) -> None:
        """Prints text of several lines, where `trainer.logger` names the console."""
        if self._shows:
            self._console.progress(text)

    def finish(self) -> None:
        """Ends all trackers; waits a little for those that are behind."""
        self._console.stop()
        for tracker in self._trackers:
            if not tracker.finish(FINISH_TIMEOUT_S):
                tracker.warn("does not finish")

    def _wake(self) -> None:
        for tracker in self._trackers:
            tracker.wake()

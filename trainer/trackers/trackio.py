"""Trackio: a folder of its own (TRACKIO_DIR; else in the user's cache), for `trackio show`; or the Space or server that
TRACKIO_SPACE_ID or TRACKIO_SERVER_URL names. The run's name there is kept in RUN/trackio_id.txt: a resumed run
continues it."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence

from trainer.evaluate.sample import Sample
from trainer.trackers.base import TrackedRun


class Adapter:
    """Numbers by step, and samples as the table val/generations. What is not finite is left out."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trackio = trackio
        # it knows runs by name, and two runs may have the same one
        name = run.kept_id("trackio") or run.keep_id("trackio", f"{run.name}-{uuid.uuid4().hex[:4]}")
        self._run = trackio.init(
            project=run.project, name=name, config=dict(run.options), resume="allow", embed=False, auto_log_gpu=False
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({name: float(value) for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        columns = ["step", "data_source", "input", "output", "gts", "score"]
        rows = [[getattr(sample, name) for name in columns] for sample in samples]
        self._run.log({"val/generations": self._trackio.Table(columns=columns, data=rows)}, step=step)

    def finish(self) -> None:
        self._run.finish()

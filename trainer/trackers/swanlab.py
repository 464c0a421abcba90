"""SwanLab. Without SWANLAB_API_KEY it writes RUN/swanlab, which `swanlab sync` uploads later; SWANLAB_MODE decides
where it is set. The run's id is kept in RUN/swanlab_id.txt: a resumed run continues there."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from trainer.evaluate.sample import Sample
from trainer.trackers.base import TrackedRun


class Adapter:
    """Numbers by step, and samples as texts. What is not finite is left out."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        mode = os.environ.get("SWANLAB_MODE") or ("online" if os.environ.get("SWANLAB_API_KEY") else "offline")
        online: dict[str, Any] = {}
        if mode == "online":
            online = {"id": run.keep_id("swanlab", run.kept_id("swanlab")), "resume": "allow"}
        folder = run.run_dir / "swanlab"
        folder.mkdir(exist_ok=True)
        self._swanlab = swanlab
        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            config=dict(run.options),
            mode=cast(Any, mode),
            log_dir=str(folder),
            **online,
        )

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({name: float(value) for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        texts = [
            self._swanlab.Text(f"{sample.input}\n---\n{sample.output}", caption=f"{sample.data_source} {sample.score}")
            for sample in samples
        ]
        if texts:
            self._run.log({"val/generations": texts}, step=step)

    def finish(self) -> None:
        self._run.finish()

"""MLflow. Without MLFLOW_TRACKING_URI it writes RUN/mlflow.db, for `mlflow ui --backend-store-uri sqlite:///...`. The
run's id is kept in RUN/mlflow_id.txt: a resumed run continues there."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trainer.evaluate.sample import Sample
from trainer.trackers.base import TrackedRun

_REFUSED = re.compile(r"[^\w\-. :/]")  # in names; what it takes beside letters, digits and _
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM = 1000, 100, 6000  # of one call


class Adapter:
    """Numbers by step, options as parameters, samples as the artifact generations/step_N.json.

    `@` is written `_at_`, since MLflow refuses it. What is not finite is left out.
    """

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        for name in ("mlflow", "alembic"):  # which tell of every table that they make
            logging.getLogger(name).setLevel(logging.WARNING)
        self._metric = Metric
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{run.run_dir.absolute() / 'mlflow.db'}"
        self._client = MlflowClient(tracking_uri=uri)
        known = run.kept_id("mlflow")
        if known is not None:
            self._run_id = known
            self._client.update_run(known, status="RUNNING")
            return
        experiment = self._client.get_experiment_by_name(run.project)
        place = None if "MLFLOW_TRACKING_URI" in os.environ else (run.run_dir.absolute() / "mlflow_artifacts").as_uri()
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project, place)
        self._run_id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        run.keep_id("mlflow", self._run_id)
        params = [Param(name, value[:_LONGEST_PARAM]) for name, value in _flat(run.options)]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MOST_PARAMS])

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        rows = [
            self._metric(_REFUSED.sub("_", name.replace("@", "_at_")), float(value), now, step)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        for start in range(0, len(rows), _MOST_METRICS):
            self._client.log_batch(self._run_id, metrics=rows[start : start + _MOST_METRICS])

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        rows = {"step": step, "samples": [asdict(sample) for sample in samples]}
        self._client.log_dict(self._run_id, rows, f"generations/step_{step}.json")

    def finish(self) -> None:
        self._client.set_terminated(self._run_id)


def _flat(options: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Each option with its dotted name."""
    for name, value in options.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield _REFUSED.sub("_", f"{prefix}{name}"), str(value)

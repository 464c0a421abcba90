"""Stand-ins for the tracking packages that are not in the dev extra: they record calls under the packages' own names.

What they take and refuse is that of mlflow 3.17, swanlab 0.10 and trackio 0.43, with which the adapters were tried.
"""

from __future__ import annotations

import importlib.machinery
import re
import types
from collections.abc import Callable
from typing import Any, NamedTuple


class Calls(list[tuple[str, Any]]):
    """What was called, in order."""

    def note(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: self.append((name, (args, kwargs)))

    def of(self, name: str) -> list[Any]:
        return [given for called, given in self if called == name]


def module(name: str, **contents: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    for key, value in contents.items():
        setattr(made, key, value)
    return made


def fake_mlflow(calls: Calls) -> dict[str, types.ModuleType]:
    """Runs that exist outlive the client, as on a server."""

    class Metric(NamedTuple):
        key: str
        value: float
        timestamp: int
        step: int

    class Param(NamedTuple):
        key: str
        value: str

    class MlflowClient:
        runs: dict[str, list[Metric]] = {}

        def __init__(self, tracking_uri: str) -> None:
            calls.append(("client", tracking_uri))

        def get_experiment_by_name(self, name: str) -> Any:
            return None

        def create_experiment(self, name: str, artifact_location: str | None = None) -> str:
            return f"experiment-{name}"

        def create_run(self, experiment_id: str, run_name: str) -> Any:
            self.runs["r1"] = []
            calls.append(("create_run", (experiment_id, run_name)))
            return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1"))

        def update_run(self, run_id: str, status: str) -> None:
            assert run_id in self.runs

        def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
            assert len(metrics) <= 1000 and len(params) <= 100
            for entry in (*metrics, *params):
                assert re.fullmatch(r"[\w\-. :/]+", entry.key), f"mlflow refuses the name {entry.key!r}"
            self.runs[run_id] += metrics

        def log_dict(self, run_id: str, dictionary: Any, artifact_file: str) -> None:
            calls.append(("log_dict", (artifact_file, dictionary)))

        def set_terminated(self, run_id: str) -> None:
            calls.append(("set_terminated", run_id))

    entities = module("mlflow.entities", Metric=Metric, Param=Param)
    tracking = module("mlflow.tracking", MlflowClient=MlflowClient)
    return {
        "mlflow": module("mlflow", entities=entities, tracking=tracking),
        "mlflow.entities": entities,
        "mlflow.tracking": tracking,
    }


def fake_run(calls: Calls) -> Any:
    def log(data: dict[str, Any], step: int | None = None) -> None:
        calls.append(("log", (step, data)))

    return types.SimpleNamespace(log=log, finish=calls.note("finish"))


def fake_swanlab(calls: Calls) -> dict[str, types.ModuleType]:
    def init(**options: Any) -> Any:
        assert options["mode"] == "online" or not {"id", "resume"} & set(options), "only online runs have ids"
        calls.append(("init", options))
        return fake_run(calls)

    def text(content: str, caption: str | None = None) -> tuple[str, str | None]:
        return content, caption

    return {"swanlab": module("swanlab", init=init, Text=text)}


def fake_trackio(calls: Calls) -> dict[str, types.ModuleType]:
    def init(**options: Any) -> Any:
        calls.append(("init", options))
        return fake_run(calls)

    def table(columns: list[str], data: list[list[Any]]) -> list[dict[str, Any]]:
        return [dict(zip(columns, row, strict=True)) for row in data]

    return {"trackio": module("trackio", init=init, Table=table)}


FAKES = {"mlflow": fake_mlflow, "swanlab": fake_swanlab, "trackio": fake_trackio}

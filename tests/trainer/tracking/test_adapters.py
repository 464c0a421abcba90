"""The adapters to tracking packages: what they hand over, that a resumed run goes on in the same place, and what is
said where a package is missing."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.tracking.fake_packages import FAKES, Calls
from tests.trainer.tracking.scripted import Run
from trainer.main_ppo import main
from trainer.tracking.trackers import PACKAGES, TRACKERS, check_trackers
from verl_lite.config.checks import TRACKERS as KNOWN
from verl_lite.errors import UserError

NUMBERS = {"val-core/gsm8k/acc/mean@8": 0.5}


@pytest.fixture
def calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    """The fake package of the tracker that the test names."""
    for variable in ("MLFLOW_TRACKING_URI", "SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    made = Calls()
    for name, package in FAKES[request.param](made).items():
        monkeypatch.setitem(sys.modules, name, package)
    return made


def train(folder: Path, tracker: str, *steps: int) -> str:
    """Logs these steps with samples, as a run of its own; gives what was printed."""
    return Run(folder, loggers=[tracker]).train(*steps, samples=True, **NUMBERS, bad=math.nan)


@pytest.mark.parametrize("calls", ["mlflow"], indirect=True)
def test_mlflow_goes_on_in_the_same_run_and_has_names_that_it_takes(tmp_path: Path, calls: Calls) -> None:
    assert train(tmp_path, "mlflow", 1, 2) == ""
    assert train(tmp_path, "mlflow", 2, 3) == ""
    assert calls.of("create_run") == [("experiment-p", "e")]
    assert calls.of("client") == [f"sqlite:///{tmp_path}/mlflow.db"] * 2
    runs = sys.modules["mlflow.tracking"].MlflowClient.runs  # type: ignore[attr-defined]
    assert [metric.step for metric in runs["r1"] if metric.key == "actor/lr"] == [1, 2, 3]
    assert {metric.key for metric in runs["r1"] if hasattr(metric, "step")} == {
        "val-core/gsm8k/acc/mean_at_8", "actor/lr", "training/global_step",
    }  # fmt: skip
    assert [path for path, _ in calls.of("log_dict") if "gen" in path] == [
        f"generations/step_{step}.json" for step in (1, 2, 2, 3)
    ]
    assert calls.of("set_terminated") == ["r1", "r1"]


@pytest.mark.parametrize("calls", ["swanlab"], indirect=True)
def test_swanlab_is_offline_without_a_key_and_goes_on_with_its_id_with_one(
    tmp_path: Path, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert train(tmp_path, "swanlab", 1) == ""
    assert calls.of("init")[0]["mode"] == "offline" and calls.of("init")[0]["log_dir"] == str(tmp_path / "swanlab")
    monkeypatch.setenv("SWANLAB_API_KEY", "key")
    train(tmp_path, "swanlab", 2)
    train(tmp_path, "swanlab", 2, 3)
    first, second = calls.of("init")[1:]
    assert first["mode"] == second["mode"] == "online" and first["resume"] == "allow"
    assert first["id"] == second["id"] == (tmp_path / "swanlab_id.txt").read_text()
    logged = [(step, data) for step, data in calls.of("log") if "actor/lr" in data]
    assert [step for step, _ in logged] == [1, 2, 3] and "bad" not in logged[0][1]
    assert (1, {"val/generations": [("Sort 21 | now\n\n---\n12", "score 1.0")]}) in calls.of("log")


@pytest.mark.parametrize("calls", ["trackio"], indirect=True)
def test_trackio_goes_on_under_the_name_that_it_knows(tmp_path: Path, calls: Calls) -> None:
    assert train(tmp_path, "trackio", 1) == ""
    train(tmp_path, "trackio", 1, 2)
    first, second = calls.of("init")
    assert first["name"] == second["name"] == (tmp_path / "trackio_id.txt").read_text()
    assert first["name"].startswith("e-") and first["resume"] == "allow" and first["project"] == "p"
    assert [step for step, data in calls.of("log") if "actor/lr" in data] == [1, 2]
    (row,) = calls.of("log")[1][1]["val/generations"]
    assert row["output"] == "12" and row["score"] == 1.0


@pytest.mark.parametrize("calls", sorted(FAKES), indirect=True)
def test_what_they_are_told_of_the_configuration_can_be_read(tmp_path: Path, calls: Calls) -> None:
    tracker = next(name for name in FAKES if name in sys.modules and not hasattr(sys.modules[name], "__file__"))
    train(tmp_path, tracker, 1)
    options: list[Any] = [given["config"] for given in calls.of("init")]
    options += [given for name, given in calls.of("log_dict") if name == "config.json"]
    assert options
    assert all(each["trainer"]["project_name"] == "p" for each in options)


def test_a_missing_package_is_an_error_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("mlflow", "swanlab"):
        monkeypatch.setitem(PACKAGES, name, f"no_such_{name}")
    with pytest.raises(UserError, match=r"needs the package no_such_mlflow: pip install no_such"):
        check_trackers(["console", "mlflow"])
    assert main(["trainer.logger=[console,swanlab]", "model.path=/nowhere", "data.train_files=/nowhere"]) == 2
    assert "pip install no_such_swanlab" in capsys.readouterr().err


def test_one_given_by_its_path_is_found() -> None:
    check_trackers(["tests.trainer.tracking.scripted:Scripted"])


def test_the_configuration_check_knows_every_tracker() -> None:
    assert set(KNOWN) == set(TRACKERS) and set(PACKAGES) < set(TRACKERS)

"""The adapters to tracking packages: what they hand over, that a resumed run goes on in the same place, and what is
said where a package is missing. What stands in for a package takes what mlflow 3.17 and swanlab 0.10
took when the adapters were tried with them."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from tests.tiny_run import ROOT
from tests.trainer.observe.scripted import Run
from trainer.main_ppo import main
from trainer.observe.console import Console
from trainer.observe.trackers import TRACKERS, TrackedRun, check_trackers
from verl_lite.errors import UserError


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> MagicMock:
    """In place of each package: it records what it is called with."""
    for variable in ("MLFLOW_TRACKING_URI", "SWANLAB_MODE", "SWANLAB_API_KEY"):
        monkeypatch.delenv(variable, raising=False)
    made = MagicMock(__spec__=ModuleSpec("made", None))
    made.MlflowClient().create_run().info.run_id = "r1"
    made.reset_mock()
    for name in ("mlflow", "mlflow.tracking", "mlflow.entities", "swanlab"):
        monkeypatch.setitem(sys.modules, name, made)
    return made


def train(folder: Path, tracker: str, *steps: int) -> str:
    """Logs these steps with samples, as a run of its own; returns what it printed."""
    numbers = {"val-core/gsm8k/acc/mean@8": 0.5, "bad": math.nan}
    return Run(folder, loggers=[tracker]).train(*steps, samples=True, **numbers)


def logged(package: MagicMock) -> tuple[list[int], dict[str, Any]]:
    """Steps of the numbers, and the first samples."""
    calls = package.init().log.call_args_list
    data = [(call.kwargs["step"], call.args[0]) for call in calls]
    numbers = [(step, row) for step, row in data if "actor/lr" in row]
    assert all("bad" not in row for _, row in numbers)
    return [step for step, _ in numbers], next(row for _, row in data if "val/generations" in row)


def test_mlflow_goes_on_in_the_same_run_and_has_names_that_it_takes(tmp_path: Path, package: MagicMock) -> None:
    train(tmp_path, "mlflow", 1, 2)
    train(tmp_path, "mlflow", 2, 3)
    client = package.MlflowClient()
    assert client.create_run.call_count == 1 and (tmp_path / "mlflow_id.txt").read_text() == "r1"
    assert package.MlflowClient.call_args_list[0].kwargs == {"tracking_uri": f"sqlite:///{tmp_path}/mlflow.db"}
    given = [(call.args[0], call.args[3]) for call in package.Metric.call_args_list]
    assert [step for name, step in given if name == "actor/lr"] == [1, 2, 3]
    assert {name for name, _ in given} == {"val-core/gsm8k/acc/mean_at_8", "actor/lr", "training/global_step"}
    assert all(re.fullmatch(r"[\w\-. :/]+", name) for name, _ in given)
    files = [call.args[2] for call in client.log_dict.call_args_list]
    assert [x for x in files if x != "config.json"] == [f"generations/step_{x}.json" for x in (1, 2, 2, 3)]
    assert client.log_dict.call_args_list[0].args[1]["trainer"]["project_name"] == "p"
    assert client.set_terminated.call_count == 2


def test_swanlab_is_offline_without_a_key_and_goes_on_with_its_id_with_one(
    tmp_path: Path, package: MagicMock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "swanlab sync" in train(tmp_path, "swanlab", 1)
    monkeypatch.setenv("SWANLAB_API_KEY", "key")
    train(tmp_path, "swanlab", 2)
    train(tmp_path, "swanlab", 2, 3)
    first, second, third = [call.kwargs for call in package.init.call_args_list]
    assert first["mode"] == "offline" and "id" not in first and first["log_dir"] == str(tmp_path / "swanlab")
    assert second["mode"] == third["mode"] == "online" and second["resume"] == "allow"
    assert second["id"] == third["id"] == (tmp_path / "swanlab_id.txt").read_text()
    assert first["config"]["trainer"]["project_name"] == first["project"] == "p"
    assert logged(package)[0] == [1, 2, 3]
    assert package.Text.call_args_list[0].args == ("Sort 21 | now\n\n---\n12",)


def test_what_is_no_tracker_or_lacks_its_package_is_an_error_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *of: None if name == "swanlab" else find(name, *of))
    assert main(["trainer.logger=[console,swanlab]", "model.path=/nowhere", "data.train_files=/nowhere"]) == 2
    assert "pip install swanlab" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"trainer.logger=swandb is not known; known: .*tensorboard.*wandb"):
        check_trackers(["jsonl", "swandb"])
    check_trackers(["tests.trainer.observe.scripted:Scripted"])


def test_a_name_that_wandb_refuses_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", MagicMock(__spec__=ModuleSpec("wandb", None)))
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    check_trackers(["console"], "a/b")
    check_trackers(["wandb"], "a b.c-d")
    for project in ("a/b", "a\\b", "50%", "p" * 129):
        with pytest.raises(UserError, match=rf"trainer.project_name={re.escape(project)}: wandb refuses"):
            check_trackers(["wandb"], project)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    check_trackers(["wandb"], "a/b")
    monkeypatch.setenv("WANDB_PROJECT", "q?")
    with pytest.raises(UserError, match=r"WANDB_PROJECT=q\?: wandb refuses"):
        check_trackers(["wandb"], "mine")


def test_wandb_takes_the_names_of_its_variables_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb = MagicMock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_PROJECT", "of the shell")
    monkeypatch.delenv("WANDB_NAME", raising=False)
    TRACKERS.get_fn("wandb")(TrackedRun(tmp_path, "verl_lite", "e", {}, Console()))
    given = wandb.init.call_args.kwargs
    assert (given["project"], given["name"]) == ("of the shell", "e")
    said = "WANDB_PROJECT=of the shell is the name for wandb, instead of trainer.project_name=verl_lite"
    assert said in capsys.readouterr().out


WITHOUT_SERVICE = """
import sys
import time
from pathlib import Path
import psutil
from trainer.observe.console import Console
from trainer.observe.trackers import TRACKERS, TrackedRun

TRACKERS.get_fn("wandb")(TrackedRun(Path(sys.argv[1]), "p", "e", {}, Console()))
# on a busy machine the service starts later than `wandb.init` returns
deadline = time.monotonic() + 60
services = []
while not services and time.monotonic() < deadline:
    time.sleep(0.1)
    services = psutil.Process().children(recursive=True)
assert services
for service in services:
    service.kill()
psutil.wait_procs(services)
"""


@pytest.mark.slow
def test_wandb_says_nothing_at_the_end_where_its_service_ended_with_the_run(tmp_path: Path) -> None:
    """As it does with an account on a machine without a way out, whose uploads never end."""
    environment = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": str(ROOT)}
    # a test before this one may have started a service in this process, which the command would use instead of its own
    environment.pop("WANDB_SERVICE", None)
    command = [sys.executable, "-c", WITHOUT_SERVICE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    [folder] = tmp_path.glob("wandb/offline-run-*")
    assert f"wandb is offline and writes to disk; to upload the run: wandb sync {folder}" in done.stdout

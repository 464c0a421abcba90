"""Trackers: what lands in the files, and that one which raises or hangs neither stops nor slows a run."""

from __future__ import annotations

import io
import json
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.console import Console
from trainer.samples import Sample
from trainer.tracking import TRACKERS, TrackedRun, Tracking, read_metrics, register_tracker
from verl_lite.config import PPOConfig, TrainerConfig
from verl_lite.errors import UserError

SAMPLE = Sample(3, "val-0", "verl_lite/sort", "Sort 21 | now\n", "12", "12", 1.0, 3, "stop", 2, {"acc": 1.0})


class Run:
    """A run folder, its trackers and what the console printed."""

    def __init__(self, folder: Path, *loggers: str) -> None:
        self.folder, self.file = folder, io.StringIO()
        self.config = PPOConfig(trainer=TrainerConfig(logger=list(loggers), experiment_name="test"))
        self.tracking = Tracking(folder, self.config, Console(self.file))

    def lines(self, name: str) -> list[Any]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@pytest.fixture
def clean_registry() -> Iterator[None]:
    before = dict(TRACKERS)
    yield
    TRACKERS.clear()
    TRACKERS.update(before)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "wandb")) for name in sorted(TRACKERS)]
)
def test_every_tracker_takes_numbers_and_samples_and_starts_again_in_the_same_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    for start in (0, 2):
        run = Run(tmp_path, name)
        with run.tracking as tracking:
            for step in (start, start + 1):
                tracking.log({"training/global_step": step, "critic/score/mean": 0.5, "x": math.nan}, step)
            tracking.log_samples([SAMPLE], start + 1)
        assert "tracker" not in run.file.getvalue(), run.file.getvalue()
    left = {path.name for path in tmp_path.iterdir()}
    expected = {"jsonl": {"metrics.jsonl", "samples.jsonl"}, "tensorboard": {"tensorboard"}, "console": set()}
    assert left == expected.get(name, {"wandb", "wandb_id.txt"})


def test_jsonl_has_a_line_per_step_and_null_for_what_is_no_number(tmp_path: Path) -> None:
    run = Run(tmp_path, "jsonl")
    with run.tracking as tracking:
        tracking.log({"a": 1.5, "b": math.nan, "c": math.inf}, step=0)
        tracking.log({"a": 2.0}, step=1)
        tracking.log_samples([SAMPLE], step=1)
    assert run.lines("metrics.jsonl") == [
        {"step": 0, "data": {"a": 1.5, "b": None, "c": None}},
        {"step": 1, "data": {"a": 2.0}},
    ]
    (sample,) = run.lines("samples.jsonl")
    assert sample["step"] == 1 and sample["output"] == "12" and sample["extra"] == {"acc": 1.0}


def test_a_resumed_run_appends_and_reading_leaves_out_what_was_repeated(tmp_path: Path) -> None:
    for steps, value in ((range(1, 6), 1.0), (range(4, 7), 2.0)):
        with Run(tmp_path, "jsonl").tracking as tracking:
            for step in steps:
                tracking.log({"x": value + step / 10}, step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "da')  # the machine went down here
    read = read_metrics(tmp_path / "metrics.jsonl")
    assert {step: row["x"] for step, row in read.items()} == {1: 1.1, 2: 1.2, 3: 1.3, 4: 2.4, 5: 2.5, 6: 2.6}


def test_going_back_forgets_later_steps_and_joins_lines_of_one_step(tmp_path: Path) -> None:
    with Run(tmp_path, "jsonl").tracking as tracking:
        for step in (1, 2, 3):
            tracking.log({"x": step}, step)
        tracking.log({"val": 0.5, "bad": math.nan}, step=2)
    assert read_metrics(tmp_path / "metrics.jsonl") == {1: {"x": 1}, 2: {"x": 2, "val": 0.5}}


def test_tensorboard_has_the_numbers_at_their_steps(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Run(tmp_path, "tensorboard").tracking as tracking:
        for step in (1, 2):
            tracking.log({"critic/score/mean": step / 2}, step)
        tracking.log_samples([SAMPLE], 2)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("critic/score/mean")] == [(1, 0.5), (2, 1.0)]
    assert "samples/text_summary" in events.Tags()["tensors"]


class Broken:
    """Raises in the call named by `where`."""

    def __init__(self, run: TrackedRun, where: str) -> None:
        self.where = where
        self.attempt("start")

    def attempt(self, what: str) -> None:
        if what == self.where:
            raise ConnectionError("the server is down")

    def log(self, metrics: object, step: int) -> None:
        self.attempt("log")

    def log_samples(self, samples: object, step: int) -> None:
        self.attempt("log_samples")

    def finish(self) -> None:
        self.attempt("finish")


@pytest.mark.parametrize("where", ["start", "log", "log_samples", "finish"])
def test_a_tracker_that_raises_costs_one_warning(tmp_path: Path, clean_registry: None, where: str) -> None:
    register_tracker("broken")(lambda run: Broken(run, where))
    run = Run(tmp_path, "broken", "jsonl")
    with run.tracking as tracking:
        for step in range(20):
            tracking.log({"x": 1.0}, step)
            tracking.log_samples([SAMPLE], step)
    assert len(run.lines("metrics.jsonl")) == 20
    printed = run.file.getvalue()
    assert printed.count("the server is down") == 1 and "tracker broken" in printed


@pytest.mark.parametrize("where", ["start", "log"])
def test_a_tracker_that_hangs_delays_nothing(
    tmp_path: Path, clean_registry: None, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr("trainer.tracking._FINISH_TIMEOUT_S", 0.1)
    monkeypatch.setattr("trainer.tracking._QUEUE_LENGTH", 10)
    release = threading.Event()

    class Hanging(Broken):
        def attempt(self, what: str) -> None:
            if what == self.where:
                release.wait(20)

    register_tracker("hanging")(lambda run: Hanging(run, where))
    run = Run(tmp_path, "hanging", "jsonl")
    started = time.monotonic()
    with run.tracking as tracking:
        for step in range(50):
            tracking.log({"x": 1.0}, step)
    assert time.monotonic() - started < 2.0
    assert len(run.lines("metrics.jsonl")) == 50 and run.file.getvalue().count("tracker hanging") == 1
    release.set()


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    run = Run(tmp_path / "gone", "jsonl")
    with run.tracking as tracking:
        tracking.log({"x": 1.0}, 1)
        tracking.log({"x": 1.0}, 2)
    assert run.file.getvalue().count("cannot write") == 1


def test_unknown_trackers_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tracker 'swandb'.*console, jsonl, tensorboard, wandb"):
        Run(tmp_path, "jsonl", "swandb")


@pytest.mark.slow
def test_wandb_without_an_account_is_offline_and_keeps_its_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    ids = []
    for step in (1, 2):
        with Run(tmp_path, "wandb").tracking as tracking:
            tracking.log({"training/global_step": step, "x": 1.0}, step)
        ids.append((tmp_path / "wandb_id.txt").read_text())
    assert ids[0] == ids[1] and any(path.name.startswith("offline-run") for path in (tmp_path / "wandb").iterdir())

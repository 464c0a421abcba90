"""Trackers: what lands in the files, and that one which raises or hangs neither stops nor slows a run."""

from __future__ import annotations

import io
import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from trainer.console import Console
from trainer.evaluate.sample import Sample
from trainer.trackers.base import PACKAGES
from trainer.tracking import TRACKERS, Tracking, read_metrics
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


INSTALLED = [name for name in sorted(TRACKERS) if name not in PACKAGES or find_spec(PACKAGES[name]) is not None]
"""Trackers that need nothing, or a package of the dev extra; the others are in trackers/test_adapters.py."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "wandb")) for name in INSTALLED]
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
    assert left == expected.get(name, {"wandb", "wandb_id.txt", "wandb_step.txt"})


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


def test_a_resumed_run_hides_in_tensorboard_what_it_repeats(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def train(steps: range, value: float) -> None:
        with Run(tmp_path, "tensorboard").tracking as tracking:
            for step in steps:
                tracking.log({"training/global_step": step, "x": value}, step)

    train(range(1, 6), 1.0)
    train(range(3, 5), 2.0)  # rewound: the first step done again is 3
    with Run(tmp_path, "tensorboard").tracking as tracking:  # continued after 4, with a validation before the next step
        tracking.log({"val": 0.5}, 4)
        tracking.log({"training/global_step": 5, "x": 3.0}, 5)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("x")] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)]
    assert [event.step for event in events.Scalars("val")] == [4]


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    run = Run(tmp_path / "gone", "jsonl")
    with run.tracking as tracking:
        tracking.log({"x": 1.0}, 1)
        tracking.log({"x": 1.0}, 2)
    assert run.file.getvalue().count("cannot write") == 1


def test_unknown_trackers_are_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tracker 'swandb'.*tensorboard, wandb, mlflow, swanlab, trackio"):
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

"""What lands in the record and in TensorBoard's and wandb's files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.observe.scripted import Run
from trainer.observe.tracking import TRACKERS, read_metrics
from verl_lite.config import PPOConfig


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("console", set()),
        ("jsonl", set()),
        ("tensorboard", {"tensorboard"}),
        pytest.param("wandb", {"wandb", "wandb_id.txt"}, marks=pytest.mark.slow),
    ],
)
def test_every_tracker_takes_numbers_and_samples_and_starts_again_in_the_same_folder(
    name: str, left: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's own record is there whatever `trainer.logger` says."""
    for variable in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setattr("trainer.observe.tracking.FINISH_TIMEOUT_S", 120.0)  # this is no test of a busy machine
    for start in (0, 2):
        run = Run(tmp_path, loggers=[name])
        printed = run.train(start, start + 1, samples=True, bad=math.nan)
        assert "note: tracker" not in printed and ("to upload the run: wandb sync" in printed) is (name == "wandb")
        ids = [file.read_text() for file in tmp_path.glob("*_id.txt")]
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"} | left
    if name == "wandb":  # without an account it is offline, and goes on in the same run
        assert ids == [(tmp_path / "wandb_id.txt").read_text()]
        assert any(path.name.startswith("offline-run") for path in (tmp_path / "wandb").iterdir())
    if name == "tensorboard":
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        # TensorBoard reads files of the same second in the order of their names, in which .10 comes before .9
        rates = sorted((event.step, event.value) for event in events.Scalars("actor/lr"))
        assert rates == [(0, 0), (1, 0.5), (2, 1), (3, 1.5)]
        assert "samples/text_summary" in events.Tags()["tensors"]


@pytest.mark.slow
def test_the_guide_sends_a_recorded_run_to_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines of REPORTS.md, which wandb runs offline here. They give it the repeated step 2 as it was in the end."""
    wandb = pytest.importorskip("wandb")
    guide = (Path(__file__).parents[3] / "trainer" / "REPORTS.md").read_text(encoding="utf-8")
    [lines_of_guide] = re.findall(r"```python\n(import wandb\n.*?)```", guide, flags=re.DOTALL)
    for kl, steps in ((0.0, (1, 2, 3)), (1.0, (2, 3))):
        Run(tmp_path, []).train(*steps, **{"actor/kl_coef": kl})
    sent = []
    monkeypatch.setattr(wandb.Run, "log", lambda run, metrics, step: sent.append((step, metrics["actor/kl_coef"])))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN").mkdir()
    (tmp_path / "metrics.jsonl").rename(tmp_path / "RUN" / "metrics.jsonl")
    exec(lines_of_guide, {})
    assert sent == [(1, 0.0), (2, 1.0), (3, 1.0)]


def test_the_record_has_a_line_per_step_and_null_for_what_is_no_number(tmp_path: Path) -> None:
    with Run(tmp_path, loggers=[]).tracking as tracking:
        tracking.log({"a": 1.5, "b": math.nan, "c": math.inf}, step=0)
        tracking.log({"a": 2.0}, step=1)
    assert lines(tmp_path / "metrics.jsonl") == [
        {"step": 0, "data": {"a": 1.5, "b": None, "c": None}},
        {"step": 1, "data": {"a": 2.0}},
    ]


def test_a_resumed_run_appends_and_reading_leaves_out_what_was_repeated(tmp_path: Path) -> None:
    for steps, value in ((range(1, 6), 1.0), (range(4, 7), 2.0)):
        with Run(tmp_path, loggers=[]).tracking as tracking:
            for step in steps:
                tracking.log({"training/global_step": float(step), "x": value + step / 10, "only": 1 / value}, step)
                tracking.log({"timing_s/save_checkpoint": value}, step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "da')  # the machine went down here
    Run(tmp_path, loggers=[]).train(6)
    read = read_metrics(tmp_path / "metrics.jsonl")
    assert {step: row.get("x") for step, row in read.items()} == {1: 1.1, 2: 1.2, 3: 1.3, 4: 2.4, 5: 2.5, 6: None}
    assert read[5]["timing_s/save_checkpoint"] == 2.0 and read[6]["actor/lr"] == 3.0 and "x" not in read[6]


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    assert Run(tmp_path / "gone", loggers=[]).train(1, 2).count("cannot write") == 1


def test_the_tracker_of_the_guide_receives_metrics_samples_and_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(__file__).parents[3] / "trainer" / "REPORTS.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    [code] = [block for block in blocks if "class MyTracker" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    monkeypatch.setitem(TRACKERS, "mine", names["MyTracker"])
    Run(tmp_path, ["mine"]).train(1, 2, samples=True)
    written = [json.loads(line) for line in (tmp_path / "my_tracker.jsonl").read_text().splitlines()]
    assert [line["step"] for line in written] == [1, 1, 2, 2]
    assert written[0]["lr"] == PPOConfig().actor.optim.lr and written[0]["actor/lr"] == 0.5
    assert written[1]["answers"] == ["12"]

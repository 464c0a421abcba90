"""The report of a sweep: pictures, page and their words, for whole studies and for those with nothing to show."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import optuna
import pytest
from matplotlib.colors import to_hex

from tests.trainer.reports.pages.test_page import Reader
from trainer.sweep_report import main, write_report
from trainer.sweeps.engine import Engine
from trainer.sweeps.importance import importance_of
from trainer.sweeps.options import Plan, Question
from trainer.sweeps.pictures import WORST_TO_BEST, Colours, curve_of
from trainer.sweeps.space import read_space
from trainer.sweeps.study import METRICS, Attempt, RunRecord, Study, read_study

METRIC = "val-core/task/acc/mean@1"
FAKE = str(Path(__file__).with_name("fake_trial.py"))


class Made:
    """A study on the disk whose trials a test makes up."""

    def __init__(self, folder: Path, space: dict[str, Any], seeds: tuple[int, ...] | None = None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        found, _ = read_space(space)
        question = Question(FAKE, "none", space=found, seeds=seeds, metric=METRIC)
        self.study = Study(folder, question, Plan("random", 3), "journal", str(folder))
        self.study.save()
        self.engine = Engine(self.study)

    def add(self, state: str, histories: list[dict[int, float]], error: str = "", **values: Any) -> None:
        """A trial that ended so; a run with that history for each of its seeds."""
        number = len(self.engine.trials())
        given = {
            parameter.name: values[parameter.name.replace(".", "_")]
            for parameter in self.study.question.space.parameters
        }
        seeds = self.study.question.seeds or (None,)
        for seed, history in zip(seeds, histories, strict=True):
            folder = self.study.trial_folder(number) / ("run" if seed is None else f"seed-{seed}")
            folder.mkdir(parents=True)
            lines = [json.dumps({"step": step, "data": {METRIC: value}}) + "\n" for step, value in history.items()]
            (folder / METRICS).write_text("".join(lines))
            done = "done" if state == "COMPLETE" else "failed"
            command = ["python", FAKE, f"trainer.seed={seed}"]
            run = RunRecord(seed, folder, command, done, list(history.values())[-1] if history else None)
            run.attempts = [Attempt(0.0, "cpu 0", 1, 0, ended=90.0, cause="done")]
            run.save()
        ends = [list(history.values())[-1] for history in histories if history]
        self.engine.optuna.add_trial(
            optuna.trial.create_trial(
                params=given,
                distributions=self.study.question.space.distributions(),
                value=None if state == "FAIL" else sum(ends) / len(ends),
                intermediate_values=histories[0] if state == "PRUNED" else {},
                state=optuna.trial.TrialState[state],
                user_attrs={"error": error} if error else {},
            )
        )

    def page(self) -> str:
        """The page, which is checked to be whole."""
        document = write_report(self.study.folder)[0].read_text()
        assert not Reader(document).open
        return document


class _Words(HTMLParser):
    def __init__(self, document: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.feed(re.sub("(?s)<(script|style|svg).*?</\\1>", "", document))

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def words(document: str) -> str:
    """What a reader sees besides pictures."""
    return re.sub(r"\s+", " ", " ".join(_Words(document).parts))


SPACE = {"lr": "log(1e-4,1e-2)", "kind.of": ["a", "<i>b</i>"]}


def test_a_study_with_all_kinds_of_trials(tmp_path: Path) -> None:
    made = Made(tmp_path / "s", SPACE, seeds=(1, 2))
    made.add("COMPLETE", [{1: 0.1, 2: 0.4}, {1: 0.3, 2: 0.6}], lr=1e-3, kind_of="a")
    made.add("COMPLETE", [{1: 0.1, 2: 0.1}, {1: 0.1, 2: 0.3}], lr=2e-4, kind_of="<i>b</i>")
    made.add("PRUNED", [{1: 0.05}, {1: 0.07}], lr=1e-2, kind_of="a")
    made.add("FAIL", [{}, {}], error="out of memory: <b>CUDA</b>", lr=5e-3, kind_of="a")
    document = made.page()
    told = words(document)
    # t(1) = 12.706, standard error 0.1: 0.5 +- 1.3; Welch: sqrt(0.02) * t(2) = 0.141 * 4.303 = 0.61
    assert "0.5 +- 1.3" in told and "difference of 0.3 +- 0.61" in told and "not told apart by these seeds" in told
    assert "<i>b</i>" in told and "out of memory: <b>CUDA</b>" in told and "<b>CUDA" not in document
    assert f"python {FAKE} trainer.seed=1" in told and str(tmp_path / "s" / "trials" / "0000" / "seed-2") in told
    assert "2 trials are complete; with fewer than 4 nothing is said" in told
    ids = set(re.findall(r'id="([^"]*-trial-\d+)"', document))
    assert {f"curves-trial-{n}" for n in (0, 1, 2)} <= ids and "curves-trial-3" not in ids
    assert {"parallel-trial-2", "slice-lr-trial-0", "slice-kind.of-trial-1", "slice-lr-interval-trial-0"} <= ids
    assert {one for one in ids if one.startswith("curves-end")} == {"curves-end-trial-2"}  # the cross of the pruned one
    files = {path.name for path in (tmp_path / "s").glob("*.png")}
    assert files == {"curves.png", "parallel.png", "slice-1.png", "slice-2.png"}
    rows = re.findall(r'<tr data-key="(trial-\d)">', document)
    assert rows == ["trial-0", "trial-1", "trial-2", "trial-3"] and 'data-order="180.0"' in document


def test_a_study_without_anything_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Made(tmp_path / "s", SPACE)
    told = words(made.page())
    assert "trials 0" in told and "The study has no trials yet. To begin: python -m trainer.sweep --study" in told
    made.engine.plan()
    assert "No trial is finished yet. To go on: python -m trainer.sweep" in words(made.page())
    made.add("FAIL", [{}], error="wrong input: no such file", lr=1e-3, kind_of="a")
    assert "No trial is complete. Trial 3: wrong input: no such file." in words(made.page())
    assert main([str(tmp_path / "s")]) == 0 and "report.html" in capsys.readouterr().out
    assert main([str(tmp_path / "other" / "t")]) == 2 and "there is no study" in capsys.readouterr().err


def test_a_metric_that_is_nan_everywhere(tmp_path: Path) -> None:
    made = Made(tmp_path / "s", SPACE)
    made.add("FAIL", [{1: float("nan"), 2: float("nan")}], error="no number", lr=1e-3, kind_of="a")
    told = words(made.page())
    assert f"{METRIC} is not a number (nan or inf) in every step of every run" in told
    assert f"No run has logged {METRIC} as a number" in told


def test_one_trial_alone(tmp_path: Path) -> None:
    made = Made(tmp_path / "s", {"x": [1, 2]})
    made.add("COMPLETE", [{3: 0.25}], x="2")
    told = words(made.page())
    assert "One trial is complete: there is nothing to compare it with." in told
    assert "there are no intervals: seeds=3 gives some" in told


def test_curves_are_means_over_seeds_without_what_is_no_number(tmp_path: Path) -> None:
    made = Made(tmp_path / "s", {"x": [1]}, seeds=(1, 2))
    made.add("COMPLETE", [{1: 1.0, 2: float("nan"), 3: 3.0}, {1: 3.0, 2: 4.0}], x="1")
    trial = read_study(made.study.folder).trials[0]
    assert curve_of(trial, METRIC) == [(1, 2.0), (2, 4.0), (3, 3.0)]
    made.add("COMPLETE", [{step: float(step) for step in range(1000)}, {0: 0.0}], x="1")
    thin = curve_of(read_study(made.study.folder).trials[1], METRIC)
    assert len(thin) == 400 and thin[0] == (0, 0.0) and thin[-1] == (999, 999.0)


def test_colours_are_by_rank_so_that_one_bad_trial_leaves_the_others_apart(tmp_path: Path) -> None:
    for mode, values in (("max", (-1000.0, 0.5, 0.51, 0.52)), ("min", (1000.0, 0.52, 0.51, 0.5))):
        made = Made(tmp_path / mode, {"x": [1, 2, 3, 4]})
        for place, value in enumerate(values, start=1):
            made.add("COMPLETE", [{1: value}], x=str(place))
        made.add("COMPLETE", [{1: values[1]}], x="2")
        made.add("FAIL", [{1: 0.6}], x="3")
        record = read_study(made.study.folder)
        object.__setattr__(record.question, "mode", mode)
        colours = Colours(record)
        found = [colours.of(trial) for trial in record.trials]
        # at equal distances on the scale, whatever the values are; equal values alike
        assert found[:4] == [to_hex(WORST_TO_BEST(place)) for place in (0, 1 / 3, 2 / 3, 1.0)]
        assert found[4] == found[1] and found[5] not in found[:5]


def test_a_trial_has_one_colour_in_all_pictures(tmp_path: Path) -> None:
    made = Made(tmp_path / "s", {"lr": "log(1e-4,1e-2)", "kind": ["a", "b"]})
    for value, lr in ((0.1, 1e-3), (0.9, 2e-3), (0.4, 5e-3)):
        made.add("COMPLETE", [{1: 0.0, 2: value}], lr=lr, kind="a")
    document = made.page()
    for number in range(3):
        drawn = re.findall(rf'<g id="[^"]*-trial-{number}">(.*?)</g>', document, re.DOTALL)
        colours = {colour for one in drawn for colour in re.findall(r"(?:stroke|fill): (#[0-9a-f]{6})", one)}
        assert len(drawn) == 4 and len(colours) == 1


def test_importance_finds_the_parameter_that_counts(tmp_path: Path) -> None:
    made = Made(tmp_path / "s", {"x": "uniform(0,1)", "y": "uniform(0,1)"})
    for place in range(60):  # x and y run through [0, 1] in different orders
        x, y = (place * 0.618034) % 1, (place * 0.414214) % 1
        made.add("COMPLETE", [{1: x}], x=x, y=y)
    found = importance_of(read_study(made.study.folder))
    assert list(found.shares) == ["x", "y"] and found.shares["x"] > 0.8
    assert found.note == "PED-ANOVA: what the best 6 of 60 complete trials have in common."


def test_importance_says_what_is_missing(tmp_path: Path) -> None:
    made = Made(tmp_path / "s", {"x": [1, 2], "y": [1, 2]})
    for x in ("1", "2", "1", "2"):
        made.add("COMPLETE", [{1: 1.0}], x=x, y="1")
    assert importance_of(read_study(made.study.folder)).note.endswith("when two parameters vary; only x did.")
    made.add("COMPLETE", [{1: 1.0}], x="1", y="2")
    assert importance_of(read_study(made.study.folder)).note == "All trials have the same value."

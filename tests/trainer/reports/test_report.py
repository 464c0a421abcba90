"""The page of trainer.report (safe with what models write, bounded in size, for any kind of run); trainer.inspect."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.run_folder import HOSTILE, SAMPLE, make_run, make_study
from trainer import inspect, report
from trainer.evaluate.sample_files import SampleFiles
from trainer.reports import run_data
from trainer.reports.page import page as document
from trainer.reports.page_data import MAX_POINTS, page_data
from trainer.reports.run_data import read_run


class Page(HTMLParser):
    """Collects elements and the text in scripts; knows whether every element is closed."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(document)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found


def page_of(*folders: Path) -> Page:
    page = Page(report.write_report(folders, folders[0] / "out.html").read_text(encoding="utf-8"))
    assert not page.open
    return page


def test_what_a_model_wrote_stays_text(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "<b>a</b>"))
    assert page.names.count("script") == 3 and "img" not in page.names and "b" not in page.names
    assert HOSTILE in [row[7] for row in page.data["samples"]]
    assert "innerHTML" not in page.scripts[2] and "insertAdjacentHTML" not in page.scripts[2]


def test_a_page_allows_its_own_scripts_and_nothing_from_elsewhere(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "a"))
    library = gzip.decompress(base64.b64decode(page.scripts[1])).decode()
    assert "plotly.js" in library[:200]
    digests = [base64.b64encode(hashlib.sha256(x.encode()).digest()).decode() for x in (page.scripts[2], library)]
    (policy,) = (value for name, value in page.attributes if name == "content" and value and "default-src" in value)
    allowed = f"script-src 'sha256-{digests[0]}' 'sha256-{digests[1]}'"
    assert " ".join(policy.split()) == f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; {allowed}"
    assert not {name for name, _ in page.attributes} & {"src", "href"}


def test_text_with_halves_of_characters_goes_through_and_what_is_no_number_does_not() -> None:
    assert Page(document("\ud800", {"a": "\ud800 \u2028"})).data == {"a": "? \u2028"}
    with pytest.raises(ValueError):
        document("t", float("nan"))


def test_curves_configuration_findings_and_docs_are_on_the_page(tmp_path: Path) -> None:
    data = page_of(make_run(tmp_path / "a")).data
    (run,) = data["runs"]
    assert run["steps"] == [0, 1, 2, 3, 4] and run["series"]["critic/score/mean"] == [[None, 0.1, 0.2, 0.3, 0.4]]
    assert run["config"]["actor.optim.lr"] == ["0.001", "command line"] and run["state"] == "finished"
    assert {finding["grade"] for finding in run["findings"]} <= {"ok", "look", "bad"}
    assert "sum of token_level_scores" in data["docs"]["critic/score/mean"]["formula"]
    (line,) = data["validation"]
    assert line["names"] == {"0": "val-core/sums/acc/mean@1"}
    assert line["intervals"] == {"0": "val-aux/sums/acc/mean@1/ci95"} and line["measures"] == {"0": "acc mean@1"}
    assert len(data["samples"]) == 13 and len(data["prompts"]) == 1 and run["notes"] == ["a note"]


def test_a_run_without_samples_and_without_configuration(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {"train/loss": 2.0}}\n')
    data = page_of(tmp_path).data
    assert data["samples"] == [] and data["runs"][0]["config"] == {} and data["runs"][0]["total_steps"] is None


def test_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    data = page_of(make_run(tmp_path / "a"), make_run(tmp_path / "b", steps=6, lr=0.01)).data
    assert [run["title"] for run in data["runs"]] == ["a", "b"] and {row[0] for row in data["samples"]} == {0, 1}
    assert [run["config"]["actor.optim.lr"][0] for run in data["runs"]] == ["0.001", "0.01"]


def test_runs_with_other_measures_are_compared_by_the_one_they_share(tmp_path: Path) -> None:
    logged = (
        {"val-core/s/acc/mean@4": 0.5, "val-aux/s/reward/mean@4": 0.4, "val-core/t/acc/mean@4": 0.5},
        {"val-core/s/reward/mean@2": 0.6, "val-core/t/reward/mean@2": 0.6},
    )
    for name, numbers in zip("ab", logged, strict=True):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps({"step": 1, "data": numbers}) + "\n")
    lines = {line["source"]: line for line in page_of(tmp_path / "a", tmp_path / "b").data["validation"]}
    assert lines["s"]["names"] == {"0": "val-aux/s/reward/mean@4", "1": "val-core/s/reward/mean@2"}
    assert lines["t"]["measures"] == {"0": "acc mean@4", "1": "reward mean@2"}, "side by side in one chart"


def test_the_page_of_a_sweep_has_its_trials_and_its_best_runs(tmp_path: Path) -> None:
    data = page_of(make_study(tmp_path / "sweep")).data
    study = data["study"]
    assert [run["title"] for run in data["runs"]] == ["0001/run", "0000/run"]
    assert [trial["state"] for trial in study["trials"]] == ["complete", "complete", "pruned", "failed"]
    assert study["parameters"] == ["lr", "kind"] and study["trials"][1]["parameters"] == {"lr": 0.002, "kind": "a"}
    assert study["trials"][0]["curves"] == [[[step, step / 4] for step in range(5)]]
    assert study["trials"][3]["value"] is None and study["trials"][3]["error"] == "out of memory"
    assert study["trials"][0]["commands"] == ["cmd 1", "cmd 2"]
    assert study["note"].startswith("Trial 1 is 0.5 better than trial 0, more than the 95% interval")


def test_a_run_that_ended_with_an_error_shows_it_and_how_to_run_the_step_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "my run", total=9)
    crash = folder / "crash" / "step_5"
    crash.mkdir(parents=True)
    (crash / "error.txt").write_text("Traceback ...\n  File x\nValueError: my loss is a list\n  To run it again\n")
    (run,) = page_of(folder).data["runs"]
    first = run["findings"][0]
    assert first["grade"] == "bad" and first["text"].endswith("error in step 5: ValueError: my loss is a list")
    assert "Traceback" in first["log"] and f"python -m trainer.replay '{crash}'" in first["advice"]
    assert inspect.main([str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "ValueError: my loss is a list" in shown and "trainer.replay" in shown
    os.utime(crash / "error.txt", (1.0, 1.0))  # it was resumed, and has gone on since
    assert run_data.read_failure(read_run(folder)) is None


def test_samples_are_capped_evenly_with_best_and_worst_of_each_step_and_it_is_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "a", steps=2)
    files = SampleFiles(folder, 1 << 30, print)
    for step in range(1, 21):
        rows = [replace(SAMPLE, uid=f"u{i}", score=i / 50, output="x" * 9000, step=step) for i in range(50)]
        files.write_training(rows, step)
    data = page_data([read_run(folder)], sample_bytes=23 * 20_000)
    train = [row for row in data["samples"] if row[1] == "train"]
    assert len(json.dumps(data["samples"])) < 23 * 30_000
    for step in range(1, 21):
        of_step = [row for row in train if row[2] == step]
        assert {0.0, 0.98} <= {row[9] for row in of_step} and 2 <= len(of_step) <= 4
        assert {row[3] for row in of_step} == {row[3] for row in train}  # the same prompts at each step
    assert "(cut here; 9,000 characters)" in train[0][7]
    assert "of 1,003 samples are on this page, taken from every step" in data["runs"][0]["notes"][-1]


def test_long_curves_are_thinned_and_the_last_step_stays(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "data": {"critic/score/mean": float(step)}}) for step in range(4001)]
    rare = json.dumps({"step": 4001, "data": {"val-core/sums/acc/mean@1": 0.5}})
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, rare]) + "\n")
    (run,) = page_data([read_run(tmp_path)])["runs"]
    assert len(run["steps"]) <= MAX_POINTS and run["steps"][-1] == 4001 and run["steps"][:2] == [0, 3]
    assert run["series"]["critic/score/mean"][0][1] == 3.0
    assert run["series"]["val-core/sums/acc/mean@1"] == [[4001], [0.5]]
    assert run["notes"] == ["the curves show one step in 3, and the last"]


# ------------------------------------------------------------------------------------------------------ commands


def test_the_command_writes_into_the_run_folder_or_where_it_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_run(tmp_path / "a")
    assert report.main([str(folder / "metrics.jsonl")]) == 0 and (folder / "report.html").is_file()
    assert "MiB" in capsys.readouterr().out
    assert report.main([str(folder), "--out", str(tmp_path / "new" / "x.html")]) == 0
    assert (tmp_path / "new" / "x.html").is_file()
    assert report.main([str(tmp_path / "nothing")]) == 2 and "no such folder" in capsys.readouterr().err


def test_inspect_shows_state_curves_findings_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_run(tmp_path / "a")
    assert inspect.main([str(folder)]) == 0
    shown = capsys.readouterr().out
    for word in (
        "finished",
        "step 4 of 4",
        "critic/score/mean",
        "▁",
        "gen",
        "checks are fine",
        "best",
        "worst",
        "after",
    ):
        assert word in shown
    assert inspect.main([str(folder), "--follow"]) == 0  # it has ended: drawn once
    assert inspect.main([str(tmp_path)]) == 2


def test_whoever_has_seen_enough_of_a_run_ends_the_looking_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def ctrl_c(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect.time, "sleep", ctrl_c)
    monkeypatch.setattr(run_data, "_is_held", lambda path: True)
    assert inspect.main([str(make_run(tmp_path / "a")), "--follow"]) == 0
    shown = capsys.readouterr()
    assert "critic/score/mean" in shown.out and "left running" not in shown.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--best", "--count", "1"], ["step 4, p0", "1 of 13 that fit"]),
        (["--worst"], ["score late"]),
        (["--changed"], ["+1  train, p0", "step 1, score 0", "step 4, score 1: answer 4"]),
        (["--grep", "ONERROR"], ["1 of 1 that fit", "onerror=alert"]),
        (["--uid", "v0", "--step", "2"], ["val, step 2, v0", "1 of 1"]),
        (["--grep", "nowhere"], ["no samples fit"]),
    ],
)
def test_inspect_shows_the_samples_that_are_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: list[str]
) -> None:
    assert inspect.main([str(make_run(tmp_path / "a")), *options]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in words) and "\x1b[2J" not in shown
    assert re.search("Traceback", shown) is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--count", "0"], "--count 0: expected 1 or more"),
        (["--changed", "--step", "2"], "--changed compares the steps of a run: leave out --step"),
        (["--follow", "--best"], "--follow draws the overview, without samples"),
        (["--best", "--worst"], "not allowed with"),
    ],
)
def test_inspect_refuses_what_contradicts_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], sentence: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        inspect.main([str(tmp_path), *options])
    assert ended.value.code == 2 and sentence in capsys.readouterr().err

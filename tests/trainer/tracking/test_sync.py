"""`trainer.sync`: what a tracker did not take while the run trained, handed over afterwards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.tracking.scripted import SAMPLE, Hanging, Run, Scripted, raising
from trainer.sync import main
from trainer.tracking import TRACKERS

CONFIG = "trainer:\n  project_name: p\n  experiment_name: e  # command line\n  logger: [console, scripted]\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def test_what_it_lacks_is_handed_over_in_order_and_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run(folder, Scripted(raising("start"))).train(1, 2, 3, samples=True)
    TRACKERS["scripted"] = back = Scripted(raising("log", times=1))
    assert main([str(folder)]) == 1 and "lacks 6" in capsys.readouterr().out
    assert main([str(folder)]) == 0 and "scripted: took 6 messages" in capsys.readouterr().out
    assert main([str(folder)]) == 0 and back.steps == [1, 2, 3]


def test_one_that_hangs_keeps_nobody_waiting(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Run(folder, Scripted(raising("start"))).train(1)
    monkeypatch.setattr("trainer.sync.PATIENCE_S", 0.2)
    TRACKERS["scripted"] = Scripted(hanging := Hanging("log"))
    assert main([str(folder)]) == 1 and "lacks 1" in capsys.readouterr().out
    hanging.release.set()


def test_a_tracker_that_the_run_did_not_have_gets_all_of_it_as_it_was_in_the_end(folder: Path) -> None:
    for steps in ((1, 2, 3), (2, 3)):
        Run(folder, Scripted()).train(*steps, samples=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "da')  # the machine went down here
    TRACKERS["other"] = other = Scripted()
    assert main([str(folder), "--to", "other"]) == 0 and other.steps == [1, 2, 3]
    samples = [given for _, given in other.taken if isinstance(given, list)]
    assert samples == [[replace(SAMPLE, step=step)] for step in (1, 2, 3)]
    assert main([str(folder), "--to", "other", "--all"]) == 0 and other.steps == [1, 2, 3] * 2


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nothing_here"], "expected the folder of a run"),
        ([".", "--to", "wandbb"], "--to wandbb: no tracker 'wandbb'; known: jsonl, console"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    argv: list[str], says: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    assert main(argv) == 2 and says in " ".join(capsys.readouterr().err.split())

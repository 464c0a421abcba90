"""`trainer.sync`: what a tracker did not take while the run trained, handed over afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.trainer.trackers.scripted import SAMPLE, Run, Scripted, raising
from trainer.sync import Asked, main, sync, whole_run
from trainer.tracking import TRACKERS
from verl_lite.errors import UserError

CONFIG = "trainer:\n  project_name: p\n  experiment_name: e  # command line\n"


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[None]:
    before = dict(TRACKERS)
    yield
    TRACKERS.clear()
    TRACKERS.update(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(CONFIG)
    return tmp_path


def test_what_was_kept_is_handed_over_in_order_and_forgotten(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(folder, Scripted(raising("log")))
    run.train(1, 2, 3, samples=True)
    TRACKERS["scripted"] = back = Scripted()
    assert sync(Asked(folder)) == 0
    assert back.steps == [1, 2, 3] and not run.spool.exists()
    assert "scripted: took" in capsys.readouterr().out
    assert sync(Asked(folder)) == 0 and back.steps == [1, 2, 3]


def test_what_is_not_taken_stays_for_the_next_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(folder, Scripted(raising("start")))
    run.train(1, 2, 3, 4)
    assert sync(Asked(folder)) == 1
    refuses_one = Scripted(raising("log", times=1))
    TRACKERS["scripted"] = refuses_one
    assert sync(Asked(folder, "scripted")) == 1
    assert refuses_one.steps == [2, 3, 4] and "lacks 1" in capsys.readouterr().out
    assert sync(Asked(folder)) == 0 and refuses_one.steps == [2, 3, 4, 1]


def test_a_line_that_was_cut_off_is_left_out(folder: Path) -> None:
    run = Run(folder, Scripted(raising("start")))
    run.train(1)
    with run.spool.open("a") as file:
        file.write('{"step": 2, "metr')
    TRACKERS["scripted"] = back = Scripted()
    assert sync(Asked(folder)) == 0 and back.steps == [1] and not run.spool.exists()


def test_a_tracker_that_the_run_did_not_have_gets_all_of_it_as_it_was_in_the_end(folder: Path) -> None:
    for steps in ((1, 2, 3), (2, 3)):
        Run(folder, Scripted()).train(*steps, samples=True)
    TRACKERS["other"] = other = Scripted()
    assert sync(Asked(folder, "other")) == 0
    assert other.steps == [1, 2, 3] and [step for step, _ in other.taken] == [1, 1, 2, 2, 3, 3]
    samples = [given for _, given in other.taken if isinstance(given, list)]
    assert [[replace(sample, step=3) for sample in given] for given in samples] == [[SAMPLE]] * 3
    assert sync(Asked(folder, "other")) == 0 and other.steps == [1, 2, 3], "it lacks nothing now"
    assert sync(Asked(folder, "other", whole=True)) == 0 and other.steps == [1, 2, 3] * 2


def test_samples_of_a_step_done_twice_are_those_of_the_second_time(folder: Path) -> None:
    for steps in ((1, 2, 3), (2, 3)):
        Run(folder, Scripted()).train(*steps, samples=True)
    counts = [len(message.samples) for message in whole_run(folder) if message.samples is not None]
    assert counts == [1, 1, 1]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "expected one run folder"),
        (["a", "b"], "expected one run folder"),
        (["a", "--to"], "--to needs the name"),
        (["a", "--all"], "--all only with --to"),
        (["a", "--quick"], "--quick is not known"),
        (["nothing_here"], "expected the folder of a run"),
    ],
)
def test_a_wrong_command_line_says_what_is_wrong(
    argv: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2 and says in capsys.readouterr().err


def test_an_unknown_tracker_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"^--to wandbb: no tracker 'wandbb'; known: .*wandb"):
        sync(Asked(folder, "wandbb"))

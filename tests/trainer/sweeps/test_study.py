"""A study's log, what is decided from it, and what is said of its trials. No Ray runs here."""

from __future__ import annotations

import csv
import errno
import fcntl
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer import sweep
from trainer.sweep import summary
from trainer.sweeps import sweep_checks, trial_process, tuning
from trainer.sweeps.study import Study, locked
from trainer.sweeps.study_spec import STOP, Search, StudySpec
from trainer.sweeps.trial_process import Order, diagnose, held_up
from trainer.sweeps.tuning import Place, Sweep
from verl_lite.errors import UserError

T_1 = 12.7062
"""The 97.5% quantile of Student's t with one degree of freedom, from a table."""

Name = tuple[int, int | None]


@pytest.fixture(autouse=True)
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "problem", lambda *_: "")


def spec_of(words: list[str], seeds: int | None = None) -> StudySpec:
    return StudySpec(words, {}, None if seeds is None else list(range(1, seeds + 1)), "m", "max")


class Driver:
    """Stands in for Tune: asks a sweep for runs and answers for them."""

    def __init__(self, folder: Path, asked: StudySpec | None = None, search: Search | None = None) -> None:
        if asked is not None:
            Study(folder, asked, Search()).save()
        self.study, self.told, self.active = Study.load(folder), list[str](), dict[str, Name]()
        self.study.search = search or self.study.search
        self.study.save()
        self.sweep = Sweep(self.study, Place(None, {}), self.told.append)

    def next(self) -> Name | None:
        name = f"tune-{len(self.active)}"
        order = self.sweep.suggest(name)
        if not isinstance(order, dict):
            return None
        trial, run = order["order"].folder.parent, order["order"].folder.name
        trial.mkdir(parents=True, exist_ok=True)
        self.active[name] = int(trial.name), None if run == "run" else int(run.removeprefix("seed-"))
        return self.active[name]

    def say(self, run: Name | None, values: dict[int, float], ended: dict[str, Any] | None = None) -> None:
        name = [name for name, known in self.active.items() if known == run][-1]
        names = ["other"] if ended and not values else []
        said = {"values": values, "step": max(values, default=0), "waits": "", "names": names, "ended": ended}
        self.sweep.on_trial_result(name, {"report": json.dumps(said)})

    def end(self, run: Name | None, values: dict[int, float], state: str = "done", error: str = "") -> None:
        self.say(run, values, {"state": state, "seconds": 1.0, "steps": 3} | ({"error": error} if error else {}))


def test_a_grid_is_run_in_order_each_trial_with_its_seeds_and_goes_on_from_the_log(tmp_path: Path) -> None:
    driver = Driver(tmp_path, spec_of(["x=1,2", "y=5"], seeds=2))
    assert [driver.next() for _ in range(5)] == [(0, 1), (0, 2), (1, 1), (1, 2), None]
    assert driver.told == [], "what Tune takes ahead has not started"
    driver.say((0, 1), {})
    driver.say((0, 1), {1: 0.25})
    assert driver.told == ["trial 0 seed 1 starts: x=1"]
    driver.end((0, 1), {1: 0.25, 2: 0.5})
    driver.end((0, 2), {2: 0.7})
    driver.end((1, 1), {2: 0.1})

    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"trial": 1, "se')  # what a crash cut off
    again = Driver(tmp_path)
    assert again.next() == (1, 2) and again.next() is None, "what is done is not run again"
    again.end((1, 2), {2: 0.3})
    first, second = Study.load(tmp_path).finished()
    assert (first.number, first.value, second.value) == (0, pytest.approx(0.6), pytest.approx(0.2))
    assert first.half_width == pytest.approx(T_1 * 0.1, rel=1e-3), "two values' standard error is half their range"

    rows = list(csv.DictReader((tmp_path / "trials.csv").open()))
    assert [row["state"] for row in rows] == ["complete"] * 2 and rows[0]["x"] == "1" and rows[0]["value"] == "0.6"
    assert rows[0]["runs"] == "trials/0000/seed-1;trials/0000/seed-2"
    told = summary(Study.load(tmp_path), "GO ON")
    assert "0.6 +- 1.3 (2 seeds)" in told and "python -m trainer.main_ppo y=5 x=1 trainer.seed=2" in told


def test_asha_judges_means_over_seeds_and_its_decision_is_on_disk_before_runs_are_asked_to_end(tmp_path: Path) -> None:
    driver = Driver(tmp_path, spec_of(["x=1,2,3"], seeds=2), Search(asha={"reduction_factor": 2}))
    study = driver.study
    runs = [driver.next() for _ in range(6)]
    for run in runs[:2]:
        driver.say(run, {1: 0.5})
    driver.say((1, 1), {1: 0.7})
    driver.say((1, 2), {1: 0.7})
    driver.say((1, 1), {1: 0.7, 2: 0.9})
    assert study.trials[1].means == {1: 0.7}, "a step is judged when all seeds that have begun are there"
    driver.say((1, 2), {1: 0.7, 2: 0.5})
    assert study.trials[1].means == {1: 0.7, 2: 0.7} and study.trials[1].state == "running"
    log = tmp_path / "log.jsonl"

    seen: list[bool] = []
    ask = study.ask_to_end
    study.ask_to_end = lambda trial: (seen.append('"prune": true' in log.read_text()), ask(trial))[1]  # type: ignore[method-assign]
    driver.say((2, 1), {1: 0.2})
    assert seen == [True] and (study.trials[2].folder / STOP).exists()
    driver.end((2, 1), {}, "stopped")
    driver.end((2, 2), {}, "stopped")
    assert Study.load(tmp_path).trials[2].state == "pruned"

    again = Driver(tmp_path)
    assert [again.next() for _ in range(5)] == [(0, 1), (0, 2), (1, 1), (1, 2), None], "a pruned trial stays pruned"
    assert [trial.means for trial in again.study.trials] == [{1: 0.5}, {1: 0.7, 2: 0.7}, {1: 0.2}]
    again.say((0, 1), {1: 0.5, 2: 0.6})
    assert again.study.trials[0].is_pruned, "the judge knows what was judged before"


def test_a_sweep_that_goes_on_puts_each_trial_into_its_bracket_again(tmp_path: Path) -> None:
    search = Search(asha={"brackets": 3, "grace_period": 1})
    choices = ",".join(map(str, range(12)))
    brackets = []
    for part in ("first", "again"):
        (tmp_path / part).mkdir()
        driver = Driver(tmp_path / part, spec_of([f"x={choices}"], seeds=1), search)
        for run in [driver.next() for _ in range(12)]:
            np.random.random()  # what else the process draws
            driver.say(run, {1: 0.5})
        asha = driver.sweep._asha
        assert asha is not None
        brackets.append([asha._brackets.index(asha._trial_info[str(number)]) for number in range(12)])
    assert brackets[0] == brackets[1] and len(set(brackets[0])) > 1


def test_a_trial_fails_with_its_run(tmp_path: Path) -> None:
    driver = Driver(tmp_path, spec_of(["x=1,2"], seeds=2))
    assert [driver.next(), driver.next()] == [(0, 1), (0, 2)]
    driver.end((0, 1), {1: 0.5}, "failed", "ValueError: the reward is wrong")
    assert (driver.study.trials[0].folder / STOP).exists(), "its other runs are in vain"
    driver.end((0, 2), {1: 0.5}, "stopped")
    assert driver.next() == (1, 1) and driver.next() == (1, 2) and driver.next() is None
    driver.end((1, 1), {1: float("nan")})
    driver.end((1, 2), {1: 0.5})
    assert [trial.state for trial in driver.study.trials] == ["failed", "failed"]
    told = summary(driver.study, "GO ON")
    assert "trial 0 failed: ValueError: the reward is wrong" in told and "m is nan" in told
    assert Driver(tmp_path).next() is None


def test_a_run_without_the_metric_ends_the_sweep(tmp_path: Path) -> None:
    driver = Driver(tmp_path, spec_of(["x=1,2"]))
    driver.end(driver.next(), {})
    assert "--metric m: trial 0 does not log it" in str(driver.sweep.problem) and "other" in str(driver.sweep.problem)
    assert driver.next() is None and (tmp_path / STOP).exists()


@pytest.mark.parametrize("kind", ["optuna", "random"])
def test_drawn_trials_differ_and_go_on(tmp_path: Path, kind: str) -> None:
    driver = Driver(tmp_path, spec_of(["x=uniform(0,1)", "n=int(1,4)", "y=a,b"]), Search(kind, 4))
    assert [driver.next() for _ in range(3)] == [(0, None), (1, None), (2, None)]
    driver.end((0, None), {1: 0.5})
    driver.end((1, None), {}, "failed", "it broke")
    again = Driver(tmp_path, search=Search(kind, 6))  # more than there were
    runs = [again.next() for _ in range(5)]
    assert runs == [(2, None), (3, None), (4, None), (5, None), None], "the one that ran goes on, then new ones"
    for run in runs[:4]:
        again.end(run, {1: 0.1})
    values = [trial.parameters["x"] for trial in again.study.trials]
    assert len(set(values)) == 6 and all(0 <= float(value) <= 1 for value in values)
    assert [trial.state for trial in again.study.trials] == ["complete", "failed", *["complete"] * 4]


def test_a_draw_that_the_command_would_refuse_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "problem", lambda _, values, gpus: "x is in the way" if values["x"] < 5 else "")
    driver = Driver(tmp_path, spec_of(["x=int(1,9)"]), Search("optuna", 8))
    while (run := driver.next()) is not None:
        driver.end(run, {1: 0.5})
    refused = [trial for trial in driver.study.trials if int(trial.parameters["x"]) < 5]
    assert refused and all((trial.state, trial.error) == ("failed", "x is in the way") for trial in refused)
    assert len(driver.study.trials) == 8


def test_another_question_a_damaged_study_and_a_second_sweep_are_refused(tmp_path: Path) -> None:
    driver = Driver(tmp_path, spec_of(["x=1,2"]))
    with pytest.raises(UserError, match=r"words was \['x=1,2'\], and is \['x=1,3'\]"):
        driver.study.refuse_another(spec_of(["x=1,3"]))
    for _ in range(2):
        who = f"pid {os.getpid()} of user [^ ]* is working on it"
        with locked(tmp_path), pytest.raises(UserError, match=who), locked(tmp_path):
            pass
    driver.next()
    (tmp_path / "log.jsonl").write_text("no\n")
    with pytest.raises(UserError, match="log.jsonl cannot be read .*start a study with another name"):
        Study.load(tmp_path)
    with pytest.raises(UserError, match="no study exists there"):
        Study.load(tmp_path / "nowhere")


def test_a_file_system_without_locks_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a study and of the log of a run."""

    def without(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    with locked(tmp_path):
        assert "cannot be locked (No locks available): a second sweep" in capsys.readouterr().out
    order = Order([], tmp_path, "", "m", None, "sweep", gpus=False, umask=0o077)
    with (tmp_path / "log").open("ab") as log:
        assert held_up(order, log) == ""


def test_a_second_sweep_changes_nothing_and_sees_what_the_first_has_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first, seen = Driver(tmp_path, spec_of(["x=1,2"])), list[list[str]]()

    @contextmanager
    def places(*_: object) -> Iterator[Place]:  # in which Ray starts
        if not first.active:
            first.end(first.next(), {1: 1.0}, "failed", "ValueError: always")
        yield Place(None, {})

    options = SimpleNamespace(trainer=SimpleNamespace(umask="077", device="cpu"))
    monkeypatch.setattr(sweep_checks, "load", lambda *_: options)
    monkeypatch.setattr(sweep_checks, "check_sweep", lambda *_: None)
    monkeypatch.setattr(tuning, "places", places)
    monkeypatch.setattr(tuning, "run_study", lambda study, *_: seen.append([trial.state for trial in study.trials]))
    argv = ["x=1,2", "--metric", "m", "--random", "1", "--study", str(tmp_path)]
    before = (tmp_path / "study.json").read_text()
    with locked(tmp_path):
        assert sweep.main(argv) == 2 and "is working on it: wait for it" in capsys.readouterr().err
    assert (tmp_path / "study.json").read_text() == before and seen == []
    assert sweep.main(argv) == 1 and seen == [["failed"]]
    assert '"trials": 1' in (tmp_path / "study.json").read_text()


# ------------------------------------------------------------------------------------------------- a run, from outside


def test_a_run_says_that_it_waits_for_one_of_an_earlier_sweep(tmp_path: Path) -> None:
    order = Order([], tmp_path / "run", "", "m", None, "mark", gpus=False, umask=0o077)
    with (tmp_path / "run.log").open("ab") as before, (tmp_path / "run.log").open("ab") as log:
        assert held_up(order, before) == ""
        assert held_up(order, log) == f"an earlier sweep's process, which writes to {log.name}, has not ended yet"
        before.close()
        assert held_up(order, log) == ""


def test_a_run_that_has_waited_does_not_end_like_the_process_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "trials" / "0000" / "run"
    run.parent.mkdir(parents=True)
    before = run.with_suffix(".log").open("ab")
    fcntl.flock(before, fcntl.LOCK_EX)
    reports = list[dict[str, Any]]()
    umask = os.umask(0o077)
    os.umask(umask)

    def report(result: dict[str, str]) -> None:
        reports.append(json.loads(result["report"]))
        if reports[-1]["waits"]:
            before.write(b"WorkerDiedError: rank 3 is lost\n")
            before.close()

    monkeypatch.setattr(trial_process.tune, "report", report)
    command = [sys.executable, "-c", "raise SystemExit('ValueError: the reward is wrong')"]
    trial_process.train({"order": Order(command, run, str(tmp_path), "m", None, "mark", gpus=False, umask=umask)})
    assert reports[0]["waits"] and reports[-1]["ended"]["state"] == "failed"
    assert reports[-1]["ended"]["error"] == "ValueError: the reward is wrong"


@pytest.mark.parametrize(
    ("status", "output", "is_machines", "error"),
    [
        (1, "ValueError: x\nRuntimeError: CUDA error: unknown error\nbye", True, "CUDA error: unknown error"),
        (1, "WorkerDiedError: rank 3 is lost", True, "rank 3 is lost"),
        (1, "OSError: [Errno 28] No space left on device", True, "No space left"),
        (2, "UserError: trainer.n_gpus_per_node=2, but only 1 of 2 devices are available", True, "are available"),
        (-signal.SIGKILL, "step 3", True, "killed by SIGKILL: probably out of memory"),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", False, "CUDA out of memory"),
        (2, "UserError: data.train_files: there is no such file\ngive one", False, "wrong input: UserError: data"),
        (1, "Traceback\n  File x\nValueError: the reward is wrong", False, "ValueError: the reward is wrong"),
        (-signal.SIGTERM, "", False, "exit status -15, without output"),
    ],
)
def test_the_machines_faults_are_told_from_the_configurations(
    status: int, output: str, is_machines: bool, error: str
) -> None:
    found = diagnose(status, output)
    assert found[0] is is_machines and error in found[1]

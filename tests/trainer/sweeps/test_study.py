"""A study's log, what is decided from it, and what is said of its trials. No Ray here."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from trainer.sweeps.child import MetricsReader, clean, diagnose
from trainer.sweeps.options import Question, Search
from trainer.sweeps.results import compare, difference, summary
from trainer.sweeps.space import read_space
from trainer.sweeps.study import STOP, Run, Study, Trial, locked
from trainer.sweeps.target import Target
from trainer.sweeps.tuning import Sweep
from verl_lite.errors import UserError

T_1 = 12.7062
"""The 97.5% quantile of Student's t with one degree of freedom, from a table."""


def study_of(folder: Path, space: dict[str, Any], search: Search | None = None, seeds: int | None = None) -> Study:
    replicas = None if seeds is None else tuple(range(1, seeds + 1))
    question = Question("my.main", "none", space=read_space(space)[0], seeds=replicas, metric="m")
    study = Study(folder, question, search or Search(), "/")
    study.save()
    return study


class Driver:
    """Stands in for Tune: asks a sweep for runs and answers for them."""

    def __init__(self, study: Study, target: Target | None = None, **options: Any) -> None:
        self.study, self.told, self.active = study, list[str](), dict[str, tuple[int, int | None]]()
        target = target or Target.of(study.question)
        self.sweep = Sweep(study, target, self._order, self.told.append, **options)
        self._count = 0

    def _order(self, trial: Trial, run: Run) -> dict[str, Any]:
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        return {"run": (trial.number, run.seed)}

    def next(self) -> tuple[int, int | None] | None:
        self._count += 1
        order = self.sweep.next_run(str(self._count))
        if order is None:
            return None
        self.active[str(self._count)] = order["run"]
        return self.active[str(self._count)]

    def say(self, run: tuple[int, int | None], values: dict[int, float], ended: dict[str, Any] | None = None) -> None:
        name = next(name for name, known in self.active.items() if known == run)
        names = ["other"] if ended and not values else []
        step = max(values, default=0)
        said = {"values": sorted(values.items()), "step": step, "waits": "", "names": names, "ended": ended}
        self.sweep.take(name, json.loads(json.dumps(said)))

    def end(self, run: tuple[int, int | None], values: dict[int, float], state: str = "done", error: str = "") -> None:
        self.say(run, values, {"state": state, "seconds": 1.0, "steps": 3} | ({"error": error} if error else {}))


def test_a_grid_is_run_in_order_each_trial_with_its_seeds_and_goes_on_from_the_log(tmp_path: Path) -> None:
    driver = Driver(study_of(tmp_path, {"x": [1, 2], "y": [5]}, seeds=2))
    assert [driver.next() for _ in range(5)] == [(0, 1), (0, 2), (1, 1), (1, 2), None]
    driver.end((0, 1), {1: 0.25, 2: 0.5})
    driver.end((0, 2), {2: 0.7})
    driver.end((1, 1), {2: 0.1})

    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"trial": 1, "se')  # what a crash cut off
    again = Driver(Study.load(tmp_path))
    assert again.next() == (1, 2) and again.next() is None, "what is done is not run again"
    again.end((1, 2), {2: 0.3})
    first, second = Study.load(tmp_path).finished()
    assert (first.number, first.value, second.value) == (0, pytest.approx(0.6), pytest.approx(0.2))
    assert first.half_width == pytest.approx(T_1 * 0.1, rel=1e-3), (
        "half the range of two values is their standard error"
    )

    rows = list(csv.DictReader((tmp_path / "trials.csv").open()))
    assert [row["state"] for row in rows] == ["complete"] * 2 and rows[0]["x"] == "1" and rows[0]["value"] == "0.6"
    assert rows[0]["runs"] == "trials/0000/seed-1;trials/0000/seed-2"
    told = summary(Study.load(tmp_path), "python -m trainer.sweep --study s")
    assert "0.6 +- 1.3 (2 seeds)" in told and "not told apart by these seeds" in told
    assert "python -m my.main x=1 y=5 trainer.seed=2" in told


def test_asha_judges_means_over_seeds_and_its_decision_is_on_disk_before_runs_are_asked_to_end(tmp_path: Path) -> None:
    search = Search(asha={"reduction_factor": 2})
    study = study_of(tmp_path, {"x": [1, 2, 3]}, search, seeds=2)
    driver = Driver(study)
    runs = [driver.next() for _ in range(6)]
    for run in runs[:2]:
        driver.say(run, {1: 0.5})
    driver.say((1, 1), {1: 0.7})
    driver.say((1, 2), {1: 0.7})
    driver.say((1, 1), {2: 0.9})
    assert study.trials[1].means == {1: 0.7}, "a step is judged when all seeds that have begun are there"
    driver.say((1, 2), {2: 0.5})
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

    again = Driver(Study.load(tmp_path))
    assert [again.next() for _ in range(5)] == [(0, 1), (0, 2), (1, 1), (1, 2), None], "a pruned trial stays pruned"
    means = [(number, trial.means) for number, trial in enumerate(again.study.trials)]
    assert means == [(0, {1: 0.5}), (1, {1: 0.7, 2: 0.7}), (2, {1: 0.2})]
    again.say((0, 1), {1: 0.5, 2: 0.6})
    assert again.study.trials[0].is_pruned, "the judge knows what was judged before"


def test_a_trial_fails_with_its_run_and_is_run_once_more_only_when_asked(tmp_path: Path) -> None:
    driver = Driver(study_of(tmp_path, {"x": [1, 2]}, seeds=2))
    assert [driver.next(), driver.next()] == [(0, 1), (0, 2)]
    driver.end((0, 1), {1: 0.5}, "failed", "ValueError: the reward is wrong")
    assert (driver.study.trials[0].folder / STOP).exists(), "its other runs are in vain"
    driver.end((0, 2), {1: 0.5}, "stopped")
    assert driver.next() == (1, 1) and driver.next() == (1, 2) and driver.next() is None
    driver.end((1, 1), {1: float("nan")})
    driver.end((1, 2), {1: 0.5})
    assert [trial.state for trial in driver.study.trials] == ["failed", "failed"]
    told = summary(driver.study, "GO ON")
    assert "trial 0 failed: ValueError: the reward is wrong" in told and "GO ON --again" in told and "m is nan" in told
    assert Driver(Study.load(tmp_path)).next() is None
    again = Driver(Study.load(tmp_path), again=True)
    assert [again.next(), again.next(), again.next()] == [(2, 1), (2, 2), (3, 1)]
    assert again.study.trials[2].parameters == {"x": "1"}


def test_a_run_without_the_metric_ends_the_sweep(tmp_path: Path) -> None:
    driver = Driver(study_of(tmp_path, {"x": [1, 2]}))
    assert driver.next() == (0, None)
    driver.end((0, None), {})
    assert "--metric m: trial 0 does not log it" in str(driver.sweep.problem) and "other" in str(driver.sweep.problem)
    assert driver.next() is None and (tmp_path / STOP).exists()


@pytest.mark.parametrize("kind", ["optuna", "random"])
def test_drawn_trials_differ_and_go_on(tmp_path: Path, kind: str) -> None:
    space = {"x": "uniform(0,1)", "n": "int(1,4)", "y": "a,b"}
    driver = Driver(study_of(tmp_path, space, Search(kind, 4)))
    assert [driver.next() for _ in range(3)] == [(0, None), (1, None), (2, None)]
    driver.end((0, None), {1: 0.5})
    driver.end((1, None), {}, "failed", "it broke")
    study = Study.load(tmp_path)
    study.search = Search(kind, 6)  # more than there were
    again = Driver(study)
    runs = [again.next() for _ in range(5)]
    assert runs == [(2, None), (3, None), (4, None), (5, None), None], "the one that ran goes on, then new ones"
    for run in runs[:4]:
        assert run is not None
        again.end(run, {1: 0.1})
    values = [trial.parameters["x"] for trial in study.trials]
    assert len(set(values)) == 6 and all(0 <= float(value) <= 1 for value in values)
    assert [trial.state for trial in study.trials] == ["complete", "failed", *["complete"] * 4]


@pytest.mark.parametrize(("skips", "state"), [(False, "failed"), (True, "pruned")])
def test_a_draw_that_the_command_would_refuse_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skips: bool, state: str
) -> None:
    monkeypatch.setattr(Target, "problem", lambda _, values: "x is in the way" if values["x"] < 5 else None)
    driver = Driver(study_of(tmp_path, {"x": "int(1,9)"}, Search("optuna", 8)), skip_invalid=skips)
    while (run := driver.next()) is not None:
        driver.end(run, {1: 0.5})
    refused = [trial for trial in driver.study.trials if trial.parameters["x"] < 5]
    assert refused and {trial.state for trial in refused} == {state} and refused[0].error == "x is in the way"
    assert len(driver.study.trials) == 8


def test_another_question_a_damaged_study_and_a_second_sweep_are_refused(tmp_path: Path) -> None:
    study = study_of(tmp_path, {"x": [1, 2]})
    with pytest.raises(UserError) as refused:
        study.refuse_another(Question("my.main", "none", space=read_space({"x": [1], "y": [2]})[0], metric="m"))
    assert "space was {'x': ['1', '2']}, and is {'x': ['1'], 'y': ['2']}" in str(refused.value)
    assert f"python -m trainer.sweep --study {tmp_path}" in str(refused.value)
    with locked(tmp_path), pytest.raises(UserError, match="another sweep works on it"), locked(tmp_path):
        pass
    Driver(study).next()
    (tmp_path / "log.jsonl").write_text("no\n")
    with pytest.raises(UserError, match="log.jsonl cannot be read .*begin a study with another name"):
        Study.load(tmp_path)
    with pytest.raises(UserError, match="there is no study"):
        Study.load(tmp_path / "nowhere")


def test_differences_of_trials_are_welchs(tmp_path: Path) -> None:
    first, second = [0.5, 0.6, 0.55], [0.3, 0.5]
    found = difference(first, second)
    assert found is not None and found[0] == pytest.approx(0.15)
    assert found[1] == pytest.approx(T_1 * (0.05**2 / 3 + 0.02 / 2) ** 0.5, rel=1e-3), "1.2 degrees of freedom, so 1"
    assert difference([0.5], second) is None and difference([1, 1], [2, 2]) == (-1, 0.0)
    trials = [Trial(n, {}, tmp_path, [Run(0, tmp_path, [], "done", v) for v in values]) for n, values in ((0, [1.0]),)]
    assert "--seeds 3" in compare(trials[0], trials[0])


# ------------------------------------------------------------------------------------------------- a run, from outside


@pytest.mark.parametrize(
    ("status", "output", "is_machines", "error"),
    [
        (1, "ValueError: x\nRuntimeError: CUDA error: unknown error\nbye", True, "CUDA error: unknown error"),
        (1, "WorkerDiedError: rank 3 is lost", True, "rank 3 is lost"),
        (1, "OSError: [Errno 28] No space left on device", True, "No space left"),
        (2, "UserError: trainer.n_gpus_per_node=2, but only 1 of 2 devices can be had", True, "devices can be had"),
        (-signal.SIGKILL, "step 3", True, "killed by SIGKILL: no memory"),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", False, "CUDA out of memory"),
        (2, "UserError: data.train_files: there is no such file\ngive one", False, "wrong input: UserError: data"),
        (1, "Traceback\n  File x\nValueError: the reward is wrong", False, "ValueError: the reward is wrong"),
        (-signal.SIGTERM, "", False, "exit status -15, without a word"),
    ],
)
def test_the_machines_faults_are_told_from_the_configurations(
    status: int, output: str, is_machines: bool, error: str
) -> None:
    found = diagnose(status, output)
    assert found[0] is is_machines and error in found[1]


def test_a_run_inherits_nothing_of_the_sweeps_ray_unless_it_joins_a_cluster() -> None:
    here = {
        "PATH": "/bin",
        "RAY_ADDRESS": "h:1",
        "RAY_AUTH_TOKEN": "t",
        "TUNE_X": "1",
        "VERL_LITE_RUN": "m",
        "HOME": "/",
    }
    assert clean(here, ["x=1"]) == {"PATH": "/bin", "HOME": "/"}
    assert clean(here, ["ray_kwargs.ray_init.address=h:1"]) == {"PATH": "/bin", "HOME": "/", "RAY_AUTH_TOKEN": "t"}


def test_metrics_are_read_as_they_grow_and_forgotten_where_a_run_went_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path, "m")
    reader.update()
    path.write_text('{"step": 1, "data": {"m": 0.5}}\n{"step": 2, "data": {"other": 1}}\n{"step": 3, "da')
    reader.update()
    assert (reader.values, reader.step, reader.names) == ({1: 0.5}, 2, {"m", "other"})
    with path.open("a") as file:
        file.write('ta": {"m": 0.7}}\nbroken\n{"step": 2, "data": {"m": 0.6}}\n')
    reader.update()
    assert reader.values == {1: 0.5, 2: 0.6}

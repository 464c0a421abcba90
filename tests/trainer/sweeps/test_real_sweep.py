"""A sweep of real trainings, tiny ones: checked before the start, killed, gone on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny_run import ROOT, TinyTask
from trainer.sweeps.command import sweep
from trainer.sweeps.study import read_study
from verl_lite.errors import UserError

METRIC = "critic/score/mean"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TinyTask:
    return TinyTask(tmp_path_factory.mktemp("task"))


def words(folder: Path, *more: str, task: TinyTask | None = None) -> list[str]:
    task = task or TinyTask(folder / "task")
    options = [*task.options, "trainer.backend=inline", "reward.num_workers=0", "trainer.total_training_steps=4"]
    return [*options, "trainer.save_freq=1", "--metric", METRIC, "--study", str(folder / "study"), *more]


@pytest.mark.slow
def test_a_sweep_of_main_ppo_killed_in_the_middle_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    argv = words(tmp_path, "--slots", "2", "actor.optim.lr=1e-3,1e-4", "seeds=[3]", "--file", str(_file(tmp_path)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer.sweep", *argv], env=environment, stdout=file, stderr=file
        )
    runs = tmp_path / "study" / "trials"
    deadline = time.monotonic() + 300
    while not list(runs.glob("*/seed-3/global_step_1")):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    begun = {path.parents[1].name for path in runs.glob("*/seed-3/global_step_1")}
    time.sleep(3)  # the guards of the runs end what is left

    assert sweep(["--study", str(tmp_path / "study"), "--slots", "2"]) == 0, log.read_text()
    study = read_study(tmp_path / "study")
    assert [trial.state for trial in study.trials] == ["complete"] * 2
    for trial in study.trials:
        run = trial.runs[0]
        assert list(run.history(METRIC)) == [1, 2, 3, 4]
        assert run.value == max(run.history(METRIC).values()), "take: best"
        assert "trainer.seed=3" in run.command and (run.folder / "config.yaml").exists()
        assert [attempt.cause for attempt in run.attempts] in (["done"], ["sweep died", "done"]), run.log.read_text()
        rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
        steps = [row["step"] for row in rows if METRIC in row["data"]]
        assert trial.folder.name not in begun or steps.count(1) == 1, "from its checkpoint, not from the start"


def _file(folder: Path) -> Path:
    path = folder / "sweep.yaml"
    path.write_text("mode: max\ntake: best\nsettings: {trainer.val_before_train: false}\n")
    return path


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            ("actor.optim.lrr=1e-3,1e-4", "rollout.n=2,many", "trainer.default_local_dir=x"),
            "trainer.default_local_dir=x: a sweep gives .*actor.optim.lrr=1e-3: there is no such key; did you mean "
            "actor.optim.lr .*rollout.n=many: it is not a number; rollout.n is a whole number",
        ),
        (("actor.ppo_mini_batch_size=4,64",), "1 of 2 combinations would be refused.*ppo_mini_batch_size=64"),
        (("rollout.n=2,4", "--metric", "val-core/sums/reward/mean@1"), "trainer.test_freq=0, so nothing is validated"),
        (("rollout.n=2,4", "--metric", "critik/score/mean"), "did you mean critic/score/mean"),
        (("rollout.n=2,4", "--pruner", "asha:rungs=3"), "rungs is none of its parameters"),
        (("rollout.n=2,4", "trainer.logger=[console]"), "add jsonl"),
        (("trainer.seed=1,2", "seeds=2"), "trainer.seed is given, and seeds=.1, 2. gives it to each run"),
        (("rollout.n=uniform(2,4)", "--random", "3"), "rollout.n=2.6.*whole number"),
        (("rollout.n=2,4", "--per-trial", "2"), "--per-trial 2: no GPU can be used here"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(
    tmp_path: Path, more: tuple[str, ...], said: str, task: TinyTask
) -> None:
    with pytest.raises(UserError, match=f"(?s){said}"):
        sweep(words(tmp_path, *more, task=task))
    assert not (tmp_path / "study").exists()


def test_combinations_that_would_be_refused_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: TinyTask
) -> None:
    monkeypatch.setattr("trainer.sweeps.command.work", lambda _: None)
    assert sweep(words(tmp_path, "actor.ppo_mini_batch_size=2,4,64", "--skip-invalid", task=task)) == 0
    trials = read_study(tmp_path / "study").trials
    assert [trial.parameters for trial in trials] == [
        {"actor.ppo_mini_batch_size": "2"}, {"actor.ppo_mini_batch_size": "4"},
    ]  # fmt: skip

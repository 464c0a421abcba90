"""Whole sweeps over a command that stands in for a training: order, seeds, retries, pruning, ends, several at once."""

from __future__ import annotations

import csv
import functools
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import rich.console

from trainer.sweeps.checks import Combinations
from trainer.sweeps.command import sweep
from trainer.sweeps.slots import CpuPool, Slot
from trainer.sweeps.study import StudyRecord, TrialRecord, read_study
from trainer.sweeps.targets import FOLDER, RESUME, SEED, Target
from trainer.sweeps.trial import LocalLauncher
from verl_lite.errors import UserError

ROOT = Path(__file__).resolve().parents[3]
FAKE = Path(__file__).with_name("fake_trial.py")
METRIC = "val-core/task/acc/mean@1"


def words(study: Path, *more: str, slots: int = 2) -> list[str]:
    usual = ["--command", str(FAKE), "--options", "none", "--metric", METRIC, "--slots", str(slots)]
    return [*usual, "--study", str(study), *more]


def swept(study: Path, *more: str, slots: int = 2) -> tuple[int, StudyRecord]:
    status = sweep(words(study, *more, slots=slots))
    return status, read_study(study)


def starts(trial: TrialRecord, run: int = 0) -> list[list[str]]:
    lines = (trial.runs[run].folder / "starts").read_text().splitlines()
    return [json.loads(line)["words"] for line in lines]


def test_a_grid_with_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, study = swept(tmp_path, "x=1,2", "y=a,b", "seeds=2", "steps=2", "--storage", "sqlite")
    assert (
        (tmp_path / "study.db").exists() and status == 0 and [trial.state for trial in study.trials] == ["complete"] * 4
    )
    assert [trial.parameters for trial in study.trials] == [{"x": x, "y": y} for x in ("1", "2") for y in ("a", "b")]
    # seeds 1 and 2: x * 2 + 0.01 and x * 2 + 0.02; t(1) = 12.706, standard error 0.005
    assert [trial.value for trial in study.trials] == pytest.approx([2.015, 2.015, 4.015, 4.015])
    assert study.trials[0].half_width == pytest.approx(12.706 * 0.005, rel=1e-4)
    assert study.trials[0].runs[1].history(METRIC) == {1: 1.02, 2: 2.02}
    told = capsys.readouterr().out
    assert "not told apart by these seeds" in told and f"python {FAKE} steps=2 x=2 y=a trainer.seed=1" in told
    rows = list(csv.DictReader((tmp_path / "trials.csv").open()))
    assert [row["x"] for row in rows] == ["1", "1", "2", "2"] and float(rows[3][METRIC]) == pytest.approx(4.015)
    for line in rows[0]["command"].splitlines():
        assert shlex.split(line)[:2] == ["python", str(FAKE)]


def test_the_same_command_again_runs_nothing_and_more_trials_can_be_added(tmp_path: Path) -> None:
    assert sweep(words(tmp_path, "x=uniform(0,1)", "--random", "3")) == 0
    before = {trial.number: trial.parameters for trial in read_study(tmp_path).trials}
    assert sweep(words(tmp_path, "x=uniform(0,1)", "--random", "3")) == 0
    assert sweep(["--study", str(tmp_path), "--add", "2", "--slots", "2"]) == 0
    study = read_study(tmp_path)
    assert len(study.trials) == 5 and {n: study.trials[n].parameters for n in before} == before
    assert len({trial.parameters["x"] for trial in study.trials}) == 5
    assert all(len(starts(trial)) == 1 for trial in study.trials)


def test_a_random_choice_of_a_grid_has_nothing_twice(tmp_path: Path) -> None:
    _, study = swept(tmp_path, "x=1,2,3", "y=a,b", "--random", "5")
    assert len({tuple(trial.parameters.items()) for trial in study.trials}) == 5
    with pytest.raises(UserError, match="--add 2: the grid has 1 combinations left"):
        sweep(["--study", str(tmp_path), "--add", "2"])


@pytest.mark.parametrize(("words_more", "status", "state"), [((), 1, "failed"), (("--skip-invalid",), 0, "pruned")])
def test_a_choice_that_the_command_would_refuse_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words_more: tuple[str, ...], status: int, state: str
) -> None:
    """Found when a trial is drawn, since a space without end cannot be looked through before."""
    monkeypatch.setattr(Combinations, "problem", lambda _, values: "x is in the way" if 3 < values["x"] < 7 else None)
    ended, study = swept(tmp_path, "x=int(1,9)", "--optuna", "6", "steps=1", *words_more)
    refused = [trial for trial in study.trials if 3 < trial.parameters["x"] < 7]
    assert refused and ended == status and {trial.state for trial in refused} == {state}
    assert all("x is in the way" in trial.error and not trial.runs for trial in refused)
    assert {trial.state for trial in study.trials if trial not in refused} == {"complete"}


def test_a_file_that_changed_is_noticed(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("a: 1")
    study = tmp_path / "study"
    assert sweep(words(study, "--config", str(base), "x=1,2", "steps=1")) == 0
    base.write_text("a: 2")
    with pytest.raises(UserError, match="base.yaml has changed since"):
        sweep(["--study", str(study)])


@pytest.mark.parametrize("storage", ["sqlite", "journal"])
def test_a_damaged_study_is_named(tmp_path: Path, storage: str) -> None:
    swept(tmp_path, "x=1", "seeds=1", "steps=1", "--storage", storage)
    with pytest.raises(UserError, match=f"was begun with {storage}; leave it out"):
        sweep(["--study", str(tmp_path), "--storage", "journal" if storage == "sqlite" else "sqlite"])
    of_storage = tmp_path / ("study.db" if storage == "sqlite" else "journal.log")
    for path in (tmp_path / "trials" / "0000" / "seed-1.json", of_storage, tmp_path / "study.json"):
        whole = path.read_bytes()
        path.write_bytes(b"no" + whole)
        with pytest.raises(UserError, match=f"{path.name} cannot be read .*begin a study with another name"):
            sweep(["--study", str(tmp_path)])
        path.write_bytes(whole)


def test_another_question_is_refused_with_what_changed(tmp_path: Path) -> None:
    swept(tmp_path, "x=1,2", "steps=1")
    with pytest.raises(UserError) as refused:
        sweep(words(tmp_path, "x=1,2,3", "y=a,b", "steps=2"))
    told = str(refused.value)
    assert "x was ['1', '2'], and is ['1', '2', '3']" in told and "y is new" in told and "settings was" in told
    assert f"python -m trainer.sweep --study {tmp_path}" in told and "--study NAME" in told


@pytest.mark.parametrize(
    ("failure", "status", "state", "attempts", "causes"),
    [
        (("fail=error",), 1, "failed", 2, ["error", "error"]),
        (("fail=input",), 1, "failed", 1, ["wrong input"]),
        (("fail=lost", "times=2", "at=2"), 0, "complete", 3, ["lost device", "lost device", "done"]),
        (("fail=oom",), 1, "failed", 4, ["out of memory"] * 4),
    ],
)
def test_a_failure_is_met_by_its_cause_and_stops_nothing(
    tmp_path: Path, failure: tuple[str, ...], status: int, state: str, attempts: int, causes: list[str]
) -> None:
    broken = {"broken": {"yes": list(failure), "no": ["a=1"]}}
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps({"space": broken, "settings": {"steps": 3}}))
    ended, study = swept(tmp_path / "study", "--file", str(file), slots=1)
    assert ended == status and [trial.state for trial in study.trials] == [state, "complete"]
    run = study.trials[0].runs[0]
    assert [attempt.cause for attempt in run.attempts] == causes and len(starts(study.trials[0])) == attempts
    assert run.value == (3 if state == "complete" else None)
    if failure[0] == "fail=input":
        assert study.trials[0].error == "wrong input: UserError: data.train_files=['a.parquet']: there is no such file"


def test_a_lost_run_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "has", lambda self, key: key in (SEED, FOLDER, RESUME))
    _, study = swept(tmp_path, "x=1", "fail=lost", "times=1", "at=2", "seeds=[7]", slots=1)
    first, second = starts(study.trials[0])
    assert second == [*first, "trainer.resume_mode=auto"] and "trainer.seed=7" in first
    lines = (study.trials[0].runs[0].folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3], "no step is done again"


def test_when_all_devices_are_lost_it_ends_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Dying(CpuPool):
        def give_back(self, slot: Slot, lost: bool = False) -> None:
            self.size -= lost

        def why_not(self) -> list[str]:
            return ["GPU 0 was lost by 2 runs, and is left alone"]

    monkeypatch.setattr("trainer.sweeps.command.make_pool", lambda *_: (Dying(1), None))
    with pytest.raises(UserError, match="no device is left to the sweep:\n  GPU 0 was lost"):
        swept(tmp_path, "x=1,2", "fail=lost")
    assert [trial.state for trial in read_study(tmp_path).trials] == ["running", "waiting"], "it can go on"


def test_out_of_memory_is_met_with_smaller_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def config(self: Combinations, values: object, more: Sequence[str] = ()) -> dict[str, object]:
        sizes = [8, *(int(word.partition("=")[2]) for word in more)]
        return {"actor.ppo_micro_batch_size_per_gpu": sizes[-1], "actor.use_dynamic_bsz": False}

    monkeypatch.setattr(Combinations, "config", config)
    status, study = swept(tmp_path, "x=1", "seeds=[1]", "fail=oom", "times=2")
    sizes = [[word for word in words if "micro" in word] for words in starts(study.trials[0])]
    assert status == 0 and sizes == [[], *([f"actor.ppo_micro_batch_size_per_gpu={size}"] for size in (4, 2))]
    assert not any("micro" in word for word in study.trials[0].runs[0].command), "what reproduces it is as it was asked"
    assert study.trials[0].runs[0].attempts[-1].extra == sizes[-1]


def test_optuna_chooses_and_prunes_and_a_terminal_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    terminal = functools.partial(rich.console.Console, file=shown, force_terminal=True, width=150)
    monkeypatch.setattr("trainer.sweeps.table.rich.console.Console", lambda **_: terminal())
    monkeypatch.setattr("trainer.sweeps.table._UPDATE_EVERY_S", 0.0)
    more = ["x=uniform(0,1)", "y=a,b", "n=int(1,4)", "steps=12", "pause=0.05", "--optuna", "5"]
    status, study = swept(tmp_path, *more, "--pruner", "asha:min_resource=1,reduction_factor=2")
    states = [trial.state for trial in study.trials]
    assert status == 0 and len(states) == 5 and set(states) <= {"complete", "pruned"}
    assert all(0 <= float(trial.parameters["x"]) <= 1 and trial.parameters["y"] in ("a", "b") for trial in study.trials)
    text = shown.getvalue()
    assert "trials done, " in text and "running" in text and "cpu 1" in text and "best" in text and "12" in text


def test_failed_trials_run_once_more_when_asked(tmp_path: Path) -> None:
    swept(tmp_path, "x=1,2", "fail=input", "times=1")
    assert sweep(["--study", str(tmp_path), "--again"]) == 1, "the first ones have failed"
    states = [(trial.state, trial.parameters["x"]) for trial in read_study(tmp_path).trials]
    assert states[:2] == [("failed", "1"), ("failed", "2")] and len(states) == 4


def test_a_pruned_trial_ends_politely_and_keeps_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    good, bad = ["x=3", "steps=20"], ["x=1", "steps=3000", "pause=0.02"]  # a minute, unless it is pruned
    pruner = {"name": "median", "n_startup_trials": 1, "n_warmup_steps": 2}
    file.write_text(json.dumps({"space": {"run": {"good": good, "bad": bad}}, "pruner": pruner}))
    status, study = swept(tmp_path / "study", "--file", str(file), slots=1)
    first, second = study.trials
    assert status == 0 and (first.state, second.state) == ("complete", "pruned")
    assert second.runs[0].attempts[0].status == 130, "it saved what it had"
    history = second.runs[0].history(METRIC)
    assert 2 <= max(history) < 3000 and second.value == history[max(second.intermediate)]


def test_a_run_can_be_asked_to_end_where_its_sweep_ignores_or_blocks_it(tmp_path: Path) -> None:
    """`sweep &` in a script: the shell has such a job ignore SIGINT. Ray's actors have threads that block it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        command = [sys.executable, "-c", "print(end='ready', flush=True); import time; time.sleep(60)"]
        process = LocalLauncher(tmp_path).start(command, tmp_path / "log", Slot("cpu 0", (), {}))
        while not (tmp_path / "log").read_text():
            time.sleep(0.02)
        process.interrupt()
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert process.poll() in (-signal.SIGINT, 130, 1)
    finally:
        process.kill()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, before)


def test_a_metric_that_never_appears_ends_the_sweep(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="trial 0 does not log it; did you mean val-core/task/acc/mean@8"):
        swept(tmp_path, "x=1,2,3", "metric=val-core/task/acc/mean@8", slots=1)
    waiting = [trial.state for trial in read_study(tmp_path).trials]
    assert waiting[1:] == ["waiting"] * 2, "after the first trial, not after all"
    with pytest.raises(UserError, match="it logs none"):
        swept(tmp_path / "none", "x=1,2", "steps=0")


def test_nothing_of_a_run_is_left_running(tmp_path: Path) -> None:
    _, study = swept(tmp_path, "x=1", "seeds=[5]", "child=1")
    marked = [pid for pid in os.listdir("/proc") if pid.isdigit() and _is_sleeper(pid, study.trials[0].folder)]
    assert marked == []


def _is_sleeper(pid: str, folder: Path) -> bool:
    try:
        environment = Path("/proc", pid, "environ").read_bytes()
        return b"VERL_LITE_SWEEP_ATTEMPT" in environment and Path("/proc", pid, "cmdline").read_bytes().startswith(
            b"sleep\x001000"
        )
    except OSError:
        return False


# ------------------------------------------------------------------------------------------- in processes of their own


def started(study: Path, *more: str, slots: int = 2) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainer.sweep", *words(study, *more, slots=slots)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=study,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job's tests ignore it
    )


def wait_for(study: Path, trials: int) -> None:
    deadline = time.monotonic() + 120
    while len(list(study.glob("trials/*/*/metrics.jsonl"))) < trials:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on_and_runs_nothing_twice(tmp_path: Path) -> None:
    """12 trials on 2 slots; kill -9 after some of them; the same command again."""
    more = ["x=1,2,3,4", "y=a,b,c", "steps=10", "pause=0.05"]
    process = started(tmp_path, *more)
    wait_for(tmp_path, 4)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    killed = time.monotonic()
    alive = [json.loads(line)["pid"] for file in tmp_path.glob("trials/*/run/starts") for line in file.open()]
    while any(Path("/proc", str(pid)).exists() for pid in alive):
        assert time.monotonic() - killed < 30, "runs end with their sweep"
        time.sleep(0.05)
    done = {trial.number for trial in read_study(tmp_path).trials if trial.state == "complete"}
    status, study = swept(tmp_path, *more)
    assert status == 0 and [trial.state for trial in study.trials] == ["complete"] * 12
    attempts = [len(trial.runs[0].attempts) for trial in study.trials]
    assert all(attempts[number] == 1 for number in done) and sum(attempts) <= 12 + 2
    assert all(list(trial.runs[0].history(METRIC)) == list(range(1, 11)) for trial in study.trials)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["sqlite", "journal"])
def test_two_sweeps_share_a_study(tmp_path: Path, storage: str) -> None:
    more = ["x=1,2,3,4", "y=a,b", "steps=10", "pause=0.05", "--storage", storage]
    both = [started(tmp_path, *more, slots=1) for _ in range(2)]
    outputs = [process.communicate(timeout=200)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    study = read_study(tmp_path)
    assert [trial.state for trial in study.trials] == ["complete"] * 8, "planned once"
    assert [len(starts(trial)) for trial in study.trials] == [1] * 8, "run once"
    assert {trial.runs[0].attempts[0].sweep for trial in study.trials} == {0, 1}, outputs


@pytest.mark.slow
def test_ctrl_c_ends_it_in_order(tmp_path: Path) -> None:
    process = started(tmp_path, "x=1,2", "steps=1000", "pause=0.05")
    wait_for(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and f"python -m trainer.sweep --study {tmp_path}" in output
    runs = [trial.runs[0] for trial in read_study(tmp_path).trials]
    assert [run.state for run in runs] == ["stopped"] * 2 and [run.attempts[0].status for run in runs] == [130] * 2

"""A sweep's command line and its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.sweeps.options import Options, Question, read_options
from verl_lite.errors import UserError

FILE = """
command: trainer.main_ppo
config: base.yaml
settings: {trainer.total_training_steps: 100, data.train_files: [a, b]}
space: {rollout.n: [4, 8], actor.optim.lr: "log(1e-7,1e-5)"}
seeds: 3
metric: val-core/a/acc/mean@1
optuna: 40
pruner: {name: asha, reduction_factor: 3}
per_trial: 2
devices: [0, 1]
"""


def question_of(options: Options) -> Question:
    assert options.question is not None
    return options.question


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(FILE)
    options = read_options(["--file", str(file)])
    question = question_of(options)
    assert question.settings == ("trainer.total_training_steps=100", "data.train_files=[a,b]")
    assert question.seeds == (1, 2, 3) and question.files == ("base.yaml",) and question.metric.endswith("mean@1")
    assert options.plan is not None and (options.plan.kind, options.plan.trials) == ("optuna", 40)
    assert (options.plan.pruner, options.plan.pruner_arguments) == ("asha", {"reduction_factor": 3})
    assert options.means.devices == ("0", "1") and options.means.per_trial == 2

    more = ["rollout.n=2", "trainer.total_training_steps=5", "--random", "7", "--pruner", "median:n_startup_trials=2"]
    options = read_options(["--file", str(file), *more, "seeds=[7]", "--devices", "3"])
    question = question_of(options)
    assert list(question.space.written()) == ["actor.optim.lr"] and question.seeds == (7,)
    assert question.settings == ("data.train_files=[a,b]", "rollout.n=2", "trainer.total_training_steps=5")
    assert options.plan is not None and (options.plan.kind, options.plan.trials) == ("random", 7)
    assert options.plan.pruner_arguments == {"n_startup_trials": 2} and options.means.devices == ("3",)


def test_a_study_alone_goes_on() -> None:
    options = read_options(["--study", "mine", "--add", "3", "--slots", "2"])
    assert options.question is None and options.plan is None and options.add == 3
    assert options.study == Path("runs/sweeps/mine").absolute()


def test_means_are_said_again_as_they_were() -> None:
    words = ["--devices", "0,GPU-1", "--per-trial", "2", "--wait", "--retries", "0", "--grace", "7.5"]
    assert read_options(["--study", "x", *words]).means.words() == words
    assert read_options(["--study", "x", "--threads", "1"]).means.words() == []


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "nothing to search"),
        (["a=1,2", "a=3,4"], "a gets several values twice"),
        (["a=1,2", "rollout.n"], "'rollout.n' is not key=value"),
        (["a=1,2", "seeds=0"], "seeds=0: expected how many"),
        (["a=1,2", "seeds=[1,1]"], "seeds="),
        (["a=1,2", "--mode", "up"], "--mode up: expected max or min"),
        (["a=1,2", "--random", "3", "--optuna", "4"], "choose one of them"),
        (["a=1,2", "--random", "0"], "--random 0: a whole number of at least 1"),
        (["a=1,2", "--pruner", "ash"], "--pruner ash: expected none or asha"),
        (["a=1,2", "--pruner", "asha:x=y"], "a number is expected"),
        (["a=1,2", "--share", "2"], "--share 2"),
        (["a=1,2", "--share", "0.5", "--per-trial", "2"], "runs that share have one device"),
        (["a=1,2", "--slots", "0"], "--slots 0"),
        (["a=1,2", "--metrik", "x"], "--metrik x; `python -m trainer.sweep --help`"),
        (["--file", "/nowhere.yaml"], "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused(argv: list[str], said: str) -> None:
    with pytest.raises(UserError) as refused:
        read_options(argv)
    assert said in str(refused.value)


def test_an_unknown_entry_of_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("spcae: {a: [1, 2]}")
    with pytest.raises(UserError, match="spcae: there is no such entry; did you mean space"):
        read_options(["--file", str(file)])
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is no YAML: 'utf-8' codec"):
        read_options(["--file", str(file)])
    file.write_text("- a")
    with pytest.raises(UserError, match="a mapping is expected"):
        read_options(["--file", str(file)])


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("sampler_seed: one", "--sampler-seed one: a whole number"),
        ("config: {a: 1}", "config: {'a': 1} is no file name"),
        ("optuna: true", "--optuna True: a whole number"),
        ("devices: {a: b}", "devices: {'a': 'b'} is no list of devices"),
        ("pruner: {kind: asha}", "--pruner {'kind': 'asha'}, without a name: expected none or asha"),
    ],
)
def test_entries_of_the_wrong_kind_are_refused(tmp_path: Path, entry: str, said: str) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(f"space: {{rollout.n: [2, 4]}}\n{entry}\n")
    with pytest.raises(UserError) as refused:
        read_options(["--file", str(file)])
    assert said in str(refused.value)

"""What a sweep is asked: its words, its file, its space; and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from tests.tiny_run import TinyTask
from trainer.sweeps.options import Options, Question, Search, read_options
from trainer.sweeps.space import combinations, read_parameter, read_space, words_of
from trainer.sweeps.target import check, check_metric_name, find_target
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
wait: true
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
    assert options.search == Search("optuna", 40, {"reduction_factor": 3})
    assert options.resources.words() == ["--per-trial", "2", "--wait"]

    more = ["rollout.n=2", "trainer.total_training_steps=5", "--random", "7", "--pruner", "asha:grace_period=2"]
    options = read_options(["--file", str(file), *more, "--seeds", "[7]", "--per-trial", "3", "--sampler-seed", "1"])
    question = question_of(options)
    assert [parameter.name for parameter in question.space] == ["actor.optim.lr"] and question.seeds == (7,)
    assert question.settings == ("data.train_files=[a,b]", "rollout.n=2", "trainer.total_training_steps=5")
    assert options.search == Search("random", 7, {"grace_period": 2}, seed=1) and options.resources.per_trial == 3


def test_a_study_alone_goes_on_and_says_its_resources_again() -> None:
    words = ["--slots", "2", "--ray-address", "h:1", "--retries", "0", "--grace", "7.5"]
    options = read_options(["--study", "mine", *words])
    assert options.question is None and options.search is None and options.resources.words() == words
    assert options.folder == Path("runs/sweeps/mine").absolute()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "nothing to search"),
        (["a=1,2", "a=3,4"], "a gets several values twice"),
        (["a=1,2", "rollout.n"], "'rollout.n' is not key=value"),
        (["a=1,2", "seeds=0"], "--seeds 0: expected how many"),
        (["a=1,2", "--seeds", "[1,1]"], "--seeds [1,1]"),
        (["a=1,2", "--mode", "up"], "invalid choice: 'up'"),
        (["a=1,2", "--random", "3", "--optuna", "4"], "choose one of them"),
        (["a=1,2", "--random", "0"], "whole number of at least 1"),
        (["a=1,2", "--pruner", "ash"], "--pruner ash: expected none or asha"),
        (["a=1,2", "--pruner", "asha:min_resource=1"], "it is grace_period"),
        (["a=1,2", "--share", "2"], "--share"),
        (["a=1,2", "--share", "0.5", "--per-trial", "2"], "runs that share have one device"),
        (["a=1,2", "--metrik", "x"], "--metrik x; `python -m trainer.sweep --help`"),
        (["--file", "/nowhere.yaml"], "cannot be read"),
        # what could be typed before
        (["--study", "s", "--ray", "h:1"], "--ray is --ray-address HOST:PORT now"),
        (["--study", "s", "--devices", "0,1"], "CUDA_VISIBLE_DEVICES=0,1"),
        (["--study", "s", "--add", "3"], "say how many there shall be"),
        (["--study", "s", "--storage", "sqlite"], "leave it out"),
        (["--study", "s", "--stale", "9"], "one sweep at a time works on a study; --ray-address"),
        (["--study", "s", "--pruner", "median"], "median is gone: asha"),
    ],
)
def test_what_cannot_be_is_refused(argv: list[str], said: str) -> None:
    with pytest.raises(UserError) as refused:
        read_options(argv)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("spcae: {a: [1, 2]}", "spcae: there is no such entry; did you mean space"),
        ("- a", "a mapping is expected"),
        ("devices: [0]", "devices is gone: name the GPUs with CUDA_VISIBLE_DEVICES"),
        ("sampler_seed: one", "whole number of at least 0"),
        ("config: {a: 1}", "config: {'a': 1} is a mapping"),
        ("settings: 3", "settings: 3 is no mapping"),
        ("pruner: {kind: asha}", "expected none or asha"),
    ],
)
def test_a_file_that_means_nothing_is_refused(tmp_path: Path, content: str, said: str) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(content)
    with pytest.raises(UserError) as refused:
        read_options(["--file", str(file), "x=1,2"])
    assert said in str(refused.value)


# -------------------------------------------------------------------------------------------------------------- space


@pytest.mark.parametrize(
    ("word", "labels"),
    [
        ("rollout.n=4,8", ["4", "8"]),
        ("actor.optim.lr=1e-6, 3e-6", ["1e-6", "3e-6"]),
        ("data.train_files=[a,b],[c]", ["[a,b]", "[c]"]),
        ("model.path='a,b',c", ["'a,b'", "c"]),
        *((one, None) for one in ("rollout.n=4", "data.train_files=[a,b]", "model.path='a,b'", "~actor.clip_ratio")),
    ],
)
def test_commas_outside_brackets_and_quotes_part_choices(word: str, labels: list[str] | None) -> None:
    parameter = read_parameter(word)
    assert (None if parameter is None else parameter.values()) == labels


def test_ranges_are_optunas_distributions_with_their_values() -> None:
    floats, ints = optuna.distributions.FloatDistribution, optuna.distributions.IntDistribution
    for word, distribution, values in (
        ("lr=log(1e-7,1e-5)", floats(1e-7, 1e-5, log=True), None),
        ("c=uniform(0, 1)", floats(0, 1), None),
        ("c=uniform(0,0.3,step=0.1)", floats(0, 0.3, step=0.1), [0.0, 0.1, 0.2, 0.3]),
        ("n=int(1,4,log)", ints(1, 4, log=True), [1, 2, 3, 4]),
        ("+n=int(2,8,step=3)", ints(2, 8, step=3), [2, 5, 8]),
    ):
        parameter = read_parameter(word)
        assert parameter is not None and (parameter.distribution, parameter.values()) == (distribution, values)
    assert parameter.name == "n" and parameter.words(2) == ["+n=2"]


@pytest.mark.parametrize(
    "word",
    [
        *("lr=log(1e-5,1e-7)", "lr=log(0,1)", "lr=log(1e-7,1e-5,step=1)", "lr=uniform(1)", "lr=uniform(1,a)"),
        *("lr=uniform(1,1)", "lr=uniform(0,inf)", "n=int(1,2.5)", "lr=loguniform(1,2)", "n=4,,8", "n=4,8,4"),
    ],
)
def test_an_empty_or_impossible_range_is_refused_by_name(word: str) -> None:
    with pytest.raises(UserError) as refused:
        read_parameter(word)
    assert str(refused.value).startswith(word) and len(str(refused.value)) > len(word) + 20


def test_a_file_may_say_the_same_and_name_several_settings_at_once() -> None:
    written = {
        "lr": "log(1e-7,1e-5)",
        "n": [4, 8],
        "flag": [True, False],
        "files": [["a", "b"], ["c"]],
        "steps": 10,
        "variant": {"grpo": {"recipe": "grpo"}, "dapo": {"recipe": "dapo", "rollout.n": 16}},
    }
    space, fixed = read_space(written)
    assert fixed == ["steps=10"]
    assert read_space({p.key: p.written for p in space})[0] == space, "a study keeps it, and reads it again"
    values = {"lr": 2e-6, "n": "8", "flag": "false", "files": "[a,b]", "variant": "dapo"}
    assert words_of(space, values) == ["lr=2e-06", "n=8", "flag=false", "files=[a,b]", "recipe=dapo", "rollout.n=16"]


def test_grid_and_corners() -> None:
    space, _ = read_space({"a": "1,2", "n": "int(1,3)"})
    assert list(combinations(space))[2:4] == [{"a": "1", "n": 3}, {"a": "2", "n": 1}]
    assert list(combinations(())) == [{}], "seeds alone: one trial"
    assert [corner["n"] for corner in combinations(space, corners=True)] == [1, 3, 2] * 2
    for written, said in (("log(1e-7,1e-5)", "--random N"), ("int(1,1000000000)", "--random N")):
        with pytest.raises(UserError, match=said):
            list(combinations(read_space({"lr": written})[0]))


# ------------------------------------------------------------------------------------------------------------- checks


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TinyTask:
    return TinyTask(tmp_path_factory.mktemp("task"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["actor.optim.lrr=1e-3,1e-4"], "did you mean actor.optim.lr"),
        (["actor.optim.lr=1e-3,big"], "1 of 2 combinations would be refused.*actor.optim.lr=big"),
        (["rollout.n=2,4", "trainer.resume_mode=auto"], "a sweep gives it to each run itself"),
        (["rollout.n=2,4", "trainer.seed=3", "--seeds", "2"], "trainer.seed is given, and --seeds"),
        (["trainer.seed=3"], "there is nothing to vary"),
        (["rollout.n=2,4", "--metric", ""], "--metric is not given"),
        (["rollout.n=2,4", "--metric", "val-core/x/acc/mean@1"], "nothing is validated"),
        (["rollout.n=2,4", "--metric", "critic/scor/mean"], "did you mean critic/score/mean"),
        (["actor.optim.lr=log(1e-5,1e-3)"], "a grid needs values"),
    ],
)
def test_wrong_input_is_refused_before_the_first_trial(task: TinyTask, words: list[str], said: str) -> None:
    options = read_options([*task.options, "trainer.test_freq=0", "--metric", "critic/score/mean", *words])
    assert options.search is not None
    with pytest.raises(UserError, match=f"(?s){said}"):
        check(find_target(question_of(options)), options.search)


def test_combinations_that_are_refused_can_be_left_out(task: TinyTask) -> None:
    words = [*task.options, "actor.optim.lr=1e-3,big", "--metric", "critic/score/mean"]
    assert check(find_target(question_of(read_options(words))), Search(), skip_invalid=True) == [
        {"actor.optim.lr": "big"}
    ]


@pytest.mark.parametrize(
    "metric",
    [
        *("val-core/my/own/data/acc/mean@4", "val-core/x/my_part/best@8/mean", "val-aux/x/greedy/prompts", "mine"),
        *("critic/score/mean", "reward/my_part/mean", "env/my_metric", "train/loss", "actor/my_loss", "my/own"),
    ],
)
def test_names_that_a_run_or_code_of_users_may_log(metric: str) -> None:
    check_metric_name(metric)


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("critik/score/mean", "did you mean critic/score/mean"),
        ("train/los", "did you mean train/loss"),
        ("val-cor/gsm8k/acc/mean@1", "did you mean val-core/gsm8k/acc/mean@1"),
        ("val-core/gsm8k/acc", r"names of val-core/ are val-core/\{data_source\}/\{variable\}/mean@\{N\}"),
    ],
)
def test_a_metric_with_a_slip_is_refused(metric: str, said: str) -> None:
    with pytest.raises(UserError, match=f"--metric {metric}: .*{said}"):
        check_metric_name(metric)

"""What a sweep is asked: its words, its file, its space; and what is refused before anything runs."""

from __future__ import annotations

import re
from pathlib import Path

import optuna
import pytest

from tests.tiny_run import ROOT, TinyTask, good_row, write_rows
from trainer.sweeps import sweep_checks
from trainer.sweeps.study_spec import (
    Search,
    StudyOptions,
    StudySpec,
    combinations,
    metric_by_step,
    read_options,
    read_parameter,
)
from trainer.sweeps.sweep_checks import check_metric_name, check_sweep
from verl_lite.config import PPOConfig, parse_value
from verl_lite.errors import UserError

FILE = """
settings: {trainer.total_training_steps: 100, data.train_files: [a, b]}
space:
  rollout.n: [4, 8]
  actor.optim.lr: log(1e-7,1e-5)
  files: [[a, b], [c]]
  variant: {grpo: {recipe: grpo}, dapo: {recipe: dapo, rollout.n: 16, flag: true}}
seeds: 3
metric: val-core/a/acc/mean@1
optuna: 40
pruner: asha:reduction_factor=3
per_trial: 2
"""


def spec_of(argv: list[str]) -> StudySpec:
    found = read_options(argv).spec
    assert found is not None
    return found


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file, base = tmp_path / "sweep.yaml", tmp_path / "base.yaml"
    base.write_text("a: 1")
    file.write_text(FILE + f"config: {base}")
    options, asked = read_options(["--file", str(file)]), spec_of(["--file", str(file)])
    assert asked.seeds == [1, 2, 3] and asked.files == {str(base): "a: 1"} and asked.metric.endswith("mean@1")
    values = {"rollout.n": "8", "actor.optim.lr": 2e-6, "files": "[a,b]", "variant": "dapo"}
    settings = ["trainer.total_training_steps=100", "data.train_files=[a,b]"]
    chosen = ["rollout.n=8", "actor.optim.lr=2e-06", "files=[a,b]", "recipe=dapo", "rollout.n=16", "flag=true"]
    assert asked.command(values, 7) == ["--config", str(base), *settings, *chosen, "trainer.seed=7"]
    assert options.search == Search("optuna", 40, {"reduction_factor": 3}) and options.per_trial == 2

    more = ["rollout.n=2", "trainer.total_training_steps=5", "--random", "7", "--pruner", "asha:grace_period=2"]
    options = read_options(["--file", str(file), *more, "--seeds", "[7]", "--per-trial", "3"])
    asked = spec_of(["--file", str(file), *more, "--seeds", "[7]"])
    assert [parameter.name for parameter in asked.space] == ["actor.optim.lr", "files", "variant"]
    assert asked.seeds == [7] and "rollout.n=2" in asked.words and "trainer.total_training_steps=5" in asked.words
    assert options.search == Search("random", 7, {"grace_period": 2}) and options.per_trial == 3


def test_the_command_line_picks_of_the_files_groups_of_settings(tmp_path: Path) -> None:
    (tmp_path / "sweep.yaml").write_text(FILE)
    given = ["--file", str(tmp_path / "sweep.yaml")]
    (*_, picked) = spec_of([*given, "variant=dapo"]).space
    assert picked.values() == ["dapo"] and picked.words("dapo") == ["recipe=dapo", "rollout.n=16", "flag=true"]
    with pytest.raises(UserError, match="variant=dapo,rloo: there is no rloo; --file has grpo, dapo"):
        read_options([*given, "variant=dapo,rloo"])


def test_texts_with_commas_in_a_file_are_one_value_each(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(
        """
settings: {data.system_prompt: "Think, then answer", data.train_files: ["a,b.parquet", c], data.data_source: "log(1,2)"}
space: {data.prompt_template: ["{prompt} One, please.", "{prompt}"], other: {x: {data.system_prompt: "a, \U0001f600"}}}
metric: m
"""
    )
    asked = spec_of(["--file", str(file)])
    assert [parameter.name for parameter in asked.space] == ["data.prompt_template", "other"]
    [first, _] = [parameter.values() for parameter in asked.space]
    assert first is not None and len(first) == 2
    words = asked.command({"data.prompt_template": first[0], "other": "x"})
    settings = dict(word.split("=", 1) for word in words)
    values = {key: parse_value(text) for key, text in settings.items()}
    assert values["data.prompt_template"] == "{prompt} One, please." and values["data.data_source"] == "log(1,2)"
    assert values["data.train_files"] == ["a,b.parquet", "c"] and values["data.system_prompt"] == "a, \U0001f600"
    assert '"Think, then answer"' in "\n".join(words)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("settings: {trainer.seed: 010}", "line 1: YAML reads 010 as 8: write a number without leading zeros"),
        ("space:\n  rollout.n: [4]\n  rollout.n: [8]", "line 3: rollout.n is also in line 2: leave one of them out"),
        ("settings: {data.data_source: 2024-13-01}", "is not valid YAML: month must be in 1..12"),
    ],
)
def test_a_file_that_yaml_reads_otherwise_than_written_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(f"{text}\nmetric: m\n")
    with pytest.raises(UserError, match=rf"--file .*: {problem}"):
        spec_of(["--file", str(file)])


def test_a_star_in_a_metric_is_the_mean_of_all_that_fit() -> None:
    steps = {1: {"a/x/m": 0.25, "a/y/m": 0.75, "b/m": 9.0, "a/x/m/more": 9.0}, 2: {"b/m": 1.0}, 3: {"a/y/m": 0.5}}
    assert metric_by_step(steps, "a/*/m") == {1: 0.5, 3: 0.5} and metric_by_step(steps, "b/m") == {1: 9.0, 2: 1.0}


def test_a_study_alone_goes_on() -> None:
    options = read_options(["--study", "mine", "--slots", "2", "--ray-address", "h:1", "--retries", "0"])
    assert options == StudyOptions(None, None, Path("runs/sweeps/mine").absolute(), 2, 1, "h:1", 0)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "nothing to search"),
        (["a=1,2", "rollout.n"], "'rollout.n' is not key=value"),
        (["a=1,2", "--seeds", "[1,1]"], "--seeds [1,1]"),
        (["a=1,2", "--seeds", "0"], "--seeds 0: expected a number"),
        (["a=1,2", "--mode", "up"], "invalid choice: 'up'"),
        (["a=1,2", "--random", "0"], "whole number of at least 1"),
        (["a=1,2", "--pruner", "ash"], "--pruner ash: expected none, or asha"),
        (["a=1,2", "--pruner", "asha:min_resource=1"], "grace_period"),
        (["a=1,2", "--pruner", "asha:reduction_factor=1"], "reduction_factor is above 1"),
        (["a=1,2", "--pruner", "asha:reduction_factor=inf"], "reduction_factor is above 1"),
        (["a=1,2", "--pruner", "asha:reduction_factor=nan"], "reduction_factor is above 1"),
        (["a=1,2", "--pruner", "asha:brackets=1.5"], "whole numbers of at least 1"),
        (["a=1,2", "--pruner", "asha:grace_period=true"], "whole numbers of at least 1"),
        (["a=1,2", "--metrik", "x"], "--metrik x; `python -m trainer.sweep --help`"),
        (["a=1,2", "--retries", "-1"], "--retries: '-1': expected a whole number of at least 0"),
        (["a=1,2", "--slots", "²"], "whole number of at least 1"),
        (["a=1,2", "--threads", "2"], "--threads was removed: write OMP_NUM_THREADS=N before the command"),
        (["a=1,2", "--take=best"], "--take was removed: the last value"),
        (["--file", "GONE"], "--skip-invalid was removed: remove the values"),
        (["a=1,2", "--wait-for", "x"], "--wait-for x; `python -m"),
        (["--file", "/nowhere.yaml"], "cannot be read"),
        (["--file", "FILE"], "--spcae"),
    ],
)
def test_what_cannot_be_is_refused(argv: list[str], said: str, tmp_path: Path) -> None:
    files = {"FILE": tmp_path / "sweep.yaml", "GONE": tmp_path / "gone.yaml"}
    files["FILE"].write_text("spcae: {a: [1, 2]}")
    files["GONE"].write_text("space: {a: [1, 2]}\nskip_invalid: true")
    with pytest.raises(UserError) as refused:
        read_options([str(files.get(word, word)) for word in argv])
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("rollout.n=4,8", ["4", "8"]),
        ("actor.optim.lr=1e-6, 3e-6", ["1e-6", "3e-6"]),
        ("data.train_files=[a,b],[c]", ["[a,b]", "[c]"]),
        ("model.path='a,b',c", ["'a,b'", "c"]),
        ("+n=int(2,4)", [2, 3, 4]),
        *((one, None) for one in ("rollout.n=4", "data.train_files=[a,b]", "model.path='a,b'", "~actor.clip_ratio")),
    ],
)
def test_commas_outside_brackets_and_quotes_part_choices(word: str, values: list[str] | None) -> None:
    parameter = read_parameter(word)
    assert (None if parameter is None else parameter.values()) == values


def test_ranges_are_optunas_distributions_and_have_no_grid() -> None:
    floats = optuna.distributions.FloatDistribution
    for word, distribution in (("a=log(1e-7,1e-5)", floats(1e-7, 1e-5, log=True)), ("a=uniform(0, 1)", floats(0, 1))):
        parameter = read_parameter(word)
        assert parameter is not None and parameter.distribution == distribution
        with pytest.raises(UserError, match="--random N"):
            list(combinations((parameter,)))


@pytest.mark.parametrize(
    "word",
    [
        *("lr=log(1e-5,1e-7)", "lr=log(0,1)", "lr=uniform(1)", "lr=uniform(1,a)", "lr=uniform(1,1)"),
        *("lr=uniform(0,inf)", "n=int(1,2.5)", "lr=loguniform(1,2)", "n=4,,8", "n=4,8,4"),
    ],
)
def test_an_empty_or_impossible_range_is_refused_by_name(word: str) -> None:
    with pytest.raises(UserError) as refused:
        read_parameter(word)
    assert str(refused.value).startswith(word) and len(str(refused.value)) > len(word) + 20


def test_grid_and_corners() -> None:
    space = spec_of(["a=1,2", "n=int(1,3)", "--metric", "m"]).space
    assert list(combinations(space))[2:4] == [{"a": "1", "n": 3}, {"a": "2", "n": 1}]
    assert list(combinations(())) == [{}], "seeds alone: one trial"
    assert [corner["n"] for corner in combinations(space, corners=True)] == [1, 3] * 2


# ------------------------------------------------------------------------------------------------------------- checks


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> TinyTask:
    return TinyTask(tmp_path_factory.mktemp("task"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["actor.optim.lrr=1e-3,1e-4"], "did you mean actor.optim.lr"),
        (["actor.optim.lr=1e-3,big"], "1 of 2 combinations would be refused.*big"),
        (["rollout.n=2,4", "trainer.resume_mode=auto"], "the sweep sets this key for each run"),
        (["rollout.n=2,4", "trainer.seed=3", "--seeds", "2"], "trainer.seed is given, but --seeds"),
        (["trainer.seed=3"], "there is nothing to vary"),
        (["rollout.n=2,4", "--metric", ""], "--metric is not given"),
        (["rollout.n=2,4", "--metric", "val-core/x/acc/mean@1"], "nothing is validated"),
        (["rollout.n=2,4", "--metric", "critic/scor/mean"], "did you mean critic/score/mean"),
        (["actor.optim.lr=log(1e-5,1e-3)"], "a grid needs lists of values"),
    ],
)
def test_wrong_input_is_refused_before_the_first_trial(task: TinyTask, words: list[str], said: str) -> None:
    asked = spec_of([*task.options, "trainer.test_freq=0", "--metric", "critic/score/mean", *words])
    with pytest.raises(UserError, match=f"(?s){said}"):
        check_sweep(asked, Search(), None)


@pytest.mark.slow
@pytest.mark.parametrize(("file", "trials", "recipes"), [("grpo/sweep.yaml", 6, 1), ("comparison.yaml", 11, 9)])
def test_the_sweeps_of_the_recipes_are_checked_whole(
    file: str, trials: int, recipes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every word, in all combinations. Each recipe is prepared once; its model and data are not made here."""
    prepared: list[str | None] = []
    monkeypatch.setattr(sweep_checks, "prepare_recipe", lambda config: prepared.append(config.recipe))
    monkeypatch.setattr(sweep_checks, "validate", lambda *_, **__: None)
    asked = spec_of(["--file", str(ROOT / "recipes" / file)])
    assert asked.seeds and len(list(combinations(asked.space))) == trials
    check_sweep(asked, Search(), None)
    assert len(prepared) == len(set(prepared)) == recipes


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        *((name, "") for name in ("val-core/my/own/data/acc/mean@4", "val-aux/x/my_part/mean@4", "mine", "my/own")),
        *((name, "") for name in ("critic/score/mean", "reward/my_part/mean", "env/my_metric", "actor/my_loss")),
        ("critik/score/mean", "did you mean critic/score/mean"),
        ("val-cor/gsm8k/acc/mean@1", "did you mean val-core/gsm8k/acc/mean@1"),
        *((name, "") for name in ("val-core/*/mean@1", "val-core/*/acc/mean@1", "val-aux/*/greedy/*/mean@1")),
        (
            "val-core/gsm8k/acc",
            "did you mean val-core/gsm8k/acc/mean@4, val-core/gsm8k/reward/mean@4, val-core/my/own/acc",
        ),
        ("val-core/*", "did you mean val-core/gsm8k/acc/mean@4"),
    ],
)
def test_a_metric_with_a_slip_is_refused_with_those_of_the_run_and_names_of_users_are_not(
    metric: str, said: str, tmp_path: Path
) -> None:
    config = PPOConfig()
    config.data.val_files = [str(write_rows(tmp_path / "val.jsonl", [good_row(1, x) for x in ("my/own", "gsm8k")]))]
    config.rollout.val_kwargs.n = 4
    if not said:
        return check_metric_name(metric, config)
    with pytest.raises(UserError, match=f"--metric {re.escape(metric)}: .*{said}"):
        check_metric_name(metric, config)

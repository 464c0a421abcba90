"""The grammar of a sweep's parameters: what words mean, and what is refused."""

from __future__ import annotations

import optuna
import pytest

from trainer.sweeps.space import Choices, Range, Space, read_parameter, read_space, space_changes
from verl_lite.errors import UserError


def labels(word: str) -> list[str]:
    parameter = read_parameter(word)
    assert isinstance(parameter, Choices)
    return [option.label for option in parameter.options]


def the_range(word: str) -> Range:
    parameter = read_parameter(word)
    assert isinstance(parameter, Range)
    return parameter


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("rollout.n=4,8", ["4", "8"]),
        ("actor.optim.lr=1e-6, 3e-6", ["1e-6", "3e-6"]),
        ("data.train_files=[a,b],[c]", ["[a,b]", "[c]"]),
        ("model.path='a,b',c", ["'a,b'", "c"]),
    ],
)
def test_commas_outside_brackets_and_quotes_part_choices(word: str, expected: list[str]) -> None:
    assert labels(word) == expected


@pytest.mark.parametrize(
    "word", ["rollout.n=4", "data.train_files=[a,b]", "model.path='a,b'", "~actor.clip_ratio", "a="]
)
def test_one_value_is_no_parameter(word: str) -> None:
    assert read_parameter(word) is None


def test_ranges_are_optunas_distributions() -> None:
    floats, ints = optuna.distributions.FloatDistribution, optuna.distributions.IntDistribution
    assert the_range("lr=log(1e-7,1e-5)").distribution() == floats(1e-7, 1e-5, log=True)
    assert the_range("c=uniform(0, 1)").distribution() == floats(0, 1)
    assert the_range("c=uniform(0,1,step=0.25)").distribution() == floats(0, 1, step=0.25)
    assert the_range("n=int(1,64,log)").distribution() == ints(1, 64, log=True)
    assert the_range("n=int(2,8,step=2)").distribution() == ints(2, 8, step=2)


def test_values_and_settings_of_a_range() -> None:
    assert the_range("n=int(2,8,step=3)").values() == [2, 5, 8]
    assert the_range("c=uniform(0,0.3,step=0.1)").values() == [0.0, 0.1, 0.2, 0.3]
    assert the_range("c=uniform(0,1)").count() is None
    assert the_range("+n=int(1,3)").settings(2) == ("+n=2",)
    assert the_range("lr=log(1e-7,1e-5)").settings(3e-7) == ("lr=3e-07",)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lr=log(1e-5,1e-7)", "upside down.*lr=log\\(1e-07,1e-05\\)"),
        ("lr=log(0,1)", "begins above 0"),
        ("lr=log(1e-7,1e-5,step=1)", "no steps"),
        ("lr=uniform(1)", "1 numbers; a range has two"),
        ("lr=uniform(1,a)", "'a' is no number"),
        ("lr=uniform(1,1)", "write lr=1"),
        ("lr=uniform(0,inf)", "finite"),
        ("n=int(1,2.5)", "whole numbers"),
        ("lr=loguniform(1,2)", "did you mean log\\?|did you mean uniform\\?"),
        ("n=4,,8", "empty choice"),
        ("n=4,8,4", "4 is there twice"),
    ],
)
def test_what_is_no_parameter_is_refused(word: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_parameter(word)


def test_a_file_may_say_the_same_and_name_several_settings_at_once() -> None:
    space, fixed = read_space(
        {
            "lr": "log(1e-7,1e-5)",
            "n": [4, 8],
            "flag": [True, False],
            "files": [["a", "b"], ["c"]],
            "steps": 10,
            "variant": {"grpo": {"recipe": "grpo"}, "dapo": {"recipe": "dapo", "rollout.n": 16}},
        }
    )
    assert fixed == ["steps=10"] and read_space(space.written())[0] == space, "a study keeps it, and reads it again"
    values = {"lr": 2e-6, "n": "8", "flag": "false", "files": "[a,b]", "variant": "dapo"}
    assert space.settings(values) == ["lr=2e-06", "n=8", "flag=false", "files=[a,b]", "recipe=dapo", "rollout.n=16"]


def test_grid_and_corners() -> None:
    space, _ = read_space({"a": "1,2", "n": "int(1,3)"})
    assert space.size() == 6
    assert list(space.grid())[:4] == [{"a": "1", "n": 1}, {"a": "1", "n": 2}, {"a": "1", "n": 3}, {"a": "2", "n": 1}]
    assert [corner["n"] for corner in space.corners(10)] == [1, 3, 1, 3]
    assert list(Space(()).grid()) == [{}], "seeds alone: one trial"
    endless, _ = read_space({"lr": "log(1e-7,1e-5)"})
    assert endless.size() is None
    with pytest.raises(UserError, match="lr is a range, and a grid needs values.*--random N"):
        list(endless.grid())
    with pytest.raises(UserError, match="1,000,000,000 combinations"):
        list(read_space({"n": "int(1,1000000000)"})[0].grid())


def test_changes_are_told() -> None:
    changes = space_changes({"a": ["1"], "b": ["x"]}, {"a": ["1", "2"], "c": "int(1,2)"})
    assert changes == ["c is new: int(1,2)", "b is gone; it was ['x']", "a was ['1'], and is ['1', '2']"]

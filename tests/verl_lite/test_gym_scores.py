"""Answers that fool a scorer of reasoning-gym, or that it runs as code."""

from __future__ import annotations

import ast
import builtins
import importlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from verl_lite import gym_scores
from verl_lite.envs import make_env

reasoning_gym = pytest.importorskip("reasoning_gym")

RUNS_ANSWERS = sorted([*gym_scores.EXPRESSIONS, *gym_scores.LITERALS])
CODE = "setattr(__import__('builtins'), 'gym_canary', 1)"
OF_PYTHON, OF_SYMPY = ("eval", "exec", "compile"), ("parse_expr", "sympify")
READ_DATA_ONLY = {
    "bitwise_arithmetic": "the problem of the entry",
    "basic_arithmetic": "an expression that the generator has made",
    "codeio": "the program of the entry",
    "generators_00_49": "fractions that the generator has chosen",
    "generators_50_99": "fractions that the generator has chosen",
    "number_sorting": "the answer of the entry",
    "propositional_logic": "a parser of its own with this name",
}
"""Modules that run a text which no answer contains, with the text."""


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def entries(task: str, number: int = 3, **options: Any) -> list[dict[str, Any]]:
    dataset = reasoning_gym.create_dataset(task, size=number, seed=3, **options)
    return [dataset[index] for index in range(number)]


def scored(task: str, answer: str, entry: dict[str, Any]) -> float:
    return gym_scores.score(task, reasoning_gym.get_score_answer_fn(task), answer, entry)


# ------------------------------------------------------------------------------------------------- code in an answer


@pytest.mark.parametrize("task", RUNS_ANSWERS)
def test_no_answer_is_run(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "gym_canary", 0, raising=False)
    entry = entries(task, 1)[0]
    for answer in (
        CODE,
        f"{CODE}!",
        f"[{CODE}]",
        f"7 + {CODE}",
        f"\t {CODE}",
        f"(lambda: {CODE})()",
        f"[x for x in ({CODE},)]",
        f"f'{{{CODE}}}'",
        CODE.replace("setattr", "ｓｅｔａｔｔｒ"),
        f'sqrt(sqrt, "{CODE}")',
        f'sympify("{CODE}")',
    ):
        assert scored(task, answer, entry) < 0.1
        assert builtins.gym_canary == 0, f"{answer} was run"  # type: ignore[attr-defined]


def test_no_answer_of_a_composite_task_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtins, "gym_canary", 0, raising=False)
    spec = importlib.import_module("reasoning_gym.composite").DatasetSpec("countdown", 1.0, {})
    dataset = reasoning_gym.create_dataset("composite", size=2, seed=1, datasets=[spec])
    entry = dataset[0]
    assert gym_scores.score("composite", dataset.score_answer, CODE, entry) < 0.1
    assert builtins.gym_canary == 0  # type: ignore[attr-defined]
    assert gym_scores.score("composite", dataset.score_answer, entry["answer"], entry) == 1


def test_each_module_that_runs_text_is_known() -> None:
    """A new version of reasoning-gym may have further scorers that run answers."""
    found = set()
    for folder in reasoning_gym.__path__:
        for path in Path(folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            if any(_runs_text(node) for node in ast.walk(tree)):
                found.add(path.stem)
    assert set(RUNS_ANSWERS) <= found <= {*RUNS_ANSWERS, *READ_DATA_ONLY}


def _runs_text(node: ast.AST) -> bool:
    """Whether this is a call of a function that runs text; a method named `compile` does something else."""
    function = getattr(node, "func", None)
    if isinstance(function, ast.Name):
        return function.id in (*OF_PYTHON, *OF_SYMPY)
    return isinstance(function, ast.Attribute) and function.attr in OF_SYMPY


@pytest.mark.parametrize("task", RUNS_ANSWERS)
def test_right_answers_of_these_tasks_have_full_marks(task: str) -> None:
    for entry in entries(task, 6):
        assert scored(task, entry["answer"], entry) == 1


def test_a_list_that_a_scorer_reads_as_python_has_its_partial_marks() -> None:
    entry = entries("spiral_matrix", 1)[0]
    as_list = str([int(number) for number in entry["answer"].split()])
    assert scored("spiral_matrix", as_list, entry) == pytest.approx(0.1)


@pytest.mark.parametrize("answer", ["9**9**9**9", "((9**99)**99)**99", "1" + "+1" * 5000, "9" * 5000, "(" * 500])
@pytest.mark.parametrize("task", ["countdown", "polynomial_multiplication", "simple_integration"])
def test_a_number_that_takes_for_ever_is_wrong(task: str, answer: str) -> None:
    assert scored(task, answer, entries(task, 1)[0]) < 0.1


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("coin_flip", "1e-999999999"),
        ("coin_flip", ".1E-9_9999_9999"),
        ("coin_flip", "1e-0_9999999999999"),
        ("rubiks_cube", "R999999999"),
    ],
)
def test_a_short_answer_that_keeps_a_scorer_busy_is_wrong(task: str, answer: str) -> None:
    """A fraction with a billion digits, and a billion turns: the time limit would leave the answer out of the loss."""
    assert scored(task, answer, entries(task, 1)[0]) < 0.1


def test_numbers_of_a_usual_size_are_scored() -> None:
    assert scored("coin_flip", "3125e-4", {"answer": "0.3125", "metadata": {}}) == 1
    assert scored("coin_flip", "0.3125e+000", {"answer": "0.3125", "metadata": {}}) == 1


# ------------------------------------------------------------------------------- full marks without solving the task


def test_an_antiderivative_has_to_be_found() -> None:
    entry = entries("simple_integration", 1)[0]
    integrand = entry["metadata"]["integrand"]
    variable = entry["metadata"]["variable"]
    for name in ("integrate", "Integral", "expand"):
        assert scored("simple_integration", f"{name}({integrand}, {variable})", entry) == 0


def test_a_product_has_to_be_expanded() -> None:
    entry = entries("polynomial_multiplication", 1)[0]
    assert scored("polynomial_multiplication", f"expand({entry['answer']})", entry) == 0


def test_the_numbers_of_a_game_have_to_be_used() -> None:
    for entry in entries("puzzle24"):
        assert scored("puzzle24", "4*6*1*1", entry) == 0
    entry = {"answer": "8*(5*1 - 2)", "metadata": {}}
    assert scored("puzzle24", "(5*1-2)*8", entry) == 1
    # 24.5, which the scorer rounds down
    assert scored("puzzle24", "8*3 + 1/2", {"answer": "8*3*(2-1)", "metadata": {}}) == 0
    entry = entries("countdown", 1)[0]
    zero = "+".join(map(str, entry["metadata"]["numbers"]))
    target = "+".join(["pi/pi"] * entry["metadata"]["target"])
    assert scored("countdown", f"(pi-pi)*({zero}) + {target}", entry) < 0.1


@pytest.mark.parametrize("answer", ["nan", "nan + nani", "NaN+nanj", "inf+infj", "-Infinity", "1e999 + 1e999i"])
def test_nan_is_no_complex_number(answer: str) -> None:
    for entry in entries("complex_arithmetic"):
        assert scored("complex_arithmetic", answer, entry) == 0


def test_nan_is_no_sorted_number() -> None:
    entry = entries("number_sorting", 1)[0]
    count = len(entry["metadata"]["original_numbers"])
    assert scored("number_sorting", f"[{', '.join(['NaN'] * count)}]", entry) == 0


def test_a_word_such_as_nan_may_be_the_answer() -> None:
    assert scored("spell_backward", "nan", {"answer": "nan", "metadata": {}}) == 1


def test_the_first_digit_of_a_probability_is_not_the_probability() -> None:
    entry = {"answer": "0.3125", "metadata": {}}
    assert [scored("coin_flip", answer, entry) for answer in ("0", "0.3", "5/16", "0.31250")] == [0, 0, 1, 1]


def test_not_every_text_means_true() -> None:
    entry = {"answer": "False", "metadata": {}}
    assert [scored("game_of_life_halting", answer, entry) for answer in ("?", "True", "False")] == [0, 0, 1]


def test_no_score_exceeds_one() -> None:
    """The relative error of a negative right number is negative, so that the score grows with the error."""
    entry = {"answer": "-1", "metadata": {"task": "recurring_event_day"}}
    assert [scored("calendar_arithmetic", answer, entry) for answer in ("-1", "15", "1000")] == [1, 0, 0]


def test_an_environment_scores_alike() -> None:
    """An episode that fails is left out of the loss, so that raising would be better than being wrong."""
    env = make_env("reasoning_gym", {"task": "prime_factorization", "size": 3})
    env.reset(1)
    assert env.step("<answer>I do not know</answer>")[1] == 0
    env = make_env("reasoning_gym", {"task": "puzzle24", "size": 3})
    env.reset(1)
    assert env.step("<answer>4*6*1*1</answer>")[1] == 0

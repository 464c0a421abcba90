"""verl_lite/README.md stays true: its tables name what is registered, its keys exist, its recipes load, its code runs.

That the differences it states are so is in test_differences.py.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from tests.verl_lite import test_differences
from verl_lite import core_algos
from verl_lite.config import KEYS, load_config
from verl_lite.config.conflicts import conflict_problems
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY, KL_ALIASES, LOSS_AGG_MODES, POLICY_LOSS_REGISTRY

PAGE = (Path(core_algos.__file__).parent / "README.md").read_text()
COMPARISON = (Path(core_algos.__file__).parents[1] / "recipes/COMPARISON.md").read_text()
SECTIONS = {part.split("\n", 1)[0].strip(): part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}


def rows(section: str) -> list[list[str]]:
    """The cells of the section's tables, without head and rule."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    rules = {number for number, row in enumerate(cells) if all(set(cell) == {"-"} for cell in row)}
    return [row for number, row in enumerate(cells) if number not in rules and number + 1 not in rules]


def code_names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def first_names(section: str) -> list[str]:
    return [code_names(row[0])[0] for row in rows(section)]


@pytest.mark.parametrize(
    ("section", "known"),
    [
        ("Advantage estimators", ADV_ESTIMATOR_REGISTRY),
        ("Policy losses", POLICY_LOSS_REGISTRY),
        ("Aggregation", LOSS_AGG_MODES),
    ],
)
def test_tables_name_exactly_what_is_registered(section: str, known: Any) -> None:
    names = first_names(section)
    assert len(names) == len(set(names)) and set(names) == set(known)


def test_the_kl_tables_name_every_estimator_and_controller() -> None:
    named = {name for row in rows("KL") for name in code_names(row[0])}
    assert named == set(KL_ALIASES) | {"+", "fixed", "adaptive"}
    for row in rows("KL")[:4]:
        assert len({KL_ALIASES[name] for name in code_names(row[0])}) == 1, "names in a row are one estimator"


def test_papers_are_linked_by_their_numbers() -> None:
    links = re.findall(r"\[(\d{4}\.\d{5})\]\(https://arxiv\.org/abs/([\d.]+)\)", PAGE)
    assert len(links) > 20 and all(text == target for text, target in links)
    folder = Path(core_algos.__file__).parent
    files = (folder / "core_algos.py", *folder.glob("algos/*.py"), folder.parent / "trainer/rewards/scores.py")
    sources = "".join(path.read_text() for path in files)
    assert not [number for number, _ in links if f"arXiv:{number}" not in sources], "the code names the same papers"


def test_keys_exist() -> None:
    for key in re.findall(r"`((?:algorithm|actor|critic|trainer)\.[\w.]+)", PAGE):
        section = key.rstrip(".") + "."
        assert key in KEYS or any(name.startswith(section) for name in KEYS), key
    for row in rows("Policy losses"):
        for option in code_names(row[2]):
            assert not re.fullmatch(r"[a-z_.]+", option) or "actor." + option in KEYS, option


def test_options_of_estimators_are_theirs() -> None:
    """What is named without a section is an argument of the function."""
    for row in rows("Advantage estimators"):
        parameters = inspect.signature(ADV_ESTIMATOR_REGISTRY[code_names(row[0])[0]]).parameters
        arguments = [name for name in code_names(row[2]) if re.fullmatch(r"[a-z_]+", name) and name != "gpg"]
        assert set(arguments) <= set(parameters), row[0]


def test_what_only_agents_can_be_trained_with_is_said() -> None:
    sentence = re.search(r"((?:`\w+`(?: and )?)+) train agents only", PAGE)
    named = set(code_names(sentence[1])) if sentence else set()
    assert named == {name for name, facts in ADV_ESTIMATOR_REGISTRY.facts.items() if facts.get("rows") == "step"}


def test_differences_are_numbered_and_tested() -> None:
    numbers = [int(row[0]) for row in rows("Intended differences")]
    assert numbers == list(range(1, len(numbers) + 1))
    for section in ("Advantage estimators", "Policy losses", "Aggregation"):
        assert {int(number) for row in rows(section) for number in row[-1].split()} <= set(numbers)
    tested = {int(found[1]) for name in dir(test_differences) if (found := re.match(r"test_(\d+)_", name))}
    assert tested == set(numbers), "each difference has a test_N_..."


def test_files_exist() -> None:
    root = Path(core_algos.__file__).parents[1]
    named = re.findall(r"`((?:tests|trainer)/[\w/]+\.py)`", PAGE)
    assert len(named) > 4 and not [name for name in named if not (root / name).is_file()]


RECIPES = [
    re.split(r"\s{2,}", line.strip(), maxsplit=1)
    for line in re.findall(r"```text\n(.*?)```", COMPARISON, re.DOTALL)[0].splitlines()
]


@pytest.mark.parametrize(("name", "arguments"), RECIPES, ids=[name for name, _ in RECIPES])
def test_recipes_load_and_have_nothing_to_complain_about(name: str, arguments: str) -> None:
    given = ["model.path=m", "data.train_files=t.parquet", "rollout.n=8", *arguments.split()]
    config = load_config(given).config
    assert list(conflict_problems(config)) == []

"""The guide's sections on code and on judges: commands load, ground truths are read, tables are complete."""

from __future__ import annotations

import inspect
import itertools
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

import verl_lite.rewards
from verl_lite.config import load_config
from verl_lite.rewards import code, judge, load_scorer
from verl_lite.rewards.scoring import part_problems
from verl_lite.sandbox import Limits

GUIDE = (Path(verl_lite.rewards.__file__).parent / "README.md").read_text()


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)^## ", GUIDE, flags=re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1]


@pytest.mark.parametrize("title", ["Code", "A judge"])
def test_the_commands_load(title: str) -> None:
    [command] = re.findall(r"(?:^    .*\n)+", section(title), flags=re.MULTILINE)
    config = load_config(["recipe=null", *shlex.split(command)]).config
    assert config.reward.functions and list(part_problems(config.reward.functions)) == []
    load_scorer(config.reward)


@pytest.mark.parametrize(("title", "module"), [("Code", code), ("A judge", judge)])
def test_the_tables_have_every_argument_with_its_default(title: str, module: ModuleType) -> None:
    arguments = {
        name: each.default
        for name, each in inspect.signature(module.compute_score).parameters.items()
        if each.kind is inspect.Parameter.KEYWORD_ONLY
    }
    told: dict[str, str] = {}
    table = section(title).partition("| argument |")[2].partition("\n\n")[0]
    for names, default in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([^|]*) \|", table, flags=re.MULTILINE):
        told |= itertools.zip_longest(re.findall(r"\w+", names)[:3], default.split(", ")[:2], fillvalue="-")
    assert set(told) - {"-"} == set(arguments)
    for name, value in arguments.items():
        expected = "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value).lower()
        assert told[name] in (expected, "-") or isinstance(value, str), name


def test_the_programs_of_the_table_pass() -> None:
    table = section("Code").partition("| ground truth")[2].partition("\n\n")[0]
    script, call, asserts, check = [
        truth.replace("\\\\", "\\") for truth in re.findall(r"^\| `([{\[].*?[}\]])`(?: |$)", table, flags=re.MULTILINE)
    ]
    add = "def add(a, b):\n    return a + b"
    assert code.compute_score("rule/code", "print(sum(map(int, input().split())))", script)["score"] == 1.0
    assert code.compute_score("rule/code", add, call)["score"] == 1.0
    assert code.compute_score("rule/code", add, asserts)["score"] == 1.0
    filled = check.replace("def check(candidate): ...", "def check(candidate):\\n    assert candidate(1, 2) == 3")
    assert code.compute_score("rule/code", add, filled)["score"] == 1.0
    tests = "from solution import add\ndef test_sum():\n    assert add(1, 2) == 3"
    assert code.compute_score("rule/code", add, tests)["score"] == 1.0


def test_the_limits_are_those_of_the_sandbox() -> None:
    limits, text = Limits(), section("Code")
    assert f"output ({limits.output_kb >> 10} MiB)" in text and f"open files ({limits.open_files})" in text
    assert f"files ({limits.file_mb} MiB each, {limits.folder_mb} MiB in all)" in text
    assert f"up to {limits.threads}" in text and f"up to {limits.open_files} times {limits.file_mb} MiB" in text

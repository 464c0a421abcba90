"""The guide to rewards stays true: its examples and commands run and score as it says, its tables are complete."""

from __future__ import annotations

import inspect
import itertools
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

import verl_lite.rewards
from verl_lite.config import CustomRewardConfig, PPOConfig, RewardConfig, load_config, schema_of
from verl_lite.rewards import REWARDS, RewardItem, code, judge, load_scorer
from verl_lite.rewards.scoring import part_problems
from verl_lite.sandbox import Limits

GUIDE = (Path(verl_lite.rewards.__file__).parent / "README.md").read_text()
EXAMPLES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", GUIDE, flags=re.DOTALL))
ITEMS = [RewardItem(i, "s", answer, "yes", {"index": i}, [{"role": "user", "content": "?"}]) for i, answer in
         enumerate(["yes", "no", "yes" + " " * 10])]  # fmt: skip


def test_every_code_block_is_one_of_the_examples_below() -> None:
    assert GUIDE.count("```python") == len(EXAMPLES) == 1


def test_the_function_scores(tmp_path: Path) -> None:
    (tmp_path / "length.py").write_text(EXAMPLES["length.py"])
    custom = CustomRewardConfig(path=str(tmp_path / "length.py"))
    scorer = load_scorer(RewardConfig(custom_reward_function=custom, reward_kwargs={"limit": 10}))
    assert [result.score for result in scorer.score_all(ITEMS)] == [1.0, 0.0, 0.0]


def test_the_several_rewards_score(tmp_path: Path) -> None:
    (tmp_path / "length.py").write_text(EXAMPLES["length.py"])
    [command] = re.findall(r"    (reward\.functions='\{.*?\}')\n\n", GUIDE, flags=re.DOTALL)
    [argument] = shlex.split(command)
    config = load_config(["recipe=null", argument.replace("length.py", str(tmp_path / "length.py"))]).config
    assert list(part_problems(config.reward.functions)) == []
    answer = "<think>it is</think><answer>yes</answer>"
    items = [RewardItem(0, "exact_match", answer, answer), RewardItem(1, "exact_match", "yes", "yes")]
    results = load_scorer(config.reward).score_all(items)
    assert [result.score for result in results] == pytest.approx([1 + 0.1 + 0, 1 + 0 + 0.5])
    assert results[0].extra == {
        "accuracy": 1.0, "format": 1.0, "short": 0.0, "acc": 1.0, "short.acc": 1.0, "short.pred": answer,
    }  # fmt: skip
    adding = ["reward.functions.format.weight=0.2", "~reward.functions.short"]
    changed = load_config(["recipe=null", argument, *adding]).config.reward.functions
    assert list(changed) == ["accuracy", "format"] and changed["format"]["weight"] == 0.2


def test_the_options_that_it_names_exist() -> None:
    keys = {name for name in schema_of(PPOConfig).keys if name.startswith("reward.")}
    mentioned = set(re.findall(r"\breward\.\w[\w.]*\w", GUIDE))
    below = ("reward.functions.", "reward.custom_reward_function", "reward.remote")
    assert [name for name in mentioned if name not in keys and not name.startswith(below)] == []


def test_the_table_of_rewards_has_each_of_them_with_its_sources_and_arguments() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([^|]*) \| ([^|]* \| [^|]*) \|$", GUIDE, flags=re.MULTILINE)
    assert {f"rule/{name}" for name, _, _ in rows} == {name for name in REWARDS if name.startswith("rule/")}
    for name, sources, told in rows:
        function = REWARDS[f"rule/{name}"]
        for pattern in re.findall(r"`([^`]+)`", sources):
            assert REWARDS[pattern] is function, pattern
        own = list(inspect.signature(function).parameters)[4:]
        if name not in ("code", "judge"):  # which have guides of their own
            assert [argument for argument in own if f"`{argument}" not in told] == [], name


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

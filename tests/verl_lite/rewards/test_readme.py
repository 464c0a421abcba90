"""The guide to rewards stays true: its examples run and score as it says, and its table has every option."""

from __future__ import annotations

import inspect
import re
import shlex
from pathlib import Path

import pytest

import verl_lite.rewards
from verl_lite.config import CustomRewardConfig, PPOConfig, RewardConfig, load_config, schema_of
from verl_lite.rewards import (
    REWARDS,
    RewardItem,
    load_scorer,
)
from verl_lite.rewards.scoring import part_problems

GUIDE = (Path(verl_lite.rewards.__file__).parent / "README.md").read_text()
EXAMPLES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", GUIDE, flags=re.DOTALL))
ITEMS = [RewardItem(i, "s", answer, "yes", {"index": i}, [{"role": "user", "content": "?"}]) for i, answer in
         enumerate(["yes", "no", "yes" + " " * 10])]  # fmt: skip


def test_every_code_block_is_one_of_the_examples_below() -> None:
    assert GUIDE.count("```python") == len(EXAMPLES) == 2


@pytest.mark.parametrize(
    ("file", "style", "expected"),
    [
        ("length.py", "sample", [1.0, 0.0, 0.0]),
        ("rubric.py", "sample", [1.1, 0.0 + 0.1, 1.0]),
    ],
)
def test_the_functions_score(tmp_path: Path, file: str, style: str, expected: list[float]) -> None:
    (tmp_path / file).write_text(EXAMPLES[file])
    kwargs = {"limit": 10} if file == "length.py" else {}
    custom = CustomRewardConfig(path=str(tmp_path / file), style=style)
    scorer = load_scorer(RewardConfig(custom_reward_function=custom, reward_kwargs=kwargs))
    assert scorer.style == style
    assert [result.score for result in scorer.score_all(ITEMS)] == pytest.approx(expected)


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

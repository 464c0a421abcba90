"""The guide's code runs, and its table names every reward."""

from __future__ import annotations

import re
from pathlib import Path

import verl_lite.visual_rewards as package
from verl_lite.visual_rewards import VISUAL_REWARDS

GUIDE = Path(package.__file__).with_name("README.md").read_text(encoding="utf-8")


def test_the_example_keeps_its_promises() -> None:
    try:
        exec("\n".join(re.findall(r"```python\n(.*?)```", GUIDE, flags=re.DOTALL)), {"__name__": "readme"})
    finally:
        VISUAL_REWARDS.pop("brightness", None)


def test_every_reward_is_in_the_table() -> None:
    assert set(VISUAL_REWARDS) <= set(re.findall(r"^\| `(\w+)` \|", GUIDE, flags=re.MULTILINE))

"""The cases that rewards are measured with are what they say: each reward finds the right half of the answers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.bench.reward_kinds import RuleCase, cpu_seconds, rule_cases
from verl_lite.rewards import REWARDS

CASES = rule_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_half_of_the_answers_are_right(case: RuleCase) -> None:
    assert cpu_seconds(replace(case, items=case.items[:20], right=10)) >= 0


def test_every_rule_is_measured() -> None:
    measured = {case.name for case in CASES}
    waiting = {"code", "judge"}  # measured by tests.bench.rewards itself: most of their time is another process's
    assert {name.removeprefix("rule/") for name in REWARDS if name.startswith("rule/")} - waiting <= measured

"""The cases that rewards are measured with are what they say: each reward finds the right half of the answers."""

from __future__ import annotations

import pytest

from tests.bench.rewards import Case, cost, rule_cases
from verl_lite.rewards import REWARDS

CASES = rule_cases(20)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_half_of_the_answers_are_right(case: Case) -> None:
    assert cost(case)[0] >= 0


def test_every_rule_is_measured() -> None:
    waiting = {"code", "judge"}  # most of their time is another process's
    rules = {name.removeprefix("rule/") for name in REWARDS if name.startswith("rule/")}
    assert rules - waiting <= {case.name for case in CASES}

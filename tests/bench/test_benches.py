"""Benches in small: every estimator and loss has its line, and only rounding differs; rewards find right answers."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests.bench import algos
from tests.bench.rewards import Case, cost, rule_cases
from verl_lite import core_algos
from verl_lite.config import ActorConfig
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY
from verl_lite.rewards import REWARDS


def test_every_entry_has_a_line_only_rounding_differs_and_verl_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for verl: our own functions under its name, one of them broken."""
    for name in ("verl", "verl.trainer", "verl.trainer.ppo", "verl.workers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    broken = ADV_ESTIMATOR_REGISTRY | {"rloo": lambda token_level_rewards: {}["no such column"]}
    stand_in = SimpleNamespace(**{**vars(core_algos), "ADV_ESTIMATOR_REGISTRY": broken})
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", stand_in)  # type: ignore[arg-type]
    config = SimpleNamespace(ActorConfig=ActorConfig)
    monkeypatch.setitem(sys.modules, "verl.workers.config", config)  # type: ignore[arg-type]
    algos.main(["--rows", "64", "--width", "24", "--naive-rows", "16", "--repeat", "1"])
    output = capsys.readouterr().out
    lines = {(one[:10].strip(), one[11:39].strip()): one[39:].split() for one in output.splitlines()[2:]}
    assert {name for kind, name in lines if kind == "estimator"} == set(ADV_ESTIMATOR_REGISTRY)
    assert {name for kind, name in lines if kind == "loss"} == set(POLICY_LOSS_REGISTRY)
    assert all(float(columns[3]) < 1e-9 and float(columns[4]) < 1e-4 for columns in lines.values())
    assert lines.pop(("estimator", "rloo"))[5] == "KeyError:"
    assert all(float(columns[6]) > 0 and columns[7] == "0e+00" for columns in lines.values())


CASES = rule_cases(20)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_half_of_the_answers_are_right(case: Case) -> None:
    assert cost(case)[0] >= 0


def test_every_rule_is_measured() -> None:
    waiting = {"code", "judge"}  # most of their time is another process's
    rules = {name.removeprefix("rule/") for name in REWARDS if name.startswith("rule/")}
    assert rules - waiting <= {case.name for case in CASES}

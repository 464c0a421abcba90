"""The benchmark of the mathematics on a small batch: every entry has its line, and the differences are rounding."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests.bench import algos
from verl_lite import core_algos
from verl_lite.config import ActorConfig
from verl_lite.core_algos import ADV_ESTIMATOR_REGISTRY, LOSS_AGG_MODES, POLICY_LOSS_REGISTRY

SMALL = ["--rows", "64", "--width", "24", "--naive-rows", "16", "--repeat", "1"]


def table(output: str) -> dict[tuple[str, str], list[str]]:
    """The columns of each line after kind and name."""
    lines = [line for line in output.splitlines()[2:]]
    return {(line[:10].strip(), line[11:39].strip()): line[39:].split() for line in lines}


def test_every_entry_has_a_line_and_only_rounding_differs(capsys: pytest.CaptureFixture[str]) -> None:
    algos.main(SMALL)
    output = capsys.readouterr().out
    lines = table(output)
    assert {name for kind, name in lines if kind == "estimator"} == set(ADV_ESTIMATOR_REGISTRY)
    assert {name for kind, name in lines if kind == "loss"} == set(POLICY_LOSS_REGISTRY)
    assert {name for kind, name in lines if kind == "agg_loss"} == set(LOSS_AGG_MODES)
    assert ("value loss", "compute_value_loss") in lines
    assert all(float(columns[3]) < 1e-9 and float(columns[4]) < 1e-4 for columns in lines.values())
    assert "verl is not importable" in output


def test_verl_is_measured_where_it_is_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for verl: our own functions under its name, one of them broken."""
    stand_in = ModuleType("verl.trainer.ppo.core_algos")
    names = ("agg_loss", "kl_penalty", "compute_value_loss", "POLICY_LOSS_REGISTRY", "get_policy_loss_fn")
    for name in names:
        setattr(stand_in, name, getattr(core_algos, name))
    estimators = {"grpo": ADV_ESTIMATOR_REGISTRY["grpo"], "rloo": lambda token_level_rewards: {}["no such column"]}
    stand_in.ADV_ESTIMATOR_REGISTRY = estimators  # type: ignore[attr-defined]
    stand_in.get_adv_estimator_fn = estimators.__getitem__  # type: ignore[attr-defined]
    workers = SimpleNamespace(ActorConfig=ActorConfig)
    for name in ("verl", "verl.trainer", "verl.trainer.ppo", "verl.workers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", stand_in)
    monkeypatch.setitem(sys.modules, "verl.workers.config", workers)  # type: ignore[arg-type]
    algos.main([*SMALL, "--only", "grpo", "rloo", "gigpo", "vanilla", "clip_cov", "compute_value_loss", "token-mean"])
    lines = table(capsys.readouterr().out)
    for entry in (("estimator", "grpo"), ("loss", "vanilla"), ("agg_loss", "token-mean")):
        milliseconds, ratio, difference = lines[entry][5:]
        assert float(milliseconds) >= 0 and float(ratio) > 0 and float(difference) == 0, entry
    assert lines["value loss", "compute_value_loss"][7] == "0e+00"
    assert lines["estimator", "rloo"][5] == "KeyError:"
    assert lines["estimator", "gigpo"][5:] == lines["loss", "clip_cov"][5:] == ["-"]

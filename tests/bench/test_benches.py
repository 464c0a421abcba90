"""Benches in small: every estimator and loss has its line, and only rounding differs; rewards find right answers."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from tests.bench import algos, step
from tests.bench.rewards import Case, cost, rule_cases
from tests.bench.smollm2_shape import llama_135m_config
from tests.bench.step_task import SIZES, Lengths, Size
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
    empty: dict[str, float] = {}
    broken = ADV_ESTIMATOR_REGISTRY | {"rloo": lambda token_level_rewards: empty["no such column"]}
    stand_in = SimpleNamespace(**{**vars(core_algos), "ADV_ESTIMATOR_REGISTRY": broken})
    monkeypatch.setitem(sys.modules, "verl.trainer.ppo.core_algos", stand_in)
    config = SimpleNamespace(ActorConfig=ActorConfig)
    monkeypatch.setitem(sys.modules, "verl.workers.config", config)
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


def test_shares_of_the_matrix_rate_by_hand() -> None:
    """Two prompts of 3 tokens and answers of 4 tokens in total: 10 tokens through the layers, 4 through the output."""
    lengths = Lengths("short", 2, True, prompts=2, samples=1, prompt_tokens=3)
    size = Size("tiny", hidden=2, layers=3, vocabulary=5, layer_parameters=7, lengths=(lengths,))
    assert size.forward_flops(10, 4) == 2 * 3 * 7 * 10 + 2 * 2 * 5 * 4 == 500
    stages = {"gen": 1.0, "update_actor": 2.0}
    report = {"seconds": 4.0, "tokens": 4, "stages": stages}
    assert step.shares_of_rate(report, size, lengths, 1000.0) == (0.5, 0.75)
    del stages["update_actor"]
    assert step.shares_of_rate(report, size, lengths, 1000.0) == (0.5, 0.5), "the peer's update is the rest of its step"


def test_the_matrices_of_135m_are_those_of_its_network() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    [size] = [size for size in SIZES if size.name == "135M"]
    with torch.device("meta"):
        network = LlamaForCausalLM(LlamaConfig(**llama_135m_config()))
    layers = network.model.layers
    matrices = [parameter.numel() for parameter in layers[0].parameters() if parameter.ndim == 2]
    assert (size.layer_parameters, size.layers) == (sum(matrices), len(layers))
    assert network.lm_head.weight.shape == (size.vocabulary, size.hidden)


def test_135m_is_compared_with_the_peers_defaults_and_its_best_settings() -> None:
    [size] = [size for size in SIZES if size.name == "135M"]
    ours, defaults, best = step.contestants(size, size.lengths[0], ["trainer.seed=2"])
    assert ours.extra == ("trainer.seed=2",), "the settings of the recipe"
    assert json.loads(defaults.extra[0]) == {
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 16,
        "gradient_checkpointing": True,
    }
    assert json.loads(best.extra[0]) == {
        "per_device_train_batch_size": 32,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": False,
    }

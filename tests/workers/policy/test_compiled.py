"""`model.compile`: the numbers of eager execution, and a note where a layer cannot be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounterWithBackend

from tests.tiny_model import tiny_qwen2
from tests.workers.engine_cases import Batch, ragged_batch
from verl_lite.config import ModelConfig
from workers.engine.network import BuildArguments
from workers.policy.causal_lm import CausalLMPolicy, causal_lm
from workers.policy.compiled import compile_policy
from workers.policy.loading import token_network


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def network(path: str, **options: object) -> CausalLMPolicy:
    torch.manual_seed(0)
    cpu = torch.device("cpu")
    arguments = BuildArguments(
        compute_dtype=torch.float32, dtype=torch.float32, trains=True, with_weights=True, device=cpu
    )
    policy = token_network(ModelConfig(path=path, **options), causal_lm(16))(arguments)  # type: ignore[arg-type]
    assert isinstance(policy, CausalLMPolicy)
    return policy.train()


def numbers(policy: CausalLMPolicy) -> dict[str, torch.Tensor]:
    """Outputs and gradients of a packed batch."""
    inputs, _ = policy.prepare_inputs(ragged_batch(Batch(rows=6)), torch.device("cpu"))
    outputs = policy(inputs, temperature=0.8, calculate_entropy=True)
    (outputs["log_probs"].sum() + 2 * outputs["entropys"].square().sum()).backward()
    gradients = {name: value.grad for name, value in policy.named_parameters() if value.grad is not None}
    return {name: value.detach() for name, value in outputs.items()} | gradients


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys() and len(found) > 6
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max().clamp(min=1.0), name


@pytest.mark.slow
@torch._dynamo.config.patch(disable=True)  # vLLM's engine on a CPU does this
def test_a_compiled_policy_with_adapter_and_checkpointing_has_the_numbers_of_eager_execution(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_qwen2(tmp_path, hidden=32, heads=2, layers=2)
    expected = numbers(network(path, lora_rank=4))
    assert_equal(numbers(network(path, lora_rank=4, compile=True)), expected)
    assert not torch._dynamo.utils.counters["graph_break"] and "model.compile" not in capsys.readouterr().out


@pytest.mark.slow
def test_layers_share_one_graph_with_the_numbers_of_eager_execution(tmp_path: Path) -> None:
    path = tiny_qwen2(tmp_path, hidden=32, heads=2, layers=4)
    expected = numbers(network(path))
    policy, counter = network(path), CompileCounterWithBackend("aot_eager")
    compile_policy(policy, counter)
    assert_equal(numbers(policy), expected)
    assert counter.frame_count <= 4, "a graph for all four layers, and those of the logits"


def test_a_layer_that_breaks_the_graph_is_reported_and_runs_eagerly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tiny_qwen2(tmp_path, hidden=32, heads=2, layers=2)
    expected = numbers(network(path))
    policy = network(path)
    for block in policy.blocks():
        block.mlp.register_forward_hook(lambda *_: torch._dynamo.graph_break())  # type: ignore[union-attr]
    compile_policy(policy, "eager")
    assert_equal(numbers(policy), expected)
    notes = [line for line in capsys.readouterr().out.splitlines() if "model.compile" in line]
    assert len(notes) == 1 and "Qwen2DecoderLayer is not compiled and runs eagerly: Call to `torch._dynamo" in notes[0]


def test_without_a_compiler_the_policy_runs_eagerly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def no_compiler(*_: object) -> None:
        raise RuntimeError("no C++ compiler")

    path = tiny_qwen2(tmp_path, hidden=32, heads=2, layers=2)
    expected = numbers(network(path))
    policy = network(path)
    compile_policy(policy, no_compiler)
    assert_equal(numbers(policy), expected)
    notes = [line for line in capsys.readouterr().out.splitlines() if "model.compile" in line]
    assert len(notes) == 3 and all("no C++ compiler" in note for note in notes), "the layer and two functions"

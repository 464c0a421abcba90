"""The training engine on a CUDA device: the same numbers as on the CPU, within the precision it computes in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.tiny_model import tiny_qwen2
from tests.workers.engine_cases import Batch, loss_fn, planned, ragged_batch
from tests.workers.engine_cases import Case as EngineCase
from verl_lite.config import FSDPConfig, MixedPrecisionConfig, ModelConfig, OptimConfig
from verl_lite.machine.device import DETERMINISTIC
from workers.engine.fsdp import FSDPEngine
from workers.engine.packed_attention import Scores, _sdpa_runs, _varlen_attention
from workers.engine.packed_sequences import PackedSequences
from workers.policy.causal_lm import causal_lm
from workers.policy.loading import token_network
from workers.policy.output_layer import token_log_probs

pytestmark = pytest.mark.gpu
BATCH = Batch(rows=9, shared_prompts=3, failed_rows=(4,))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("model"), hidden=128, heads=4, kv_heads=2)


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """Engines on the CPU and on CUDA need groups of different backends."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def build(
    path: str,
    device: str,
    dtype: str,
    packed: bool = True,
    deterministic: bool = False,
    model: Any = None,
    **fsdp: bool,
) -> FSDPEngine:
    model = {"enable_gradient_checkpointing": False} | (model or {})
    return FSDPEngine(
        token_network(ModelConfig(path=path, use_remove_padding=packed, **model), causal_lm(16)),
        FSDPConfig(mixed_precision=MixedPrecisionConfig(param_dtype=dtype), **fsdp),
        OptimConfig(lr=1e-3, eps=1e-3),
        device=torch.device(device),
        total_training_steps=10,
        seed=0,
        deterministic=deterministic,
    )


def trained(engine: FSDPEngine, steps: int = 2) -> dict[str, torch.Tensor]:
    data, _ = planned(ragged_batch(BATCH), EngineCase(), mini_batch_size=4)
    for _ in range(steps):
        engine.move_in()
        engine.train(data, loss_fn, temperature=1.0, calculate_entropy=True)
        engine.move_out()
    engine.move_in()
    return {name: tensor.float().cpu() for name, tensor in engine.full_params()}


def test_fp32_equals_the_cpu(path: str) -> None:
    expected = trained(build(path, "cpu", "fp32"))
    torch.distributed.destroy_process_group()
    torch.backends.cuda.matmul.allow_tf32 = False
    for packed in (True, False):
        found = trained(build(path, "cuda", "fp32", packed=packed))
        for name, value in expected.items():
            assert (found[name] - value).abs().max() < 1e-5, name


def test_bf16_is_near_fp32_and_packed_near_padded(path: str) -> None:
    data, _ = planned(ragged_batch(BATCH), EngineCase())
    outputs = {
        (dtype, packed): build(path, "cuda", dtype, packed).infer(data, temperature=1.0, calculate_entropy=True)
        for dtype, packed in (("fp32", True), ("bf16", True), ("bf16", False))
    }
    reference = outputs["fp32", True]["log_probs"]
    for key in (("bf16", True), ("bf16", False)):
        assert (outputs[key]["log_probs"] - reference).abs().mean() < 0.05
        assert outputs[key]["log_probs"].dtype == torch.float32


@pytest.mark.parametrize("checkpointing", [False, True])
def test_activation_offload_changes_nothing(path: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in DETERMINISTIC.items():
        monkeypatch.setenv(name, value)
    expected = trained(build(path, "cuda", "bf16", deterministic=True))
    options = {"enable_gradient_checkpointing": checkpointing, "enable_activation_offload": True}
    found = trained(build(path, "cuda", "bf16", deterministic=True, model=options))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_offload_frees_the_device_and_changes_nothing(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in DETERMINISTIC.items():  # otherwise two equal runs differ in the last bit
        monkeypatch.setenv(name, value)
    expected = trained(build(path, "cuda", "bf16", deterministic=True))
    engine = build(path, "cuda", "bf16", deterministic=True, param_offload=True, optimizer_offload=True)
    found = trained(engine)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    engine.move_in_optimizer()
    before = torch.cuda.memory_allocated()
    engine.move_out()
    held = sum(parameter.numel() for parameter in engine.parameters.values()) * 12  # weights and two moments, fp32
    assert before - torch.cuda.memory_allocated() > 0.9 * held
    assert all(parameter.device.type == "cpu" for parameter in engine.parameters.values())


@pytest.mark.parametrize(("heads", "kv_heads", "window"), [(8, 8, None), (8, 2, None), (8, 2, 16)])
def test_varlen_attention_equals_sdpa_with_gradients(heads: int, kv_heads: int, window: int | None) -> None:
    torch.manual_seed(0)
    runs = ((2, 1), (3, 17), (1, 130))
    lengths = [length for count, length in runs for _ in range(count)]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    sequences = PackedSequences(runs, bounds, max(lengths))

    def draw(count: int) -> torch.Tensor:
        return torch.randn(sum(lengths), count, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    inputs = draw(heads), draw(kv_heads), draw(kv_heads)
    grad = torch.randn(sum(lengths), heads, 64, device="cuda", dtype=torch.bfloat16)
    results = []
    for attend in (_varlen_attention, _sdpa_runs):
        output = attend(*inputs, Scores(0.125, window, None, None), sequences)
        results.append((output, *torch.autograd.grad(output, inputs, grad)))
    for one, other in zip(*results, strict=True):
        assert (one - other).float().abs().max() < 0.03


def test_log_prob_memory_is_flat_in_tokens() -> None:
    """Peak over the inputs and gradients: a few chunks of 512 x 50,000 logits, whatever the number of tokens."""
    peaks = []
    for tokens in (4096, 16384):
        hidden = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        weight = torch.randn(50_000, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        targets = torch.randint(50_000, (tokens,), device="cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        log_probs, entropys, _ = token_log_probs(
            hidden, weight, None, targets, temperature=1.0, chunk_tokens=512, calculate_entropy=True
        )
        (log_probs.sum() + entropys.sum()).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before - 2 * hidden.numel())
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[1] < 8 * 512 * 50_000 * 4

"""Chunked log-probs and entropies against the naive formula: values, gradients, memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from tests.tiny_model import tiny_qwen2
from tests.workers.engine_cases import PROMPT, Batch, ragged_batch
from tests.workers.model_families import tiny_config, tiny_network
from trainer.planner.diffusion_memory import LiveBytes
from verl_lite.config import ActorConfig
from verl_lite.errors import UserError
from workers.engine.packing import pad
from workers.policy import output_layer
from workers.policy.causal_lm import CausalLMPolicy
from workers.policy.logit_transform import PLAIN_LOGITS, LogitTransform, logit_transform
from workers.policy.output_layer import TokenStatistics, token_log_probs


def naive(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    temperature: float,
    transform: LogitTransform = PLAIN_LOGITS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Row by row, by the definitions."""
    log_probs, entropys = [], []
    for row, target in zip(hidden, targets.tolist(), strict=True):
        logits = transform.scale * (weight @ row + (0 if bias is None else bias))
        if transform.cap is not None:
            logits = transform.cap * torch.tanh(logits / transform.cap)
        logits = logits / temperature
        log_p = logits - logits.exp().sum().log()
        log_probs.append(log_p[target])
        entropys.append(-(log_p.exp() * log_p).sum())
    return torch.stack(log_probs), torch.stack(entropys)


@pytest.mark.parametrize("chunk_tokens", [1, 3, 4, 100])
@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
@pytest.mark.parametrize("tile_bytes", [1, 300, 1 << 20])
@pytest.mark.parametrize(
    ("with_bias", "transform"),
    [(False, PLAIN_LOGITS), (True, PLAIN_LOGITS), (True, LogitTransform(0.3)), (False, LogitTransform(1.5, 2.0))],
)
def test_equals_naive_in_fp64(
    monkeypatch: pytest.MonkeyPatch,
    chunk_tokens: int,
    kept_bytes: int,
    tile_bytes: int,
    with_bias: bool,
    transform: LogitTransform,
) -> None:
    monkeypatch.setitem(output_layer.TILE_BYTES, "cpu", tile_bytes)
    monkeypatch.setattr(output_layer, "KEPT_LOGITS_BYTES", kept_bytes)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = [draw(11, 5), draw(17, 5), draw(17) if with_bias else None]
    targets = torch.randint(17, (11,), generator=generator)
    weights = draw(2, 11).detach()
    variables = [tensor for tensor in inputs if tensor is not None]

    def loss(log_probs: torch.Tensor, entropys: torch.Tensor) -> torch.Tensor:
        return (weights[0] * log_probs).sum() + (weights[1] * entropys).sum()

    def found_by(calculate_entropy: bool) -> TokenStatistics:
        return token_log_probs(
            *inputs,
            targets,
            temperature=0.7,
            chunk_tokens=chunk_tokens,
            calculate_entropy=calculate_entropy,
            transform=transform,
        )

    expected = naive(*inputs, targets, 0.7, transform)
    found = found_by(calculate_entropy=True)
    for one, other in zip(found[:2], expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    expected_grads = torch.autograd.grad(loss(*expected), variables)
    for one, other in zip(torch.autograd.grad(loss(*found[:2]), variables), expected_grads, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)
    without, *none = found_by(calculate_entropy=False)
    assert none == [None, None]
    expected_grads = torch.autograd.grad((weights[0] * naive(*inputs, targets, 0.7, transform)[0]).sum(), variables)
    for one, other in zip(torch.autograd.grad((weights[0] * without).sum(), variables), expected_grads, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_a_vocabulary_of_few_tokens() -> None:
    """Logits that are kept are one tile, also of a vocabulary that is narrower than other tiles."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(4, 5, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(3, 5, generator=generator, dtype=torch.float64).requires_grad_()
    targets = torch.tensor([0, 1, 2, 0])
    found = token_log_probs(
        hidden, weight, None, targets, temperature=1.0, chunk_tokens=4, calculate_entropy=False
    ).log_probs
    expected, _ = naive(hidden, weight, None, targets, temperature=1.0)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    gradients = torch.autograd.grad(found.sum(), (hidden, weight))
    expected_gradients = torch.autograd.grad(expected.sum(), (hidden, weight))
    for one, other in zip(gradients, expected_gradients, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
@pytest.mark.parametrize("tile_bytes", [1, 300])
@pytest.mark.parametrize(("with_bias", "cap"), [(False, None), (True, None), (False, 2.0)])
def test_candidates_restrict_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch, kept_bytes: int, tile_bytes: int, with_bias: bool, cap: float | None
) -> None:
    """Each row equals the naive formula on its part of the weights, in fp32 too, where 1e30 has no square."""
    monkeypatch.setitem(output_layer.TILE_BYTES, "cpu", tile_bytes)
    monkeypatch.setattr(output_layer, "KEPT_LOGITS_BYTES", kept_bytes)
    generator, transform = torch.Generator().manual_seed(0), LogitTransform(1.5, cap)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        shapes = [(9, 5), (17, 5), *[(17,)] * with_bias]
        leaves = [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
        hidden, weight, bias = (*leaves, None)[:3]
        kept = [
            sorted(torch.randperm(17, generator=generator)[:size].tolist()) for size in (1, 2, 3, 4, 4, 3, 2, 17, 17)
        ]
        targets = torch.tensor([ids[row % len(ids)] for row, ids in enumerate(kept)])
        candidates = torch.tensor([ids + [-1] * (4 - len(ids)) if len(ids) < 5 else [-1] * 4 for ids in kept]).int()
        expected, squares = [], []
        for row, ids in enumerate(kept):
            part = None if bias is None else bias[ids]
            place = torch.tensor([ids.index(int(targets[row]))])
            expected.append(torch.cat(naive(hidden[row : row + 1], weight[ids], part, place, 0.7, transform)))
            parts = [naive(hidden[row : row + 1], weight[ids], part, torch.tensor([j]), 0.7, transform)[0]
                     for j in range(len(ids))]  # fmt: skip
            squares.append(torch.cat(parts).exp().square().sum())
        found = token_log_probs(
            hidden, weight, bias, targets, temperature=0.7, chunk_tokens=4, calculate_entropy=True,
            calculate_sum_pi_squared=True, transform=transform, candidates=candidates,
        )  # fmt: skip
        both = torch.stack(found[:2], dim=1)
        assert torch.allclose(both, torch.stack(expected), rtol=0, atol=bound)
        assert found[2] is not None and torch.allclose(found[2], torch.stack(squares), rtol=0, atol=bound)
        weights = torch.randn(9, 2, generator=generator, dtype=dtype)
        grads = torch.autograd.grad((weights * torch.stack(expected)).sum(), leaves)
        for one, other in zip(torch.autograd.grad((weights * both).sum(), leaves), grads, strict=True):
            assert torch.allclose(one, other, rtol=0, atol=10 * bound)


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_a_token_whose_logit_is_minus_infinity_adds_no_entropy(
    monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    """Everything equals a vocabulary without that token, also if a tile contains no other."""
    monkeypatch.setitem(output_layer.TILE_BYTES, "cpu", 4 * 8 * 4)
    monkeypatch.setattr(output_layer, "KEPT_LOGITS_BYTES", kept_bytes)
    generator = torch.Generator().manual_seed(2)
    hidden, weight, bias = (torch.randn(*shape, generator=generator).double() for shape in ((9, 4), (13, 4), (13,)))
    bias[12] = -torch.inf
    targets = torch.randint(12, (9,), generator=generator)

    def results(rows: int) -> list[torch.Tensor]:
        leaves = [hidden.clone(), weight[:rows].clone(), bias[:rows].clone()]
        options = {"temperature": 0.7, "chunk_tokens": 4, "calculate_entropy": True}
        found = token_log_probs(*(leaf.requires_grad_() for leaf in leaves), targets, **options)
        assert found.entropys is not None
        gradients = torch.autograd.grad((found.log_probs + 3 * found.entropys).sum(), leaves)
        return [found.log_probs, found.entropys, *gradients]

    for one, other in zip(results(13), results(12), strict=True):
        assert torch.allclose(one[: len(other)], other, rtol=0, atol=1e-12) and not one[len(other) :].any()


@pytest.mark.parametrize("calculate_entropy", [False, True])
@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_sum_pi_squared_equals_a_dense_softmax(
    monkeypatch: pytest.MonkeyPatch, kept_bytes: int, calculate_entropy: bool
) -> None:
    monkeypatch.setitem(output_layer.TILE_BYTES, "cpu", 4 * 8 * 8)
    monkeypatch.setattr(output_layer, "KEPT_LOGITS_BYTES", kept_bytes)
    generator = torch.Generator().manual_seed(1)
    hidden, weight, bias = (torch.randn(*shape, generator=generator).double() for shape in ((9, 4), (13, 4), (13,)))
    found = token_log_probs(
        hidden.requires_grad_(),
        weight,
        bias,
        torch.randint(13, (9,), generator=generator),
        temperature=0.6,
        chunk_tokens=4,
        calculate_entropy=calculate_entropy,
        calculate_sum_pi_squared=True,
    )
    expected = [sum(p**2 for p in row) for row in torch.softmax((hidden @ weight.T + bias) / 0.6, dim=-1).tolist()]
    assert found.sum_pi_squared is not None and found.sum_pi_squared.tolist() == pytest.approx(expected, rel=1e-12)
    assert not found.sum_pi_squared.requires_grad and (found.entropys is not None) == calculate_entropy
    found.log_probs.sum().backward()
    assert hidden.grad is not None and bool(hidden.grad.any())


def test_the_policy_gives_sum_pi_squared_where_a_response_token_is_predicted(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2(tmp_path, hidden=32, heads=1, layers=1))
    columns = ragged_batch(Batch(rows=4)).batch
    outputs = CausalLMPolicy(model, chunk_tokens=3)(pad(columns), 0.5, False, calculate_sum_pi_squared=True)
    logits = model(
        columns["input_ids"], attention_mask=columns["attention_mask"], position_ids=columns["position_ids"]
    ).logits
    probs = torch.softmax(logits / 0.5, dim=-1)[:, PROMPT - 1 : -1]
    expected = torch.where(columns["response_mask"] != 0, (probs * probs).sum(-1), 0)
    assert outputs.keys() == {"log_probs", "sum_pi_squared"}
    torch.testing.assert_close(outputs["sum_pi_squared"], expected, rtol=1e-5, atol=1e-6)


def widening_mm(one: torch.Tensor, other: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """`torch.mm` as it is on CUDA, where it takes bf16 and gives fp32."""
    assert out_dtype == torch.float32 and one.dtype == other.dtype == torch.bfloat16
    return one.float() @ other.float()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kept_bytes", [0, 1 << 30])
@pytest.mark.parametrize("on_cuda", [False, True])
def test_logits_of_bf16_weights_are_not_rounded_to_bf16(
    monkeypatch: pytest.MonkeyPatch, with_bias: bool, kept_bytes: int, on_cuda: bool
) -> None:
    monkeypatch.setattr(output_layer, "KEPT_LOGITS_BYTES", kept_bytes)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 32, generator=generator).mul(2).bfloat16().requires_grad_() for n in (64, 1000))
    bias = torch.randn(1000, generator=generator).bfloat16().requires_grad_() if with_bias else None
    targets = torch.randint(1000, (64,), generator=generator)
    with monkeypatch.context() as patch:
        if on_cuda:
            patch.setattr(output_layer, "has_wide_products", lambda device: True)
            patch.setattr(output_layer.torch, "mm", widening_mm)
        found = token_log_probs(
            hidden, weight, bias, targets, temperature=1.0, chunk_tokens=16, calculate_entropy=False
        ).log_probs
    found.sum().backward()
    exact = [None if each is None else each.detach().double().requires_grad_() for each in (hidden, weight, bias)]
    expected, _ = naive(exact[0], exact[1], exact[2], targets, 1.0)
    expected.sum().backward()
    rounded = torch.nn.functional.linear(hidden, weight, bias).double().log_softmax(-1)
    rounded = rounded.gather(1, targets.unsqueeze(1)).squeeze(1)
    assert found.dtype == torch.float32
    assert (found.double() - expected).abs().max() < 1e-4 < 0.02 < (rounded - expected).abs().mean()
    for tensor, other in zip((hidden, weight, bias), exact, strict=True):
        if tensor is not None and other is not None:  # gradients are rounded once, in the end
            error = (tensor.grad.double() - other.grad).abs().max() / other.grad.abs().max()
            assert error < 0.01


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), ("cuda", torch.bfloat16)])
def test_memory_is_bounded_for_a_vocabulary_of_152k(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype
) -> None:
    """All tensors except hidden states, weights and the gradients of both, with Qwen2.5-1.5B's shapes."""
    monkeypatch.setitem(output_layer.TILE_BYTES, "cpu", output_layer.TILE_BYTES[device])
    monkeypatch.setattr(output_layer, "has_wide_products", lambda _: device == "cuda")

    def peak(count: int) -> int:
        with FakeTensorMode():
            hidden, weight = (torch.empty(n, 1536, dtype=dtype, requires_grad=True) for n in (count, 151_936))
            targets = torch.empty(count, dtype=torch.long)
            options = {"temperature": 0.9, "chunk_tokens": ActorConfig().log_prob_chunk_tokens}
            with LiveBytes() as live:
                found = token_log_probs(hidden, weight, None, targets, calculate_entropy=True, **options)
                assert found.entropys is not None
                (found.log_probs.sum() + found.entropys.sum()).backward()
            return live.peak - hidden.nbytes - weight.nbytes

    few, many = peak(2048), peak(8192)
    assert 3 * output_layer.TILE_BYTES[device] / 2 < many < 512 << 20 and many < few + (32 << 20), f"{few:,} {many:,}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "options", "expected"),
    [
        ("llama", {}, (1.0, None)),
        ("mamba2", {}, (1.0, None)),
        ("gemma2", {"final_logit_softcapping": 30.0}, (1.0, 30.0)),
        ("cohere2", {"logit_scale": 0.0625}, (0.0625, None)),
        ("granite", {"logits_scaling": 8.0}, (0.125, None)),
        ("falcon_h1", {"lm_head_multiplier": 0.5}, (0.5, None)),
        ("recurrent_gemma", {"logits_soft_cap": 20.0}, (1.0, 20.0)),
    ],
)
def test_what_a_model_does_to_its_logits_is_found(
    family: str, options: dict[str, float], expected: tuple[float, float | None], dtype: torch.dtype
) -> None:
    network = tiny_network(family, **options).to(dtype)
    scale, cap = logit_transform(network)
    assert (scale, cap or 0.0) == pytest.approx((expected[0], expected[1] or 0.0), rel=1e-6)
    assert "forward" not in vars(network.base_model), "the backbone computes again"


def test_other_transforms_of_logits_are_refused() -> None:
    class Shifted(LlamaForCausalLM):
        def forward(self, **kwargs: Any) -> Any:
            output = super().forward(**kwargs)
            output.logits = output.logits + 1.0
            return output

    class WithMore(LlamaForCausalLM):
        def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
            return SimpleNamespace(logits=self.lm_head(self.model(input_ids)[0] * 2.0))

    for network in (Shifted(tiny_config("llama")), WithMore(tiny_config("llama"))):
        with pytest.raises(UserError, match=type(network).__name__):
            logit_transform(network)

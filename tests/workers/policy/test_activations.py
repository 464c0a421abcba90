"""Activation offload and checkpointing of the first layers: the same gradient to the bit, and what moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_model import tiny_qwen2
from tests.workers.critic_cases import critic_batch, value_loss, write_critic
from tests.workers.engine_cases import Batch, Case, build_engine, gradient_of, loss_fn, ragged_batch
from verl_lite.errors import UserError
from workers.policy import activations
from workers.policy.activations import AHEAD, ActivationOffload
from workers.policy.value_head import value_head

BATCH, LAYERS = Batch(rows=6, shared_prompts=3), 6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("deep"), hidden=32, layers=LAYERS, heads=4, kv_heads=2)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[torch.Tensor]]:
    """The tensors that were copied, by the direction of the copy."""
    seen: dict[str, list[torch.Tensor]] = {"out": [], "back": []}
    copy: Callable[..., None] = activations._copy

    def counted(to: torch.Tensor, source: torch.Tensor, device: torch.device) -> None:
        direction = "back" if any(source is host for host in hosts) else "out"
        seen[direction].append(source)
        hosts.append(to)
        copy(to, source, device)

    hosts: list[torch.Tensor] = []
    monkeypatch.setattr(activations, "_copy", counted)
    return seen


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("case", [Case(), Case(checkpointing=True), Case(checkpointing=True, packed=False)])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_gradient_is_the_same_to_the_bit(
    path: str, case: Case, lora_rank: int, copied: dict[str, list[torch.Tensor]]
) -> None:
    weights: set[torch.Size] = set()

    def found(offload: bool) -> dict[str, np.ndarray]:
        engine = build_engine(path, replace(case, offload=offload), model={"lora_rank": lora_rank})
        weights.update(shape for value in engine.parameters.values() for shape in (value.shape, value.shape[::-1]))
        return gradient_of(engine, ragged_batch(BATCH), case, loss_fn, temperature=1.0, calculate_entropy=True)

    assert same(found(False), found(True))
    out, back = copied["out"], copied["back"]
    shapes, dtypes = {each.shape for each in out}, {each.dtype for each in out}
    assert dtypes == {torch.float32} and not shapes & weights
    if case.checkpointing:  # the inputs of the layers, and some tensors of the last norm
        assert LAYERS < len(out) <= LAYERS + 5 and len({each.shape for each in out[:LAYERS]}) == 1
        # the last tensors never left the device; all others came back once
        assert sum(each.nbytes for each in back) == sum(each.nbytes for each in out[:-AHEAD])


def test_a_critic_recomputes_its_first_layers_alone(
    path: str, tmp_path: Path, copied: dict[str, list[torch.Tensor]]
) -> None:
    critic, numbers = write_critic(path, tmp_path), [0]

    def found(recomputed: int | None, offload: bool) -> dict[str, np.ndarray]:
        case = Case(checkpointing=True, recomputed=recomputed, offload=offload)
        return gradient_of(build_engine(critic, case, build_policy=value_head), critic_batch(BATCH), case, value_loss)

    expected = found(None, False)
    for recomputed in (0, 2, LAYERS):
        assert same(found(recomputed, False), expected) and same(found(recomputed, True), expected)
        numbers.append(len(copied["out"]) - sum(numbers))
    assert (numbers[1] - numbers[2]) * (LAYERS - 2) == (numbers[2] - numbers[3]) * 2 > 0
    with pytest.raises(UserError, match=r"gradient_checkpointing_layers=7: .* has 6 layers that can be"):
        found(7, False)


def test_few_tensors_are_on_the_device_and_a_second_backward_reads_again() -> None:
    weight, offload = torch.rand(100, requires_grad=True), ActivationOffload()

    def chain() -> torch.Tensor:
        value = weight * 1.0
        for _ in range(20):
            value = value.sin()
        return value.sum()

    [expected] = torch.autograd.grad(chain(), weight)
    with offload:
        total = chain()
    saved = sorted(offload._unread.items())
    assert [copy.on_device is not None for _, copy in saved] == [False] * (20 - AHEAD) + [True] * AHEAD
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(total, weight, retain_graph=True)[0], expected)

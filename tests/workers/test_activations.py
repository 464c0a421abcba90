"""Activation offload and checkpointing of the first layers: the same gradient to the bit, and what moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from tests.tiny_model import tiny_qwen2
from tests.workers.critic_cases import critic_batch, value_loss, write_critic
from tests.workers.engine_cases import (
    Batch,
    Case,
    build_engine,
    gradient_of,
    loss_fn,
    ragged_batch,
)
from verl_lite.config import NetworkConfig
from verl_lite.errors import UserError
from workers.policy import activations
from workers.policy.activations import AHEAD, ActivationOffload, HostCopy
from workers.policy.value_head import value_head

BATCH = Batch(rows=6, shared_prompts=3)
ARGUMENTS = {"temperature": 1.0, "calculate_entropy": True}
LAYERS = 6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("deep"), hidden=32, layers=LAYERS, heads=4, kv_heads=2)


class Copies:
    """The copies to the host: their tensors, bytes in and out, and the most that were on the device at a time."""

    def __init__(self) -> None:
        self.packed: list[torch.Tensor] = []
        self.bytes_out = self.bytes_in = self.on_device = self.most = 0

    def count(self, change: int) -> None:
        self.on_device += change
        self.most = max(self.most, self.on_device)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    seen = Copies()

    class Counted(HostCopy):
        def __init__(self, tensor: torch.Tensor, index: int) -> None:
            seen.packed.append(tensor.detach())
            super().__init__(tensor, index)

        def __setattr__(self, name: str, value: object) -> None:
            if name == "on_device":
                seen.count((value is not None) - (getattr(self, name, None) is not None))
            super().__setattr__(name, value)

        def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
            seen.bytes_out += source.nbytes * (to is self.host)
            seen.bytes_in += source.nbytes * (source is self.host)
            super()._copy(to, source)

    monkeypatch.setattr(activations, "HostCopy", Counted)
    yield seen
    assert seen.on_device == 0, "all memory on the device is free after the backward pass"


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("case", [Case(), Case(checkpointing=True), Case(checkpointing=True, packed=False)])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_the_gradient_is_the_same_to_the_bit(path: str, case: Case, lora_rank: int, copies: Copies) -> None:
    def found(offload: bool) -> dict[str, np.ndarray]:
        engine = build_engine(path, replace(case, offload=offload), model={"lora_rank": lora_rank})
        return gradient_of(engine, ragged_batch(BATCH), case, loss_fn, **ARGUMENTS)

    expected = found(False)
    assert not copies.packed
    assert same(found(True), expected)
    assert all(tensor.is_floating_point() and not isinstance(tensor, nn.Parameter) for tensor in copies.packed)
    assert copies.most <= (AHEAD + 1 if case.checkpointing else 2 * AHEAD) and copies.bytes_in < copies.bytes_out
    if case.checkpointing:  # the inputs of the layers, and some tensors of the last norm
        inputs, ends = copies.packed[:LAYERS], copies.packed[LAYERS:]
        assert len({each.shape for each in inputs}) == 1 and inputs[0].shape[-1] == 32 and 0 < len(ends) <= 3
        assert copies.bytes_out == sum(each.nbytes for each in copies.packed)
        # the last AHEAD tensors never left the device, all others came back once
        assert copies.bytes_in == sum(each.nbytes for each in copies.packed[:-AHEAD])


def test_a_critic_offloads_and_the_first_layers_alone_are_recomputed(path: str, tmp_path: Path, copies: Copies) -> None:
    critic, case = write_critic(path, tmp_path), Case(checkpointing=True)

    def found(recomputed: int | None, offload: bool = False) -> dict[str, np.ndarray]:
        how = replace(case, recomputed=recomputed, offload=offload)
        return gradient_of(build_engine(critic, how, build_policy=value_head), critic_batch(BATCH), case, value_loss)

    expected = found(None)
    numbers = []
    for recomputed in (0, 2, LAYERS):
        assert same(found(recomputed), expected)
        assert same(found(recomputed, offload=True), expected)
        numbers.append(len(copies.packed) - sum(numbers))
    assert numbers[2] == LAYERS + 2 and (numbers[0] - numbers[1]) * (LAYERS - 2) == (numbers[1] - numbers[2]) * 2
    with pytest.raises(UserError, match=r"gradient_checkpointing_layers=7: .* has 6 layers that can be recomputed"):
        found(7)
    [problem] = NetworkConfig(gradient_checkpointing_layers=1, enable_gradient_checkpointing=False).check()
    assert "model.gradient_checkpointing_layers=1 has no effect" in problem


def test_what_was_modified_or_read_twice_is_not_mixed_up() -> None:
    """A tensor saved by two operations is copied once, but not after it was modified; a second backward reads again."""
    weight = torch.randn(100, requires_grad=True)
    offload = ActivationOffload()
    with offload:
        hidden = weight * 1.0
        with torch.no_grad():
            first = hidden.clone()
        squares = hidden.square() + hidden.square()
        with torch.no_grad():
            hidden.mul_(2)  # autograd alone would refuse the backward pass
        cubes = hidden.pow(3)
    expected = 4 * first + 3 * (2 * first).square()
    saved = [reference() for reference in offload._saved]
    assert [copy.reads for copy in saved if copy is not None] == [2, 1]
    grads = partial(torch.autograd.grad, (squares + cubes).sum(), weight, retain_graph=True)
    for _ in range(2):
        torch.testing.assert_close(grads()[0], expected)

"""The kernels of variable length that CUDA has, by their signatures: what packed attention hands to each of them."""

from __future__ import annotations

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from verl_lite.errors import UserError
from workers.engine import packed_attention
from workers.engine.packed_attention import Scores, _sdpa_runs, _varlen_attention
from workers.engine.packed_sequences import PackedSequences

SEQUENCES = PackedSequences(((1, 9), (2, 4)), torch.tensor([0, 9, 13, 17], dtype=torch.int32), 9)


def by_sequence(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bounds: torch.Tensor, scale: float, gqa: bool
) -> torch.Tensor:
    """Plain attention of each sequence. (U, heads, D)."""
    outputs = []
    for first, last in zip(bounds.tolist(), bounds.tolist()[1:], strict=False):
        parts = (tensor[first:last].transpose(0, 1) for tensor in (query, key, value))
        outputs.append(F.scaled_dot_product_attention(*parts, is_causal=True, scale=scale, enable_gqa=gqa))
    return torch.cat([output.transpose(0, 1) for output in outputs])


def of_torch_2_13(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: Any = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert window_size == (-1, 0), "causal"
    return by_sequence(query, key, value, cu_seq_q, scale, enable_gqa)


def of_torch_2_11(
    query: Any, key: Any, value: Any, cu_seq_q: Any, cu_seq_k: Any, max_q: int, max_k: int, *,
    return_aux: Any = None, scale: Any = None, window_size: tuple[int, int] = (-1, -1),
) -> torch.Tensor:  # fmt: skip
    assert window_size == (-1, 0), "causal"
    return by_sequence(query, key, value, cu_seq_q, scale, False)


@pytest.mark.parametrize("kernel", [of_torch_2_11, of_torch_2_13])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_each_version_of_torch_s_kernel_gives_the_attention_of_runs(
    kernel: Any, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "_flash_attn_varlen", lambda: None)
    monkeypatch.setattr(packed_attention, "_torch_varlen", lambda: kernel)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(17, heads, 8, generator=generator, requires_grad=True) for heads in (4, kv_heads, kv_heads)]
    results = []
    for attend in (_varlen_attention, _sdpa_runs):
        output = attend(*inputs, Scores(0.3, None, None, None), SEQUENCES)
        results.append((output, *torch.autograd.grad(output.square().sum(), inputs)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_the_installed_torch_is_one_of_them() -> None:
    """All that is handed over exists in this version's signature."""
    kernel = packed_attention._torch_varlen()
    assert kernel is not None
    asked = {"scale", "window_size"} | set(list(inspect.signature(of_torch_2_11).parameters)[:7])
    assert asked <= inspect.signature(kernel).parameters.keys()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise ImportError('_C.so: undefined symbol: _ZN3c10')", "flash-attn is installed and cannot be imported"),
        ("from missing_part import x", "missing_part"),
    ],
)
def test_a_broken_flash_attn_is_not_replaced_silently(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_stays: None
) -> None:
    (tmp_path / "flash_attn.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    packed_attention._flash_attn_varlen.cache_clear()
    with pytest.raises((UserError, ModuleNotFoundError), match=message):
        packed_attention._flash_attn_varlen()


def test_without_flash_attn_torch_s_kernel_is_used() -> None:
    packed_attention._flash_attn_varlen.cache_clear()
    if importlib.util.find_spec("flash_attn") is None:
        assert packed_attention._flash_attn_varlen() is None

"""A batch in words."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl_lite.protocol import DataProto


def test_data_info_by_hand() -> None:
    tensors = {"x": torch.zeros(2, 3, dtype=torch.bfloat16), "y": torch.zeros(2, dtype=torch.long)}
    arrays = {"name": ["a", 1], "score": np.zeros((2, 4), np.float32)}
    info = DataProto.from_dict(tensors, arrays, {"step": 1, "metrics": {"a": [1]}, "empty": []}).get_data_info()
    assert info.split("\n") == [
        "DataProto of 2 rows",
        "batch",
        "  x: (2, 3) bfloat16 on cpu",
        "  y: (2,) int64 on cpu",
        "non_tensor_batch",
        "  name: (2,) of int, str",
        "  score: (2, 4) of float32",
        "meta_info",
        "  step: int",
        "  metrics: dict of list",
        "  empty: list of nothing",
    ]
    assert DataProto().get_data_info().split("\n") == ["DataProto of 0 rows", "batch", "non_tensor_batch", "meta_info"]


def test_print_size(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = DataProto.from_dict({"x": torch.zeros(1000, 2)}, {"s": np.zeros((1000, 3), np.float32)})
    numbers.print_size("after generation")
    assert capsys.readouterr().out == "after generation, 1000 rows, tensors 0.008 MB, arrays 0.012 MB\n"
    DataProto.from_dict(non_tensors={"chat": ["long" * 1000]}).print_size()
    expected = "1 rows, tensors 0.000 MB, arrays 0.000 MB (without the objects that chat refer to)\n"
    assert capsys.readouterr().out == expected


def test_jagged_tensors() -> None:
    jagged = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(1)], layout=torch.jagged)
    data = DataProto.from_dict({"ids": jagged})
    assert "  ids: (jagged) int64 on cpu" in data.get_data_info()
    data.print_size()

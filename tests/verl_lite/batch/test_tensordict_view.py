"""A batch as one TensorDict and back."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from verl_lite.protocol import BatchError, DataProto


def batch(rows: int) -> DataProto:
    objects = {"pair": [[i, i + 1] for i in range(rows)], "info": [{"a": np.arange(i)} for i in range(rows)]}
    meta = {"step": 7, "nested": {"list": [1, 2]}, "none": None, "array": np.arange(3), "tensor": torch.ones(2)}
    return DataProto.from_dict({"x": torch.arange(rows * 2).reshape(rows, 2)}, objects, meta)


def test_kinds_by_hand() -> None:
    joined = batch(2).to_tensordict()
    assert joined.batch_size == torch.Size([2])
    assert set(joined.keys()) == {"x", "pair", "info", "step", "nested", "none", "array", "tensor"}
    assert isinstance(joined.get("pair"), NonTensorStack) and joined.get("pair").tolist() == [[0, 1], [1, 2]]
    assert isinstance(joined.get("step"), NonTensorData) and joined["step"] == 7
    made = TensorDict({"x": torch.ones(2), "name": NonTensorStack("a", "b"), "k": NonTensorData([3])}, batch_size=[2])
    data = DataProto.from_tensordict(made, meta_info={"more": 1})
    assert list(data.batch.keys()) == ["x"] and data.meta_info == {"more": 1, "k": [3]}
    assert data.non_tensor_batch["name"].tolist() == ["a", "b"] and data.non_tensor_batch["name"].dtype == object


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_there_and_back(rows: int) -> None:
    data = batch(rows)
    back = DataProto.from_tensordict(data.to_tensordict())
    assert len(back) == rows and torch.equal(back.batch["x"], data.batch["x"])
    assert list(back.batch.keys()) == ["x"] and set(back.non_tensor_batch) == {"pair", "info"}
    assert back.non_tensor_batch["pair"].shape == (rows,)  # lists of one length stay lists
    assert set(back.meta_info) == set(data.meta_info)
    back.union(data)  # raises where anything differs


def test_rows_of_the_tensordict_are_rows_of_the_batch() -> None:
    part = batch(4).to_tensordict()[torch.tensor([3, 1])]
    back = DataProto.from_tensordict(part)
    assert back.batch["x"].tolist() == [[6, 7], [2, 3]]
    assert back.non_tensor_batch["pair"].tolist() == [[3, 4], [1, 2]] and back.meta_info["nested"] == {"list": [1, 2]}


def test_without_tensors_and_with_nested_ones() -> None:
    only_objects = DataProto.from_dict(non_tensors={"n": ["a", "b"]})
    back = DataProto.from_tensordict(only_objects.to_tensordict())
    assert back.batch is None and back.non_tensor_batch["n"].tolist() == ["a", "b"]
    assert len(DataProto.from_tensordict(DataProto().to_tensordict())) == 0
    assert len(DataProto.from_tensordict(TensorDict({}, batch_size=[5]))) == 5
    jagged = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(1)], layout=torch.jagged)
    inner = TensorDict({"y": torch.arange(2)}, batch_size=[2])
    both = DataProto.from_tensordict(TensorDict({"ids": jagged, "inner": inner}, batch_size=[2])).to_tensordict()
    assert both["ids"][0].tolist() == [0, 1, 2] and both["inner", "y"].tolist() == [0, 1]


def test_nothing_is_aliased_but_tensors_and_objects() -> None:
    data = batch(2)
    joined = data.to_tensordict()
    joined["nested"]["list"].append("changed")
    joined["z"] = torch.zeros(2)
    joined["x"][0, 0] = -1
    assert data.meta_info["nested"] == {"list": [1, 2]} and "z" not in data and data.batch["x"][0, 0] == -1
    source = data.to_tensordict()
    given = {"own": [1]}
    back = DataProto.from_tensordict(source, given)
    back.meta_info["nested"]["list"].append("changed")
    back.meta_info["own"].append("changed")
    back.pop(["x"])
    assert source["nested"] == {"list": [1, 2]} and given == {"own": [1]} and "x" in source.keys()


@pytest.mark.parametrize("kind", [AssertionError, ValueError])
def test_names_used_twice(kind: type[Exception]) -> None:
    tensors = {"x": torch.zeros(1)}
    with pytest.raises(kind, match=r"non_tensor_batch\['x'\]"):
        DataProto.from_dict(tensors, {"x": ["a"]}).to_tensordict()
    with pytest.raises(kind, match=r"meta_info\['x'\]"):
        DataProto.from_dict(tensors, meta_info={"x": 1}).to_tensordict()
    with pytest.raises(kind, match=r"meta_info\['n'\]"):
        DataProto.from_dict(tensors, {"n": ["a"]}, {"n": 1}).to_tensordict()
    with pytest.raises(kind, match="'step'"):
        DataProto.from_tensordict(batch(1).to_tensordict(), meta_info={"step": 7})


def test_other_batch_dimensions_are_refused() -> None:
    for size in ([], [2, 3]):
        with pytest.raises(BatchError, match="one batch dimension"):
            DataProto.from_tensordict(TensorDict({"x": torch.zeros(2, 3)}, batch_size=size))
    with pytest.raises(BatchError, match="num_batch_dims"):
        DataProto.from_tensordict(TensorDict({}, batch_size=[2]), num_batch_dims=2)


def test_tensordict_is_imported_only_when_needed() -> None:
    program = "import sys, verl_lite.single_controller.worker_group; sys.exit('tensordict' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0

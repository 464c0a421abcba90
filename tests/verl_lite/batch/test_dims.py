"""Folding rows into groups and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl_lite.protocol import BatchError, DataProto, fold_batch_dim, unfold_batch_dim


def batch() -> DataProto:
    tensors = {"x": torch.arange(12).reshape(6, 2), "y": torch.arange(6)}
    return DataProto.from_dict(tensors, {"name": list("abcdef"), "pair": [[i, i] for i in range(6)]}, {"k": {"l": [1]}})


def test_fold_by_hand() -> None:
    folded = fold_batch_dim(batch(), new_batch_size=3)
    assert len(folded) == 3 and folded.batch.batch_size == torch.Size([3])
    assert folded.batch["y"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert folded.batch["x"].tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]
    assert folded.non_tensor_batch["name"].tolist() == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert folded.non_tensor_batch["pair"].shape == (3, 2)
    assert folded[[2]].batch["y"].tolist() == [[4, 5]]


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_unfold_is_the_inverse(groups: int) -> None:
    data = batch()
    back = unfold_batch_dim(fold_batch_dim(data, groups))
    assert len(back) == 6 and list(back.batch["x"].shape) == [6, 2] and back.non_tensor_batch["pair"].shape == (6,)
    back.meta_info["k"]["l"].append("changed")
    assert data.meta_info == {"k": {"l": [1]}} and data.batch.batch_size == torch.Size([6])
    back.meta_info.clear()
    back.union(data)  # raises where anything differs


def test_unfold_more_dimensions_and_nested_columns() -> None:
    data = DataProto.from_dict({"x": torch.arange(24).reshape(2, 3, 2, 2)}, {"n": np.arange(12).reshape(2, 3, 2)})
    flat = unfold_batch_dim(data, batch_dims=3)
    assert len(flat) == 12 and flat.batch["x"][4].tolist() == [8, 9] and flat.non_tensor_batch["n"][4] == 4
    inner = TensorDict({"z": torch.arange(4)}, batch_size=[4])
    nested = DataProto(TensorDict({"inner": inner}, batch_size=[4]))
    folded = fold_batch_dim(nested, 2)
    assert folded.batch["inner", "z"].tolist() == [[0, 1], [2, 3]]
    assert unfold_batch_dim(folded).batch["inner", "z"].tolist() == [0, 1, 2, 3]


def test_without_tensors_and_without_rows() -> None:
    names = DataProto.from_dict(non_tensors={"n": list("abcd")})
    assert fold_batch_dim(names, 2).batch is None
    assert unfold_batch_dim(fold_batch_dim(names, 2)).non_tensor_batch["n"].tolist() == list("abcd")
    empty = fold_batch_dim(batch().slice(0, 0), 2)
    assert list(empty.batch["x"].shape) == [2, 0, 2] and len(unfold_batch_dim(empty)) == 0


@pytest.mark.parametrize("groups", [0, 4, -3])
def test_sizes_that_do_not_divide(groups: int) -> None:
    with pytest.raises(BatchError, match=f"6 rows into new_batch_size={groups}"):
        fold_batch_dim(batch(), groups)


def test_columns_that_do_not_agree() -> None:
    folded = fold_batch_dim(batch(), 3)
    folded.batch["late"] = torch.zeros(3, 4)
    with pytest.raises(BatchError, match=r"first 2 dimensions.*'late': \(3, 4\)"):
        unfold_batch_dim(folded)
    with pytest.raises(BatchError, match="first 2 dimensions"):
        unfold_batch_dim(batch())
    with pytest.raises(BatchError, match="at least 1"):
        unfold_batch_dim(batch(), 0)

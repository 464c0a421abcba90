"""DataProto: verl's methods, without its traps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl_lite.protocol import (
    BatchError,
    DataProto,
    DataProtoItem,
    chunk_bounds,
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)

Change = Callable[[DataProto], object]


def batch(rows: int = 4) -> DataProto:
    tensors = {"x": torch.arange(rows * 3).reshape(rows, 3), "y": torch.arange(float(rows))}
    names = {"name": [f"n{i}" for i in range(rows)], "chat": [[{"role": "user", "i": i}] for i in range(rows)]}
    return DataProto.from_dict(tensors, names, {"step": 1, "nested": {"list": [1]}})


def y(data: DataProto) -> list[float]:
    return data.batch["y"].tolist()


def test_making_one_changes_nothing_and_keeps_lists_as_objects() -> None:
    given = {"pair": [[1, 2], [3, 4]]}
    none = DataProto(batch=None, non_tensor_batch=None, meta_info=None)  # type: ignore[arg-type]
    assert len(none) == 0 and none.non_tensor_batch == none.meta_info == {}
    data = DataProto.from_dict({"x": torch.zeros(2)}, given)
    assert given == {"pair": [[1, 2], [3, 4]]}
    assert data.non_tensor_batch["pair"].shape == (2,)  # equal-length lists do not become a matrix
    assert DataProto.from_dict({}).batch is None and len(DataProto()) == 0
    data = DataProto.from_single_dict({"t": torch.zeros(2), "a": np.array(["p", "q"])}, meta_info={"k": 1})
    assert list(data.batch.keys()) == ["t"] and list(data.non_tensor_batch) == ["a"] and data.meta_info == {"k": 1}


def test_indexing() -> None:
    data = batch()
    item = data[1]
    assert isinstance(item, DataProtoItem)
    assert item.batch["x"].tolist() == [3, 4, 5] and item.non_tensor_batch["name"] == "n1"
    mask = torch.tensor([False, True, True, False])
    for index in (slice(1, 3), [1, 2], np.array([1, 2]), torch.tensor([1, 2]), mask, mask.tolist()):
        assert y(data[index]) == [1.0, 2.0] and data[index].non_tensor_batch["name"].tolist() == ["n1", "n2"]
    assert y(data.slice(0, 4, 2)) == [0.0, 2.0] and data[np.int64(3)].non_tensor_batch["name"] == "n3"
    assert "x" in data and "name" in data and "z" not in data


def test_meta_info_is_never_shared() -> None:
    data = batch()
    results = [data.slice(0, 2), data.select(), data.repeat(2), *data.chunk(2), DataProto.concat([data]), data | data]
    results += [data.pad(3), data[[0]], pickle.loads(pickle.dumps(data)), next(data.make_iterator(2, 1))]
    results += [fold_batch_dim(data, 2)]
    for result in results:
        result.meta_info["nested"]["list"].append("changed")
        result.meta_info["new"] = True
    assert data.meta_info == {"step": 1, "nested": {"list": [1]}}


def test_select_pop_rename() -> None:
    data = batch()
    selected = data.select(batch_keys=["x"], non_tensor_batch_keys=[], meta_info_keys=["step"])
    assert list(selected.batch.keys()) == ["x"] and not selected.non_tensor_batch and selected.meta_info == {"step": 1}
    selected.rename("x", "z")
    assert list(selected.batch.keys()) == ["z"] and "x" in data
    data.select(deepcopy=True).batch["y"][:] = -1
    assert y(data) == [0.0, 1.0, 2.0, 3.0]
    popped = data.pop(batch_keys=["x"], non_tensor_batch_keys=["chat"], meta_info_keys=["step"])
    assert list(popped.batch.keys()) == ["x"] and popped.meta_info == {"step": 1}
    assert "x" not in data and "chat" not in data and "step" not in data.meta_info


def test_union_in_place_and_or_not() -> None:
    data, other = batch(), DataProto.from_dict({"z": torch.ones(4)}, {"tag": list("abcd")}, {"more": 2})
    both = data | other
    assert "z" in both and "tag" in both and both.meta_info["more"] == 2
    assert "z" not in data and "tag" not in data and "more" not in data.meta_info and "x" not in other
    assert data.union(other) is data and "z" in data
    assert data.union(DataProto.from_dict({"z": torch.ones(4)})) is data
    only_meta = DataProto(meta_info={"late": 1})
    assert (data | only_meta).meta_info["late"] == 1 and len(only_meta | data) == 4


def test_union_of_values_that_equality_is_hard_for() -> None:
    def hard() -> DataProto:
        arrays = {"f": np.array([1.0, np.nan]), "o": [{"a": np.array([np.nan])}, [1, (2,)]]}
        return DataProto.from_dict({"t": torch.tensor([1.0, float("nan")])}, arrays)

    hard().union(hard())
    for change in (lambda d: d.batch["t"].fill_(1), lambda d: d.non_tensor_batch["o"][0]["a"].fill(0)):
        different = hard()
        change(different)
        with pytest.raises(AssertionError, match="'[to]'"):
            hard().union(different)


def test_reorder_and_repeat() -> None:
    data = batch()
    assert y(data.repeat(2)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert data.repeat(2, interleave=False).non_tensor_batch["name"].tolist() == ["n0", "n1", "n2", "n3"] * 2
    assert y(data.sample_level_repeat([0, 2, 1, 0])) == [1, 1, 2]
    data.reorder(torch.tensor([3, 1, 0, 2]))
    assert y(data) == [3, 1, 0, 2] and data.non_tensor_batch["name"][0] == "n3"


@pytest.mark.parametrize(("rows", "chunks"), [(4, 2), (5, 3), (2, 4), (0, 2), (7, 1)])
def test_chunk_is_array_split_and_concat_its_inverse(rows: int, chunks: int) -> None:
    data = batch(rows)
    parts = data.chunk(chunks)
    assert [len(part) for part in parts] == [len(part) for part in np.array_split(np.arange(rows), chunks)]
    joined = DataProto.concat(parts)
    assert torch.equal(joined.batch["x"], data.batch["x"])
    assert joined.non_tensor_batch["name"].tolist() == data.non_tensor_batch["name"].tolist()
    assert [len(part) for part in data.split(3)] == [len(range(i, min(i + 3, rows))) for i in range(0, rows, 3)]
    assert chunk_bounds(5, 3) == [(0, 2), (2, 4), (4, 5)]


def test_concat_merges_metrics() -> None:
    def part(metrics: object) -> DataProto:
        return DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"metrics": metrics, "step": 1})

    merged = DataProto.concat([part({"a": 1, "b": 2}), part([{"a": 3}, {"a": 4}])]).meta_info
    assert merged == {"metrics": {"a": [1, 3, 4], "b": [2]}, "step": 1}


def test_make_iterator() -> None:
    data = batch(6)
    assert [y(part) for part in data.make_iterator(2, epochs=2)] == [[0, 1], [2, 3], [4, 5]] * 2
    shuffled = {"shuffle": True}
    first, again = ([y(p) for p in data.make_iterator(3, 2, seed=1, dataloader_kwargs=shuffled)] for _ in range(2))
    assert first == again and sorted(first[0] + first[1]) == [0, 1, 2, 3, 4, 5] and first[:2] != first[2:]


def test_pad_marks_rows_of_weight_zero() -> None:
    data = DataProto.from_dict({"x": torch.tensor([1, 2, 3]), "response_mask": torch.ones(3, 2, dtype=torch.long)})
    padded = data.pad(4)
    assert padded.batch["x"].tolist() == [1, 2, 3, 1]
    assert padded.batch["is_padding"].tolist() == [False, False, False, True]
    assert padded.batch["response_mask"].sum(1).tolist() == [2, 2, 2, 0]
    assert len(data) == 3 and data.batch["response_mask"].sum() == 6 and "is_padding" not in data.pad(3)
    assert padded.pad(3).batch["is_padding"].tolist() == [False, False, False, True, True, True]
    assert DataProto.from_dict(non_tensors={"n": ["a"]}).pad(2).batch["is_padding"].tolist() == [False, True]
    assert len(data.slice(0, 0).pad(2)) == 0


def test_verl_padding_helpers() -> None:
    data = batch(3)
    padded, added = pad_dataproto_to_divisor(data, 7)
    assert added == 4 and y(padded) == [0, 1, 2, 0, 1, 2, 0]
    assert y(unpad_dataproto(padded, added)) == [0, 1, 2] and len(unpad_dataproto(data, 9)) == 0
    assert pad_dataproto_to_divisor(data, 3) == (data, 0)


def test_rows_to_batch_and_to_disk(tmp_path: Path) -> None:
    data = batch()
    rows = collate_fn([data[i] for i in range(4)])
    data.save_to_disk(tmp_path / "batch.pkl")
    for other in (rows, DataProto.load_from_disk(tmp_path / "batch.pkl"), copy.deepcopy(data), data.to("cpu")):
        assert type(other) is DataProto and len(other | data) == 4  # the union raises where anything differs


def test_fold_by_hand_and_back() -> None:
    inner = TensorDict({"z": torch.arange(6)}, batch_size=[6])
    data = batch(6) | DataProto(TensorDict({"inner": inner}, batch_size=[6]))
    folded = fold_batch_dim(data, new_batch_size=3)
    assert len(folded) == 3 and y(folded) == [[0, 1], [2, 3], [4, 5]] and y(folded[[2]]) == [[4, 5]]
    assert folded.batch["x"][0].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert folded.batch["inner", "z"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert folded.non_tensor_batch["name"].tolist() == [["n0", "n1"], ["n2", "n3"], ["n4", "n5"]]
    assert len(unfold_batch_dim(folded) | data) == 6
    deep = DataProto.from_dict({"x": torch.arange(24).reshape(2, 3, 2, 2)}, {"n": np.arange(12).reshape(2, 3, 2)})
    flat = unfold_batch_dim(deep, batch_dims=3)
    assert len(flat) == 12 and flat.batch["x"][4].tolist() == [8, 9] and flat.non_tensor_batch["n"][4] == 4


MORE = DataProto.from_dict({"y": torch.zeros(4), "late": torch.zeros(4, 7)})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda data: DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)}), "same number of rows"),
        (lambda data: DataProto.from_dict({"a": torch.zeros(2)}, {"b": [1, 2, 3]}), r"'b'.*2 rows.*\(3,\)"),
        (lambda data: DataProto(non_tensor_batch={"b": [1, 2]}), "numpy array"),  # type: ignore[dict-item]
        (lambda data: DataProto.from_single_dict({"bad": [1]}), "'bad' must be a tensor or a numpy array, found list"),
        (lambda data: DataProto(TensorDict({}, batch_size=[2, 3])), "one batch dimension"),
        (lambda data: data.pop(batch_keys=["z"]), r"cannot pop \['z'\]"),
        (lambda data: data.union(MORE), "'y'"),
        (lambda data: data.union(DataProto(meta_info={"step": 3})), "meta_info key 'step'"),
        (lambda data: data.union(MORE.slice(0, 3)), "rows"),
        (lambda data: data.sample_level_repeat([1, 1, 1]), "3 entries"),
        (lambda data: data.chunk(0), "at least 1"),
        (lambda data: DataProto.concat([]), "at least one"),
        (lambda data: DataProto.concat([data, MORE]), r"column 'chat' is missing in part 1.*\[0\]"),
        (lambda data: DataProto.concat([data | MORE.select(["late"]), data]), "column 'late' is missing in part 1"),
        (lambda data: data.make_iterator(3, 1), "mini_batch_size=3"),
        (lambda data: data.make_iterator(2, 1, dataloader_kwargs={"bogus": 1}), "bogus"),
        (lambda data: data.select_idxs(torch.tensor([1, 0, 1, 0], dtype=torch.uint8)), "uint8"),
        (lambda data: fold_batch_dim(data, 3), "4 rows into new_batch_size=3"),
        (lambda data: unfold_batch_dim(data), "first 2 dimensions"),
    ],
)
def test_wrong_arguments_are_named_at_once(wrong: Change, said: str) -> None:
    with pytest.raises(ValueError, match=said) as caught:
        wrong(batch())
    assert isinstance(caught.value, BatchError) or "at least" in said or "'bad'" in said

"""DataProto: verl's methods, without its traps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    pad_dataproto_to_divisor,
    union_numpy_dict,
    union_tensor_dict,
    unpad_dataproto,
)


def batch(rows: int = 4) -> DataProto:
    tensors = {"x": torch.arange(rows * 3).reshape(rows, 3), "y": torch.arange(float(rows))}
    names = {"name": [f"n{i}" for i in range(rows)], "chat": [[{"role": "user", "i": i}] for i in range(rows)]}
    return DataProto.from_dict(tensors, names, {"step": 1, "nested": {"list": [1]}})


def test_from_dict_changes_nothing_and_keeps_lists_as_objects() -> None:
    given = {"pair": [[1, 2], [3, 4]]}
    data = DataProto.from_dict({"x": torch.zeros(2)}, given)
    assert given == {"pair": [[1, 2], [3, 4]]}
    assert data.non_tensor_batch["pair"].shape == (2,)  # equal-length lists do not become a matrix
    assert data.non_tensor_batch["pair"][1] == [3, 4]
    assert DataProto.from_dict({}).batch is None
    assert len(DataProto()) == 0


def test_from_single_dict_sorts_by_type() -> None:
    data = DataProto.from_single_dict({"t": torch.zeros(2), "a": np.array(["p", "q"])}, meta_info={"k": 1})
    assert list(data.batch.keys()) == ["t"] and list(data.non_tensor_batch) == ["a"] and data.meta_info == {"k": 1}
    with pytest.raises(ValueError, match="'bad' must be a tensor or a numpy array, found list"):
        DataProto.from_single_dict({"bad": [1]})


@pytest.mark.parametrize("kind", [AssertionError, ValueError])
def test_columns_of_different_lengths_are_refused(kind: type[Exception]) -> None:
    with pytest.raises(kind, match="same number of rows"):
        DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(kind, match="the batch has 2 rows"):
        DataProto.from_dict({"a": torch.zeros(2)}, {"b": [1, 2, 3]})
    with pytest.raises(kind, match="numpy array"):
        DataProto(non_tensor_batch={"b": [1, 2]})  # type: ignore[dict-item]


def test_indexing() -> None:
    data = batch()
    item = data[1]
    assert isinstance(item, DataProtoItem)
    assert item.batch["x"].tolist() == [3, 4, 5] and item.non_tensor_batch["name"] == "n1"
    mask = torch.tensor([False, True, True, False])
    for index in (slice(1, 3), [1, 2], np.array([1, 2]), torch.tensor([1, 2]), mask):
        part = data[index]
        assert part.batch["y"].tolist() == [1.0, 2.0] and part.non_tensor_batch["name"].tolist() == ["n1", "n2"]
    assert data[[False, True, True, False]].batch["y"].tolist() == [1.0, 2.0]
    assert data.slice(0, 4, 2).batch["y"].tolist() == [0.0, 2.0]
    assert data[np.int64(3)].non_tensor_batch["name"] == "n3"
    with pytest.raises(TypeError, match="not str"):
        data["x"]
    assert "x" in data and "name" in data and "z" not in data


def test_meta_info_is_never_shared() -> None:
    data = batch()
    results = [data.slice(0, 2), data.select(), data.repeat(2), *data.chunk(2), DataProto.concat([data]), data | data]
    results += [data.pad(3), data[[0]], pickle.loads(pickle.dumps(data)), next(data.make_iterator(2, 1))]
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
    deep = data.select(deepcopy=True)
    deep.batch["y"][:] = -1
    assert data.batch["y"].tolist() == [0.0, 1.0, 2.0, 3.0]
    popped = data.pop(batch_keys=["x"], non_tensor_batch_keys=["chat"], meta_info_keys=["step"])
    assert list(popped.batch.keys()) == ["x"] and popped.meta_info == {"step": 1}
    assert "x" not in data and "chat" not in data and "step" not in data.meta_info
    with pytest.raises(AssertionError, match=r"cannot pop \['x'\]"):
        data.pop(batch_keys=["x"])


def test_union_in_place_and_or_not() -> None:
    data, other = batch(), DataProto.from_dict({"z": torch.ones(4)}, {"tag": list("abcd")}, {"more": 2})
    both = data | other
    assert "z" in both and "tag" in both and both.meta_info["more"] == 2
    assert "z" not in data and "tag" not in data and "more" not in data.meta_info and "x" not in other
    assert data.union(other) is data and "z" in data
    assert data.union(DataProto.from_dict({"z": torch.ones(4)})) is data
    with pytest.raises(AssertionError, match="'z'"):
        data.union(DataProto.from_dict({"z": torch.zeros(4)}))
    with pytest.raises(AssertionError, match="meta_info key 'more'"):
        data.union(DataProto.from_dict({"w": torch.zeros(4)}, meta_info={"more": 3}))
    with pytest.raises(AssertionError, match="rows"):
        data.union(DataProto.from_dict({"w": torch.zeros(3)}))
    only_meta = DataProto(meta_info={"late": 1})
    assert (data | only_meta).meta_info["late"] == 1 and len(only_meta | data) == 4


def test_union_of_values_that_equality_is_hard_for() -> None:
    nan = np.array([1.0, np.nan])
    loop: list = [1]
    loop.append(loop)
    objects = np.empty(2, dtype=object)
    objects[:] = [{"a": np.array([np.nan])}, loop]
    same = copy.deepcopy(objects)
    union_numpy_dict({"f": nan, "o": objects}, {"f": nan.copy(), "o": same})
    different = copy.deepcopy(objects)
    different[0]["a"][0] = 0.0
    with pytest.raises(AssertionError, match="'o'"):
        union_numpy_dict({"o": objects}, {"o": different})
    with_nan = TensorDict({"t": torch.tensor([1.0, float("nan")])}, batch_size=[2])
    union_tensor_dict(with_nan, with_nan.clone())
    with pytest.raises(AssertionError, match="'t'"):
        union_tensor_dict(with_nan, TensorDict({"t": torch.ones(2)}, batch_size=[2]))


def test_reorder_repeat_unfold() -> None:
    data = batch()
    assert data.repeat(2).batch["y"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert data.repeat(2, interleave=False).non_tensor_batch["name"].tolist() == ["n0", "n1", "n2", "n3"] * 2
    assert data.sample_level_repeat([0, 2, 1, 0]).batch["y"].tolist() == [1, 1, 2]
    with pytest.raises(BatchError, match="3 entries"):
        data.sample_level_repeat([1, 1, 1])
    data.reorder(torch.tensor([3, 1, 0, 2]))
    assert data.batch["y"].tolist() == [3, 1, 0, 2] and data.non_tensor_batch["name"][0] == "n3"
    unfolded = DataProto.from_dict({"x": torch.arange(8).reshape(2, 4), "y": torch.tensor([5, 6])})
    unfolded = unfolded.unfold_column_chunks(2, split_keys=["x"])
    assert unfolded.batch["x"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert unfolded.batch["y"].tolist() == [5, 5, 6, 6]


@pytest.mark.parametrize(("rows", "chunks"), [(4, 2), (5, 3), (2, 4), (0, 2), (7, 1)])
def test_chunk_is_array_split_and_concat_its_inverse(rows: int, chunks: int) -> None:
    data = batch(rows)
    parts = data.chunk(chunks)
    assert [len(part) for part in parts] == [len(part) for part in np.array_split(np.arange(rows), chunks)]
    joined = DataProto.concat(parts)
    assert torch.equal(joined.batch["x"], data.batch["x"])
    assert joined.non_tensor_batch["name"].tolist() == data.non_tensor_batch["name"].tolist()
    assert [len(part) for part in data.split(3)] == [len(range(i, min(i + 3, rows))) for i in range(0, rows, 3)]


def test_chunk_bounds_by_hand() -> None:
    assert chunk_bounds(5, 3) == [(0, 2), (2, 4), (4, 5)]
    with pytest.raises(ValueError, match="at least 1"):
        chunk_bounds(5, 0)


def test_concat_merges_metrics_and_refuses_conflicts() -> None:
    def part(metrics: object, step: int = 1) -> DataProto:
        return DataProto.from_dict({"x": torch.zeros(1)}, meta_info={"metrics": metrics, "step": step})

    merged = DataProto.concat([part({"a": 1, "b": 2}), part([{"a": 3}, {"a": 4}])]).meta_info
    assert merged == {"metrics": {"a": [1, 3, 4], "b": [2]}, "step": 1}
    with pytest.raises(AssertionError, match="Conflicting values for meta_info key 'step'"):
        DataProto.concat([part({}), part({}, step=2)])
    with pytest.raises(ValueError, match="at least one"):
        DataProto.concat([])


def test_make_iterator() -> None:
    data = batch(6)
    plain = [part.batch["y"].tolist() for part in data.make_iterator(2, epochs=2)]
    assert plain == [[0, 1], [2, 3], [4, 5]] * 2
    shuffled = {"shuffle": True}
    first = [p.batch["y"].tolist() for p in data.make_iterator(3, 2, seed=1, dataloader_kwargs=shuffled)]
    again = [p.batch["y"].tolist() for p in data.make_iterator(3, 2, seed=1, dataloader_kwargs=shuffled)]
    assert first == again and sorted(first[0] + first[1]) == [0, 1, 2, 3, 4, 5] and first[:2] != first[2:]
    with pytest.raises(AssertionError, match="mini_batch_size=4"):
        next(data.make_iterator(4, 1))


def test_pad_marks_rows_of_weight_zero() -> None:
    data = DataProto.from_dict({"x": torch.tensor([1, 2, 3]), "response_mask": torch.ones(3, 2, dtype=torch.long)})
    padded = data.pad(4)
    assert padded.batch["x"].tolist() == [1, 2, 3, 1]
    assert padded.batch["is_padding"].tolist() == [False, False, False, True]
    assert padded.batch["response_mask"].sum(1).tolist() == [2, 2, 2, 0]
    assert len(data) == 3 and data.batch["response_mask"].sum() == 6
    assert "is_padding" not in data.pad(3)
    again = padded.pad(3)
    assert again.batch["is_padding"].tolist() == [False, False, False, True, True, True]
    names = DataProto.from_dict(non_tensors={"n": ["a"]}).pad(2)
    assert names.batch["is_padding"].tolist() == [False, True]
    assert len(data.slice(0, 0).pad(2)) == 0
    assert len(data.pad(16)) == 16


def test_verl_padding_helpers() -> None:
    data = batch(3)
    padded, added = pad_dataproto_to_divisor(data, 7)
    assert added == 4 and padded.batch["y"].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert unpad_dataproto(padded, added).batch["y"].tolist() == [0, 1, 2]
    assert pad_dataproto_to_divisor(data, 3) == (data, 0)
    data.padding(2)
    assert data.batch["y"].tolist() == [0, 1, 2, 2, 2] and data.non_tensor_batch["name"][-1] == "n2"
    data.padding(1, "first")
    assert data.batch["y"].tolist()[-1] == 0


def test_rows_to_batch_and_to_disk(tmp_path: Path) -> None:
    data = batch()
    rows = collate_fn([data[i] for i in range(4)])
    assert torch.equal(rows.batch["x"], data.batch["x"])
    assert rows.non_tensor_batch["chat"][2] == [{"role": "user", "i": 2}]
    data.save_to_disk(tmp_path / "batch.pkl")
    loaded = DataProto.load_from_disk(tmp_path / "batch.pkl")
    assert torch.equal(loaded.batch["x"], data.batch["x"]) and loaded.meta_info == data.meta_info
    assert loaded.non_tensor_batch["chat"].tolist() == data.non_tensor_batch["chat"].tolist()
    assert data.to("cpu") is data
    assert type(copy.deepcopy(data)) is DataProto


def test_parts_with_other_columns_are_named() -> None:
    """Not lost without a word in one order, and a bare KeyError in the other."""
    plain = DataProto.from_dict({"x": torch.zeros(2)}, {"name": ["a", "b"]})
    more = DataProto.from_dict({"x": torch.zeros(2), "y": torch.ones(2)}, {"name": ["a", "b"]})
    for parts, missing, having in (([plain, more], 0, "[1]"), ([more, plain], 1, "[0]")):
        with pytest.raises(ValueError, match=f"column 'y' is missing in part {missing}") as caught:
            DataProto.concat(parts)
        assert having in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda data: data.select_idxs(torch.tensor([1, 0, 1, 0], dtype=torch.uint8)), "uint8"),
        (lambda data: data.unfold_column_chunks(2, ["name"]), r"'name' has shape \(4,\)"),
        (lambda data: data.unfold_column_chunks(2, ["z"]), "'z' is missing"),
        (lambda data: data.make_iterator(2, 1, dataloader_kwargs={"bogus": 1}), "bogus"),
        (lambda data: data.make_iterator(3, 1), "mini_batch_size=3"),
    ],
)
def test_wrong_arguments_are_named_at_once(wrong: Callable[[DataProto], object], said: str) -> None:
    data = DataProto.from_dict({"x": torch.arange(4)}, {"name": ["a", "b", "c", "d"]})
    with pytest.raises(ValueError, match=said):
        wrong(data)


def test_nothing_is_given_and_nothing_is_left() -> None:
    assert len(unpad_dataproto(DataProto.from_dict({"x": torch.arange(6)}), 9)) == 0
    empty: Any = None
    assert DataProto(non_tensor_batch=empty, meta_info=empty).non_tensor_batch == {}

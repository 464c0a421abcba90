"""Futures of batches, put together and cut without waiting."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from verl_lite.protocol import DataProto, DataProtoFuture


class Source:
    """A future of rows start .. start + rows, which counts how often it is fetched."""

    def __init__(self, start: int, rows: int) -> None:
        self.fetched = 0
        self.data = DataProto.from_dict({"x": torch.arange(start, start + rows)}, meta_info={"k": [1]})
        self.future = DataProtoFuture(["handle"], self._resolve, lambda values: values[0])

    def _resolve(self, handles: list[Any]) -> list[Any]:
        self.fetched += 1
        return [self.data]


def test_concat_waits_only_in_get() -> None:
    first, second = Source(0, 3), Source(10, 1)
    whole = DataProtoFuture.concat([first.future, second.future])
    assert first.fetched == second.fetched == 0
    assert whole.get().batch["x"].tolist() == [0, 1, 2, 10]
    assert whole.get() is whole.get() and first.fetched == second.fetched == 1


def test_chunks_are_those_of_the_batch_fetched_once() -> None:
    source = Source(0, 5)
    parts = source.future.chunk(3)
    assert source.fetched == 0 and len(parts) == 3
    assert [part.get().batch["x"].tolist() for part in (parts[2], parts[0], parts[1])] == [[4], [0, 1], [2, 3]]
    assert source.fetched == 1
    parts[0].get().meta_info["k"].append(2)
    assert parts[1].get().meta_info == {"k": [1]}


def test_parts_go_together_again() -> None:
    parts = Source(0, 5).future.chunk(2)
    again = DataProtoFuture.concat([parts[1], parts[0]]).chunk(4)
    assert [part.get().batch["x"].tolist() for part in again] == [[3, 4], [0], [1], [2]]


def test_made_futures_have_no_handles_to_pass_on() -> None:
    """Workers would take the handles for even parts: these batches have 3 and 1 rows, a mesh of 2 cuts 2 and 2."""
    source = Source(0, 3)
    assert source.future.futures == ["handle"]
    assert DataProtoFuture.concat([source.future, Source(3, 1).future]).futures == []
    assert all(part.futures == [] for part in source.future.chunk(2))


def test_wrong_arguments() -> None:
    with pytest.raises(TypeError, match="found \\['str'\\]"):
        DataProtoFuture.concat(["handle"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="at least one"):
        DataProtoFuture.concat([])
    with pytest.raises(ValueError, match="at least 1, found 0"):
        Source(0, 1).future.chunk(0)

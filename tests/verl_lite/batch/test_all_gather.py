"""The rows of two gloo processes on both of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.workers.ranks import Ranks
from verl_lite.protocol import DataProto, all_gather_data_proto

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as two:
        yield two


def gather(counts: list[int], group_of_one: bool) -> dict[str, Any]:
    """Rank r holds counts[r] rows; row i of rank r is 10 r + i."""
    rank = dist.get_rank()
    group = [dist.new_group([0]), dist.new_group([1])][rank] if group_of_one else None
    rows = torch.arange(counts[rank]) + 10 * rank
    mask = (torch.arange(16)[None, :] < (rows % 10 + 1)[:, None]).long()
    tensors = {"id": rows, "x": torch.where(mask > 0, rows[:, None] / 7, -0.0), "response_mask": mask}
    names = {"name": [f"r{int(row)}" for row in rows], "square": (rows**2).numpy()}
    data = DataProto.from_dict(tensors, names, {"rank": rank, "metrics": {"a": [rank]}})
    returned = all_gather_data_proto(data, group)
    return {
        "same": returned is data,
        "rows": len(data),
        "tensors": {name: value.numpy() for name, value in data.batch.items()},
        "arrays": data.non_tensor_batch,
        "meta": data.meta_info,
    }


@pytest.mark.parametrize("counts", [[3, 1], [0, 2]])
def test_rows_of_all_ranks_in_rank_order(ranks: Ranks, counts: list[int]) -> None:
    expected = [i for i in range(counts[0])] + [10 + i for i in range(counts[1])]
    for rank, result in enumerate(ranks.run(gather, counts, False)):
        assert result["same"] and result["rows"] == len(expected)
        assert result["tensors"]["id"].tolist() == expected
        lengths = [row % 10 + 1 for row in expected]
        assert result["tensors"]["response_mask"].sum(1).tolist() == lengths
        for row, length, value in zip(expected, lengths, result["tensors"]["x"], strict=True):
            assert (value[:length] == np.float32(row) / np.float32(7)).all()
            assert (value[length:] == 0).all() and np.signbit(value[length:]).all()
        assert result["arrays"]["name"].tolist() == [f"r{row}" for row in expected]
        assert result["arrays"]["square"].tolist() == [row**2 for row in expected]
        assert result["meta"] == {"rank": rank, "metrics": {"a": [rank]}}  # each keeps its own


def test_within_a_group(ranks: Ranks) -> None:
    results = ranks.run(gather, [2, 3], True)
    assert [result["tensors"]["id"].tolist() for result in results] == [[0, 1], [10, 11, 12]]


def gather_different_columns() -> str:
    names = {"shared": ["a"]} | ({"extra": ["b"]} if dist.get_rank() else {})
    try:
        all_gather_data_proto(DataProto.from_dict({"x": torch.zeros(1)}, names))
    except ValueError as error:
        return str(error)
    return "no error"


def test_different_columns_are_an_error_on_every_rank(ranks: Ranks) -> None:
    for message in ranks.run(gather_different_columns):
        assert "same columns" in message and "extra" in message

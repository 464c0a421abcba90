"""The table of columns: one entry each, writers that exist, and errors that name who should have written what."""

from pathlib import Path

import pytest
import torch

from verl_lite.protocol import DataProto
from verl_lite.schema import COLUMNS, check, column

ROOT = Path(__file__).parents[2]


def test_each_column_has_one_entry_and_every_tensor_has_rows():
    names = [entry.name for entry in COLUMNS]
    assert len(names) == len(set(names))
    assert all(entry.dims[0] == "B" for entry in COLUMNS)
    assert all(entry.dtype == "object" or hasattr(torch, entry.dtype) for entry in COLUMNS)


@pytest.mark.parametrize("entry", COLUMNS, ids=lambda entry: entry.name)
def test_the_writer_is_a_file_that_names_the_column(entry):
    assert f'"{entry.name}"' in (ROOT / entry.writer).read_text()


def test_column_gives_the_entry():
    entry = column("advantages")
    assert (entry.dims, entry.dtype, entry.writer) == (("B", "R"), "float32", "trainer/advantage.py")
    assert column("reward/acc").writer == "trainer/rewards/scores.py"
    with pytest.raises(ValueError, match="'advantage' is not a column of a batch; did you mean advantages"):
        column("advantage")


def batch(**tensors: torch.Tensor) -> DataProto:
    given = {"responses": torch.zeros(2, 3), "response_mask": torch.ones(2, 3), "input_ids": torch.zeros(2, 8)}
    return DataProto.from_dict(tensors=given | tensors, non_tensors={"uid": ["a", "b"]})


def test_check_passes_what_is_complete():
    check(batch(), ["responses", "response_mask", "input_ids", "uid"], stage="update_actor")


def test_check_names_stage_column_and_writer():
    with pytest.raises(
        ValueError, match=r"update_actor: column 'advantages' is missing .*trainer/advantage.py writes it"
    ):
        check(batch(), ["responses", "advantages"], stage="update_actor")
    with pytest.raises(ValueError, match="the batch has no columns"):
        check(DataProto(), ["uid"], stage="reward")


def test_check_finds_wrong_shapes():
    with pytest.raises(ValueError, match=r"adv: column 'advantages' has shape \(2,\), expected \(B, R\)"):
        check(batch(advantages=torch.zeros(2)), ["advantages"], stage="adv")
    with pytest.raises(ValueError, match=r"'advantages' has shape \(2, 4\), so R = 4, but 'responses' has R = 3"):
        check(batch(advantages=torch.zeros(2, 4)), ["responses", "advantages"], stage="adv")

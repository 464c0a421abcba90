"""The table of columns: one entry each, writers that exist, and errors that name who should have written what."""

from pathlib import Path

import pytest
import torch

from verl_lite.protocol import DataProto
from verl_lite.schema import COLUMNS, check, column

ROOT = Path(__file__).parents[2]


def test_each_column_has_one_entry_and_a_writer() -> None:
    assert len({entry.name for entry in COLUMNS}) == len(COLUMNS)
    for entry in COLUMNS:
        assert entry.dims[0] == "B" and (entry.dtype == "object" or hasattr(torch, entry.dtype))
        assert (ROOT / entry.writer).is_file(), entry
    assert column("reward/acc").writer == "trainer/rewards/scores.py"
    with pytest.raises(ValueError, match="'advantage' is not a column of a batch; did you mean advantages"):
        column("advantage")


@pytest.mark.parametrize(
    ("tensors", "wanted", "said"),
    [
        ({}, ["responses", "input_ids", "uid"], None),
        (
            {},
            ["responses", "advantages"],
            r"column 'advantages' is missing .*trainer/ppo/advantage.py writes it",
        ),
        ({"advantages": torch.zeros(2)}, ["advantages"], r"'advantages' has shape \(2,\), expected \(B, R\)"),
        (
            {"advantages": torch.zeros(2, 4)},
            ["responses", "advantages"],
            r"'advantages' has shape \(2, 4\), so R = 4, but 'responses' has R = 3",
        ),
        ({"frames": torch.zeros(2, 5, 3, 8, 8), "latents": torch.zeros(2, 4)}, ["frames", "latents"], None),
        ({"latents": torch.zeros(2)}, ["latents"], r"'latents' has shape \(2,\), expected \(B, R\+1, \.\.\.\)"),
    ],
)
def test_what_is_missing_or_misshapen_is_told(tensors: dict, wanted: list[str], said: str | None) -> None:
    given = {"responses": torch.zeros(2, 3), "input_ids": torch.zeros(2, 8)} | tensors
    data = DataProto.from_dict(given, non_tensors={"uid": ["a", "b"]})
    if said is None:
        check(data, wanted, stage="stage")
        return
    with pytest.raises(ValueError, match=said):
        check(data, wanted, stage="stage")

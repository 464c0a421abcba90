"""DAPO's penalty of long answers, against numbers worked by hand."""

from __future__ import annotations

import pytest
import torch

from verl_lite.algos.reward_shaping import overlong_penalty


def test_the_penalty_begins_in_the_buffer_and_ends_at_the_factor() -> None:
    """Up to 16 of 20 tokens nothing; then a quarter of the factor for each of the last four."""
    lengths = torch.tensor([0, 1, 16, 17, 18, 19, 20])
    penalty = overlong_penalty(lengths, max_response_length=20, buffer_len=4, penalty_factor=2.0)
    assert penalty.tolist() == [0, 0, 0, -0.5, -1.0, -1.5, -2.0]
    assert penalty.dtype == torch.float32


def test_a_buffer_may_be_the_whole_answer() -> None:
    assert overlong_penalty(torch.tensor([0, 5, 10]), 10, 10, 1.0).tolist() == [0, -0.5, -1.0]


@pytest.mark.parametrize("buffer_len", [0, -1, 11])
def test_a_buffer_that_does_not_fit_is_refused(buffer_len: int) -> None:
    with pytest.raises(ValueError, match=f"buffer_len={buffer_len}; expected 1 to max_response_length=10"):
        overlong_penalty(torch.tensor([3]), 10, buffer_len, 1.0)

"""The checks of arguments: labels that are not one for each row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl_lite.algos.masked import Labels, check_rows


@pytest.mark.parametrize("labels", [np.array(1), torch.tensor(1), np.zeros((3, 1)), torch.zeros(2), ["a"], None])
def test_labels_of_another_shape_are_named(labels: Labels | None) -> None:
    with pytest.raises(ValueError, match="gigpo: index"):
        check_rows("gigpo", 3, index=labels)


@pytest.mark.parametrize("labels", [np.arange(3), torch.arange(3), ["a", "b", "a"]])
def test_one_label_for_each_row_is_accepted(labels: Labels) -> None:
    check_rows("gigpo", 3, index=labels)

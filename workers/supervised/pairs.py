"""Batches of pairs: each row is a pair, and the loss reads its two texts as two rows."""

from collections.abc import Mapping

import torch

from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto

MARGIN = "margin"
"""Column with the required difference of the two scores of each pair."""
_COLUMNS_OF_PAIRS = {"mini_batch", "micro_batch", "is_padding", MARGIN}
"""Columns of a planned batch with one value per pair; the others have one per sequence."""


def texts_of(data: DataProto) -> DataProto:
    """Splits a planned batch of n pairs into 2n sequences, chosen and rejected alternately.

    Both sequences of a pair are in the same micro-batch, because the pair was planned as one row.
    """
    columns: dict[str, torch.Tensor] = {}
    for name in map(str, data.batch.keys()):
        column = data.batch[name]
        if name in _COLUMNS_OF_PAIRS:
            columns[name] = column.repeat_interleave(2, 0)
        else:
            columns[name] = column.reshape(2 * len(data), -1)
    return DataProto.from_dict(columns, meta_info=data.meta_info)


def valid_pairs(data: DataProto) -> torch.Tensor:
    """Returns (n,) bool for the 2n sequences of `texts_of`: False for pairs that only pad the batch."""
    has_answer = data.batch["response_mask"].any(1)  # (2n,)
    return has_answer.view(-1, 2).all(1)


def means_over_pairs(values_by_name: Mapping[str, torch.Tensor]) -> dict[str, Metric]:
    """Returns the means of values (n,), one per pair of a micro-batch, as metrics."""
    metrics = {}
    for name, values in values_by_name.items():
        total = values.detach().sum()
        metrics[name] = Metric.mean(float(total), len(values))
    return metrics

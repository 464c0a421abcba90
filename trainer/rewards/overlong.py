"""The penalty of long answers (`reward.overlong_buffer`), taken off the scores of training, on the driver.

The outcome stays known beside it: groups are filtered by what the reward said, and validation, which this does not
touch, reports it.
"""

from __future__ import annotations

from collections.abc import Container

import torch

from verl_lite.algos.reward_shaping import overlong_penalty
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto, as_column

LOGGED = ("overlong_reward", "overlong")
"""Columns `reward/<name>` of the penalty and of whether there is one, under verl's names."""


def punish_overlong(batch: DataProto, config: PPOConfig) -> tuple[DataProto, dict[str, Metric]]:
    """The batch with the penalty added to each answer's score; as it is where reward.overlong_buffer is off.

    Reads token_level_scores and response_mask (B, R). Writes token_level_scores, and outcomes (B,), the scores before;
    with reward.overlong_buffer.log also reward/overlong_reward and reward/overlong (0 or 1), with the metrics
    reward/overlong_reward/mean and reward/overlong/mean over answers that count. An answer whose reward failed has
    no penalty. Raises UserError if the reward function gave such a name to a value of its own.
    """
    options = config.reward.overlong_buffer
    if not options.enable:
        return batch, {}
    lengths = (batch.batch["response_mask"] != 0).sum(1)
    penalty = overlong_penalty(lengths, config.data.max_response_length, options.len, options.penalty_factor)
    penalty = torch.where(lengths > 0, penalty, 0)
    result = batch.select()
    scores = batch.batch["token_level_scores"].clone()
    result.batch["outcomes"] = scores.sum(1)
    scores[torch.arange(len(batch)), (lengths - 1).clamp(min=0)] += penalty
    result.batch["token_level_scores"] = scores
    return result, _logged(result, penalty, int((lengths > 0).sum())) if options.log else {}


def _logged(batch: DataProto, penalty: torch.Tensor, counted: int) -> dict[str, Metric]:
    """Adds the columns to the batch; gives their means."""
    columns = dict(zip(LOGGED, (penalty, (penalty < 0).float()), strict=True))
    check_no_such_entry(batch.non_tensor_batch)
    batch.non_tensor_batch |= {f"reward/{name}": as_column(values.tolist()) for name, values in columns.items()}
    return {f"reward/{name}/mean": Metric.mean(float(values.sum()), counted) for name, values in columns.items()}


def check_no_such_entry(names: Container[str]) -> None:
    """Raises UserError if one of the columns is there already."""
    for name in LOGGED:
        if f"reward/{name}" in names:
            raise UserError(
                f"The reward function returned an entry {name!r}, which is a column of reward.overlong_buffer.log: "
                "call it something else, or set reward.overlong_buffer.log=false"
            )

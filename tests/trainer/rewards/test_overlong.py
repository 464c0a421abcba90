"""The penalty of long answers: on which token it stands, what stays known beside it, what is logged."""

from __future__ import annotations

import pytest
import torch

from trainer.rewards.scores import punish_overlong
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.metrics import values
from verl_lite.protocol import DataProto, as_column


def configured(log: bool = False) -> PPOConfig:
    config = PPOConfig()
    config.data.max_response_length = 4
    buffer = config.reward.overlong_buffer
    buffer.enable, buffer.len, buffer.penalty_factor, buffer.log = True, 2, 0.5, log
    return config


def batch() -> DataProto:
    """Answers of 2, 3 and 4 tokens, each worth 1, and one of 4 whose reward failed."""
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    scores = torch.tensor([[0, 1.0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]])
    return DataProto.from_dict(tensors={"response_mask": mask, "token_level_scores": scores})


def test_the_score_loses_the_penalty_and_the_outcome_does_not() -> None:
    before = batch()
    punished, metrics = punish_overlong(before, configured(log=True))
    expected = [[0, 1.0, 0, 0], [0, 0, 0.75, 0], [0, 0, 0, 0.5], [0, 0, 0, 0]]
    assert punished.batch["token_level_scores"].tolist() == expected
    assert punished.batch["outcomes"].tolist() == [1, 1, 1, 0]
    assert before.batch["token_level_scores"].equal(batch().batch["token_level_scores"]) and "outcomes" not in before
    assert punished.non_tensor_batch["reward/overlong_reward"].tolist() == [0, -0.25, -0.5, 0]
    assert punished.non_tensor_batch["reward/overlong"].tolist() == [0, 1, 1, 0]
    assert values(metrics) == {
        "reward/overlong_reward/mean": pytest.approx(-0.25),  # over answers that count
        "reward/overlong/mean": pytest.approx(2 / 3),
    }
    punished, metrics = punish_overlong(before, configured())
    assert metrics == {} and not punished.non_tensor_batch and punished.batch["token_level_scores"].tolist() == expected


def test_an_entry_of_that_name_is_not_overwritten() -> None:
    given = batch()
    given.non_tensor_batch["reward/overlong"] = as_column([1, 2, 3, 4])
    with pytest.raises(UserError, match="returned an entry 'overlong'"):
        punish_overlong(given, configured(log=True))
    punish_overlong(given, configured())

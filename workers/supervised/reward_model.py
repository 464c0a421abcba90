"""Loss and worker that train a reward model on pairs of answers.

The network is a sequence classifier with one label; the code that loads `reward_model.model.path` loads it. Both texts
of a pair are in one micro-batch. The loss is divided by the number of pairs in the whole optimizer step, so it depends
neither on the division into micro-batches nor on the number of ranks.
"""

from functools import partial

import torch
import torch.nn.functional as F

from verl_lite.config import RewardTrainingConfig
from verl_lite.core_algos import LossResult
from verl_lite.protocol import DataProto
from workers.policy.loading import load_model_config
from workers.policy.sequence_score import new_sequence_score, scored_rows
from workers.supervised.pairs import means_over_pairs, texts_of, valid_pairs
from workers.supervised.worker import SupervisedWorker


def bradley_terry(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    margin: torch.Tensor,
    center_coefficient: float,
) -> torch.Tensor:
    """Returns -log sigmoid(chosen - rejected - margin) + center_coefficient * (chosen + rejected)^2 per pair, (n,).

    The first term is Bradley and Terry (1952) as in Stiennon et al. (2020), equation 1. The second term, Eisenstein et
    al. (2023), as in TRL's RewardTrainer, keeps the scores near 0; the first term depends on their difference alone.

    Args:
        chosen, rejected: (n,) scores.
        margin: (n,) required difference between the two scores; Touvron et al. (2023), Llama 2, equation 2, as in TRL's
            RewardTrainer.
        center_coefficient: Weight of the second term.
    """
    comparison = -F.logsigmoid(chosen - rejected - margin)
    centering = (chosen + rejected).square()
    return comparison + center_coefficient * centering


def pair_loss(data: DataProto, outputs: dict[str, torch.Tensor], center_coefficient: float) -> LossResult:
    """Returns the loss of a micro-batch and its metrics, which are means over pairs.

    Metrics: loss; accuracy, the share of pairs whose chosen score is higher than the rejected score; margin, the chosen
    score minus the rejected score.

    Args:
        data: Rows that alternate between chosen and rejected texts, with the column margin, and
            meta_info["num_tokens"], the number of pairs in the optimizer step.
        outputs: scores (2n, R), nonzero at only one position of each row.
        center_coefficient: See `bradley_terry`.
    """
    is_valid = valid_pairs(data)  # (n,)
    # the sum over a row is the only score in it
    row_scores = outputs["scores"].sum(1)  # (2n,)
    scores = row_scores.view(-1, 2)[is_valid]
    chosen, rejected = scores.unbind(1)
    # both rows of a pair have its margin
    required_margins = data.batch["margin"].view(-1, 2)[is_valid]
    losses = bradley_terry(chosen, rejected, required_margins[:, 0], center_coefficient)

    margins = chosen - rejected
    values_by_name = {
        "loss": losses,
        "accuracy": margins > 0,
        "margin": margins,
    }
    metrics = means_over_pairs(values_by_name)
    # a sum over the micro-batch, because the divisor counts the pairs of the whole optimizer step
    return losses.sum() / data.meta_info["num_tokens"], metrics


class RewardTrainingWorker(SupervisedWorker):
    """One rank that trains a reward model."""

    def __init__(self, config: RewardTrainingConfig, total_training_steps: int) -> None:
        loss = partial(pair_loss, center_coefficient=config.loss.center_rewards_coefficient)
        super().__init__(config, total_training_steps, new_sequence_score, loss)
        text_config = load_model_config(config.model).get_text_config()
        self.pad_token_id = text_config.pad_token_id

    def rows(self, data: DataProto) -> DataProto:
        """Returns the texts of the pairs, one per row, with the columns for their scores."""
        texts = texts_of(data)
        score_columns = scored_rows(texts.batch, self.pad_token_id)
        texts.batch.update(score_columns)
        return texts

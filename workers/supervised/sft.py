"""Loss and worker of supervised fine-tuning."""

from collections.abc import Collection

import torch

from verl_lite.config import SFTConfig
from verl_lite.config.supervised import LOG_PROB_CHUNK_TOKENS
from verl_lite.core_algos import LossResult
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from workers.policy.causal_lm import causal_lm
from workers.supervised.worker import SupervisedWorker, learnt_ends


def sft_loss(data: DataProto, outputs: dict[str, torch.Tensor]) -> LossResult:
    """Returns the loss of a micro-batch and its metrics.

    The loss is the negative log-likelihood of the trained tokens, divided by their number in the optimizer step.

    Args:
        data: response_mask (B, R), and meta_info["num_tokens"], the number of trained tokens in the optimizer step.
        outputs: log_probs (B, R).
    """
    mask = data.batch["response_mask"]
    trained_log_probs = outputs["log_probs"] * mask
    negative_log_likelihood = -trained_log_probs.sum()
    total = float(negative_log_likelihood.detach())
    trained_tokens = int(mask.sum())
    metrics = {"loss": Metric.mean(total, trained_tokens)}

    # not divided by the tokens of this micro-batch, so that the gradient does not depend on how rows are packed
    return negative_log_likelihood / data.meta_info["num_tokens"], metrics


class SFTWorker(SupervisedWorker):
    """One rank of supervised fine-tuning."""

    config: SFTConfig

    def __init__(self, config: SFTConfig, total_training_steps: int) -> None:
        super().__init__(
            config,
            total_training_steps,
            causal_lm(LOG_PROB_CHUNK_TOKENS),
            sft_loss,
            temperature=1.0,
            calculate_entropy=False,
        )

    def answer_ends(self) -> Collection[int]:
        return learnt_ends(self.config)

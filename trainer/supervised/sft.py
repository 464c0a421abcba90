"""Loss and worker for supervised fine-tuning, and the job of `trainer.main_sft`.

The loop is in `trainer.supervised.loop`, the loss and worker of loss=dpo in `trainer.supervised.dpo`.
"""

from functools import partial

import torch

from trainer.data.preferences import Pair
from trainer.data.sft_dataset import Example, collate, load_examples
from trainer.supervised.dpo import DPOWorker, check_pair
from trainer.supervised.loop import SupervisedJob, SupervisedWorker, Task
from trainer.supervised.reward_training import pair_task
from verl_lite.config import SFTConfig
from verl_lite.config.supervised import LOG_PROB_CHUNK_TOKENS
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from workers.policy.causal_lm import causal_lm
from workers.policy.loading import NetworkSpec, Policy
from workers.policy.tokenizer import load_tokenizer


def sft_loss(data: DataProto, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Metric]]:
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

    def __init__(self, config: SFTConfig, total_training_steps: int) -> None:
        super().__init__(
            config,
            total_training_steps,
            causal_lm(LOG_PROB_CHUNK_TOKENS),
            sft_loss,
            temperature=1.0,
            calculate_entropy=False,
        )


class SFTJob(SupervisedJob[SFTConfig]):
    """`python -m trainer.main_sft`."""

    module = "trainer.main_sft"
    next_options = "model.path={} data.train_files=FILE rollout.n=8"

    @staticmethod
    def build_policy(spec: NetworkSpec) -> Policy:
        build = causal_lm(LOG_PROB_CHUNK_TOKENS)
        return build(spec)

    def read_task(self) -> Task[Example] | Task[Pair]:
        data = self.config.data
        tokenizer = load_tokenizer(self.config.model, data.chat_template)
        if self.config.loss == "dpo":
            return pair_task(DPOWorker, tokenizer, data, check=check_pair, report=self.console.print)

        load = partial(load_examples, tokenizer=tokenizer, config=data, report=self.console.print)
        train_examples = load(data.train_files, option="data.train_files")
        val_examples: list[Example] = []
        if data.val_files:
            val_examples = load(data.val_files, option="data.val_files")
        return Task(
            worker=SFTWorker,
            train=train_examples,
            val=val_examples,
            collate=partial(collate, pad_token_id=tokenizer.pad_token_id),
            # the trained tokens, the unit of the loss
            count=lambda batch: batch.batch["response_mask"].sum(1),
        )

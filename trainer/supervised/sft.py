"""Loss and worker for supervised fine-tuning, and the job of `trainer.main_sft`; the loop is in
`trainer.supervised.loop`, the loss and worker of loss=dpo in `trainer.supervised.dpo`."""

from functools import partial
from typing import Any

import torch

from trainer.data.sft_dataset import collate, load_examples
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
    """Returns the negative log-likelihood of the trained tokens over their number in the optimizer step, and
    metrics."""
    nll = -(outputs["log_probs"] * data.batch["response_mask"]).sum()
    tokens = int(data.batch["response_mask"].sum())
    return nll / data.meta_info["num_tokens"], {"loss": Metric.mean(float(nll.detach()), tokens)}


class SFTWorker(SupervisedWorker):
    """One rank of supervised fine-tuning."""

    def __init__(self, config: SFTConfig, total_training_steps: int) -> None:
        policy = causal_lm(LOG_PROB_CHUNK_TOKENS)
        super().__init__(config, total_training_steps, policy, sft_loss, temperature=1.0, calculate_entropy=False)


class SFTJob(SupervisedJob[SFTConfig]):
    """`python -m trainer.main_sft`."""

    module = "trainer.main_sft"
    next_options = "model.path={} data.train_files=FILE rollout.n=8"

    @staticmethod
    def build_policy(spec: NetworkSpec) -> Policy:
        return causal_lm(LOG_PROB_CHUNK_TOKENS)(spec)

    def read_task(self) -> Task[Any]:
        config, show = self.config, self.console.print
        tokenizer, files = load_tokenizer(config.model, config.data.chat_template), config.data.val_files
        if config.loss == "dpo":
            return pair_task(DPOWorker, tokenizer, config.data, check=check_pair, report=show)
        return Task(
            worker=SFTWorker,
            train=load_examples(
                config.data.train_files, tokenizer, config.data, option="data.train_files", report=show
            ),
            val=load_examples(files, tokenizer, config.data, option="data.val_files", report=show) if files else [],
            collate=partial(collate, pad_token_id=tokenizer.pad_token_id),
            count=lambda batch: batch.batch["response_mask"].sum(1),
        )

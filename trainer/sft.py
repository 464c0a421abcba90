"""Supervised fine-tuning: its loss, and the worker that does its heavy part; `trainer.supervised` has the loop.

The same training engine, planner and worker groups as in reinforcement learning; only the loss differs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from trainer.data.sft import collate, load_examples
from trainer.supervised import SupervisedWorker, Task, check, train
from verl_lite.checks.model import adapter
from verl_lite.config import SFTConfig
from verl_lite.errors import UserError
from verl_lite.metric_docs import MetricDoc
from verl_lite.metrics import Metric
from verl_lite.protocol import DataProto
from verl_lite.single_controller.decorator import Dispatch, register
from workers.policy.causal_lm import causal_lm
from workers.policy.tokenizer import load_tokenizer

LOG_PROB_CHUNK_TOKENS = 1024


def sft_loss(data: DataProto, outputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Negative log-likelihood of the learnt tokens, divided by their number in the whole optimizer step."""
    nll = -(outputs["log_probs"] * data.batch["response_mask"]).sum()
    tokens = int(data.batch["response_mask"].sum())
    return nll / data.meta_info["num_tokens"], {"loss": Metric.mean(float(nll.detach()), tokens)}


class SFTWorker(SupervisedWorker):
    """One rank of supervised fine-tuning."""

    def __init__(self, config: SFTConfig, total_training_steps: int) -> None:
        super().__init__(config, total_training_steps, causal_lm(LOG_PROB_CHUNK_TOKENS))

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def train(self, data: DataProto) -> DataProto:
        """One optimizer step on a planned batch; metrics in meta_info."""
        metrics = self.engine.train(data, sft_loss, temperature=1.0, calculate_entropy=False, epochs=1)
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_METRIC)
    def measure(self, data: DataProto) -> DataProto:
        """The loss on a planned batch, without training; metrics in meta_info."""
        outputs = self.engine.infer(data, temperature=1.0, calculate_entropy=False)
        mask = data.batch["response_mask"]
        nll = -float((outputs["log_probs"] * mask).sum())
        return DataProto(meta_info={"metrics": {"loss": Metric.mean(nll, int(mask.sum()))}})


@dataclass(frozen=True)
class SFTResult:
    """folder: the model in Hugging Face format. loss: of the last training steps; val_loss: None without such files."""

    folder: Path
    steps: int
    loss: float
    val_loss: float | None


def run_sft(config: SFTConfig, report: Callable[[str], None] = print) -> SFTResult:
    """Trains as configured. report: takes each line of progress. Raises UserError for input that cannot be used."""
    check(config)
    for problem in adapter(config.model):
        raise UserError(problem)
    tokenizer, files = load_tokenizer(config.model), config.data.val_files
    task = Task(
        name="sft",
        worker=SFTWorker,
        train=load_examples(config.data.train_files, tokenizer, config.data, option="data.train_files"),
        val=load_examples(files, tokenizer, config.data, option="data.val_files") if files else [],
        collate=partial(collate, pad_token_id=tokenizer.pad_token_id),
        count=lambda batch: batch.batch["response_mask"].sum(1),
    )
    result = train(config, task, report)
    return SFTResult(result.folder, result.steps, result.loss, result.val.get("loss"))


METRIC_DOCS = (
    MetricDoc(
        "{train,val}/loss",
        "-log p of the tokens of the answers, mean over these tokens; main_rm: of the pairs",
        "nats",
        "main_sft, main_rm",
    ),
)

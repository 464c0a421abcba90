"""The job of `trainer.main_rm`, which trains a reward model on pairs of answers, and the task that it shares with DPO.

The loop is in `trainer.supervised.loop`, loss and worker are in `workers.supervised.reward_model`.
"""

from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from trainer.data.preferences import (
    CheckPair,
    Pair,
    PairDataConfig,
    collate_pairs,
    load_pairs,
)
from trainer.data.sft_dataset import Report
from trainer.supervised.loop import SupervisedJob, Task
from verl_lite.config import ModelConfig, RewardTrainingConfig
from workers.policy.loading import NetworkSpec, Policy
from workers.policy.sequence_score import new_sequence_score
from workers.policy.tokenizer import load_tokenizer
from workers.supervised.reward_model import RewardTrainingWorker
from workers.supervised.worker import SupervisedWorker


class RewardTrainingJob(SupervisedJob[RewardTrainingConfig]):
    """`python -m trainer.main_rm`."""

    module = "trainer.main_rm"
    next_options = (
        "reward_model.enable=true reward_model.model.path={} model.path=POLICY data.train_files=FILE rollout.n=8"
    )

    @staticmethod
    def build_policy(spec: NetworkSpec) -> Policy:
        return new_sequence_score(spec)

    def read_task(self) -> Task[Pair]:
        model = self.config.model
        data = self.config.data
        # the options of a sequence classifier have no tokenizer_path
        source = ModelConfig(path=model.path, trust_remote_code=model.trust_remote_code)
        tokenizer = load_tokenizer(source, data.chat_template)
        return pair_task(RewardTrainingWorker, tokenizer, data, data.score_at, report=self.console.print)


def pair_task(
    worker: type[SupervisedWorker],
    tokenizer: PreTrainedTokenizerBase,
    data: PairDataConfig,
    score_at: str = "end_of_turn",
    check: CheckPair = lambda pair, where: None,
    report: Report = lambda line: None,
) -> Task[Pair]:
    """Returns the task of a loss that is a mean over pairs.

    Args:
        worker: The worker class.
        tokenizer, data, score_at, check, report: See `load_pairs`.

    Raises:
        UserError: If a row is unusable.
    """
    load = partial(
        load_pairs,
        tokenizer=tokenizer,
        config=data,
        score_at=score_at,
        check=check,
        report=report,
    )
    train_pairs = load(data.train_files, option="data.train_files")
    val_pairs: list[Pair] = []
    if data.val_files:
        val_pairs = load(data.val_files, option="data.val_files")
    return Task(
        worker=worker,
        train=train_pairs,
        val=val_pairs,
        collate=partial(collate_pairs, pad_token_id=tokenizer.pad_token_id),
        # each row is a pair, the unit of the loss
        count=lambda batch: torch.ones(len(batch), dtype=torch.long),
    )

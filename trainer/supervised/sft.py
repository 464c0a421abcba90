"""The job of `trainer.main_sft`: supervised fine-tuning, and DPO with loss=dpo.

The loop is in `trainer.supervised.loop`, the losses and workers are in `workers.supervised`.
"""

from functools import partial

from trainer.data.preferences import Pair
from trainer.data.sft_dataset import Example, collate, load_examples
from trainer.supervised.loop import SupervisedJob, Task
from trainer.supervised.reward_training import pair_task
from verl_lite.config import SFTConfig
from verl_lite.config.supervised import LOG_PROB_CHUNK_TOKENS
from verl_lite.errors import UserError
from workers.policy.causal_lm import causal_lm
from workers.policy.loading import NetworkSpec, Policy
from workers.policy.tokenizer import load_tokenizer
from workers.supervised.dpo import DPOWorker
from workers.supervised.sft import SFTWorker


class SFTJob(SupervisedJob[SFTConfig]):
    """`python -m trainer.main_sft`."""

    module = "trainer.main_sft"
    next_options = "model.path={} data.train_files=FILE rollout.n=8"

    @staticmethod
    def build_policy(spec: NetworkSpec) -> Policy:
        build = causal_lm(LOG_PROB_CHUNK_TOKENS)
        return build(spec)

    def read_task(self) -> Task[Example] | Task[Pair]:
        """Returns pairs of answers with loss=dpo, otherwise single sequences."""
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


def check_pair(pair: Pair, where: str) -> None:
    """Raises UserError if the answers follow different prompts, or if an answer is only its end-of-turn token."""
    if pair.chosen.prompt != pair.rejected.prompt:
        raise UserError(
            f"{where}: the chats differ before their last message, and DPO compares two answers to the same prompt; "
            "cut both chats after the first message that differs, or remove such rows"
        )
    answers = {"chosen": pair.chosen, "rejected": pair.rejected}
    for name, answer in answers.items():
        # 1 token is the end of the turn
        if len(answer.response) < 2:
            raise UserError(f"{where}: the {name} answer has no tokens before its end-of-turn token; remove such rows")

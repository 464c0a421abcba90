"""What the reward model reads: the policy's own token ids, or its texts under a tokenizer and template of its own.

Which of them is decided and checked once, before anything heavy starts (`reward_inputs`). Token ids are the cheaper way
and keep the prompts that samples share; they mean the same only where the vocabularies agree. Otherwise each answer is
decoded, put behind its prompt as the assistant's message, rendered by the reward model's chat template and tokenised
anew (`reward_model.retokenize`). A text that is too long for the model has no score: it is not cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.policy.loading import load_model_config, longest_context
from workers.policy.sequence_score import check_sequence_classifier

# From a batch to a batch with the token columns that the model reads, and for each row why it has no score, or None.
RewardInputs = Callable[[DataProto], tuple[DataProto, list[str | None]]]


@dataclass(frozen=True)
class Limit:
    """The longest row that the reward model takes, and what says so."""

    tokens: int
    reason: str


def reward_inputs(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> RewardInputs:
    """The way from batches to rows for the reward model of `config`.

    tokenizer: the policy's. Raises UserError for a model that cannot score, or cannot read what the policy writes.
    """
    path = str(config.reward_model.model.path)
    try:
        model = load_model_config(config.reward_model.model)
    except UserError as error:
        raise UserError(f"reward_model.{error}") from error
    check_sequence_classifier(model, path)
    reward_tokenizer = load_reward_tokenizer(path, config.reward_model.model.trust_remote_code)
    if config.reward_model.retokenize:
        return Retokenizer(tokenizer, reward_tokenizer, longest_row(config, model))
    check_same_vocabulary(tokenizer, reward_tokenizer, path)
    longest = config.data.max_prompt_length + config.data.max_response_length
    context = longest_context(model)
    if context is not None and context < longest:
        raise UserError(
            f"reward_model.model.path={path!r}: it reads at most {context} tokens, fewer than data.max_prompt_length + "
            f"data.max_response_length = {longest}: lower these, or take a model with a longer context"
        )
    return policy_tokens


def policy_tokens(batch: DataProto) -> tuple[DataProto, list[str | None]]:
    """The rows as the policy sampled them."""
    return batch, [None] * len(batch)


class Retokenizer:
    """Rows under another tokenizer and chat template.

    tokenizer: the policy's. reward_tokenizer: the reward model's, with a chat template; UserError without. limit: None
    where a row may have any length.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, reward_tokenizer: PreTrainedTokenizerBase, limit: Limit | None
    ) -> None:
        if reward_tokenizer.chat_template is None:
            raise UserError(
                f"reward_model.retokenize=true: the tokenizer in {reward_tokenizer.name_or_path!r} (reward_model.model."
                "path) has no chat template, so chats cannot become its input; add chat_template to its "
                "tokenizer_config.json"
            )
        self._policy, self._reward, self._limit = tokenizer, reward_tokenizer, limit

    def __call__(self, batch: DataProto) -> tuple[DataProto, list[str | None]]:
        """Reads raw_prompt, responses, attention_mask, response_mask.

        The rows are right-padded and all answer: `responses` is input_ids, and response_mask is 1 on every token of a
        row that can be scored. Of a row longer than the limit only the first tokens stay, which are not scored.
        """
        tokens = self._reward(self.texts(batch), add_special_tokens=False)["input_ids"]
        errors = [self._too_long(len(row)) for row in tokens]
        readable = torch.tensor([error is None for error in errors])
        if self._limit is not None:
            tokens = [row[: self._limit.tokens] for row in tokens]
        return right_padded(tokens, batch.batch["response_mask"].any(1) & readable), errors

    def texts(self, batch: DataProto) -> list[str]:
        """Each row's chat with its answer as the assistant's message, under the reward model's template."""
        answers = batch.batch["responses"]
        lengths = batch.batch["attention_mask"][:, -answers.shape[1] :].sum(1).tolist()
        written = [row[:length] for row, length in zip(answers.tolist(), lengths, strict=True)]
        chats = [
            [*prompt, {"role": "assistant", "content": text}]
            for prompt, text in zip(
                batch.non_tensor_batch["raw_prompt"],
                self._policy.batch_decode(written, skip_special_tokens=True),
                strict=True,
            )
        ]
        return cast(list[str], self._reward.apply_chat_template(chats, tokenize=False, add_generation_prompt=False))

    def _too_long(self, length: int) -> str | None:
        """Why a text of so many tokens has no score, if that is so."""
        if self._limit is None or length <= self._limit.tokens:
            return None
        return (
            f"The reward model was not asked: prompt and answer are {length} tokens of its tokenizer, and "
            f"{self._limit.reason} allows {self._limit.tokens}."
        )


def right_padded(tokens: Sequence[Sequence[int]], answered: torch.Tensor) -> DataProto:
    """The token columns of rows without a prompt of their own. answered: (B,) bool, the rows that count."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.long) for row in tokens], batch_first=True)
    lengths = torch.tensor([len(row) for row in tokens])
    real = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": real,
            "position_ids": (real.cumsum(1) - 1).clamp(min=0),
            "responses": ids,
            "response_mask": real * answered[:, None],
        }
    )


def load_reward_tokenizer(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer in the reward model's folder. UserError without one."""
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(
            f"reward_model.model.path={path!r}: its tokenizer cannot be read ({error}), and without it nothing says "
            "that the policy's token ids mean the same to it; put the tokenizer's files into the folder"
        ) from error


def check_same_vocabulary(
    tokenizer: PreTrainedTokenizerBase, reward_tokenizer: PreTrainedTokenizerBase, path: str
) -> None:
    """Raises UserError unless each token of the policy has the same id in the reward model's vocabulary."""
    ours, theirs = tokenizer.get_vocab(), reward_tokenizer.get_vocab()
    differing = sorted((token for token, number in ours.items() if theirs.get(token) != number), key=lambda t: ours[t])
    if differing:
        token = differing[0]
        found = f"has id {theirs[token]}" if token in theirs else "does not exist"
        raise UserError(
            f"reward_model.retokenize=false hands the policy's token ids to reward_model.model.path={path!r}, but the "
            f"vocabularies differ in {len(differing)} of {len(ours)} tokens: {token!r} is {ours[token]} for the policy "
            f"and {found} there. Set reward_model.retokenize=true"
        )


def longest_row(config: PPOConfig, model: PretrainedConfig) -> Limit | None:
    """The tighter of the model's context and the token budget of a micro-batch; None where there is neither."""
    options, actor = config.reward_model, config.actor
    limits = []
    context = longest_context(model)
    if context is not None:
        limits.append(Limit(context, "the context of reward_model.model.path"))
    if actor.use_dynamic_bsz if options.use_dynamic_bsz is None else options.use_dynamic_bsz:
        own = options.forward_max_token_len_per_gpu
        key = "actor.ppo_max_token_len_per_gpu" if own is None else "reward_model.forward_max_token_len_per_gpu"
        limits.append(Limit(own or actor.ppo_max_token_len_per_gpu, key))
    return min(limits, key=lambda limit: limit.tokens, default=None)

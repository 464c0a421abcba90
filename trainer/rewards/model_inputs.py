"""Inputs of the reward model: the policy's token ids, or its texts under the reward model's tokenizer and template.

Using the token ids is cheaper and keeps prompts that samples share, but requires equal vocabularies. Otherwise
(`reward_model.retokenize`) each answer is decoded, appended to its prompt as the assistant's message, rendered with the
reward model's chat template and tokenized again. A text that is too long gets no score; it is not truncated.
"""

import re
from collections.abc import Callable

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.policy.chat_template import render_chats
from workers.policy.loading import load_model_config, longest_context
from workers.policy.sequence_score import check_sequence_classifier

# Converts a batch to the token columns of the reward model, and an error message for each row without score, else None.
RewardInputs = Callable[[DataProto], tuple[DataProto, list[str | None]]]


def reward_inputs(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> RewardInputs:
    """Returns the function that converts batches to inputs of the reward model.

    Args:
        config: configuration of the run.
        tokenizer: the policy's tokenizer.

    Raises:
        UserError: if the model has no score, or cannot read the policy's tokens.
    """
    path = str(config.reward_model.model.path)
    try:
        model = load_model_config(config.reward_model.model)
    # the message begins with model.path, which is also the name of the policy's option
    except UserError as error:
        raise UserError(f"reward_model.{error}") from error
    check_sequence_classifier(model, path)
    trust = config.reward_model.model.trust_remote_code
    try:
        reward_tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        raise UserError(f"reward_model.model.path={path!r}: its tokenizer cannot be read ({error})") from error

    context = longest_context(model)
    if config.reward_model.retokenize:
        longest, reason = _longest_row(config, context)
        return Retokenizer(tokenizer, reward_tokenizer, longest, reason)

    problem = f"reward_model.retokenize=false passes the policy's token ids to reward_model.model.path={path!r}"
    check_same_vocabulary(tokenizer, reward_tokenizer, problem, "reward model", "Set reward_model.retokenize=true")
    # here an error at the start: without a new tokenization, the longest row is known
    longest = config.data.max_prompt_length + config.data.max_response_length
    if context is not None and context < longest:
        raise UserError(
            f"reward_model.model.path={path!r}: it reads at most {context} tokens, fewer than data.max_prompt_length + "
            f"data.max_response_length = {longest}; lower these, or use a model with a longer context"
        )
    return lambda batch: (batch, [None] * len(batch))


def _longest_row(config: PPOConfig, context: int | None) -> tuple[int | None, str]:
    """Returns the largest number of tokens of a row of the reward model, and the option or model that sets it.

    Args:
        config: configuration of the run.
        context: the longest sequence that the model reads; None: no limit.

    Returns:
        None and an empty text if nothing limits the rows.
    """
    options = config.reward_model
    actor = config.actor
    limits = []
    if context is not None:
        limits.append((context, "the context of reward_model.model.path"))
    # null means the actor's value, in both options
    use_dynamic_bsz = actor.use_dynamic_bsz if options.use_dynamic_bsz is None else options.use_dynamic_bsz
    if use_dynamic_bsz:
        # a row must fit into a micro-batch
        own_limit = options.forward_max_token_len_per_gpu
        if own_limit is None:
            limits.append((actor.ppo_max_token_len_per_gpu, "actor.ppo_max_token_len_per_gpu"))
        else:
            limits.append((own_limit, "reward_model.forward_max_token_len_per_gpu"))
    return min(limits, default=(None, ""))


class Retokenizer:
    """Converts the rows of a batch to another tokenizer and chat template.

    Args:
        tokenizer: the policy's tokenizer.
        reward_tokenizer: the reward model's tokenizer.
        longest: largest number of tokens of a row; None: no limit.
        reason: the option or model that sets `longest`.

    Raises:
        UserError: if the reward model's tokenizer has no chat template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        reward_tokenizer: PreTrainedTokenizerBase,
        longest: int | None = None,
        reason: str = "",
    ) -> None:
        if reward_tokenizer.chat_template is None:
            raise UserError(
                f"reward_model.retokenize=true: the tokenizer in {reward_tokenizer.name_or_path!r} (reward_model.model."
                "path) has no chat template; add chat_template to its tokenizer_config.json"
            )
        self._policy_tokenizer = tokenizer
        self._reward_tokenizer = reward_tokenizer
        self._longest = longest
        self._reason = reason
        added_tokens = reward_tokenizer.added_tokens_decoder.values()
        special_texts = {str(token) for token in added_tokens if token.special}
        # the longest first, because a text may begin with another one
        patterns = [re.escape(text) for text in sorted(special_texts, key=len, reverse=True)]
        self._special_text = re.compile("|".join(patterns) or r"(?!)")

    def __call__(self, batch: DataProto) -> tuple[DataProto, list[str | None]]:
        """Returns the token columns of a batch, and for each row its error or None.

        Reads raw_prompt, responses, attention_mask and response_mask.

        Rows are right-padded. They have no separate prompt: `responses` equals input_ids, and response_mask is 1 on
        every token of a row that can be scored. A row longer than the limit is cut and not scored.
        """
        texts = self.texts(batch)
        # without special tokens, because the chat template writes them
        tokens = self._reward_tokenizer(texts, add_special_tokens=False)["input_ids"]
        errors = []
        rows = []
        for row in tokens:
            errors.append(self._length_error(len(row)))
            # cut, because a row that is too long must also fit into the model and a micro-batch
            readable = row[: self._longest]
            rows.append(torch.tensor(readable, dtype=torch.long))

        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        columns = torch.arange(ids.shape[1])
        attention_mask = (columns < lengths[:, None]).long()
        positions = attention_mask.cumsum(1) - 1

        is_readable = torch.tensor([error is None for error in errors])
        is_scored = batch.batch["response_mask"].any(1) & is_readable
        tensors = {
            "input_ids": ids,
            "attention_mask": attention_mask,
            "position_ids": positions.clamp(min=0),
            "responses": ids,
            "response_mask": attention_mask * is_scored[:, None],
        }
        return DataProto.from_dict(tensors=tensors), errors

    def _length_error(self, length: int) -> str | None:
        """Returns the error of a row that is too long, None for other rows."""
        if self._longest is None or length <= self._longest:
            return None
        return (
            f"The reward model did not score the answer: prompt and answer have {length} tokens in its "
            f"tokenizer, but {self._reason} allows {self._longest}."
        )

    def texts(self, batch: DataProto) -> list[str]:
        """Renders each chat, with the answer as assistant message, by the chat template of the reward model."""
        answers = batch.batch["responses"]
        width = answers.shape[1]
        answer_mask = batch.batch["attention_mask"][:, -width:]
        lengths = answer_mask.sum(1).tolist()
        answer_ids = []
        for padded_ids, length in zip(answers.tolist(), lengths, strict=True):
            answer_ids.append(padded_ids[:length])
        # the special tokens are those of the policy; the reward model's template writes its own
        answer_texts = self._policy_tokenizer.batch_decode(answer_ids, skip_special_tokens=True)

        chats = []
        prompts = batch.non_tensor_batch["raw_prompt"]
        for prompt, answer_text in zip(prompts, answer_texts, strict=True):
            answer = {"role": "assistant", "content": self._without_special_tokens(answer_text)}
            chats.append([*prompt, answer])
        return render_chats(self._reward_tokenizer, chats, add_generation_prompt=False)

    def _without_special_tokens(self, text: str) -> str:
        """Returns an answer whose text contains no special token of the reward model: a space divides each.

        A policy can spell <|im_end|> with ordinary tokens. The reward model's tokenizer would make one token of it, and
        the answer could continue the chat with a user who praises it.
        """
        return self._special_text.sub(lambda token: f"{token[0][:1]} {token[0][1:]}", text)


def check_same_vocabulary(
    tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, problem: str, reader: str, remedy: str
) -> None:
    """Raises UserError unless each token of the policy has the same id in the vocabulary of another model.

    Args:
        tokenizer: the policy's tokenizer.
        other: tokenizer of the other model.
        problem: beginning of the message.
        reader: kind of the other model, for the message.
        remedy: end of the message.
    """
    policy_ids = tokenizer.get_vocab()
    other_ids = other.get_vocab()
    # the other model may have further tokens, which the policy never writes
    differing = []
    for token, number in policy_ids.items():
        if other_ids.get(token) != number:
            differing.append(token)
    if not differing:
        return
    # the smallest id, so that the message names the same token every time
    first = min(differing, key=lambda token: policy_ids[token])
    there = f"has id {other_ids[first]}" if first in other_ids else "does not exist"
    raise UserError(
        f"{problem}, but the vocabularies differ in {len(differing)} of {len(policy_ids)} tokens: {first!r} is "
        f"{policy_ids[first]} for the policy and {there} in the {reader}. {remedy}"
    )

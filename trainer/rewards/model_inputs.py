"""Inputs of the reward model: the policy's token ids, or its texts under the reward model's tokenizer and template.

Using the token ids is cheaper and keeps prompts that samples share, but requires equal vocabularies. Otherwise
(`reward_model.retokenize`) each answer is decoded, appended to its prompt as the assistant's message, rendered with the
reward model's chat template and tokenized again. A text that is too long gets no score; it is not truncated.
"""

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

    tokenizer: the policy's tokenizer. Raises UserError if the model has no score, or cannot read the policy's tokens.
    """
    path = str(config.reward_model.model.path)
    try:
        model = load_model_config(config.reward_model.model)
    except UserError as error:
        raise UserError(f"reward_model.{error}") from error
    check_sequence_classifier(model, path)
    try:
        trust = config.reward_model.model.trust_remote_code
        reward_tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
    except (OSError, ValueError) as error:
        raise UserError(f"reward_model.model.path={path!r}: its tokenizer cannot be read ({error})") from error
    context = longest_context(model)
    if config.reward_model.retokenize:
        options, actor = config.reward_model, config.actor
        limits = [] if context is None else [(context, "the context of reward_model.model.path")]
        if actor.use_dynamic_bsz if options.use_dynamic_bsz is None else options.use_dynamic_bsz:
            limit = options.forward_max_token_len_per_gpu
            key = "actor.ppo_max_token_len_per_gpu" if limit is None else "reward_model.forward_max_token_len_per_gpu"
            limits.append((limit or actor.ppo_max_token_len_per_gpu, key))
        return Retokenizer(tokenizer, reward_tokenizer, *min(limits, default=(None, "")))
    problem = f"reward_model.retokenize=false passes the policy's token ids to reward_model.model.path={path!r}"
    check_same_vocabulary(tokenizer, reward_tokenizer, problem, "reward model", "Set reward_model.retokenize=true")
    longest = config.data.max_prompt_length + config.data.max_response_length
    if context is not None and context < longest:
        raise UserError(
            f"reward_model.model.path={path!r}: it reads at most {context} tokens, fewer than data.max_prompt_length + "
            f"data.max_response_length = {longest}; lower these, or use a model with a longer context"
        )
    return lambda batch: (batch, [None] * len(batch))


class Retokenizer:
    """Converts the rows of a batch to another tokenizer and chat template.

    tokenizer: the policy's tokenizer. reward_tokenizer: the reward model's tokenizer; UserError if it has no chat
    template. longest: largest number of tokens of a row; None: no limit. reason: the option or model that sets it.
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
        self._policy, self._reward, self._longest, self._reason = tokenizer, reward_tokenizer, longest, reason

    def __call__(self, batch: DataProto) -> tuple[DataProto, list[str | None]]:
        """Returns the token columns and errors of a batch. Reads raw_prompt, responses, attention_mask, response_mask.

        Rows are right-padded. They have no separate prompt: `responses` equals input_ids, and response_mask is 1 on
        every token of a row that can be scored. A row longer than the limit is cut and not scored.
        """
        tokens = self._reward(self.texts(batch), add_special_tokens=False)["input_ids"]
        longest = max(map(len, tokens)) if self._longest is None else self._longest
        errors = [
            f"The reward model did not score the answer: prompt and answer have {len(row)} tokens in its "
            f"tokenizer, but {self._reason} allows {longest}."
            if len(row) > longest
            else None
            for row in tokens
        ]
        answered = batch.batch["response_mask"].any(1) & torch.tensor([error is None for error in errors])
        rows = [torch.tensor(row[:longest], dtype=torch.long) for row in tokens]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        real = (torch.arange(ids.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]).long()
        columns = {
            "input_ids": ids,
            "attention_mask": real,
            "position_ids": (real.cumsum(1) - 1).clamp(min=0),
            "responses": ids,
            "response_mask": real * answered[:, None],
        }
        return DataProto.from_dict(tensors=columns), errors

    def texts(self, batch: DataProto) -> list[str]:
        """Renders each chat, with the answer as assistant message, by the chat template of the reward model."""
        answers = batch.batch["responses"]
        lengths = batch.batch["attention_mask"][:, -answers.shape[1] :].sum(1).tolist()
        written = [row[:length] for row, length in zip(answers.tolist(), lengths, strict=True)]
        texts = self._policy.batch_decode(written, skip_special_tokens=True)
        prompts = batch.non_tensor_batch["raw_prompt"]
        chats = [[*p, {"role": "assistant", "content": text}] for p, text in zip(prompts, texts, strict=True)]
        return render_chats(self._reward, chats, add_generation_prompt=False)


def check_same_vocabulary(
    tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, problem: str, reader: str, remedy: str
) -> None:
    """Raises UserError unless each token of the policy has the same id in the vocabulary of another model. problem,
    reader, remedy: beginning of the message, kind of the model, and end of the message."""
    ours, theirs = tokenizer.get_vocab(), other.get_vocab()
    differing = sorted((token for token, number in ours.items() if theirs.get(token) != number), key=lambda t: ours[t])
    if differing:
        token = differing[0]
        found = f"has id {theirs[token]}" if token in theirs else "does not exist"
        raise UserError(
            f"{problem}, but the vocabularies differ in {len(differing)} of {len(ours)} tokens: {token!r} is "
            f"{ours[token]} for the policy and {found} in the {reader}. {remedy}"
        )

"""Supervised fine-tuning data: reads, checks and tokenizes rows, and marks the tokens that are trained on.

A row is a list of chat messages, all of whose assistant messages are trained on, or a question and its answer. The chat
template is applied turn by turn and a question is tokenized separately, exactly as for generation, so that training and
generation see the same tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from trainer.data.row_formats import Chat, check_prompt, check_text_only, value_at
from trainer.data.sources import read_rows
from verl_lite.config import SFTDataConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.policy.chat_template import render_chats
from workers.policy.tokenizer import NO_TEMPLATE, plain_template

COMPLETION = "completion"  # TRL's name for the answer column


@dataclass(frozen=True)
class Example:
    """One sequence. prompt: tokens before the first trained token. response: the remaining tokens. mask: 1 for each
    response token that is trained on, else 0."""

    prompt: list[int]
    response: list[int]
    mask: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def load_examples(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig, *, option: str
) -> list[Example]:
    """Loads all sequences of the files. option: the configuration key that lists the files, for messages.

    Raises UserError if a file, column or row is unusable, or if a sequence is longer than data.max_length and
    data.truncation is "error".
    """
    examples = []
    for row, where in rows_of(files, option):
        chat, first = read_chat(row, config, where)
        example = encode_chat(chat, tokenizer, where, first)
        excess = len(example) - config.max_length
        if excess > 0 and config.truncation == "error":
            raise UserError(
                f"{where} has {len(example)} tokens, more than data.max_length={config.max_length}. Raise it, or set "
                "data.truncation=right (cut the end off) or drop (leave such rows out)"
            )
        kept = len(example.response) - max(excess, 0)
        if excess <= 0 or (config.truncation == "right" and kept > 0):
            examples.append(Example(example.prompt, example.response[:kept], example.mask[:kept]))
    if not examples:
        raise UserError(f"{option}={list(files)}: no rows are left; expected at least one")
    return examples


def rows_of(files: Sequence[str], option: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields each row of the files with its location for messages. Raises UserError for an unreadable file."""
    for path in files:
        for index, row in enumerate(read_rows(path, option)):
            where = f"{option}: row {index} of {path}"
            check_text_only(row, where)
            yield row, where


def read_chat(row: dict[str, Any], config: SFTDataConfig, where: str) -> tuple[Chat, int]:
    """Returns the chat of a row and the index of the first message that may be trained on: the messages column and 0,
    else the prompt column followed by the response (or TRL's completion) column, and the length of the prompt."""
    if row.get(config.messages_key) is not None:
        chat = row[config.messages_key]
        _check_answer(chat, f"{where}, column {config.messages_key!r}")
        return chat, 0
    key = config.response_key if value_at(row, config.response_key) is not None else COMPLETION
    prompt, response = value_at(row, config.prompt_key), value_at(row, key)
    if prompt is None or not isinstance(response, str | list):
        raise UserError(
            f"{where}: there is neither a chat in column {config.messages_key!r} (data.messages_key) nor a prompt in "
            f"{config.prompt_key!r} (data.prompt_key) with an answer, text or messages, in {config.response_key!r} "
            f"(data.response_key) or {COMPLETION!r}; columns found: {', '.join(row)}. A correct row: "
            '{"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]}'
        )
    question = question_of(prompt, f"{where}, column {config.prompt_key!r}")
    answer = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
    _check_answer(answer, f"{where}, column {key!r}")
    return [*question, *answer], len(question)


def _check_answer(chat: Any, where: str) -> None:
    """Raises UserError unless `chat` is a list of messages with at least one assistant message."""
    check_prompt(chat, where)
    if not any(message["role"] == "assistant" for message in chat):
        raise UserError(f"{where}: there is no assistant message, so there is nothing to train on")


def question_of(prompt: Any, where: str) -> Chat:
    """Returns a prompt as messages; plain text becomes one user message. Raises UserError for any other type."""
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    check_prompt(chat, where)
    return chat


def encode_chat(chat: Chat, tokenizer: PreTrainedTokenizerBase, where: str, first: int = 0) -> Example:
    """Tokenizes a chat and marks the tokens to train on: assistant messages from index `first`.

    Each such message is trained on up to and including its end-of-turn token. Text that the template writes after that
    token, such as a newline, is context only. If the template writes no end-of-turn token, the tokenizer's is added.
    Raises UserError if the template changes earlier turns when later turns follow.
    """
    tokens: list[int] = []
    mask: list[int] = []
    done = ""
    for place, message in enumerate(chat):
        if message["role"] != "assistant" or place < first:
            continue
        for turns, learnt in ((chat[:place], False), (chat[: place + 1], True)):
            text = render(turns, tokenizer, is_question=not learnt)
            if not text.startswith(done):
                raise UserError(
                    f"{where}: the chat template renders earlier turns differently when later turns follow, so one row "
                    "cannot train several turns; split the row into one row for each assistant message"
                )
            new = encode_text(text[len(done) :], tokenizer)
            kept = turn_of(new, tokenizer) if learnt else new
            tokens += kept + new[len(kept) :]
            mask += [int(learnt)] * len(kept) + [0] * (len(new) - len(kept))
            done = text
    start = mask.index(1)
    return Example(tokens[:start], tokens[start:], mask[start:])


def render(chat: Chat, tokenizer: PreTrainedTokenizerBase, *, is_question: bool) -> str:
    """Returns the text of a chat under the chat template, for a question including the generation prompt. Without a
    template, the text is the content of the messages; more than two messages are then a UserError."""
    if tokenizer.chat_template is None and len(chat) > 2:
        raise UserError(NO_TEMPLATE.format("chats of several messages"))
    template = tokenizer.chat_template or plain_template(tokenizer)
    return render_chats(tokenizer, [chat], chat_template=template, add_generation_prompt=is_question)[0]


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the token ids of a text, without the special tokens that a tokenizer adds by default."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def turn_of(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns an answer's tokens up to its last end-of-turn token, which is appended if the answer has none."""
    ends = [place for place, token in enumerate(tokens) if token == tokenizer.eos_token_id]
    return tokens[: ends[-1] + 1] if ends else [*tokens, tokenizer.eos_token_id]


def collate(examples: Sequence[Example], pad_token_id: int) -> DataProto:
    """Collates sequences into a batch with the columns of a rollout.

    Prompts are left-padded to (B, P) and responses right-padded to (B, R), where P and R are the longest lengths in
    the batch. response_mask is 1 for tokens that are trained on.
    """

    def padded(rows: Iterable[Sequence[int]], value: int, side: str = "right") -> torch.Tensor:
        tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)

    responses = padded((example.response for example in examples), pad_token_id)
    ids = torch.cat([padded((example.prompt for example in examples), pad_token_id, "left"), responses], dim=1)
    is_prompt = padded(([1] * len(example.prompt) for example in examples), 0, "left")
    attention = torch.cat([is_prompt, padded(([1] * len(example.response) for example in examples), 0)], dim=1)
    columns = {"input_ids": ids, "attention_mask": attention, "responses": responses}
    columns["position_ids"] = (attention.cumsum(1) - 1).clamp(min=0)
    return DataProto.from_dict(columns | {"response_mask": padded((example.mask for example in examples), 0)})

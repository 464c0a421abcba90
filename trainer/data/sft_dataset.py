"""The rows of supervised fine-tuning, read, checked and tokenised: which tokens are given, and which are learnt.

A row is a list of chat messages, in which everything that the assistant says is learnt, or a question and its answer.
The chat template is applied piece by piece: a question is tokenised on its own, exactly as it will be when the model is
asked it, so training and generation see the same tokens.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from trainer.data.row_formats import Chat, check_prompt, value_at
from trainer.data.sources import read_rows
from verl_lite.config import SFTDataConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.policy.chat_template import render_chats
from workers.policy.tokenizer import NO_TEMPLATE, plain_template

COMPLETION = "completion"  # TRL's name of the answer


@dataclass(frozen=True)
class Example:
    """One sequence. prompt: tokens up to the first learnt one; response: the rest; mask: 1 where a token is learnt."""

    prompt: list[int]
    response: list[int]
    mask: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def load_examples(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig, *, option: str
) -> list[Example]:
    """All sequences of the files.

    Args:
        option: the configuration key the files came from, for messages.
    Raises:
        UserError: for a file, column or row that cannot be used, and for a sequence longer than data.max_length unless
            data.truncation says what to do with it.
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
    """Each row of the files, and where it stands, for messages. Raises UserError for a file that cannot be read."""
    for path in files:
        for index, row in enumerate(read_rows(path, option)):
            yield row, f"{option}: row {index} of {path}"


def read_chat(row: dict[str, Any], config: SFTDataConfig, where: str) -> tuple[Chat, int]:
    """The chat of a row, from its messages column or else from its prompt and response (or TRL's completion) columns;
    and the place of the first message that may be learnt, which is 0 or the one behind the prompt."""
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
    """Raises UserError unless these are messages of which the assistant says something."""
    check_prompt(chat, where)
    if not any(message["role"] == "assistant" for message in chat):
        raise UserError(f"{where}: no message is the assistant's, nothing to learn")


def question_of(prompt: Any, where: str) -> Chat:
    """A prompt as messages; text is the user's. Raises UserError for what is neither."""
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    check_prompt(chat, where)
    return chat


def encode_chat(chat: Chat, tokenizer: PreTrainedTokenizerBase, where: str, first: int = 0) -> Example:
    """Tokens of a chat; learnt are the assistant's from message `first` on, each up to and with its end-of-turn token.

    What a template writes behind that token (a newline, say) is context only. A template that writes no end-of-turn
    token gets the tokenizer's. Raises UserError if the template rewrites earlier turns when later ones come.
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
                    f"{where}: the chat template writes earlier turns differently once later ones follow, so that "
                    "several turns cannot be learnt from one row; split the row into one row for each assistant message"
                )
            new = encode_text(text[len(done) :], tokenizer)
            kept = turn_of(new, tokenizer) if learnt else new
            tokens += kept + new[len(kept) :]
            mask += [int(learnt)] * len(kept) + [0] * (len(new) - len(kept))
            done = text
    start = mask.index(1)
    return Example(tokens[:start], tokens[start:], mask[start:])


def render(chat: Chat, tokenizer: PreTrainedTokenizerBase, *, is_question: bool) -> str:
    """The chat as the template writes it, with the beginning of an answer behind a question. Without a template a
    question and its answer are their texts; UserError for more messages."""
    if tokenizer.chat_template is None and len(chat) > 2:
        raise UserError(NO_TEMPLATE.format("chats of several messages"))
    template = tokenizer.chat_template or plain_template(tokenizer)
    return render_chats(tokenizer, [chat], chat_template=template, add_generation_prompt=is_question)[0]


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Its tokens, without those that a tokenizer adds by itself."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) if text else []


def turn_of(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """An answer up to and with its last end-of-turn token, which is added where the template writes none."""
    ends = [place for place, token in enumerate(tokens) if token == tokenizer.eos_token_id]
    return tokens[: ends[-1] + 1] if ends else [*tokens, tokenizer.eos_token_id]


def collate(examples: Sequence[Example], pad_token_id: int) -> DataProto:
    """A batch with the columns of a rollout: prompts left-padded to (B, P), responses right-padded to (B, R).

    response_mask is 1 on learnt tokens; P and R are the longest of the batch.
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

"""Preference data: reads, checks and tokenizes pairs of a chosen and a rejected answer.

A row has a question and two answers, in any of the common public formats (see `read_pair`). Question and answer are
tokenized separately, because a policy also receives the question as tokens and samples the tokens of the answer.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from trainer.data.chat_tokens import (
    Arguments,
    encode_and_cut,
    end_of_answer,
    ends_of_answers,
    render,
)
from trainer.data.chats import Chat, read_messages
from trainer.data.row_formats import is_missing, value_at
from trainer.data.sft_dataset import (
    LOSS_MASKS,
    NO_ARGUMENTS,
    Example,
    Report,
    as_answer,
    collate,
    found_columns,
    question_of,
    row_report,
    rows_of,
    split_loss_mask,
    template_arguments,
)
from trainer.data.sources import Row
from trainer.data.template_checks import check_calls_shown, check_messages_shown
from verl_lite.config import PreferenceDataConfig, SFTDataConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.supervised.pairs import MARGIN

PairDataConfig = PreferenceDataConfig | SFTDataConfig


@dataclass(frozen=True)
class Pair:
    """Two sequences to score, with a mask of 1 on every token of the answers.

    Attributes:
        chosen: The question and the better answer.
        rejected: The question and the worse answer.
        margin: The amount by which the loss requires the chosen score to exceed the rejected score.
    """

    chosen: Example
    rejected: Example
    margin: float = 0.0

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)

    @property
    def texts(self) -> tuple[Example, ...]:
        """The two sequences."""
        return self.chosen, self.rejected


CheckPair = Callable[[Pair, str], None]
"""Called with a pair and its location; raises UserError if the loss cannot use the pair."""


def load_pairs(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: PairDataConfig,
    score_at: str = "end_of_turn",
    *,
    option: str,
    check: CheckPair = lambda pair, where: None,
    report: Report = lambda line: None,
) -> list[Pair]:
    """Loads all pairs of the files.

    Args:
        files: Paths of the files.
        tokenizer: The tokenizer, with its chat template.
        config: Section `data` of the options.
        score_at: The end of an answer, see `encode_answer`.
        option: The configuration key that lists the files, for messages.
        check: Further check of each pair.
        report: Receives a sentence on the rows.

    Raises:
        UserError: If a file, column or row is unusable, or if question and answer together are longer than
            data.max_length (data.truncation=drop drops such pairs instead).
    """
    pairs: list[Pair] = []
    rows_read = 0
    for row, where in rows_of(files, option):
        chosen_chat, rejected_chat = read_pair(row, config, where)
        arguments = template_arguments(row, tokenizer, config, chosen_chat, where)
        chosen = encode_answer(chosen_chat, tokenizer, score_at, where, arguments)
        rejected = encode_answer(rejected_chat, tokenizer, score_at, where, arguments)
        # tokens are compared, because a template can write different messages alike
        chosen_tokens = chosen.prompt + chosen.response
        if chosen_tokens == rejected.prompt + rejected.response:
            raise UserError(f"{where}: both answers have the same tokens, so neither is better; remove such rows")
        pair = Pair(chosen, rejected, _margin(row, where))
        check(pair, where)
        rows_read += 1

        # overlong answers are never truncated: a truncated answer would be a different answer
        longest = max(len(chosen), len(rejected))
        if longest <= config.max_length:
            pairs.append(pair)
        elif config.truncation == "error":
            raise UserError(
                f"{where}: question and answer together have {longest} tokens, more than data.max_length="
                f"{config.max_length}. Raise it, or set data.truncation=drop to leave such pairs out"
            )
    if not pairs:
        raise UserError(f"{option}={list(files)}: no pairs are left; expected at least one")
    report(row_report(option, pairs, rows_read, cut=0, config=config))
    return pairs


def _margin(row: Row, where: str) -> float:
    """Returns the row's value in TRL's column `margin`, or 0 without one."""
    margin = row.get(MARGIN)
    # parquet gives each row the columns of all rows
    if margin is None:
        return 0.0
    # Python counts a bool as an int
    is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
    # json and parquet can hold NaN and infinity, with which no loss is finite
    if not is_number or not math.isfinite(margin):
        raise UserError(f"{where}, column {MARGIN!r}: found {margin!r}, expected a finite number; leave the column out")
    return float(margin)


def read_pair(row: Row, config: PairDataConfig, where: str) -> tuple[Chat, Chat]:
    """Returns the chosen and the rejected chat of a row. Each ends with a message of the assistant.

    An answer is text or a list of messages. Text, and a list that begins with an assistant message, continue the row's
    prompt (text or messages), which is then required. Any other list is a complete chat; a prompt column is ignored.

    Args:
        row: The row.
        config: Section `data` of the options.
        where: Location of the row, for messages.

    Raises:
        UserError: If a column is missing or holds anything else, or if an answer has loss_mask 0.
    """
    chosen = _chat(row, config.chosen_key, "chosen_key", config, where)
    rejected = _chat(row, config.rejected_key, "rejected_key", config, where)
    return chosen, rejected


def _chat(row: Row, key: str, option: str, config: PairDataConfig, where: str) -> Chat:
    """Returns the chat that ends with the answer in a column.

    Args:
        row: The row.
        key: Name of the column.
        option: The option of section `data` that names the column, for messages.
        config: Section `data` of the options.
        where: Location of the row, for messages.
    """
    column = f"{where}, column {key!r}"
    answer = _column(row, key, option, where)
    messages = read_messages(as_answer(answer, column), column)
    if messages[-1]["role"] != "assistant":
        raise UserError(
            f"{column}: its last message is of role {messages[-1]['role']!r}; expected 'assistant', because an answer "
            "is the assistant's"
        )
    # text, or a list that continues the prompt; any other list is a complete chat
    if messages[0]["role"] == "assistant":
        prompt = _column(row, config.prompt_key, "prompt_key", where)
        question = question_of(prompt, f"{where}, column {config.prompt_key!r}")
        messages = [*question, *messages]

    # masks of earlier messages change nothing, because the loss covers only the answer
    may_be_learnt, chat = split_loss_mask(messages, column)
    if not may_be_learnt[-1]:
        raise UserError(
            f"{column}: the answer has {' or '.join(LOSS_MASKS)} 0, and the loss compares whole answers; leave the row "
            "out"
        )
    return chat


def _column(row: Row, key: str, option: str, where: str) -> object:
    """Returns the value of a column.

    Args:
        row: The row.
        key: Name of the column.
        option: The option of section `data` that names the column, for the message.
        where: Location of the row, for the message.

    Raises:
        UserError: If the row lacks the column, or has no value there.
    """
    value = value_at(row, key)
    if is_missing(value):
        lacking = "value in column" if key in row else "column"
        raise UserError(
            f"{where}: there is no {lacking} {key!r} (data.{option}); {found_columns(row)}. A correct row: "
            '{"prompt": "2+2=", "chosen": "4", "rejected": "5"}'
        )
    return value


def encode_answer(
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
    score_at: str,
    where: str,
    arguments: Arguments = NO_ARGUMENTS,
) -> Example:
    """Tokenizes a chat whose last message is the answer.

    Args:
        chat: checked messages.
        tokenizer: the tokenizer, with its chat template.
        score_at: "end_of_turn" ends the answer at that token, without the text that the template writes after it.
        where: place of the row, for messages.
        arguments: arguments of the chat template.

    Raises:
        UserError: if the chat template refuses the chat, leaves out its tool calls, a message or the reasoning of the
            answer, or renders the question differently when the answer follows.
    """
    # with the generation prompt, after which a policy samples its answer
    question = render(chat[:-1], tokenizer, where, is_question=True, arguments=arguments)
    whole = render(chat, tokenizer, where, is_question=False, arguments=arguments)
    check_calls_shown(chat, tokenizer, where, arguments)
    check_messages_shown(chat, whole, tokenizer, where, arguments, learnt=[len(chat) - 1])
    # the answer is sampled after exactly the tokens of the question
    if not whole.startswith(question):
        raise UserError(
            f"{where}: the chat template renders the question differently when an answer follows, so training "
            "would use other tokens than generation; use another template"
        )
    # cut where the answer begins, so that no token belongs to both
    tokens, [start] = encode_and_cut(whole, [len(question)], tokenizer)
    prompt = tokens[:start]
    response = tokens[start:]
    if score_at == "end_of_turn":
        end = end_of_answer(response, 0, len(response), tokenizer, arguments)
        if end is not None:
            # without the text that the template writes after the end, such as a newline
            response = response[:end]
        else:
            # the template writes no end, so it is added, as in `sft_dataset.encode_chat`
            ends = ends_of_answers(tokenizer, arguments)
            response = [*response, ends[0]]
    return Example(prompt, response, [1] * len(response))


def collate_pairs(pairs: Sequence[Pair], pad_token_id: int) -> DataProto:
    """Collates pairs into a batch with the columns of `trainer.data.sft_dataset.collate`.

    Each row holds the chosen sequence followed by the rejected sequence, so rows are twice as wide. `texts_of` in
    `workers.supervised.pairs` separates the two. A pair is one row, because the plan of a batch never divides a row
    between micro-batches.
    """
    texts: list[Example] = []
    for pair in pairs:
        texts += pair.texts
    batch = collate(texts, pad_token_id).batch  # (2n, L)
    columns: dict[str, torch.Tensor] = {}
    for name in map(str, batch.keys()):
        columns[name] = batch[name].reshape(len(pairs), -1)  # (n, 2L)
    margins = [pair.margin for pair in pairs]
    columns[MARGIN] = torch.tensor(margins)
    return DataProto.from_dict(columns)

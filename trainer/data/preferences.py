"""Pairs of answers, of which one is the better: read, checked and tokenised.

A row has a question and two answers, in any of the forms in which such data is published (see `read_pair`). Question
and answer are tokenised each on its own, as a policy reads the one and samples the other.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from trainer.data.row_formats import check_prompt
from trainer.data.sft_dataset import Chat, Example, collate, encode_text, question_of, render, rows_of, turn_of
from verl_lite.config import PreferenceDataConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto

MARGIN = "margin"


@dataclass(frozen=True)
class Pair:
    """Two texts to be scored. Every token of an answer is in its mask. margin: by how much the first score is to exceed
    the second in the loss."""

    chosen: Example
    rejected: Example
    margin: float = 0.0

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)


def load_pairs(
    files: Sequence[str], tokenizer: PreTrainedTokenizerBase, config: PreferenceDataConfig, *, option: str
) -> list[Pair]:
    """All pairs of the files. option: the configuration key the files came from, for messages.

    Raises UserError for a file, column or row that cannot be used, and for an answer that with its question is longer
    than data.max_length, unless data.truncation=drop: a cut answer would be another one.
    """
    pairs: list[Pair] = []
    for row, where in rows_of(files, option):
        chats = read_pair(row, config, where)
        chosen, rejected = (encode_answer(chat, tokenizer, config.score_at, where) for chat in chats)
        if chosen.prompt + chosen.response == rejected.prompt + rejected.response:
            raise UserError(
                f"{where}: both answers have the same tokens, and neither is the better; leave such rows out"
            )
        longest = max(len(chosen), len(rejected))
        if longest <= config.max_length:
            pairs.append(Pair(chosen, rejected, _margin(row, where)))
        elif config.truncation == "error":
            raise UserError(
                f"{where} has an answer of {longest} tokens with its question, more than data.max_length="
                f"{config.max_length}. Raise it, or set data.truncation=drop to leave such pairs out"
            )
    if not pairs:
        raise UserError(f"{option}={list(files)}: no pairs are left; expected at least one")
    return pairs


def _margin(row: dict[str, Any], where: str) -> float:
    """TRL's column `margin`; 0 without it."""
    margin = row.get(MARGIN, 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise UserError(f"{where}, column {MARGIN!r}: found {margin!r}, expected a finite number; leave the column out")
    return float(margin)


def read_pair(row: dict[str, Any], config: PreferenceDataConfig, where: str) -> tuple[Chat, Chat]:
    """The two chats of a row, the better one first; each ends with the assistant's answer.

    An answer is text or a list of messages. Text, and messages that begin with the assistant's, answer the prompt
    (text or messages), which the row then has to have. Other lists are whole chats, and a prompt beside them says
    nothing new.
    """
    better, worse = (config.chosen_key, "chosen_key"), (config.rejected_key, "rejected_key")
    return _chat(row, *better, config, where), _chat(row, *worse, config, where)


def _chat(row: dict[str, Any], key: str, option: str, config: PreferenceDataConfig, where: str) -> Chat:
    answer, place = _column(row, key, option, where), f"{where}, column {key!r}"
    if isinstance(answer, str):
        answer = [{"role": "assistant", "content": answer}]
    check_prompt(answer, place)
    if answer[-1]["role"] != "assistant":
        found = f"its last message is of role {answer[-1]['role']!r}"
        raise UserError(f"{place}: {found}; expected the assistant's, which is what is scored")
    if answer[0]["role"] != "assistant":
        return answer
    prompt = _column(row, config.prompt_key, "prompt_key", where)
    return [*question_of(prompt, f"{where}, column {config.prompt_key!r}"), *answer]


def _column(row: dict[str, Any], key: str, option: str, where: str) -> Any:
    if row.get(key) is None:
        raise UserError(
            f"{where}: there is no column {key!r} (data.{option}); columns found: {', '.join(row)}. A correct row: "
            '{"prompt": "2+2=", "chosen": "4", "rejected": "5"}'
        )
    return row[key]


def encode_answer(chat: Chat, tokenizer: PreTrainedTokenizerBase, score_at: str, where: str) -> Example:
    """The tokens of a chat's last message behind those of the rest. score_at: where the answer's tokens end.

    Raises UserError if the chat template writes the rest differently once the answer follows.
    """
    question, whole = render(chat[:-1], tokenizer, is_question=True), render(chat, tokenizer, is_question=False)
    if not whole.startswith(question):
        raise UserError(
            f"{where}: under the chat template the question with its answer does not begin with the question as it is "
            "asked, so that the model would score other tokens than a policy reads; use another template"
        )
    response = encode_text(whole[len(question) :], tokenizer)
    response = turn_of(response, tokenizer) if score_at == "end_of_turn" else response
    return Example(encode_text(question, tokenizer), response, [1] * len(response))


def collate_pairs(pairs: Sequence[Pair], pad_token_id: int) -> DataProto:
    """A batch with the columns of `trainer.data.sft_dataset.collate`. Each row holds the chosen text and, to its right,
    the rejected text, so rows are twice as wide. `texts_of` separates the two."""
    texts = collate([text for pair in pairs for text in (pair.chosen, pair.rejected)], pad_token_id)
    columns = {str(name): texts.batch[name].reshape(len(pairs), -1) for name in texts.batch.keys()}
    return DataProto.from_dict(columns | {MARGIN: torch.tensor([pair.margin for pair in pairs])})


def texts_of(data: DataProto) -> DataProto:
    """A planned batch of (n,) pairs as one of (2n,) texts, chosen and rejected in turn. A pair was planned as one row,
    so its two texts are in the same micro-batch."""
    of_pair = {"mini_batch", "micro_batch", "is_padding", MARGIN}
    columns: dict[str, torch.Tensor] = {}
    for name in map(str, data.batch.keys()):
        column = data.batch[name]
        columns[name] = column.repeat_interleave(2, 0) if name in of_pair else column.reshape(2 * len(data), -1)
    return DataProto.from_dict(columns, meta_info=data.meta_info)

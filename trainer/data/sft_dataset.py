"""Supervised fine-tuning data: reads, checks and tokenizes rows, and marks the tokens that are trained on.

A row is a list of chat messages, a question and its answer, or plain text. The chat template is applied turn by turn
and a question is tokenized separately, exactly as for generation, so that training and generation see the same tokens.
data.assistant_only_loss and data.completion_only_loss choose the tokens in the loss.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
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

COMPLETION, TEXT = "completion", "text"  # TRL's names for the answer column and for plain text
ALL_TOKENS = "set data.assistant_only_loss=false and data.completion_only_loss=false to train on all tokens"


@dataclass(frozen=True)
class Example:
    """One sequence. prompt: tokens before the first trained token. response: the remaining tokens. mask: 1 for each
    response token that is trained on, else 0."""

    prompt: list[int]
    response: list[int]
    mask: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)

    @property
    def texts(self) -> tuple["Example", ...]:
        """The sequences of a row, as in `trainer.data.preferences.Pair`."""
        return (self,)


Report = Callable[[str], None]
"""Called with a sentence on the rows of an option's files."""


def load_examples(
    files: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    config: SFTDataConfig,
    *,
    option: str,
    report: Report = lambda line: None,
) -> list[Example]:
    """Loads all sequences of the files. option: the configuration key that lists the files, for messages.

    Raises UserError if a file, column or row is unusable, if a row has no token in the loss, or if a sequence is longer
    than data.max_length and data.truncation is "error".
    """
    examples, read, cut = [], 0, 0
    for row, where in rows_of(files, option):
        example = read_example(row, tokenizer, config, where)
        read += 1
        excess = len(example) - config.max_length
        if excess > 0 and config.truncation == "error":
            raise UserError(
                f"{where} has {len(example)} tokens, more than data.max_length={config.max_length}. Raise it, or set "
                "data.truncation=right (cut the end off) or drop (leave such rows out)"
            )
        kept = len(example.response) - max(excess, 0)
        if excess <= 0 or (config.truncation == "right" and kept > 0):
            examples.append(Example(example.prompt, example.response[:kept], example.mask[:kept]))
            cut += excess > 0
    if not examples:
        raise UserError(f"{option}={list(files)}: no rows are left; expected at least one")
    report(row_report(option, examples, read, cut, config))
    return examples


def row_report(option: str, rows: Sequence[Any], read: int, cut: int, config: Any) -> str:
    """Returns a sentence on the rows of an option's files: number, tokens, share in the loss, and dropped and cut rows.

    rows: the kept rows, examples or pairs. read: number of rows in the files. cut: number of rows that are cut off.
    config: section `data` of the options.
    """
    lengths, unit = [len(row) for row in rows], "pairs" if len(rows[0].texts) == 2 else "rows"
    share = sum(sum(text.mask) for row in rows for text in row.texts) / sum(lengths)
    report = f"{option}: {len(rows):,} {unit} of {min(lengths)} to {max(lengths)} tokens, {sum(lengths):,} in total, "
    report += f"{share:.1%} of them in the loss"
    if dropped := read - len(rows):
        limit, is_cut = f"data.max_length={config.max_length}", config.truncation == "right"
        why = f"no token in the loss is left within {limit}" if is_cut else f"data.truncation=drop: longer than {limit}"
        report += f"; dropped: {dropped:,} ({why})"
    return report + (f"; cut off at {config.max_length} tokens: {cut:,} (data.truncation=right)" if cut else "")


def rows_of(files: Sequence[str], option: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields each row of the files with its location for messages. Raises UserError for an unreadable file."""
    for path in files:
        for index, row in enumerate(read_rows(path, option)):
            where = f"{option}: row {index} of {path}"
            check_text_only(row, where)
            yield row, where


def read_example(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig, where: str) -> Example:
    """Returns the sequence of a row of any format. Raises UserError if the row is unusable."""
    is_text = all(value_at(row, key) is None for key in (config.messages_key, config.prompt_key))
    if is_text and row.get(TEXT) is not None:
        if config.completion_only_loss:
            raise UserError(
                f"{where}: plain text has no completion, so data.completion_only_loss=true leaves no token in the "
                "loss; leave the option out, or write the row with the columns prompt and completion"
            )
        return encode_plain_text(row[TEXT], tokenizer, f"{where}, column {TEXT!r}")
    chat, first = read_chat(row, config, where)
    return encode_chat(chat, tokenizer, where, first, assistant_only=config.assistant_only_loss)


def encode_plain_text(text: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> Example:
    """Tokenizes a text for language modeling, as TRL does: with the tokenizer's special tokens and the end-of-sequence
    token. All tokens are in the loss except the first, which nothing predicts."""
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: found {text!r:.200}, expected text; remove such rows")
    tokens = list(tokenizer(text)["input_ids"])
    tokens += [tokenizer.eos_token_id] * (tokens[-1] != tokenizer.eos_token_id)
    return Example(tokens[:1], tokens[1:], [1] * (len(tokens) - 1))


def read_chat(row: dict[str, Any], config: SFTDataConfig, where: str) -> tuple[Chat, int]:
    """Returns the chat of a row and the index of the first message in the loss.

    The chat is the messages column, or the prompt column followed by the response (or TRL's completion) column. The
    completion is the last assistant message of the former and the second column of the latter; by default, the loss is
    on all messages of the former and on the completion of the latter.
    """
    needs_assistant = config.assistant_only_loss
    if row.get(config.messages_key) is not None:
        chat = row[config.messages_key]
        _check_answer(chat, f"{where}, column {config.messages_key!r}", needs_assistant or config.completion_only_loss)
        places = [place for place, message in enumerate(chat) if message["role"] == "assistant"]
        return chat, places[-1] if config.completion_only_loss else 0
    key = config.response_key if value_at(row, config.response_key) is not None else COMPLETION
    prompt, response = value_at(row, config.prompt_key), value_at(row, key)
    if prompt is None or not isinstance(response, str | list):
        raise UserError(
            f"{where}: there is neither a chat in column {config.messages_key!r} (data.messages_key) nor a prompt in "
            f"{config.prompt_key!r} (data.prompt_key) with an answer, text or messages, in {config.response_key!r} "
            f"(data.response_key) or {COMPLETION!r}, nor plain text in {TEXT!r}; columns found: {', '.join(row)}. "
            'A correct row: {"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]}'
        )
    question = question_of(prompt, f"{where}, column {config.prompt_key!r}")
    answer = [{"role": "assistant", "content": response}] if isinstance(response, str) else response
    _check_answer(answer, f"{where}, column {key!r}", needs_assistant)
    return [*question, *answer], 0 if config.completion_only_loss is False else len(question)


def _check_answer(chat: Any, where: str, needs_assistant: bool | None) -> None:
    """Raises UserError unless `chat` is a list of messages, with an assistant message if the mask needs one."""
    check_prompt(chat, where)
    if needs_assistant and not any(message["role"] == "assistant" for message in chat):
        raise UserError(
            f"{where}: there is no assistant message, so no token is in the loss; remove such rows, or {ALL_TOKENS}"
        )


def question_of(prompt: Any, where: str) -> Chat:
    """Returns a prompt as messages; plain text becomes one user message. Raises UserError for any other type."""
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    check_prompt(chat, where)
    return chat


def encode_chat(
    chat: Chat, tokenizer: PreTrainedTokenizerBase, where: str, first: int = 0, *, assistant_only: bool = True
) -> Example:
    """Tokenizes a chat and marks the tokens in the loss.

    With assistant_only, these are the assistant messages from index `first`, each up to and including its end-of-turn
    token. Text that the template writes after that token, such as a newline, is context only. Otherwise they are all
    tokens from message `first`. If the template writes no end-of-turn token, the tokenizer's is added. Raises UserError
    if the template changes earlier turns when later turns follow.
    """
    # parts that are tokenized separately: end of their messages, if they end with a generation prompt, mask
    parts: list[tuple[int, bool, bool]] = []
    for place in (place for place, message in enumerate(chat) if message["role"] == "assistant" and place >= first):
        parts.append((place, True, not assistant_only and (place > first or first == 0)))
        parts.append((place + 1, False, True))
    if not assistant_only and first and chat[first]["role"] != "assistant":
        parts.insert(0, (first, False, False))
    if not assistant_only and chat[-1]["role"] != "assistant":
        parts.append((len(chat), False, True))
    tokens: list[int] = []
    mask: list[int] = []
    done = ""
    for end, is_question, learnt in parts:
        text = render(chat[:end], tokenizer, is_question=is_question)
        if not text.startswith(done):
            raise UserError(
                f"{where}: the chat template renders earlier turns differently when later turns follow, so one row "
                "cannot train several turns; split the row into one row for each assistant message, or set "
                "data.completion_only_loss=true to train on the last one"
            )
        new = encode_text(text[len(done) :], tokenizer)
        is_answer = learnt and not is_question and chat[end - 1]["role"] == "assistant"
        kept = turn_of(new, tokenizer) if is_answer else new
        after = new[len(kept) :]
        tokens += kept + after
        mask += [int(learnt)] * len(kept) + [int(learnt and not assistant_only)] * len(after)
        done = text
    start = max(1, mask.index(1)) if 1 in mask else len(mask)  # nothing predicts the first token
    if start == len(mask):
        raise UserError(f"{where}: no token is in the loss; remove such rows, or {ALL_TOKENS}")
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

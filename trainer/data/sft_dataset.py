"""Supervised fine-tuning data: reads, checks and tokenizes rows, and marks the tokens that are trained on.

A row is a list of chat messages, a question and its answer, or plain text. A chat is tokenized as a whole, and cut
where generation would begin an answer (`chat_tokens`), so that training and generation see the same tokens.
data.assistant_only_loss and data.completion_only_loss choose the tokens in the loss.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from trainer.data.chat_tokens import (
    Arguments,
    ChatText,
    encode_and_cut,
    end_of_answer,
    ends_of_answers,
)
from trainer.data.chats import (
    Chat,
    read_messages,
    read_tools,
    read_tools_file,
    refuse_messages_as_text,
    wrong_value,
)
from trainer.data.row_formats import check_text_only, is_missing, own_template_arguments, value_at
from trainer.data.sources import Row, read_rows
from trainer.data.template_checks import check_calls_shown, check_messages_shown, check_tools_shown
from verl_lite.config import PreferenceDataConfig, SFTDataConfig, SupervisedDataConfig
from verl_lite.errors import UserError
from verl_lite.json_types import ToolSchema
from verl_lite.protocol import DataProto

# TRL's names for the answer column and for plain text
COMPLETION = "completion"
TEXT = "text"
LOSS_MASKS = ("loss_mask", "weight")  # of verl and of OpenAI
NO_ARGUMENTS: Arguments = MappingProxyType({})
ALL_TOKENS = "set data.assistant_only_loss=false and data.completion_only_loss=false to train on all tokens"


@dataclass(frozen=True)
class Example:
    """One sequence.

    Attributes:
        prompt: Tokens before the first trained token.
        response: The remaining tokens.
        mask: 1 for each response token that is trained on, else 0.
    """

    prompt: list[int]
    response: list[int]
    mask: list[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)

    @property
    def texts(self) -> tuple["Example", ...]:
        """The sequences of a row, as in `trainer.data.preferences.Pair`."""
        return (self,)


class TrainingRow(Protocol):
    """One row of supervised training: an `Example`, or a pair of two. Its length is the number of its tokens."""

    def __len__(self) -> int: ...

    @property
    def texts(self) -> tuple[Example, ...]: ...


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
    """Loads all sequences of the files.

    Args:
        files: Paths of the files.
        tokenizer: The tokenizer, with its chat template.
        config: Section `data` of the options.
        option: The configuration key that lists the files, for messages.
        report: Receives a sentence on the rows.

    Raises:
        UserError: If a file, column or row is unusable, if a row has no token in the loss, or if a sequence is longer
            than data.max_length and data.truncation is "error".
    """
    examples = []
    rows_read = 0
    rows_cut = 0
    for row, where in rows_of(files, option):
        example = read_example(row, tokenizer, config, where)
        rows_read += 1
        surplus = len(example) - config.max_length
        if surplus <= 0:
            examples.append(example)
            continue
        if config.truncation == "error":
            raise UserError(
                f"{where} has {len(example)} tokens, more than data.max_length={config.max_length}. Raise it, or set "
                "data.truncation=right (cut the end off) or drop (leave such rows out)"
            )
        remaining = len(example.response) - surplus
        # a row that is cut within its prompt would have no token in the loss
        if config.truncation == "right" and remaining > 0:
            response = example.response[:remaining]
            mask = example.mask[:remaining]
            examples.append(Example(example.prompt, response, mask))
            rows_cut += 1
    if not examples:
        raise UserError(f"{option}={list(files)}: no rows are left; expected at least one")
    report(row_report(option, examples, rows_read, rows_cut, config))
    return examples


def row_report(
    option: str,
    rows: Sequence[TrainingRow],
    read: int,
    cut: int,
    config: SFTDataConfig | PreferenceDataConfig,
) -> str:
    """Returns a sentence on the rows of an option's files: number, tokens, share in the loss, and dropped and cut rows.

    Args:
        option: The configuration key that lists the files.
        rows: The remaining rows, examples or pairs.
        read: Number of rows in the files.
        cut: Number of rows that are cut off.
        config: Section `data` of the options.
    """
    unit = "pairs" if len(rows[0].texts) == 2 else "rows"
    lengths = [len(row) for row in rows]
    total = sum(lengths)
    loss_share = count_loss_tokens(rows) / total
    report = f"{option}: {len(rows):,} {unit} of {min(lengths)} to {max(lengths)} tokens, {total:,} in total, "
    report += f"{loss_share:.1%} of them in the loss"
    dropped = read - len(rows)
    if dropped and config.truncation == "right":
        report += f"; dropped: {dropped:,} (no token in the loss is left within data.max_length={config.max_length})"
    elif dropped:
        report += f"; dropped: {dropped:,} (data.truncation=drop: longer than data.max_length={config.max_length})"
    if cut:
        report += f"; cut off at {config.max_length} tokens: {cut:,} (data.truncation=right)"
    return report


def count_loss_tokens(rows: Sequence[TrainingRow]) -> int:
    """Returns the number of tokens of the rows that are in the loss."""
    total = 0
    for row in rows:
        for text in row.texts:
            total += sum(text.mask)
    return total


def rows_of(files: Sequence[str], option: str) -> Iterator[tuple[Row, str]]:
    """Yields each row of the files with its location for messages. Raises UserError for an unreadable file."""
    for path in files:
        rows = read_rows(path, option)
        for index, row in enumerate(rows):
            where = f"{option}: row {index} of {path}"
            check_text_only(row, where)
            yield row, where


def read_example(row: Row, tokenizer: PreTrainedTokenizerBase, config: SFTDataConfig, where: str) -> Example:
    """Returns the sequence of a row of any format.

    Args:
        row: The row.
        tokenizer: The tokenizer, with its chat template.
        config: Section `data` of the options.
        where: Location of the row, for messages.

    Raises:
        UserError: If the row is unusable.
    """
    has_messages = value_at(row, config.messages_key) is not None
    has_prompt = value_at(row, config.prompt_key) is not None
    # the other forms have priority, so that their rows may have a column of this name
    if row.get(TEXT) is not None and not has_messages and not has_prompt:
        if config.completion_only_loss:
            raise UserError(
                f"{where}: plain text has no completion, so data.completion_only_loss=true leaves no token in the "
                "loss; leave the option out, or write the row with the columns prompt and completion"
            )
        return encode_plain_text(row[TEXT], tokenizer, f"{where}, column {TEXT!r}")

    chat, first = read_chat(row, config, where)
    return encode_chat(
        chat,
        tokenizer,
        where,
        first,
        assistant_only=config.assistant_only_loss,
        arguments=template_arguments(row, tokenizer, config, chat, where),
    )


def template_arguments(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    config: SupervisedDataConfig,
    chat: Chat,
    where: str,
) -> Arguments:
    """Returns the arguments of the chat template for a row: data.apply_chat_template_kwargs, its own, and its tools.

    Args:
        row: the row, which may have arguments of its own (`own_template_arguments`), and in the column data.tools_key
            tool schemas. data.tools_path has those of rows without.
        tokenizer: the tokenizer.
        config: section `data` of the options.
        chat: the messages of the row.
        where: place of the row, for messages.

    Raises:
        UserError: if the arguments or the tools are invalid, or if the template does not show the tools.
    """
    arguments = {**config.apply_chat_template_kwargs, **own_template_arguments(row, where)}
    tools = None
    if config.tools_key:
        tools = row.get(config.tools_key)
    # the row's own tools have priority over those of the file
    if tools:
        arguments["tools"] = read_tools(tools, f"{where}, column {config.tools_key!r}")
    elif config.tools_path is not None:
        arguments["tools"] = _tools_of_file(config.tools_path)
    if "tools" in arguments:
        check_tools_shown(chat, tokenizer, where, arguments)
    return arguments


@functools.cache
def _tools_of_file(path: str) -> list[ToolSchema] | None:
    """Reads the file of tools once instead of once per row."""
    return read_tools_file(path)


def encode_plain_text(text: object, tokenizer: PreTrainedTokenizerBase, where: str) -> Example:
    """Tokenizes a text for language modeling, as TRL does.

    The tokenizer's special tokens and the end-of-sequence token are added. All tokens are in the loss except the first,
    which nothing predicts.

    Args:
        text: Value of the column.
        tokenizer: The tokenizer.
        where: Location of the column, for messages.

    Raises:
        UserError: If the value is no text, or the tokenizer has no token for it, or no end-of-sequence token.
    """
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: found {text!r:.200}, expected text; remove such rows")
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{where}: plain text ends with the end-of-text token, which the tokenizer of {tokenizer.name_or_path!r} "
            "lacks: set eos_token in its tokenizer_config.json"
        )
    encoding = tokenizer(text)
    tokens = list(encoding["input_ids"])
    if not tokens:
        raise UserError(
            f"{where}: the tokenizer of {tokenizer.name_or_path!r} has no token for any part of {text!r:.200}; "
            "remove such rows, or use the tokenizer of the model"
        )
    # a text that the chat template rendered begins with this token already
    if tokenizer.bos_token_id is not None and tokens[:2] == [tokenizer.bos_token_id] * 2:
        tokens = tokens[1:]
    # some tokenizers add the end themselves, and it must not be learnt twice
    if tokens[-1] != tokenizer.eos_token_id:
        tokens.append(tokenizer.eos_token_id)
    response = tokens[1:]
    return Example(tokens[:1], response, [1] * len(response))


def read_chat(row: Row, config: SFTDataConfig, where: str) -> tuple[Chat, int]:
    """Returns the chat of a row and the index of the first message in the loss.

    The chat is one of:
    - the messages column. By default, all its messages are in the loss; its completion is the last assistant message.
    - the prompt column followed by the response (or TRL's completion) column. By default, only the latter, which is the
      completion, is in the loss.

    Args:
        row: The row.
        config: Section `data` of the options.
        where: Location of the row, for messages.

    Raises:
        UserError: If the row has neither form, or no assistant message although the loss needs one.
    """
    needs_assistant = config.assistant_only_loss
    messages = value_at(row, config.messages_key)
    if messages is not None:
        column = f"{where}, column {config.messages_key!r}"
        chat = _read_answer(messages, column, needs_assistant or config.completion_only_loss)
        if not config.completion_only_loss:
            return chat, 0
        last_answer = max(index for index, message in enumerate(chat) if message["role"] == "assistant")
        return chat, last_answer

    response_key = config.response_key
    # the column of TRL is read without an option that names it
    if value_at(row, response_key) is None:
        response_key = COMPLETION
    prompt = value_at(row, config.prompt_key)
    response = value_at(row, response_key)
    # a number, for example; null and NaN of a table count as missing
    if prompt is not None and not is_missing(response) and not isinstance(response, str | list):
        raise wrong_value(f"{where}, column {response_key!r}", response, "an answer: text or messages")
    if prompt is None or is_missing(response):
        if config.chosen_key in row:
            raise UserError(
                f"{where}: found a pair of answers (column {config.chosen_key!r}), expected one answer. loss=dpo "
                f"trains on pairs; data.response_key={config.chosen_key} trains on the better answers alone"
            )
        raise UserError(
            f"{where}: there is neither a chat in column {config.messages_key!r} (data.messages_key) nor a prompt in "
            f"{config.prompt_key!r} (data.prompt_key) with an answer, text or messages, in {config.response_key!r} "
            f"(data.response_key) or {COMPLETION!r}, nor plain text in {TEXT!r}; {found_columns(row)}. "
            'A correct row: {"messages": [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": "4"}]}'
        )
    question = question_of(prompt, f"{where}, column {config.prompt_key!r}")
    response_column = f"{where}, column {response_key!r}"
    answer = _read_answer(as_answer(response, response_column), response_column, needs_assistant)
    first = len(question)
    # `is False`, because None, the default, means the completion
    if config.completion_only_loss is False:
        first = 0
    return [*question, *answer], first


def found_columns(row: Row) -> str:
    """Returns the columns of a row for messages about a missing value, apart from those that are empty."""
    filled = [name for name, value in row.items() if not is_missing(value)]
    empty = [name for name in row if name not in filled]
    text = f"columns found: {', '.join(filled) or 'none'}"
    if empty:
        text += f" (without a value in this row: {', '.join(empty)})"
    return text


def _read_answer(messages: object, where: str, needs_assistant: bool | None) -> Chat:
    """Returns checked messages. Raises UserError if there is no assistant message although the mask needs one."""
    chat = read_messages(messages, where)
    if needs_assistant and not any(message["role"] == "assistant" for message in chat):
        raise UserError(
            f"{where}: there is no assistant message, so no token is in the loss; remove such rows, or {ALL_TOKENS}"
        )
    return chat


def question_of(prompt: object, where: str) -> Chat:
    """Returns a prompt as messages; plain text becomes one user message. Raises UserError for any other type."""
    if isinstance(prompt, str):
        refuse_messages_as_text(prompt, where)
        prompt = [{"role": "user", "content": prompt}]
    return read_messages(prompt, where)


def as_answer(answer: object, where: str) -> object:
    """Returns an answer as a list of messages if it is plain text, other values unchanged.

    Raises UserError for messages written as text.
    """
    if not isinstance(answer, str):
        return answer
    refuse_messages_as_text(answer, where)
    return [{"role": "assistant", "content": answer}]


def encode_chat(
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    first: int = 0,
    *,
    assistant_only: bool = True,
    arguments: Arguments = NO_ARGUMENTS,
) -> Example:
    """Tokenizes a chat and marks the tokens in the loss.

    With assistant_only, these are the assistant messages from index `first`, each up to and including its end-of-turn
    token. Text that the template writes after that token, such as a newline, is context only. Otherwise they are all
    tokens from message `first`. If the template writes no end-of-turn token after an answer, one is added. Messages
    with `loss_mask: 0` are never in the loss.

    Args:
        chat: checked messages, see `chats.read_messages`.
        tokenizer: the tokenizer, with its chat template.
        where: place of the row, for messages.
        first: index of the first message in the loss.
        assistant_only: whether only assistant messages are in the loss.
        arguments: arguments of the chat template.

    Raises:
        UserError: if the template refuses the chat, leaves out its tool calls or the content or learnt reasoning of a
            message, or changes earlier turns when later turns follow, or if no token is in the loss.
    """
    may_be_learnt, chat = split_loss_mask(chat, where)
    chat_text = ChatText(chat, tokenizer, where, arguments)
    check_calls_shown(chat, tokenizer, where, arguments)
    # positions in the text, which is cut there before it is tokenized
    answers = []
    left_out = []
    for index, message in enumerate(chat):
        if message["role"] == "assistant" and index >= first:
            start = chat_text.answer_start(index)
            stop = chat_text.message_end(index)
            answers.append(_Span(start, stop, may_be_learnt[index]))
        # other messages need no border if only answers are learnt; many templates refuse a chat that ends there
        if not may_be_learnt[index] and not assistant_only:
            start = chat_text.message_end(index - 1)
            stop = chat_text.message_end(index)
            left_out.append(_Span(start, stop, is_learnt=False))
    learnt_from = len(chat_text.whole)
    if not assistant_only:
        learnt_from = chat_text.message_start(first)
    # after the positions, whose errors say more about a template that changes earlier answers
    learnt = [index for index in range(first, len(chat)) if may_be_learnt[index]]
    check_messages_shown(chat, chat_text.whole, tokenizer, where, arguments, learnt=learnt)

    tokens, mask = _encode_spans(chat_text.whole, learnt_from, answers, left_out, tokenizer, arguments)
    border = len(mask)  # between prompt and response
    if 1 in mask:
        # at least 1, because nothing predicts the first token
        border = max(1, mask.index(1))
    if border == len(mask):
        raise UserError(f"{where}: no token is in the loss; remove such rows, or {ALL_TOKENS}")
    return Example(tokens[:border], tokens[border:], mask[border:])


@dataclass(frozen=True)
class _Span:
    """A part of a chat's text, from character `start` to `stop`, and whether it is in the loss."""

    start: int
    stop: int
    is_learnt: bool


def _encode_spans(
    text: str,
    learnt_from: int,
    answers: Sequence[_Span],
    left_out: Sequence[_Span],
    tokenizer: PreTrainedTokenizerBase,
    arguments: Arguments,
) -> tuple[list[int], list[int]]:
    """Tokenizes a chat, completes the ends of its answers, and marks the tokens in the loss.

    Args:
        text: the text of the chat.
        learnt_from: everything from this character is in the loss; the text's length = only the answers are.
        answers: the answers, each of which must end with an end-of-turn token.
        left_out: parts that are never in the loss.
        tokenizer: the tokenizer.
        arguments: arguments of the chat template.

    Returns:
        The tokens, and for each of them 1 if it is in the loss, else 0.
    """
    # tokens are cut at every border, so that no token is partly in the loss
    borders = {learnt_from}
    for span in (*answers, *left_out):
        borders |= {span.start, span.stop}
    cuts = sorted(borders)
    tokens, counts = encode_and_cut(text, cuts, tokenizer)
    token_index = dict(zip(cuts, counts, strict=True))
    first_learnt = token_index[learnt_from]
    num_learnt = len(tokens) - first_learnt
    mask = [0] * first_learnt + [1] * num_learnt

    # an answer without its end would teach the model not to stop
    missing_ends: list[tuple[int, int]] = []  # the index of an end to be added, and its mask
    for answer in answers:
        start = token_index[answer.start]
        stop = token_index[answer.stop]
        end = end_of_answer(tokens, start, stop, tokenizer, arguments)
        if end is None:
            end = stop
            missing_ends.append((stop, int(answer.is_learnt)))
        if answer.is_learnt:
            mask[start:end] = [1] * (end - start)
    # after the answers, because parts that are left out are never in the loss
    for span in left_out:
        start = token_index[span.start]
        stop = token_index[span.stop]
        mask[start:stop] = [0] * (stop - start)

    # from the end, so that earlier indices stay valid
    for index, is_learnt in reversed(missing_ends):
        ends = ends_of_answers(tokenizer, arguments)
        tokens.insert(index, ends[0])
        mask.insert(index, is_learnt)
    return tokens, mask


def split_loss_mask(chat: Chat, where: str) -> tuple[list[bool], Chat]:
    """Returns for each message whether it may be in the loss, and the messages without the entry that says so.

    The entry is `loss_mask` (verl) or `weight` (OpenAI), 0 or 1. Raises UserError for any other value.
    """
    may_be_learnt = []
    messages = []
    for message in chat:
        # without the entry, because a template could write it
        message = dict(message)
        is_learnt = True
        for name in LOSS_MASKS:
            value = message.pop(name, 1)
            if value not in (0, 1):
                raise UserError(f"{where}: a message has {'/'.join(LOSS_MASKS)} {value!r}; expected 0 or 1")
            if value == 0:
                is_learnt = False
        may_be_learnt.append(is_learnt)
        messages.append(message)
    return may_be_learnt, messages


def collate(examples: Sequence[Example], pad_token_id: int) -> DataProto:
    """Collates sequences into a batch with the columns of a rollout.

    Prompts are left-padded to (B, P) and responses right-padded to (B, R), where P and R are the longest lengths in
    the batch. response_mask is 1 for tokens that are trained on.

    Args:
        examples: The sequences.
        pad_token_id: Token id of the padding.
    """
    prompts = [example.prompt for example in examples]
    responses = [example.response for example in examples]
    prompt_ids = _padded(prompts, pad_token_id, "left")
    response_ids = _padded(responses, pad_token_id, "right")
    input_ids = torch.cat([prompt_ids, response_ids], dim=1)

    # not compared with the padding token, which may also be a token of the text
    prompt_ones = [[1] * len(prompt) for prompt in prompts]
    response_ones = [[1] * len(response) for response in responses]
    is_prompt = _padded(prompt_ones, 0, "left")
    is_response = _padded(response_ones, 0, "right")
    attention_mask = torch.cat([is_prompt, is_response], dim=1)
    # positions count from the first token that is not padding
    positions = attention_mask.cumsum(1) - 1

    masks = [example.mask for example in examples]
    return DataProto.from_dict(
        {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "responses": response_ids,
            "position_ids": positions.clamp(min=0),
            "response_mask": _padded(masks, 0, "right"),
        }
    )


def _padded(rows: Sequence[Sequence[int]], value: int, side: str) -> torch.Tensor:
    """Returns the rows as a (B, longest) tensor of int64.

    Args:
        rows: Token ids or mask values of each row.
        value: The padding.
        side: "left" or "right", the side on which it is added.
    """
    tensors = [torch.tensor(row, dtype=torch.long) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)

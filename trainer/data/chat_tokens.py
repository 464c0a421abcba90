"""Chats as tokens for supervised training: the text of the chat template, tokenized as a whole and cut at the answers.

The tokens of a chat are those of `tokenizer.apply_chat_template(chat)`. The text before an answer is what generation
receives as its prompt. If a token of the whole text covers the end of that prompt and the beginning of the answer,
which generation never sees, the text is tokenized in two parts there.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from trainer.data.chats import Chat
from verl_lite.errors import UserError
from verl_lite.json_types import KeywordArguments
from workers.agents.conversation import end_of_turn, writes_end_of_turn
from workers.policy.chat_template import ChatTemplateError, render_chats
from workers.policy.tokenizer import NO_TEMPLATE, plain_template

_SHOWN_CHARACTERS = 40  # of a prompt's end in a message
_TAG = re.compile(r"<[^<>]*>")

UNFINISHED = "\ufffd"  # what a tokenizer decodes the first bytes of a character to
MOST_BYTES = 4  # of a character in UTF-8, and so the largest number of its tokens
Arguments = KeywordArguments
"""Arguments of the chat template: data.apply_chat_template_kwargs, and the row's `tools` if it has some."""


def render(
    chat: Chat,
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    is_question: bool,
    arguments: Arguments,
) -> str:
    """Returns the text of a chat under the chat template.

    Args:
        chat: the messages.
        tokenizer: its template is used. Without one, the text is the content of the messages.
        where: place of the row, for messages.
        is_question: True to append the generation prompt.
        arguments: arguments of the template.

    Raises:
        UserError: if the template refuses the chat, or if there is none for a chat of more than two messages.
    """
    template_arguments = dict(arguments)
    if tokenizer.chat_template is None:
        if "tools" in arguments:
            raise UserError(f"{where}: {NO_TEMPLATE.format('chats with tools')}")
        if len(chat) > 2:
            raise UserError(f"{where}: {NO_TEMPLATE.format('chats of several messages')}")
        template_arguments["chat_template"] = plain_template(tokenizer)
    try:
        [text] = render_chats(tokenizer, [chat], add_generation_prompt=is_question, **template_arguments)
        return text
    except ChatTemplateError as error:
        raise UserError(
            f"{where}: the chat template of {tokenizer.name_or_path!r} (or data.chat_template) refuses this chat "
            f"({error}). Change the row, data.chat_template or data.apply_chat_template_kwargs"
        ) from error


def without_tools(arguments: Arguments) -> Arguments:
    """Returns the arguments of the template without `tools`."""
    arguments_without_tools = dict(arguments)
    arguments_without_tools.pop("tools", None)
    return arguments_without_tools


def encode_text(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the token ids of a text, without the special tokens that a tokenizer adds by default."""
    if not text:
        return []
    encoding = tokenizer(text, add_special_tokens=False)
    return list(encoding["input_ids"])


def encode_and_cut(text: str, cuts: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Tokenizes a text such that no token crosses one of the cuts.

    The text is tokenized as a whole. At the first cut that a token crosses, the part before the cut is tokenized alone,
    and the part after it as a continuation, for which this is repeated.

    Args:
        text: the text of a chat.
        cuts: ascending positions of characters.
        tokenizer: the tokenizer.

    Returns:
        The tokens, and for each cut the number of tokens before it.
    """
    tokens: list[int] = []  # of text[:start]
    counts: list[int] = []
    start = 0
    while True:
        rest = text[start:]
        new_tokens = _encode_part(text, start, len(text), tokenizer)
        ends = _token_ends(rest, new_tokens, tokenizer, is_continuation=start > 0)

        crossed_cut = None
        num_exact = 0  # new tokens before the last cut that no token crosses
        last_exact_cut = start
        for cut in cuts[len(counts) :]:
            # exact for the first cut only, because each exact check tokenizes the text before the cut again
            count = _tokens_before(cut - start, rest, new_tokens, ends, tokenizer, check_prompt=not counts)
            if count is None:
                crossed_cut = cut
                break
            counts.append(len(tokens) + count)
            num_exact = count
            last_exact_cut = cut
        if crossed_cut is None:
            return tokens + new_tokens, counts

        # the part before the cut is tokenized alone, as generation does with a prompt; tokens before earlier cuts stay
        tokens += new_tokens[:num_exact]
        tokens += _encode_part(text, last_exact_cut, crossed_cut, tokenizer)
        counts.append(len(tokens))
        start = crossed_cut


def end_of_answer(
    tokens: Sequence[int],
    start: int,
    stop: int,
    tokenizer: PreTrainedTokenizerBase,
    arguments: Arguments,
) -> int | None:
    """Returns the index after the token that ends an answer, or None if there is no such token.

    Args:
        tokens: the tokens of the whole chat.
        start, stop: the range of the answer's message in them.
        tokenizer: the tokenizer, with its chat template.
        arguments: arguments of the chat template.
    """
    # searched from the end, because an answer can contain the token earlier; the template may write text after it
    for end in ends_of_answers(tokenizer, arguments):
        for index in range(stop - 1, start - 1, -1):
            if tokens[index] == end:
                return index + 1

    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    if not _ends_with_next_message(tokenizer, arguments):
        # another end than that of a plain answer, such as Llama's <|eom_id|> after a call of a built-in tool
        last = _last_special(tokens, start, stop, special, tokenizer)
        if last is not None:
            return last + 1
    # the token that begins the next message ends the answer, as in the templates of GLM
    if stop < len(tokens) and tokens[stop] in special:
        return stop + 1
    return None


def _last_special(
    tokens: Sequence[int],
    start: int,
    stop: int,
    special: Collection[int],
    tokenizer: PreTrainedTokenizerBase,
) -> int | None:
    """Returns the index of the last special token in tokens[start:stop], or None if other text follows it.

    Text that consists of blanks, such as a newline, may follow it.
    """
    for index in range(stop - 1, start - 1, -1):
        if tokens[index] in special:
            return index
        text = str(tokenizer.decode([tokens[index]]))
        if text.strip():
            return None
    return None


def rewritten_length(last: str, earlier: str) -> int | None:
    """Returns the length of an answer that the template writes differently once other messages follow.

    Args:
        last: the template's text of the answer at the end of a chat.
        earlier: the text of a longer chat, from the same answer on.

    Returns:
        The length in `earlier`, or None if more than tags, such as an empty think block, are left out there.
    """
    # the shortest beginning of the answer that the longer chat leaves out, such as an empty think block
    for num_left_out in range(len(last)):
        remainder = last[num_left_out:]
        if earlier.startswith(remainder):
            # an answer without its thinking is not what a model writes that thinks first
            text_left_out = _TAG.sub("", last[:num_left_out])
            return None if text_left_out.strip() else len(remainder)
    return None


class ChatText:
    """Positions of the messages of a chat in its text.

    A template renders only whole chats. The end of a message is therefore found by rendering the chat up to this
    message, which has to be the beginning of the text of the whole chat.

    Args:
        chat: The checked messages.
        tokenizer: The tokenizer, with its chat template.
        where: Location of the row, for messages.
        arguments: Arguments of the chat template.

    Attributes:
        whole: the text of the chat under the chat template.
    """

    def __init__(self, chat: Chat, tokenizer: PreTrainedTokenizerBase, where: str, arguments: Arguments) -> None:
        self._chat = chat
        self._tokenizer = tokenizer
        self._where = where
        self._arguments = arguments
        self.whole = render(chat, tokenizer, where, is_question=False, arguments=arguments)

    def answer_start(self, index: int) -> int:
        """Returns the position at which the answer in message `index` begins: behind the generation prompt.

        A greeting, which no prompt precedes, begins with its own content.
        """
        if index > 0:
            return self._length(index, is_question=True)
        # a template cannot render a chat without messages, so the content itself is searched
        end = self.message_end(0)
        content = self._chat[0]["content"] or ""
        start = end
        if content.strip():
            start = self.whole.rfind(content.strip(), 0, end)
        if start < 0:
            raise UserError(
                f"{self._where}: the chat begins with an answer, and the chat template does not write its content as "
                "it is; begin the row with a question, or set data.completion_only_loss=true to train on the last "
                "answer alone"
            )
        return start

    def message_end(self, index: int) -> int:
        """Returns the position at which a message ends; 0 for -1."""
        if index < 0:
            return 0
        if index == len(self._chat) - 1:
            return len(self.whole)
        if index == 0 or self._chat[index]["role"] != "assistant":
            return self._length(index + 1, is_question=False)

        # a template may write an answer differently at the end of a chat, such as Qwen3 with an empty think block
        start = self.answer_start(index)
        text = self._text(index + 1, is_question=False)
        length = rewritten_length(text[start:], self.whole[start:])
        if length is None:
            return self._length(index + 1, is_question=False)
        return start + length

    def message_start(self, index: int) -> int:
        """Returns the position at which a message begins; for an answer, behind the generation prompt."""
        if index == 0:
            return 0
        if self._chat[index]["role"] == "assistant":
            return self.answer_start(index)
        return self.message_end(index - 1)

    def _length(self, count: int, *, is_question: bool) -> int:
        """Returns the length of the text of the first messages. Raises UserError if the whole text begins otherwise."""
        text = self._text(count, is_question=is_question)
        if not self.whole.startswith(text):
            # Some templates of reasoning models begin an answer with <think>, and leave the thinking out of a finished
            # one. For an earlier answer, one row for each answer may help.
            is_last = count == len(self._chat) - 1
            if is_question and is_last and self.whole.startswith(self._text(count, is_question=False)):
                prompt_end = text[-_SHOWN_CHARACTERS:]
                raise UserError(
                    f"{self._where}: the chat template ends the prompt of message {count} with {prompt_end!r}, and "
                    "writes that answer differently, so training would use other tokens than generation; set "
                    "data.chat_template to a template that writes answers as the model generates them"
                )
            raise UserError(
                f"{self._where}: the chat template renders earlier turns differently when later turns follow, so one "
                "row cannot train several turns; split the row into one row for each assistant message, or set "
                "data.completion_only_loss=true to train on the last one"
            )
        return len(text)

    def _text(self, count: int, *, is_question: bool) -> str:
        """Returns the text of the first messages."""
        chat = self._chat[:count]
        text = render(chat, self._tokenizer, self._where, is_question=is_question, arguments=self._arguments)
        if self.whole.startswith(text):
            return text
        # some templates end every chat with the end-of-text token, as those of Phi-3; it is not part of the message
        text_without_end = text.removesuffix(self._tokenizer.eos_token or "")
        if self.whole.startswith(text_without_end):
            return text_without_end
        return text


def _ends_with_next_message(tokenizer: PreTrainedTokenizerBase, arguments: Arguments) -> bool:
    """Returns whether the template writes no end after an answer, so that the next message ends it (GLM)."""
    template = str(tokenizer.chat_template)
    return not _writes_end(tokenizer, template, _key_of(arguments))


def ends_of_answers(tokenizer: PreTrainedTokenizerBase, arguments: Arguments) -> list[int]:
    """Returns the tokens that can end an answer: that of the chat template, and the tokenizer's end-of-text token.

    The first one is added to answers that the template leaves without an end.

    Raises:
        UserError: if there is no such token.
    """
    template = str(tokenizer.chat_template)
    end_of_template = _end_of_turn(tokenizer, template, _key_of(arguments))
    # the template's end comes first: the tokenizer's can differ, as that of Gemma, and the first one is what is added
    ends = []
    for token in (end_of_template, tokenizer.eos_token_id):
        if token is not None and token not in ends:
            ends.append(token)
    if not ends:
        raise UserError(
            f"The tokenizer of {tokenizer.name_or_path!r} has no end-of-text token, and its chat template writes no "
            "special token after an answer, so no answer would end: set eos_token in its tokenizer_config.json"
        )
    return ends


def _key_of(arguments: Arguments) -> str:
    """Returns the arguments without tools as json text, because a cache needs a key that can be hashed."""
    arguments_without_tools = without_tools(arguments)
    return json.dumps(arguments_without_tools, sort_keys=True, default=str)


@functools.lru_cache(maxsize=16)
def _writes_end(tokenizer: PreTrainedTokenizerBase, template: str, arguments: str) -> bool:
    """Returns whether the template writes an end after an answer at the end of a chat.

    The parameters are those of `_end_of_turn`.
    """
    template_arguments = json.loads(arguments)
    return writes_end_of_turn(tokenizer, template_arguments)


@functools.lru_cache(maxsize=16)
def _end_of_turn(tokenizer: PreTrainedTokenizerBase, template: str, arguments: str) -> int | None:
    """Returns `end_of_turn`, which renders several chats and is therefore called once per template.

    Args:
        tokenizer: the tokenizer.
        template: its chat template, as a part of the cache's key, because it can be replaced.
        arguments: see `_key_of`.
    """
    template_arguments = json.loads(arguments)
    return end_of_turn(tokenizer, template_arguments)


def _tokens_before(
    cut: int,
    text: str,
    tokens: list[int],
    ends: list[int] | None,
    tokenizer: PreTrainedTokenizerBase,
    check_prompt: bool,
) -> int | None:
    """Returns the number of tokens before a cut, or None if a token crosses it.

    Args:
        cut: position in the text.
        text: the text of `tokens`.
        tokens: tokens of the text.
        ends: position in the text at which each token ends; None if the tokenizer does not tell.
        check_prompt: True to require that the text before the cut alone has the same tokens. This is exact, but takes
            as long as tokenizing that text.
        tokenizer: the tokenizer.
    """
    if ends is None or check_prompt:
        prompt = encode_text(text[:cut], tokenizer)
        if tokens[: len(prompt)] != prompt:
            return None
        return len(prompt)

    count = bisect_right(ends, cut)
    last_end = ends[count - 1] if count else 0
    # a blank that no token shows belongs to the next token, so the tokens before the cut must end exactly there
    if last_end != cut:
        return None
    last_tokens = tokens[:count][-MOST_BYTES:]
    if _splits_character(cut, text, last_tokens, tokenizer):
        return None
    return count


def _splits_character(cut: int, text: str, last_tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Returns True if the tokens before a cut end inside of a character.

    A token may have all bytes of a character and the first bytes of the next one; its reported end is then that of the
    former. A tokenizer with a Unicode normal form may join a combining mark to the character before it.

    Args:
        cut: position in the text.
        text: the text.
        last_tokens: the last tokens before the cut, enough for one character.
        tokenizer: the tokenizer.
    """
    if cut < len(text) and unicodedata.combining(text[cut]):
        return True
    decoded = str(tokenizer.decode(last_tokens))
    # the text itself may contain this character
    last_character = text[cut - 1 : cut]
    return decoded.endswith(UNFINISHED) and last_character != UNFINISHED


def _token_ends(
    text: str,
    tokens: list[int],
    tokenizer: PreTrainedTokenizerBase,
    *,
    is_continuation: bool,
) -> list[int] | None:
    """Returns the position at which each token ends, in ascending order, or None if the tokenizer does not tell.

    Args:
        text: a text.
        tokens: its tokens.
        tokenizer: the tokenizer.
        is_continuation: True if the text follows another one, see `_encode_continuation`.
    """
    if not text:
        return []
    # only the tokenizers of the library `tokenizers` report positions
    if not tokenizer.is_fast:
        return None
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ends = [end for _, end in encoding["offset_mapping"]]
    surplus = len(ends) - len(tokens)
    # a continuation has fewer tokens than the same text alone if the latter begins with an added blank
    if surplus < 0 or (surplus and not is_continuation):
        return None
    # a tokenizer may report a smaller end after a larger one, and the ends are searched by bisection
    ascending_ends = itertools.accumulate(ends[surplus:], max)
    return list(ascending_ends)


def _encode_part(text: str, start: int, stop: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Returns the token ids of text[start:stop], as a continuation of the text before it if there is some."""
    part = text[start:stop]
    if start == 0:
        return encode_text(part, tokenizer)
    return _encode_continuation(part, tokenizer)


def _encode_continuation(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokenizes a text that follows another one.

    Tokenizers in the manner of SentencePiece add a blank before a text. Here they must not, so the text is tokenized
    behind a special token, which is then removed.
    """
    if not text:
        return []
    anchor = tokenizer.eos_token
    anchor_token = tokenizer.eos_token_id
    # the special token is usable only if it remains one token, and if the text behind it keeps its characters
    if anchor is not None and encode_text(anchor, tokenizer) == [anchor_token]:
        first_token, *tokens = encode_text(anchor + text, tokenizer)
        decoded = str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
        if first_token == anchor_token and decoded.strip() == text.strip():
            return tokens
    return encode_text(text, tokenizer)

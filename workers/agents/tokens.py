"""What the tokens of a tokenizer can contain, and which of them ends a turn."""

from collections.abc import Sequence

from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase

_MERGED_CHARACTERS = {"NoneType": 1, "NFC": 4}
"""By class name of a normalizer, the number of characters that it merges into one at most. No other is known."""


def characters_per_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Returns the maximum number of characters that one token can encode, or None if the tokenizer has no known bound.

    A byte-level BPE with a token for every byte has a bound: a token encodes as many bytes as its name has characters,
    and a character has at least one byte. NFC normalisation merges at most four characters into one. There is no bound
    if a token absorbs the spaces around it, or if some character has no token.
    """
    # only fast tokenizers have a backend
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = getattr(backend, "normalizer", None)
    merged_characters = _MERGED_CHARACTERS.get(type(normalizer).__name__)
    # in the representation, because a sequence of several pre-tokenizers may contain it
    is_byte_level = "ByteLevel" in repr(getattr(backend, "pre_tokenizer", None))
    if merged_characters is None or not is_byte_level:
        return None

    added_tokens = tokenizer.added_tokens_decoder.values()
    absorbs_spaces = any(token.lstrip or token.rstrip for token in added_tokens)
    vocabulary = tokenizer.get_vocab()
    has_all_bytes = vocabulary.keys() >= set(ByteLevel.alphabet())
    if absorbs_spaces or not has_all_bytes:
        return None
    longest_name = max(map(len, vocabulary))
    return merged_characters * longest_name


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the ids of all tokens that are no ordinary text."""
    return frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)


def closing_index(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerBase, special_ids: frozenset[int] | None = None
) -> int | None:
    """Returns the index of the token that ends an assistant's turn.

    It is the first special token, and only blanks may come before it.

    Args:
        ids: The tokens that the chat template writes after the answer.
        tokenizer: The tokenizer.
        special_ids: The result of `special_token_ids`, if the caller has it.

    Returns:
        The index, or None if the turn has no such token.
    """
    if special_ids is None:
        special_ids = special_token_ids(tokenizer)
    for index, token in enumerate(ids):
        if token not in special_ids:
            continue
        text_before = str(tokenizer.decode(list(ids[:index])))
        return None if text_before.strip() else index
    return None


def closing_token(
    text: str, tokenizer: PreTrainedTokenizerBase, special_ids: frozenset[int] | None = None
) -> int | None:
    """Returns the token that ends an assistant's turn in the text after the answer; see `closing_index`."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    index = closing_index(ids, tokenizer, special_ids)
    return None if index is None else int(ids[index])

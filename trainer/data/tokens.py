"""Prompts as token ids: the chat template applied, tokenised in one process or several, kept on disk for the next run.

What comes out is what the rollout engine samples from, so lengths are measured on the very same tokens.
"""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from trainer.data.token_cache import TokenCache, digest_of
from verl_lite.config import DataConfig
from verl_lite.errors import UserError

_ENCODE_ROWS = 1000
_TEMPLATE_ARGUMENTS = ("conversation", "tokenize", "add_generation_prompt", "return_tensors", "return_dict", "padding")
"""What is asked of the chat template here, and so is not the user's to say."""

CACHED_FROM = 5_000
"""Prompts from which tokens are kept on disk: fewer are made in less than two seconds of one core (recipes/LOG.md)."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """What the chat template is given of a row. tools: their schemas as json, None = none."""

    messages: list[dict[str, str]]
    tools: str | None = None


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> list[np.ndarray]:
    """Token ids of each prompt, int32, with the generation prompt at the end, exactly as they will be sampled from.

    Raises UserError for a tokenizer without a chat template, for arguments that are not the user's to give, for a
    prompt that the template refuses, and for tools or a system prompt that it does not show.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            "The tokenizer of model.path has no chat template, so chat messages cannot become a prompt. Give one that "
            "has with model.tokenizer_path, or add chat_template to its tokenizer_config.json"
        )
    kwargs = dict(config.apply_chat_template_kwargs)
    for name in (name for name in kwargs if name in _TEMPLATE_ARGUMENTS):
        raise UserError(
            f"data.apply_chat_template_kwargs.{name}={kwargs[name]!r}: it is decided by the trainer, which needs the "
            "text of one prompt with the beginning of an answer; leave it out"
        )
    _check_shown(prompts, tokenizer, config, kwargs)
    if len(prompts) < CACHED_FROM:
        return _encode(prompts, tokenizer, kwargs, config.filter_overlong_prompts_workers)
    cache = TokenCache()
    name = digest_of(_identity(tokenizer, kwargs), (json.dumps([p.messages, p.tools], default=str) for p in prompts))
    found = cache.read(name, rows=len(prompts))
    if found is None:
        found = _encode(prompts, tokenizer, kwargs, config.filter_overlong_prompts_workers)
        cache.write(name, found)
    return found


def _identity(tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]) -> list[str]:
    """Everything besides the prompts that the tokens depend on, as text.

    A template that writes the date of today gives other prompts tomorrow.
    """
    import tokenizers
    import transformers

    template = str(tokenizer.chat_template)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    return [
        type(tokenizer).__qualname__,
        content,
        template,
        json.dumps(tokenizer.special_tokens_map, sort_keys=True, default=str),
        json.dumps(kwargs, sort_keys=True, default=str),
        time.strftime("%Y-%m-%d") if "strftime_now" in template else "",
        f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}",
    ]


def _encode(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any], workers: int
) -> list[np.ndarray]:
    chunks = [list(prompts[start : start + _ENCODE_ROWS]) for start in range(0, len(prompts), _ENCODE_ROWS)]
    workers = min(workers, len(chunks))
    if workers <= 1:
        encoded = [_encode_chunk(tokenizer, chunk, kwargs) for chunk in chunks]
    else:
        with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
            count = len(chunks)
            encoded = list(pool.map(_encode_chunk, [tokenizer] * count, chunks, [kwargs] * count))
    return [np.array(tokens, dtype=np.int32) for chunk in encoded for tokens in chunk]


def _encode_chunk(tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt], kwargs: dict[str, Any]) -> list[list[int]]:
    texts: list[str] = []
    for tools, group in itertools.groupby(prompts, key=lambda prompt: prompt.tools):
        texts += _render(tokenizer, [prompt.messages for prompt in group], tools, kwargs)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _render(
    tokenizer: PreTrainedTokenizerBase, chats: list[list[dict[str, str]]], tools: str | None, kwargs: dict[str, Any]
) -> list[str]:
    shown = kwargs if tools is None else {**kwargs, "tools": json.loads(tools)}
    try:
        return list(tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True, **shown))
    except Exception as error:  # the template is the model's code and kwargs are the user's: they may raise anything
        if len(chats) > 1:  # which of them it was is found one by one
            return [_render(tokenizer, [chat], tools, kwargs)[0] for chat in chats]
        given = f" with data.apply_chat_template_kwargs={kwargs}" * bool(kwargs)
        raise UserError(
            f"The chat template of {tokenizer.name_or_path!r}{given} refuses the prompt {chats[0]!r:.200} "
            f"({type(error).__name__}: {error}). Change the prompt in the data, take another template with "
            "model.tokenizer_path, or other data.apply_chat_template_kwargs"
        ) from error


def _check_shown(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, config: DataConfig, kwargs: dict[str, Any]
) -> None:
    """Raises UserError where the template leaves out tools, or the system prompt of data.system_prompt."""
    name = f"the chat template of {tokenizer.name_or_path!r}"
    with_tools = next((prompt for prompt in prompts if prompt.tools is not None), None)
    if with_tools is not None:
        chats = [with_tools.messages]
        if _render(tokenizer, chats, with_tools.tools, kwargs) == _render(tokenizer, chats, None, kwargs):
            raise UserError(
                f"The rows have tools (data.tools_path={config.tools_path}, or a column 'tools'), and {name} does not "
                "show them: take a template that does with model.tokenizer_path, write them into the system prompt, or "
                "leave them out (data.columns.tools=null)"
            )
    system = config.system_prompt
    prompted = next((prompt for prompt in prompts if prompt.messages[0]["content"] == system), None)
    if system is not None and prompted is not None and len(prompted.messages) > 1:
        whole, rest = prompted.messages, prompted.messages[1:]
        if _render(tokenizer, [whole], prompted.tools, kwargs) == _render(tokenizer, [rest], prompted.tools, kwargs):
            raise UserError(
                f"data.system_prompt={system!r:.100}: {name} does not show system messages; write it around the prompt "
                "with data.prompt_template, or take another template with model.tokenizer_path"
            )


def truncate(tokens: np.ndarray, limit: int, side: str) -> np.ndarray:
    """At most `limit` tokens. side: the end that is cut off, `left` or `right`; `middle` keeps both ends."""
    if side == "left":
        return tokens[-limit:]
    if side == "right":
        return tokens[:limit]
    head = limit // 2
    return np.concatenate([tokens[:head], tokens[len(tokens) - (limit - head) :]])

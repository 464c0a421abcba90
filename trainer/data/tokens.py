"""Tokenizes prompts: applies the chat template, encodes the text, and caches the token ids on disk.

The rollout engine samples from exactly these tokens, so prompt lengths are exact. `datasets.map` caches the tokens in
the folder `tokens/` of VERL_LITE_CACHE (default ~/.cache/verl_lite). The name of a cache file is a digest of everything
that the tokens depend on, so a file is never out of date and may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import pyarrow
from transformers import PreTrainedTokenizerBase

from trainer.data.template_checks import check_calls_shown, check_messages_shown
from verl_lite.config import DataConfig
from verl_lite.errors import UserError
from verl_lite.json_types import KeywordArguments
from workers.policy.chat_template import ChatTemplateError, render_chats
from workers.policy.tokenizer import NO_TEMPLATE, plain_template

if TYPE_CHECKING:
    import datasets

CACHED_FROM = 5_000
"""Smallest number of prompts that is cached. Fewer take less than two seconds on one core (recipes/LOG.md)."""

_USUAL_ROLES = {"user", "assistant", "tool"}
"""Roles that every template shows, or that other checks cover."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """The chat template's input for one row.

    Attributes:
        messages: Chat messages.
        tools: Tool schemas as json text, or None.
    """

    messages: list[dict[str, str]]
    tools: str | None = None


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> list[np.ndarray]:
    """Returns the int32 token ids of each prompt, including the generation prompt at the end.

    Without a chat template, the text of a prompt is its single message.

    Raises:
        UserError: If the tokenizer has no template and a prompt has several messages or tools, if the template raises
            an error for a prompt, or if its output does not contain the tools, tool calls or the system prompt.
    """
    kwargs = dict(config.apply_chat_template_kwargs)
    # the tokenizers of base models have no template
    if tokenizer.chat_template is None:
        for prompt in prompts:
            if prompt.tools or len(prompt.messages) > 1:
                raise UserError(NO_TEMPLATE.format("prompts of several messages or with tools"))
        kwargs["chat_template"] = plain_template(tokenizer)

    _check_shown(prompts, tokenizer, config, kwargs)
    if len(prompts) < CACHED_FROM:
        token_ids = _encode(prompts, tokenizer, kwargs)
        return [np.array(tokens, dtype=np.int32) for tokens in token_ids]
    return _encode_with_cache(prompts, tokenizer, kwargs, config.filter_overlong_prompts_workers)


class _PromptColumns(TypedDict):
    """The fields of `Prompt` as columns of a dataset, the messages as json text."""

    messages: list[str]
    tools: list[str | None]


def _encode_with_cache(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    kwargs: KeywordArguments,
    workers: int,
) -> list[np.ndarray]:
    """Returns the token ids of each prompt from the cache file, which this call writes if it is missing.

    Args:
        prompts: The prompts. Values that are not json become text, as templates would show them.
        tokenizer: The tokenizer.
        kwargs: Arguments of the chat template.
        workers: Number of processes that tokenize.
    """
    import datasets

    def encode(batch: _PromptColumns) -> dict[str, list[list[int]]]:
        batch_prompts = []
        for messages_text, tools in zip(batch["messages"], batch["tools"], strict=True):
            messages = json.loads(messages_text)
            batch_prompts.append(Prompt(messages, tools))
        return {"tokens": _encode(batch_prompts, tokenizer, kwargs)}

    columns: _PromptColumns = {
        # json text, because a column of dictionaries would give each message the keys of all messages
        "messages": [json.dumps(prompt.messages, default=str) for prompt in prompts],
        "tools": [prompt.tools for prompt in prompts],
    }
    identity = _identity(tokenizer, kwargs)
    cache_file = _cache_file(identity, columns)
    folder = cache_file.parent

    text = datasets.Value("large_string")
    input_features = datasets.Features(dict.fromkeys(columns, text))
    rows = datasets.Dataset.from_dict(dict(columns), features=input_features)
    token_list = datasets.List(datasets.Value("int32"))
    tokenize = partial(
        rows.map,
        encode,
        batched=True,
        remove_columns=list(columns),
        features=datasets.Features({"tokens": token_list}),
        new_fingerprint=cache_file.stem,  # otherwise `datasets` would pickle and hash the tokenizer
    )
    # None tokenizes in this process
    num_processes = workers if workers > 1 else None
    datasets.disable_progress_bars()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tokenized = tokenize(cache_file_name=str(cache_file), num_proc=num_processes)
        return _arrays(tokenized)
    # a damaged file, or a folder that cannot be written: the cache only saves time, so the run continues without it
    except (OSError, pyarrow.ArrowInvalid) as error:
        logger.warning("the prompt tokens in %s cannot be used (%s): tokenizing without the cache", folder, error)
        if folder.is_dir():
            # also the files of single processes, whose names have a suffix; the next run would read them again
            for damaged_file in folder.glob(f"{cache_file.stem}*"):
                damaged_file.unlink(missing_ok=True)
        tokenized = tokenize(keep_in_memory=True)
        return _arrays(tokenized)


def _cache_file(identity: Sequence[str], columns: _PromptColumns) -> Path:
    """Returns the path of the cache file, whose name is a digest of everything that the tokens depend on.

    Args:
        identity: See `_identity`.
        columns: The prompts.
    """
    content = json.dumps([identity, columns])
    digest = hashlib.blake2b(content.encode(), digest_size=16)
    # the folder that also has the files of recipes
    cache = os.environ.get("VERL_LITE_CACHE") or "~/.cache/verl_lite"
    folder = Path(cache).expanduser().absolute() / "tokens"
    return folder / f"{digest.hexdigest()}.arrow"


def _arrays(rows: datasets.Dataset) -> list[np.ndarray]:
    """Returns the tokens of each row as views of the dataset's memory."""
    arrays: list[np.ndarray] = []
    for chunk in rows.data.column("tokens").chunks:
        # the offsets of a chunk can be those of a longer array, of which it is a part
        first_offset = chunk.offsets[0].as_py()
        boundaries = chunk.offsets.to_numpy() - first_offset
        all_tokens = chunk.flatten().to_numpy()
        # np.split expects the boundaries between parts, without the beginning and the end
        arrays += np.split(all_tokens, boundaries[1:-1])
    return arrays


def _identity(tokenizer: PreTrainedTokenizerBase, kwargs: KeywordArguments) -> list[str]:
    """Returns everything except the prompts that the tokens depend on, as text.

    This includes the date if the template uses it, because the prompts then change every day.
    """
    import tokenizers
    import transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)  # of fast tokenizers
    if backend is not None:
        # the whole tokenizer.json: also the normal form and the division into words change the tokens
        vocabulary = backend.to_str()
    else:
        vocabulary = json.dumps(tokenizer.get_vocab(), sort_keys=True)
    template = str(tokenizer.chat_template)
    date = ""
    if "strftime_now" in template:
        date = time.strftime("%Y-%m-%d")
    return [
        type(tokenizer).__qualname__,
        vocabulary,
        template,
        json.dumps([tokenizer.special_tokens_map, kwargs], sort_keys=True, default=str),
        date,
        transformers.__version__,
        tokenizers.__version__,
    ]


def _encode(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, kwargs: KeywordArguments) -> list[list[int]]:
    """Returns the token ids of each prompt."""
    texts: list[str] = []
    # prompts with the same tools are rendered by one call, which compiles the template once
    for tools, group in itertools.groupby(prompts, key=lambda prompt: prompt.tools):
        chats = [prompt.messages for prompt in group]
        texts += _render(tokenizer, chats, tools, kwargs)
    # without special tokens, because the template has written those of the model
    encoding = tokenizer(texts, add_special_tokens=False)
    return encoding["input_ids"]


def _render(
    tokenizer: PreTrainedTokenizerBase,
    chats: list[list[dict[str, str]]],
    tools: str | None,
    kwargs: KeywordArguments,
) -> list[str]:
    """Returns the texts of chats with the same tools.

    Args:
        tokenizer: The tokenizer, with its chat template.
        chats: The messages of each chat.
        tools: Tool schemas as json text, or None.
        kwargs: Arguments of the chat template.

    Raises:
        UserError: If the template refuses a chat, about the first such chat.
    """
    arguments = _with_tools(kwargs, tools)
    try:
        return render_chats(tokenizer, chats, add_generation_prompt=True, **arguments)
    except ChatTemplateError as error:
        # the error does not say which chat failed, so the chats are rendered one by one to name it
        if len(chats) > 1:
            texts: list[str] = []
            for chat in chats:
                texts += _render(tokenizer, [chat], tools, kwargs)
            return texts
        raise UserError(
            f"The chat template of {tokenizer.name_or_path!r} with data.apply_chat_template_kwargs={kwargs} refuses "
            f"the prompt {chats[0]!r:.200} ({error}). Change the prompt in the data, data.chat_template, or "
            "data.apply_chat_template_kwargs"
        ) from error


def _with_tools(kwargs: KeywordArguments, tools: str | None) -> KeywordArguments:
    """Returns the arguments of the template with the tools of a prompt, given as json text."""
    if tools is None:
        return kwargs
    return {**kwargs, "tools": json.loads(tools)}


def _check_shown(
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    config: DataConfig,
    kwargs: KeywordArguments,
) -> None:
    """Checks that the template shows all parts of prompts, with the first prompt that has such a part.

    A template ignores parts that it does not know without an error, and training would then run without them.

    Args:
        prompts: The prompts.
        tokenizer: The tokenizer, with its chat template.
        config: Section `data` of the options, with the system prompt.
        kwargs: Arguments of the chat template.

    Raises:
        UserError: If the template's output ignores a prompt's tools, tool calls, results of tools, messages of a role,
            or data.system_prompt.
    """
    with_calls = _first_prompt(prompts, _has_calls)
    with_results = _first_prompt(prompts, _has_results)
    for example in (with_calls, with_results):
        if example is not None:
            arguments = _with_tools(kwargs, example.tools)
            where = f"The prompt {example.messages!r:.200}"
            check_calls_shown(example.messages, tokenizer, where, arguments)

    with_tools = _first_prompt(prompts, lambda prompt: prompt.tools is not None)
    if with_tools is not None:
        part = "tools (data.columns.tools=null leaves them out)"
        _check_part_shown(part, with_tools, Prompt(with_tools.messages), tokenizer, kwargs)

    system = config.system_prompt
    if system is not None:
        _check_system_shown(prompts, system, tokenizer, kwargs)

    # templates treat a message by its role and place, so that one prompt of each sequence of roles is enough
    first_of_roles: dict[tuple[str, ...], Prompt] = {}
    for prompt in prompts:
        roles = tuple(message["role"] for message in prompt.messages)
        first_of_roles.setdefault(roles, prompt)
    for roles, example in first_of_roles.items():
        if not set(roles) <= _USUAL_ROLES:
            arguments = _with_tools(kwargs, example.tools)
            where = f"The prompt {example.messages!r:.200}"
            [whole] = _render(tokenizer, [example.messages], example.tools, kwargs)
            check_messages_shown(example.messages, whole, tokenizer, where, arguments, is_question=True)


def _check_system_shown(
    prompts: Sequence[Prompt], system: str, tokenizer: PreTrainedTokenizerBase, kwargs: KeywordArguments
) -> None:
    """Raises UserError if the template does not show data.system_prompt, whose text is `system`."""

    def begins_with_system(prompt: Prompt) -> bool:
        # a prompt of the system message alone has nothing to compare it with
        return prompt.messages[0]["content"] == system and len(prompt.messages) > 1

    with_system = _first_prompt(prompts, begins_with_system)
    if with_system is not None:
        part = f"data.system_prompt={system!r:.100} (use data.prompt_template)"
        without_system = Prompt(with_system.messages[1:], with_system.tools)
        _check_part_shown(part, with_system, without_system, tokenizer, kwargs)


def _has_calls(prompt: Prompt) -> bool:
    return any("tool_calls" in message for message in prompt.messages)


def _has_results(prompt: Prompt) -> bool:
    return any(message["role"] == "tool" for message in prompt.messages)


def _first_prompt(prompts: Sequence[Prompt], has_part: Callable[[Prompt], bool]) -> Prompt | None:
    """Returns the first prompt for which `has_part` is true; None without one."""
    for prompt in prompts:
        if has_part(prompt):
            return prompt
    return None


def _check_part_shown(
    part: str,
    prompt: Prompt,
    prompt_without: Prompt,
    tokenizer: PreTrainedTokenizerBase,
    kwargs: KeywordArguments,
) -> None:
    """Raises UserError if the template gives the same text with and without a part of the prompt.

    Args:
        part: Name of the part and advice, for the message.
        prompt: A prompt with the part.
        prompt_without: The same prompt without it.
        tokenizer: The tokenizer, with its chat template.
        kwargs: Arguments of the chat template.
    """
    text = _render(tokenizer, [prompt.messages], prompt.tools, kwargs)
    try:
        text_without = _render(tokenizer, [prompt_without.messages], prompt_without.tools, kwargs)
    # a template that requires the part shows it
    except UserError:
        return
    if text == text_without:
        raise UserError(
            f"The chat template of {tokenizer.name_or_path!r} does not show {part}: set another template with "
            "data.chat_template"
        )

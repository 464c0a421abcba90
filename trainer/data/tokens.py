"""Tokenizes prompts: applies the chat template, encodes the text, and caches the token ids on disk.

The rollout engine samples from exactly these tokens, so prompt lengths are exact. `datasets.map` caches the tokens in
the folder `tokens/` of VERL_LITE_CACHE (default ~/.cache/verl_lite). The name of a cache file is a digest of everything
that the tokens depend on, so a file is never out of date and may be deleted at any time.
"""

import hashlib
import itertools
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from transformers import PreTrainedTokenizerBase

from trainer.data.chat_tokens import check_calls_shown
from verl_lite.config import DataConfig
from verl_lite.errors import UserError
from workers.policy.chat_template import ChatTemplateError, render_chats
from workers.policy.tokenizer import NO_TEMPLATE, plain_template

CACHED_FROM = 5_000
"""Smallest number of prompts that is cached. Fewer take less than two seconds on one core (recipes/LOG.md)."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """The chat template's input for one row. tools: tool schemas as json text, or None."""

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
    if tokenizer.chat_template is None:
        if any(prompt.tools or len(prompt.messages) > 1 for prompt in prompts):
            raise UserError(NO_TEMPLATE.format("prompts of several messages or with tools"))
        kwargs["chat_template"] = plain_template(tokenizer)
    _check_shown(prompts, tokenizer, config, kwargs)
    if len(prompts) < CACHED_FROM:
        return [np.array(tokens, dtype=np.int32) for tokens in _encode(prompts, tokenizer, kwargs)]
    return _encode_with_cache(prompts, tokenizer, kwargs, config.filter_overlong_prompts_workers)


def _encode_with_cache(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any], workers: int
) -> list[np.ndarray]:
    import datasets

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        chunk = [Prompt(json.loads(text), tools) for text, tools in zip(batch["messages"], batch["tools"], strict=True)]
        return {"tokens": _encode(chunk, tokenizer, kwargs)}

    columns = {
        "messages": [json.dumps(prompt.messages, default=str) for prompt in prompts],
        "tools": [prompt.tools for prompt in prompts],
    }
    content = json.dumps([_identity(tokenizer, kwargs), columns])
    name = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
    folder = Path(os.environ.get("VERL_LITE_CACHE") or "~/.cache/verl_lite").expanduser().absolute() / "tokens"
    texts = datasets.Features(dict.fromkeys(columns, datasets.Value("large_string")))
    rows = datasets.Dataset.from_dict(columns, features=texts)
    tokens = datasets.Features({"tokens": datasets.List(datasets.Value("int32"))})
    options: dict[str, Any] = {"batched": True, "remove_columns": list(columns), "features": tokens}
    datasets.disable_progress_bars()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = str(folder / f"{name}.arrow")
        processes = workers if workers > 1 else None
        kept = rows.map(encode, cache_file_name=file, num_proc=processes, new_fingerprint=name, **options)
        return _arrays(kept)
    except (OSError, pyarrow.ArrowInvalid) as error:  # a damaged file, or a folder that cannot be written
        logger.warning("the prompt tokens in %s cannot be used (%s): tokenizing without the cache", folder, error)
        for damaged in folder.glob(f"{name}*") if folder.is_dir() else ():
            damaged.unlink(missing_ok=True)
        return _arrays(rows.map(encode, keep_in_memory=True, new_fingerprint=name, **options))


def _arrays(rows: Any) -> list[np.ndarray]:
    """Returns the tokens of each row as views of the dataset's memory."""
    found: list[np.ndarray] = []
    for chunk in rows.data.column("tokens").chunks:
        ends = chunk.offsets.to_numpy() - chunk.offsets[0].as_py()
        found += np.split(chunk.flatten().to_numpy(), ends[1:-1])
    return found


def _identity(tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]) -> list[str]:
    """Returns everything except the prompts that the tokens depend on, as text. This includes the date if the template
    uses it, because the prompts then change every day."""
    import tokenizers
    import transformers

    template = str(tokenizer.chat_template)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    settings = json.dumps([tokenizer.special_tokens_map, kwargs], sort_keys=True, default=str)
    day = time.strftime("%Y-%m-%d") if "strftime_now" in template else ""
    versions = [transformers.__version__, tokenizers.__version__]
    return [type(tokenizer).__qualname__, content, template, settings, day, *versions]


def _encode(prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any]) -> list[list[int]]:
    texts: list[str] = []
    for tools, group in itertools.groupby(prompts, key=lambda prompt: prompt.tools):
        texts += _render(tokenizer, [prompt.messages for prompt in group], tools, kwargs)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def _render(
    tokenizer: PreTrainedTokenizerBase, chats: list[list[dict[str, str]]], tools: str | None, kwargs: dict[str, Any]
) -> list[str]:
    shown = kwargs if tools is None else {**kwargs, "tools": json.loads(tools)}
    try:
        return render_chats(tokenizer, chats, add_generation_prompt=True, **shown)
    except ChatTemplateError as error:
        if len(chats) > 1:  # renders the chats one by one to find the chat that fails
            return [_render(tokenizer, [chat], tools, kwargs)[0] for chat in chats]
        raise UserError(
            f"The chat template of {tokenizer.name_or_path!r} with data.apply_chat_template_kwargs={kwargs} refuses "
            f"the prompt {chats[0]!r:.200} ({error}). Change the prompt in the data, data.chat_template, or "
            "data.apply_chat_template_kwargs"
        ) from error


def _check_shown(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, config: DataConfig, kwargs: dict[str, Any]
) -> None:
    """Raises UserError if the template's output ignores a prompt's tools, tool calls, results of tools, or
    data.system_prompt. Looks at the first prompt that has such a part."""
    system = config.system_prompt
    with_tools = [each for each in prompts if each.tools is not None][:1]
    with_system: list[Prompt] = []
    if system is not None:
        with_system = [each for each in prompts if each.messages[0]["content"] == system and len(each.messages) > 1][:1]
    with_calls = [each for each in prompts if any("tool_calls" in message for message in each.messages)][:1]
    with_results = [each for each in prompts if any(message["role"] == "tool" for message in each.messages)][:1]
    for each in (*with_calls, *with_results):
        arguments = kwargs if each.tools is None else {**kwargs, "tools": json.loads(each.tools)}
        check_calls_shown(each.messages, tokenizer, f"The prompt {each.messages!r:.200}", arguments)

    cases = [("tools (data.columns.tools=null leaves them out)", each, Prompt(each.messages)) for each in with_tools]
    for each in with_system:
        what = f"data.system_prompt={system!r:.100} (use data.prompt_template)"
        cases.append((what, each, Prompt(each.messages[1:], each.tools)))
    for what, prompt, prompt_without in cases:
        whole = _render(tokenizer, [prompt.messages], prompt.tools, kwargs)
        try:
            without = _render(tokenizer, [prompt_without.messages], prompt_without.tools, kwargs)
        except UserError:  # a template that requires the part shows it
            continue
        if whole == without:
            raise UserError(
                f"The chat template of {tokenizer.name_or_path!r} does not show {what}: set another template with "
                "data.chat_template"
            )

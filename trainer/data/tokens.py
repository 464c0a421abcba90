"""Prompts as token ids: the chat template applied, and tokenised.

What comes out is what the rollout engine samples from, so lengths are measured on the very same tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from verl_lite.config import DataConfig
from verl_lite.errors import UserError
from workers.policy.tokenizer import NO_TEMPLATE, plain_template

PARALLEL_FROM = 5_000
"""Prompts that several processes tokenise: fewer take less than two seconds of one core (recipes/LOG.md)."""


@dataclass(frozen=True)
class Prompt:
    """What the chat template is given of a row. tools: their schemas as json, None = none."""

    messages: list[dict[str, str]]
    tools: str | None = None


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, config: DataConfig
) -> list[np.ndarray]:
    """Token ids of each prompt, int32, with the generation prompt at the end, exactly as they will be sampled from.

    Raises:
        UserError: for a chat where the tokenizer has no template (a single message is its text), for a prompt or
            arguments that the template refuses, and for tools or a system prompt that it does not show.
    """
    kwargs = dict(config.apply_chat_template_kwargs)
    if tokenizer.chat_template is None:
        if any(prompt.tools or len(prompt.messages) > 1 for prompt in prompts):
            raise UserError(NO_TEMPLATE.format("prompts of several messages or with tools"))
        kwargs["chat_template"] = plain_template(tokenizer)
    _check_shown(prompts, tokenizer, config, kwargs)
    workers = config.filter_overlong_prompts_workers
    alone = workers == 1 or len(prompts) < PARALLEL_FROM
    found = _encode(prompts, tokenizer, kwargs) if alone else _encode_in_processes(prompts, tokenizer, kwargs, workers)
    return [np.array(tokens, dtype=np.int32) for tokens in found]


def _encode_in_processes(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, kwargs: dict[str, Any], workers: int
) -> list[list[int]]:
    import datasets

    def encode(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        chunk = [Prompt(json.loads(text), tools) for text, tools in zip(batch["messages"], batch["tools"], strict=True)]
        return {"tokens": _encode(chunk, tokenizer, kwargs)}

    columns = {
        "messages": [json.dumps(prompt.messages, default=str) for prompt in prompts],
        "tools": [prompt.tools for prompt in prompts],
    }
    texts = datasets.Features(dict.fromkeys(columns, datasets.Value("large_string")))
    rows = datasets.Dataset.from_dict(columns, features=texts)
    datasets.disable_progress_bars()
    options: dict[str, Any] = {"batched": True, "remove_columns": list(columns), "keep_in_memory": True}
    return rows.map(encode, num_proc=workers, new_fingerprint="prompts", **options)["tokens"][:]


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
        return list(tokenizer.apply_chat_template(chats, tokenize=False, add_generation_prompt=True, **shown))
    except Exception as error:  # the template is the model's code and kwargs are the user's: they may raise anything
        if len(chats) > 1:  # which of them it was is found one by one
            return [_render(tokenizer, [chat], tools, kwargs)[0] for chat in chats]
        raise UserError(
            f"The chat template of {tokenizer.name_or_path!r} with data.apply_chat_template_kwargs={kwargs} refuses "
            f"the prompt {chats[0]!r:.200} ({type(error).__name__}: {error}). Change the prompt in the data, take "
            "another template with data.chat_template, or other data.apply_chat_template_kwargs"
        ) from error


def _check_shown(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, config: DataConfig, kwargs: dict[str, Any]
) -> None:
    """Raises UserError where the template leaves out tools, or the system prompt of data.system_prompt."""
    system = config.system_prompt
    with_tools = [each for each in prompts if each.tools is not None][:1]
    with_system = [each for each in prompts if each.messages[0]["content"] == system and len(each.messages) > 1][:1]
    cases = [("tools (data.columns.tools=null leaves them out)", each, Prompt(each.messages)) for each in with_tools]
    for each in with_system:
        what = f"data.system_prompt={system!r:.100} (use data.prompt_template)"
        cases.append((what, each, Prompt(each.messages[1:], each.tools)))
    for what, *pair in cases:
        whole, without = (_render(tokenizer, [each.messages], each.tools, kwargs) for each in pair)
        if whole == without:
            raise UserError(
                f"The chat template of {tokenizer.name_or_path!r} does not show {what}: take another template with "
                "data.chat_template"
            )

"""Whether the policy can read what it will be given: so many tokens, and no token that it does not know."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.data.prompts import PromptDataset
from verl_lite.config import PPOConfig
from verl_lite.errors import UserError
from workers.policy.loading import load_model_config, longest_context


def check_context(config: PPOConfig) -> None:
    """Raises UserError where prompt and answer together may be longer than the model's positions reach: an engine
    refuses that late, and a model that is run beyond them writes nonsense."""
    context = longest_context(load_model_config(config.model))
    longest = config.data.max_prompt_length + config.data.max_response_length
    if context is not None and longest > context:
        raise UserError(
            f"data.max_prompt_length={config.data.max_prompt_length} + data.max_response_length="
            f"{config.data.max_response_length} = {longest} tokens are more than the {context} positions of model.path="
            f"{config.model.path!r}: lower one of them, or take a model with a longer context"
        )


def check_vocabulary(config: PPOConfig, datasets: Iterable[PromptDataset]) -> None:
    """Raises UserError for a prompt with a token that the model has no embedding for, as another model's tokenizer
    writes them."""
    size = load_model_config(config.model).get_text_config().vocab_size
    for data in datasets:
        largest = data.largest_token()
        if largest >= size:
            raise UserError(
                f"data.{data.split}_files: a prompt has the token {largest}, and model.path={config.model.path!r} "
                f"knows the tokens 0 to {size - 1}: give the tokenizer that belongs to it in model.tokenizer_path"
            )

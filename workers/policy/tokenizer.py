"""The tokenizer of a model, and the tokens that end a response."""

import functools
from pathlib import Path

from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from verl_lite.config import ModelConfig
from verl_lite.errors import UserError
from workers.policy.model_errors import user_error_on_failure

NO_TEMPLATE = (
    "The tokenizer of model.path has no chat template, which {} need. Give one with data.chat_template: a file, the "
    "Jinja text itself, or none, for the texts of the messages one after another"
)


def load_tokenizer(model: ModelConfig, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.tokenizer_path` or `model.path`; pads with the end-of-text token where it has no pad
    token.

    Args:
        chat_template: data.chat_template.
    Raises:
        UserError: for a tokenizer that cannot be read or has neither token, or a template that is no file.
    """
    path = model.tokenizer_path or model.path
    key = "model.path" if model.tokenizer_path is None else "model.tokenizer_path"
    remedy = "expected a folder with tokenizer_config.json and tokenizer.json as Hugging Face writes them"
    with user_error_on_failure(f"{key}={path!r}: its tokenizer cannot be read", remedy):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise UserError(
                f"{key}={path!r}: the tokenizer has neither a pad nor an end-of-text token; "
                "set pad_token or eos_token in its tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template == "none":
        tokenizer.chat_template = plain_template(tokenizer)
    elif chat_template is not None and ("{{" in chat_template or "{%" in chat_template):
        tokenizer.chat_template = chat_template
    elif chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            asked = f"data.chat_template={chat_template}"
            raise UserError(f"{asked}: a file, Jinja text, or none is expected ({error})") from error
    return tokenizer


def plain_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template that writes the texts of the messages one after another, behind the token that begins every text of
    this tokenizer, if there is one."""
    begins = tokenizer.bos_token is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    return "{{ bos_token }}" * begins + "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def stop_token_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's end of text and those of the model's generation config."""
    assert model.path is not None
    return _stop_token_ids(model.path, tokenizer.eos_token_id)


@functools.cache
def _stop_token_ids(path: str, eos_token_id: int | None) -> tuple[int, ...]:
    stops = set() if eos_token_id is None else {eos_token_id}
    try:
        configured = GenerationConfig.from_pretrained(path).eos_token_id
    except OSError:  # a model without generation_config.json has only the tokenizer's
        configured = None
    stops.update([configured] if isinstance(configured, int) else configured or [])
    return tuple(sorted(stops))

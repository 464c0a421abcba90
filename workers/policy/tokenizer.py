"""The tokenizer of a model, and the tokens that end a response."""

import functools
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from verl_lite.config import ModelConfig
from verl_lite.errors import UserError
from workers.policy.generation_config import eos_token_ids, generation_config
from workers.policy.model_errors import user_error_on_failure

NO_TEMPLATE = (
    "The tokenizer of model.path has no chat template, which {} need. Set data.chat_template to a file, to a Jinja "
    "template, or to none, which concatenates the texts of the messages"
)


def load_tokenizer(model: ModelConfig, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of `model.tokenizer_path` or `model.path`. Without a pad token, the end-of-text token pads.

    Args:
        model: options with the path of the tokenizer.
        chat_template: value of data.chat_template.

    Raises:
        UserError: the tokenizer cannot be read or has neither of these tokens, or the template's file cannot be read.
    """
    path = model.tokenizer_path or model.path
    key = "model.path" if model.tokenizer_path is None else "model.tokenizer_path"
    remedy = "expected a folder with tokenizer_config.json and tokenizer.json as Hugging Face writes them"
    with user_error_on_failure(f"{key}={path!r}: its tokenizer cannot be read", remedy):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=model.trust_remote_code)
    # transformers makes an empty tokenizer from a folder without tokenizer.json
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise UserError(f"{key}={path!r}: its tokenizer has no tokens besides {tokenizer.all_special_tokens}; {remedy}")
    # the mask and not the token marks padding, so that any token can pad
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise UserError(
                f"{key}={path!r}: the tokenizer has neither a pad nor an end-of-text token; "
                "set pad_token or eos_token in its tokenizer_config.json"
            )
        tokenizer.pad_token = tokenizer.eos_token
    set_chat_template(tokenizer, chat_template)
    return tokenizer


def set_chat_template(tokenizer: PreTrainedTokenizerBase, chat_template: str | None) -> None:
    """Gives a tokenizer the template that data.chat_template names: a file, a Jinja template, none, or the name of one
    of the tokenizer's own templates. None leaves it unchanged; of several templates, transformers then takes tool_use
    for chats with tools, and default for others.

    Raises:
        UserError: the template's file cannot be read.
    """
    own_templates = tokenizer.chat_template
    if chat_template is None:
        return
    if isinstance(own_templates, dict) and chat_template in own_templates:
        tokenizer.chat_template = own_templates[chat_template]
    elif chat_template == "none":
        tokenizer.chat_template = plain_template(tokenizer)
    # a template without an expression or a statement would ignore the chat, so that such a text is a path
    elif "{{" in chat_template or "{%" in chat_template:
        tokenizer.chat_template = chat_template
    else:
        try:
            tokenizer.chat_template = Path(chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            option = f"data.chat_template={chat_template}"
            raise UserError(f"{option}: expected a file, a Jinja template, or none ({error})") from error


def plain_template(tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the Jinja template that concatenates the texts of the messages, after the token that this tokenizer puts
    at the beginning of every text, if any."""
    texts = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    if tokenizer.bos_token is None:
        return texts
    # chats are encoded without special tokens, so that the template has to write this one
    first_ids = tokenizer("")["input_ids"][:1]
    if first_ids == [tokenizer.bos_token_id]:
        return "{{ bos_token }}" + texts
    return texts


def stop_token_ids(model: ModelConfig, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns the tokens that end a response: the tokenizer's end-of-text token and those of the generation config."""
    return _stop_token_ids(str(model.path), tokenizer.eos_token_id)


# cached, because each call would read and check the file
@functools.cache
def _stop_token_ids(path: str, eos_token_id: int | None) -> tuple[int, ...]:
    stops = set(eos_token_ids(generation_config(path)))
    if eos_token_id is not None:
        stops.add(eos_token_id)
    return tuple(sorted(stops))

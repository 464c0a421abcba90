"""Model folders that are broken, and entries that fit no model: each is told as the user's, with key and cause."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2, tiny_tokenizer
from trainer.data.tokens import Prompt, encode_prompts
from verl_lite.config import DataConfig, ModelConfig
from verl_lite.errors import UserError
from workers.policy.chat_template import ChatTemplateError, render_chats
from workers.policy.loading import NetworkSpec, build_network, count_parameters, load_model_config
from workers.policy.model_errors import user_error_on_failure
from workers.policy.tokenizer import load_tokenizer, plain_template


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tiny_qwen2(tmp_path_factory.mktemp("good") / "model"))


@pytest.fixture
def spoilt(good: Path, tmp_path: Path) -> Callable[[str, bytes | None], ModelConfig]:
    """A copy of the good folder in which one file has another content, or is missing."""

    def spoil(name: str, content: bytes | None) -> ModelConfig:
        shutil.copytree(good, tmp_path / "model")
        (tmp_path / "model" / name).unlink()
        if content is not None:
            (tmp_path / "model" / name).write_bytes(content)
        return ModelConfig(path=str(tmp_path / "model"))

    return spoil


def load(model: ModelConfig) -> None:
    spec = NetworkSpec(model, load_model_config(model), torch.float32, with_weights=True)
    build_network(AutoModelForCausalLM, spec)


def test_a_folder_without_a_tokenizer_is_no_empty_tokenizer(spoilt: Callable) -> None:
    with pytest.raises(UserError, match="model.path=.*its tokenizer has no tokens besides .*expected a folder with"):
        load_tokenizer(spoilt("tokenizer.json", None))


def test_a_chat_template_is_a_file_or_text_or_none(good: Path, tmp_path: Path) -> None:
    model, chat = ModelConfig(path=str(good)), [{"role": "system", "content": "1+"}, {"role": "user", "content": "1="}]
    (tmp_path / "own.jinja").write_text("<{{ messages[-1].content }}>")
    for asked, text in {"none": "1+1=", f"{tmp_path}/own.jinja": "<1=>", "{{ messages[0].content }}": "1+"}.items():
        assert load_tokenizer(model, asked).apply_chat_template(chat, tokenize=False) == text
    with pytest.raises(UserError, match="data.chat_template=None: expected a file, a Jinja template, or none"):
        load_tokenizer(model, "None")


@pytest.mark.parametrize(
    ("template", "excess"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "took more than 0.15 s"),
        ("{{ 9 ** (9 ** 9) }}", "took more than 0.15 s"),  # one call of C code
        ("{{ 'x' * 1000000000 }}", "needed more than 0 GiB of memory"),
        ("{{ 'x' * 2000000 }}", "wrote 2,000,000 characters, more than the 1,048,576 allowed"),
    ],
)
def test_a_template_that_takes_too_much_is_refused_and_the_folder_named(
    good: Path, template: str, excess: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SECONDS": 0.1, "MEMORY_BYTES": 64 << 20}.items():
        monkeypatch.setattr(f"workers.policy.chat_template.{name}", value)
    tokenizer = load_tokenizer(ModelConfig(path=str(good)), template)
    with pytest.raises(UserError, match=f"The chat template of '{good}'.*{excess}"):
        encode_prompts([Prompt([{"role": "user", "content": "1="}])], tokenizer, DataConfig())
    tokenizer.chat_template = "{{ messages[0].content }}{{ raise_exception('no') if messages[1] }}"
    chat = [{"role": "user", "content": "1="}]
    assert render_chats(tokenizer, [chat] * 3) == ["1="] * 3, "another template is not charged for it"
    with pytest.raises(ChatTemplateError, match="^TemplateError: no$"):
        render_chats(tokenizer, [chat, chat * 2])


def test_plain_text_begins_with_the_token_that_the_tokenizer_puts_there() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<|endoftext|>"})
    assert plain_template(tokenizer).startswith("{% for")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.chat_template = plain_template(tokenizer)
    chat = [{"role": "user", "content": "1+1="}]
    assert tokenizer.apply_chat_template(chat)["input_ids"] == tokenizer("1+1=")["input_ids"]


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("hidden_size", -1),
        ("hidden_size", 0),
        ("hidden_size", "a"),
        ("num_hidden_layers", 3),
        ("num_attention_heads", 0),
        ("tie_word_embeddings", "maybe"),
        ("hidden_act", "nope"),
        ("rope_scaling", {"rope_type": "x"}),
        ("layer_types", ["x"]),
        ("torch_dtype", "int8"),
    ],
)
def test_entries_with_which_no_model_can_be_built_are_named(good: Path, entry: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"model.override_config.*{entry}"):
        count_parameters(ModelConfig(path=str(good), override_config={entry: value}))


@pytest.mark.parametrize("value", [0, 0.0, False, None])
def test_an_entry_that_the_model_lacks_may_be_switched_off(good: Path, value: Any) -> None:
    plain = count_parameters(ModelConfig(path=str(good)))
    assert count_parameters(ModelConfig(path=str(good), override_config={"embd_pdrop": value})) == plain
    with pytest.raises(UserError, match="model.override_config.embd_pdrop=0.1: a qwen2 config has no such entry"):
        count_parameters(ModelConfig(path=str(good), override_config={"embd_pdrop": 0.1}))


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"model_type": "nope"}'])
def test_a_config_that_describes_no_known_model_is_named(spoilt: Callable, content: bytes) -> None:
    with pytest.raises(UserError, match="model.path=.*cannot be read.*expected a folder with config.json"):
        count_parameters(spoilt("config.json", content))


def test_code_that_comes_with_a_model_is_not_run_unasked(spoilt: Callable) -> None:
    content = json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}).encode()
    with pytest.raises(UserError, match="model.path=.*trust_remote_code"):
        count_parameters(spoilt("config.json", content))


@pytest.mark.parametrize(("name", "content"), [("tokenizer_config.json", b"{"), ("tokenizer_config.json", b"[]")])
def test_a_broken_tokenizer_is_named_by_the_key_that_gave_it(spoilt: Callable, name: str, content: bytes) -> None:
    broken = spoilt(name, content)
    with pytest.raises(UserError, match="model.path=.*tokenizer cannot be read"):
        load_tokenizer(broken)
    with pytest.raises(UserError, match="model.tokenizer_path=.*tokenizer cannot be read"):
        load_tokenizer(ModelConfig(path="elsewhere", tokenizer_path=broken.path))


@pytest.mark.parametrize("content", [None, b"junk" * 10])
def test_weights_that_are_missing_or_broken_are_named(spoilt: Callable, content: bytes | None) -> None:
    with pytest.raises(UserError, match="model.path=.*the weights cannot be loaded"):
        load(spoilt("model.safetensors", content))


def test_weights_of_another_size_are_named(good: Path) -> None:
    with pytest.raises(UserError, match="model.override_config=.*vocab_size.*the weights cannot be loaded"):
        load(ModelConfig(path=str(good), override_config={"vocab_size": 100}))


def test_want_of_memory_is_not_the_users() -> None:
    for error in (MemoryError, torch.OutOfMemoryError):
        with pytest.raises(error), user_error_on_failure("x", "y"):
            raise error

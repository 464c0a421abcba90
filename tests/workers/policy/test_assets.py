"""Files of a model besides its weights: what transformers would not write is copied, what it cannot read is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.tiny_model import tiny_qwen2
from tests.workers.engine_cases import Case, build_engine
from verl_lite.config import ModelConfig, OptimConfig
from verl_lite.errors import UserError
from workers.policy.causal_lm import causal_lm
from workers.policy.export import export
from workers.policy.loading import check_network
from workers.policy.tokenizer import load_tokenizer, stop_token_ids
from workers.policy.value_head import value_head

TOKENS = torch.tensor([[3, 9, 30, 11]])
LANGUAGE_MODEL = causal_lm(64)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(tiny_qwen2(tmp_path / "model", hidden=32, heads=4))


def change(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.mark.parametrize(
    "entries",
    [
        {"temperature": 0.9, "top_p": 0.6},  # Llama 2, Vicuna
        {"do_sample": False, "top_k": 5, "typical_p": 0.5},
        {"num_beams": 1, "length_penalty": 2.0, "early_stopping": True},
        {"return_dict_in_generate": False, "output_scores": True},
        {"temperature": -1.0},
        {"an_entry_of_another_release": [1, 2]},
    ],
)
@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_a_generation_config_is_exported_as_it_is(
    model: Path, tmp_path: Path, entries: dict[str, Any], trained: str
) -> None:
    file = model / "generation_config.json"
    change(file, **entries)
    options = {"lora_rank": 2} if trained == "adapter" else {}
    check_network(ModelConfig(path=str(model), **options), LANGUAGE_MODEL, trains=True)
    build_engine(str(model), Case(), OptimConfig(lr=0.0), model=options).save(str(tmp_path / "checkpoint"))
    export(str(tmp_path / "checkpoint"), str(tmp_path / "hf"))
    assert (tmp_path / "hf" / "generation_config.json").read_bytes() == file.read_bytes()
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(model)(TOKENS).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(TOKENS).logits, expected)


@pytest.mark.parametrize(
    "content",
    [
        '{"max_new_tokens": 0}',
        '{"num_return_sequences": 3}',
        '{"early_stopping": "perhaps"}',
        '{"cache_implementation": "x"}',
        '{"eos_token_id": "2"}',
        '{"eos_token_id": [1.5]}',
        "[1]",
        "{",
        "",
    ],
)
def test_a_generation_config_that_nobody_could_read_is_refused_with_its_name(model: Path, content: str) -> None:
    (model / "generation_config.json").write_text(content)
    for trains in (True, False):
        with pytest.raises(UserError, match=r"generation_config.json is invalid .*correct or remove this file"):
            check_network(ModelConfig(path=str(model)), LANGUAGE_MODEL, trains=trains)
    with pytest.raises(UserError, match=r"generation_config.json is invalid"):
        stop_token_ids(ModelConfig(path=str(model)), load_tokenizer(ModelConfig(path=str(model))))


def test_sampling_options_in_config_json_are_kept(model: Path, tmp_path: Path) -> None:
    """Older models have them there; transformers reads them, and refuses to save them."""
    change(model / "config.json", temperature=0.7, do_sample=True, max_length=50, my_own_entry={"a": [1]})
    for build_policy in (LANGUAGE_MODEL, value_head):
        check_network(ModelConfig(path=str(model)), build_policy, trains=True)
    build_engine(str(model), Case(), OptimConfig(lr=0.0)).save(str(tmp_path / "checkpoint"))
    export(str(tmp_path / "checkpoint"), str(tmp_path / "hf"), "bf16")
    exported = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert exported["my_own_entry"] == {"a": [1]} and exported["dtype"] == "bfloat16"
    assert exported["architectures"] == ["Qwen2ForCausalLM"]
    assert AutoConfig.from_pretrained(tmp_path / "hf").hidden_size == 32


def test_files_that_are_missing_stay_missing(model: Path, tmp_path: Path) -> None:
    (model / "generation_config.json").unlink()
    check_network(ModelConfig(path=str(model)), LANGUAGE_MODEL, trains=True)
    build_engine(str(model), Case(), OptimConfig(lr=0.0)).save(str(tmp_path / "checkpoint"))
    export(str(tmp_path / "checkpoint"), str(tmp_path / "hf"))
    assert not (tmp_path / "hf" / "generation_config.json").exists()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("1+1")["input_ids"] == AutoTokenizer.from_pretrained(model)("1+1")["input_ids"]


def test_a_checkpoint_needs_no_file_of_the_initial_model(model: Path, tmp_path: Path) -> None:
    engine = build_engine(str(model), Case(), OptimConfig(lr=0.0))
    model.rename(tmp_path / "elsewhere")
    engine.save(str(tmp_path / "checkpoint"))
    export(str(tmp_path / "checkpoint"), str(tmp_path / "hf"))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "elsewhere")(TOKENS).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")(TOKENS).logits, expected)


def test_a_tokenizer_that_cannot_be_saved_is_refused_before_training(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("no save_vocabulary")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", refuse)
    with pytest.raises(UserError, match=r"its tokenizer cannot be saved \(NotImplementedError: no save_vocabulary\)"):
        check_network(ModelConfig(path=str(model)), LANGUAGE_MODEL, trains=True)


CODE = """
from transformers import Qwen2Config, Qwen2ForCausalLM

class OwnConfig(Qwen2Config):
    model_type = "own_qwen"

class OwnForCausalLM(Qwen2ForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_with_code_of_its_own_is_exported_with_it(model: Path, tmp_path: Path) -> None:
    (model / "own.py").write_text(CODE)
    entries = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"}
    change(model / "config.json", model_type="own_qwen", auto_map=entries, architectures=["OwnForCausalLM"])
    trusted = {"trust_remote_code": True}
    check_network(ModelConfig(path=str(model), **trusted), LANGUAGE_MODEL, trains=True)
    engine = build_engine(str(model), Case(), OptimConfig(lr=0.0), model=trusted)
    engine.save(str(tmp_path / "checkpoint"))
    with pytest.raises(UserError, match="the model has Python code of its own; .*--trust_remote_code"):
        export(str(tmp_path / "checkpoint"), str(tmp_path / "hf"))
    export(str(tmp_path / "checkpoint"), str(tmp_path / "hf"), **trusted)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(model, **trusted)(TOKENS).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "hf", **trusted)(TOKENS).logits, expected)


BUFFER_CODE = (
    CODE
    + """
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

class OwnNorm(Qwen2RMSNorm):
    def __init__(self, size):
        super().__init__(size)
        self.register_buffer("scale", torch.full((size,), 0.5), persistent=False)

    def forward(self, hidden):
        return self.scale * super().forward(hidden)

class OwnScaledForCausalLM(OwnForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model.norm = OwnNorm(config.hidden_size)
"""
)


def test_buffers_that_no_weight_file_contains_are_those_of_the_models_code(model: Path) -> None:
    """transformers leaves them as the memory was, unless it knows the module."""
    (model / "own_scaled.py").write_text(BUFFER_CODE)
    entries = {"AutoConfig": "own_scaled.OwnConfig", "AutoModelForCausalLM": "own_scaled.OwnScaledForCausalLM"}
    change(model / "config.json", model_type="own_qwen", auto_map=entries, architectures=["OwnScaledForCausalLM"])
    engine = build_engine(str(model), Case(), OptimConfig(lr=0.0), model={"trust_remote_code": True})
    [scale] = [buffer for name, buffer in engine.policy.named_buffers() if name.endswith("norm.scale")]
    assert torch.equal(scale, torch.full_like(scale, 0.5))
    [frequencies] = [buffer for name, buffer in engine.policy.named_buffers() if name.endswith("rotary_emb.inv_freq")]
    assert frequencies[0] == 1

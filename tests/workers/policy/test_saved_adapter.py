"""Adapters that peft saved: those with the meaning of this project have the logits of peft, all others are refused."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2
from verl_lite.config import ModelConfig
from verl_lite.errors import UserError
from workers.policy.adapter import add_adapter
from workers.policy.loading import count_trained

TOKENS = torch.tensor([[3, 9, 30, 11]])
PLAIN: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_qwen2(tmp_path_factory.mktemp("base"), hidden=32, heads=4)


@pytest.fixture
def saved(base: str, tmp_path: Path) -> Callable[..., str]:
    """Saves an adapter of random numbers with entries of peft's config, and returns its folder."""

    def save(**entries: Any) -> str:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(base)
        adapted = peft.get_peft_model(model, peft.LoraConfig(**PLAIN | entries))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.2)
        adapted.save_pretrained(tmp_path / "saved")
        return str(tmp_path / "saved")

    return save


def options(base: str, folder: str, **more: Any) -> ModelConfig:
    names = {"lora_rank": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
    return ModelConfig(**{"path": base, "lora_adapter_path": folder, **names, **more})


def change_config(folder: str, **entries: Any) -> None:
    file = Path(folder) / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": False},
        {"init_lora_weights": "orthogonal"},
        {"lora_dropout": 0.3},
        {"target_modules": ".*(q_proj|down_proj)"},
    ],
)
def test_an_accepted_adapter_has_the_logits_of_peft(
    base: str, saved: Callable[..., str], entries: dict[str, Any]
) -> None:
    folder = saved(**entries)
    expected = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    network = AutoModelForCausalLM.from_pretrained(base)
    add_adapter(network, options(base, folder))
    with torch.no_grad():
        torch.testing.assert_close(network(TOKENS).logits, expected.eval()(TOKENS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_4"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "mica"),
        ("init_lora_weights", 1),
        ("use_dora", True),
        ("use_rslora", True),
        ("use_qalora", True),
        ("lora_bias", True),
        ("fan_in_fan_out", True),
        ("bias", "all"),
        ("bias", "lora_only"),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("trainable_token_indices", [3]),
        ("target_parameters", ["q_proj.weight"]),
        ("alora_invocation_tokens", [1]),
        ("ensure_weight_tying", True),
        ("loftq_config", {"loftq_bits": 4}),
        ("arrow_config", {"top_k": 3}),
        ("peft_type", "IA3"),
        ("peft_type", "ADALORA"),
        ("peft_type", None),
        ("task_type", "SEQ_CLS"),
        ("an_entry_of_a_later_release", "x"),
    ],
)
def test_an_entry_with_another_meaning_is_refused_with_file_key_value_and_accepted_values(
    base: str, saved: Callable[..., str], entry: str, value: Any
) -> None:
    folder = saved()
    change_config(folder, **{entry: value})
    shown = re.escape(f"{folder}: its adapter_config.json has {entry}={json.dumps(value)}")
    with pytest.raises(UserError, match=f"{shown}.*accepted: .*merge_and_unload"):
        count_trained(options(base, folder))


@pytest.mark.parametrize("initialization", ["pissa", "olora"])
def test_adapters_that_peft_saved_with_changed_base_weights_are_refused(
    base: str, saved: Callable[..., str], initialization: str
) -> None:
    folder = saved(init_lora_weights=initialization)
    with pytest.raises(UserError, match=f'init_lora_weights="{initialization}".*accepted: true, false, "gaussian"'):
        count_trained(options(base, folder))


def test_a_config_without_a_kind_and_sizes_that_are_no_integers_are_refused(
    base: str, saved: Callable[..., str]
) -> None:
    folder = saved()
    for name, value in {"r": None, "lora_alpha": 6.5}.items():
        before = (Path(folder) / "adapter_config.json").read_text()
        change_config(folder, **{name: value})
        with pytest.raises(UserError, match=f"has {name}=.*accepted: an integer"):
            count_trained(options(base, folder))
        (Path(folder) / "adapter_config.json").write_text(before)
    (Path(folder) / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 6}')
    with pytest.raises(UserError, match="has no peft_type; accepted: LORA"):
        count_trained(options(base, folder))
    (Path(folder) / "adapter_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"cannot be read .*expected a folder with adapter_config.json"):
        count_trained(options(base, folder))


@pytest.mark.parametrize(
    ("name", "shape", "refusal"),
    [
        ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", (32,), "neither a matrix A nor a matrix B"),
        ("model.layers.0.self_attn.q_proj.lora_B.bias", (32,), "neither a matrix A nor a matrix B"),
        ("lm_head.lora_A.weight", (4, 32), "lm_head is no layer that can have an adapter here"),
        ("model.embed_tokens.lora_embedding_A", (4, 64), "neither a matrix A nor a matrix B"),
        ("lm_head.weight", (64, 32), "neither a matrix A nor a matrix B"),
    ],
)
def test_a_tensor_without_a_place_in_the_adapter_is_refused(
    base: str, saved: Callable[..., str], name: str, shape: tuple[int, ...], refusal: str
) -> None:
    folder = saved()
    file = Path(folder) / "adapter_model.safetensors"
    save_file(load_file(file) | {f"base_model.model.{name}": torch.zeros(shape)}, file)
    with pytest.raises(UserError, match=f"{re.escape(name)}, .*{refusal}.*Merge it"):
        count_trained(options(base, folder))


def test_an_adapter_with_values_that_are_not_finite_is_refused(base: str, saved: Callable[..., str]) -> None:
    folder = saved()
    file = Path(folder) / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"][0, 0] = float("nan")
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"layers.1.mlp.down_proj.lora_A.weight .*NaN or infinite"):
        count_trained(options(base, folder))


@pytest.mark.parametrize(
    ("entries", "given"),
    [
        ({"layers_to_transform": [0]}, {}),
        ({"target_modules": ["q_proj"]}, {}),
        ({}, {"exclude_modules": ["down_proj"]}),
        ({"exclude_modules": ["layers.1.mlp.down_proj"]}, {}),
        ({"target_modules": "all-linear"}, {"target_modules": ["all-linear"], "exclude_modules": ["q_proj"]}),
    ],
)
def test_the_options_that_a_refusal_advises_are_accepted(
    base: str, saved: Callable[..., str], entries: dict[str, Any], given: dict[str, Any]
) -> None:
    folder = saved(**entries)
    refused = options(base, folder, **given)
    with pytest.raises(UserError) as caught:
        count_trained(refused)
    message = str(caught.value)
    targets = re.findall(r"Set model.target_modules=\[([^]]*)\]", message)[0].split(",")
    excluded = [] if "model.exclude_modules=[]" in message.partition("Set ")[2] else refused.exclude_modules
    assert (targets, excluded) != (refused.target_modules, refused.exclude_modules)
    assert count_trained(options(base, folder, target_modules=targets, exclude_modules=excluded)) > 0


def test_the_path_of_another_base_is_not_advised_if_it_is_the_path_of_the_run(
    base: str, saved: Callable[..., str], tmp_path: Path
) -> None:
    folder = saved()
    wide = tiny_qwen2(tmp_path / "wide", hidden=64, heads=4)
    with pytest.raises(UserError, match=f"Set model.path={base}, or train"):
        count_trained(options(wide, folder))
    change_config(folder, base_model_name_or_path=wide)
    with pytest.raises(UserError, match=f"Give the adapter of the model that is now at {wide}"):
        count_trained(options(wide, folder))

"""Weight files that differ from their network: refused on all ranks before training, or used as transformers does."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2, tiny_reward_model
from tests.workers.engine_cases import CPU, Case, build_engine
from tests.workers.ranks import OnRanks
from trainer.planner.model_shape import read_shape
from verl_lite.config import ModelConfig, OptimConfig, RolloutConfig
from verl_lite.errors import UserError
from workers.engines.base import Request, SamplingParams, build_rollout_engine
from workers.policy.causal_lm import causal_lm
from workers.policy.export import export
from workers.policy.loading import (
    PolicyBuilder,
    check_network,
    load_model_config,
    output_layer_note,
    rollout_overrides,
)
from workers.policy.sequence_score import new_sequence_score, sequence_score
from workers.policy.value_head import value_head
from workers.roles.actor_rollout import sync_weights

TOKENS = torch.tensor([[3, 9, 30, 11]])
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
LANGUAGE_MODEL = causal_lm(64)
Change = Callable[[dict[str, torch.Tensor]], object]


def changed(folder: Path, change: Change, **sizes: Any) -> str:
    """A tiny model whose weights are changed."""
    path = tiny_qwen2(folder, **{"hidden": 32, "heads": 4, "tie_word_embeddings": True, **sizes})
    weights = load_file(f"{path}/model.safetensors")
    change(weights)
    save_file(weights, f"{path}/model.safetensors", metadata={"format": "pt"})
    return path


def add_other_head(weights: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(3)
    weights[HEAD] = torch.randn_like(weights[EMBEDDING]) * 0.3


def add_equal_head(weights: dict[str, torch.Tensor]) -> None:
    weights[HEAD] = weights[EMBEDDING].clone()


def logits_of(path: str) -> torch.Tensor:
    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path)(TOKENS).logits


@pytest.mark.parametrize(
    ("change", "sizes", "problem"),
    [
        (lambda weights: weights.pop(NORM), {}, f"which also needs {NORM}"),
        (lambda weights: weights.pop(EMBEDDING), {}, "which also needs .*embed_tokens"),
        (lambda weights: weights.pop(HEAD), {"tie_word_embeddings": False}, f"also needs {HEAD}.*tie_word_embeddings"),
        (lambda weights: weights.update({NORM: torch.ones(7)}), {}, rf"{NORM} \(7,\) instead of \(32,\)"),
        (lambda weights: weights.update({"foo.weight": torch.ones(7)}), {}, "does not read foo.weight"),
        (
            lambda weights: weights.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}),
            {},
            "does not read model.layers.0.self_attn.q_norm.weight",
        ),
        (
            lambda weights: weights.update({f"model.layers.2.{n}.weight": torch.ones(1) for n in "abcdefg"}),
            {},
            "model.layers.2.a.weight.* and 2 more",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_the_check_and_by_the_loader(
    tmp_path: Path, change: Change, sizes: dict[str, Any], problem: str
) -> None:
    path = changed(tmp_path / "model", change, **sizes)
    for trains in (True, False):
        with pytest.raises(UserError, match=f"model.path='{path}'.*{problem}"):
            check_network(ModelConfig(path=path), LANGUAGE_MODEL, trains=trains)
    with pytest.raises(UserError, match=f"model.path='{path}'.*{problem}"):
        build_engine(path, Case())


@pytest.mark.parametrize("build_policy", [value_head, new_sequence_score, sequence_score])
def test_backbones_of_critics_and_reward_models_are_checked_alike(tmp_path: Path, build_policy: PolicyBuilder) -> None:
    is_frozen = build_policy is sequence_score
    path = tiny_reward_model(tmp_path) if is_frozen else tiny_qwen2(tmp_path, hidden=32, heads=4)
    check_network(ModelConfig(path=path), build_policy, trains=not is_frozen)
    weights = load_file(f"{path}/model.safetensors")
    for name, value in {NORM: torch.ones(7), "model.layers.1.extra": torch.ones(1)}.items():
        save_file(weights | {name: value}, f"{path}/model.safetensors")
        with pytest.raises(UserError, match=name):
            check_network(ModelConfig(path=path), build_policy, trains=not is_frozen)


def failure_of(path: str) -> str:
    """On each rank: the error of building an engine."""
    try:
        build_engine(path, Case())
    except UserError as error:
        return str(error)
    return ""


def test_all_ranks_fail_together(tmp_path: Path, two_ranks: OnRanks) -> None:
    path = changed(tmp_path / "model", lambda weights: weights.pop(NORM))
    assert all(f"which also needs {NORM}" in failure for failure in two_ranks(failure_of, path))


def test_an_output_layer_of_its_own_is_used_everywhere_although_the_config_ties_it(
    tmp_path: Path, two_ranks: OnRanks
) -> None:
    path = changed(tmp_path / "model", add_other_head)
    model = ModelConfig(path=path)
    expected = logits_of(path)  # transformers keeps the output layer, too
    check_network(model, LANGUAGE_MODEL, trains=True)
    assert "with tie_word_embeddings=false" in output_layer_note(model)
    assert not load_model_config(model).tie_word_embeddings and not read_shape(model).tied

    engine = build_engine(path, Case(), OptimConfig(lr=0.0))
    engine.save(str(tmp_path / "checkpoint"))
    export(str(tmp_path / "checkpoint"), str(tmp_path / "hf"))
    assert not json.loads((tmp_path / "hf" / "config.json").read_text())["tie_word_embeddings"]
    torch.testing.assert_close(logits_of(str(tmp_path / "hf")), expected)
    assert set(two_ranks(failure_of, path)) == {""}

    options = RolloutConfig(max_num_seqs=4)
    overrides = rollout_overrides(model)
    rollout = build_rollout_engine(
        "hf", path, options, max_model_len=16, device=CPU, dtype=torch.float32, seed=0, override_config=overrides
    )
    sync_weights(engine, rollout, version=1, bucket_mb=1)
    rollout.submit(Request("a", tuple(TOKENS[0].tolist()), SamplingParams(temperature=0.0, max_tokens=1)))
    completions = [completion for _ in range(4) for completion in rollout.step()]
    rollout.close()
    log_probs = expected[0, -1].log_softmax(-1)
    assert completions[0].token_ids == [int(log_probs.argmax())]
    assert completions[0].log_probs == pytest.approx([float(log_probs.max())], abs=1e-5)


@pytest.mark.parametrize("trained", ["all", "adapter"])
def test_a_separate_output_layer_is_exported_after_training(tmp_path: Path, trained: str) -> None:
    path = changed(tmp_path / "model", add_other_head)
    lora = {"lora_rank": 2} if trained == "adapter" else {}
    engine = build_engine(path, Case(), OptimConfig(lr=0.0), model=lora)
    engine.save(str(tmp_path / "checkpoint"))
    export(str(tmp_path / "checkpoint"), str(tmp_path / "hf"))
    torch.testing.assert_close(logits_of(str(tmp_path / "hf")), logits_of(path))


def test_equal_weights_that_are_stored_twice_stay_tied(tmp_path: Path) -> None:
    path = changed(tmp_path / "twice", add_equal_head)
    only_head = changed(tmp_path / "head", lambda weights: weights.update({HEAD: weights.pop(EMBEDDING)}))
    as_bin = changed(tmp_path / "bin", add_equal_head)
    torch.save(load_file(f"{as_bin}/model.safetensors"), f"{as_bin}/pytorch_model.bin")
    Path(as_bin, "model.safetensors").unlink()
    for folder in (path, only_head, as_bin):
        model = ModelConfig(path=folder)
        check_network(model, LANGUAGE_MODEL, trains=True)
        assert load_model_config(model).tie_word_embeddings
        assert output_layer_note(model) == "" and rollout_overrides(model) == {}


def test_weights_in_shards_and_in_a_pickle_are_compared_too(tmp_path: Path) -> None:
    path = changed(tmp_path / "shards", add_other_head)
    network = AutoModelForCausalLM.from_pretrained(path)
    network.save_pretrained(path, max_shard_size="10KB")
    Path(path, "model.safetensors").unlink(missing_ok=True)
    as_bin = changed(tmp_path / "bin", add_other_head)
    torch.save(load_file(f"{as_bin}/model.safetensors"), f"{as_bin}/pytorch_model.bin")
    Path(as_bin, "model.safetensors").unlink()
    for folder in (path, as_bin):
        config = json.loads(Path(folder, "config.json").read_text()) | {"tie_word_embeddings": True}
        Path(folder, "config.json").write_text(json.dumps(config))
        assert not load_model_config(ModelConfig(path=folder)).tie_word_embeddings


def test_tying_by_an_option_would_lose_the_output_layer_and_is_refused(tmp_path: Path) -> None:
    path = changed(tmp_path / "model", add_other_head)
    for tied in (True, False):
        model = ModelConfig(path=path, override_config={"tie_word_embeddings": tied})
        if tied:
            with pytest.raises(UserError, match=r"remove model.override_config.tie_word_embeddings"):
                load_model_config(model)
        else:
            check_network(model, LANGUAGE_MODEL, trains=True)


def test_heads_of_other_trainers_and_layers_that_the_user_removes_are_no_error(tmp_path: Path) -> None:
    path = changed(tmp_path / "model", lambda weights: weights.update({"v_head.summary.weight": torch.ones(1, 32)}))
    check_network(ModelConfig(path=path), LANGUAGE_MODEL, trains=True)
    fewer = ModelConfig(path=path, override_config={"num_hidden_layers": 1, "layer_types": ["full_attention"]})
    check_network(fewer, LANGUAGE_MODEL, trains=True)


def test_options_with_which_transformers_could_not_read_the_export_are_refused_before_training(tmp_path: Path) -> None:
    path = tiny_qwen2(tmp_path, hidden=32, heads=4)
    fewer = ModelConfig(path=path, override_config={"num_hidden_layers": 1})  # layer_types still has two
    with pytest.raises(UserError, match=r"could not be exported .*`num_hidden_layers` \(1\).*model.override_config"):
        check_network(fewer, LANGUAGE_MODEL, trains=True)
    check_network(fewer, LANGUAGE_MODEL, trains=False)


def test_quantized_weights_and_folders_of_adapters_are_refused(tmp_path: Path) -> None:
    path = tiny_qwen2(tmp_path, hidden=32, heads=4)
    file = tmp_path / "config.json"
    before = file.read_text()
    for method in ("fp8", "gptq", "awq", "bitsandbytes"):
        file.write_text(json.dumps(json.loads(before) | {"quantization_config": {"quant_method": method}}))
        with pytest.raises(UserError, match=f"quant_method='{method}'.*Give the model with weights in bf16 or fp32"):
            load_model_config(ModelConfig(path=path))
    file.write_text(before)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(UserError, match="it contains an adapter.*Set model.path to its base model"):
        load_model_config(ModelConfig(path=path))


def test_a_pickle_of_an_old_torch_is_read(tmp_path: Path) -> None:
    """Such files are no zip files, and torch cannot map them."""
    for change, is_tied in ((add_other_head, False), (add_equal_head, True)):
        folder = Path(changed(tmp_path / f"tied {is_tied}", change))
        weights = load_file(folder / "model.safetensors")
        torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
        (folder / "model.safetensors").unlink()
        assert load_model_config(ModelConfig(path=str(folder))).tie_word_embeddings == is_tied


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1"),
        ("model.safetensors.index.json", b"{nope"),
        ("model.safetensors.index.json", b"{}"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 5}}'),
        ("pytorch_model.bin", b"nothing"),
    ],
)
def test_damaged_weights_of_a_tied_model_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder = Path(changed(tmp_path / "model", add_equal_head))
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match="model.path=.*the weights cannot be loaded.*weight files must be complete"):
        load_model_config(ModelConfig(path=str(folder)))

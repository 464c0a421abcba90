"""LoRA in the training engine: it is peft's, on one rank and two; the base stays; the reference is the adapter off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.tiny_model import tiny_qwen2
from tests.workers.engine_cases import (
    BATCH,
    CPU,
    PROMPT,
    RESPONSE,
    TEMPERATURE,
    Batch,
    Case,
    assert_close,
    build_engine,
    loss_fn,
    planned,
    ragged_batch,
)
from tests.workers.engines.test_engines import vllm_missing
from tests.workers.invariance import POLICY, plain_outputs
from tests.workers.ranks import OnRanks
from tests.workers.rollout.scripted import answer
from verl_lite.config import MixedPrecisionConfig, ModelConfig, OptimConfig, RolloutConfig
from verl_lite.errors import UserError
from verl_lite.protocol import DataProto
from workers.engine.fsdp import FSDPEngine
from workers.engines.base import SamplingParams, build_rollout_engine
from workers.policy.adapter import base_note
from workers.policy.export import export, export_adapter
from workers.policy.loading import count_parameters, count_trained
from workers.roles.actor_rollout import sync_weights

OPTIM = OptimConfig(lr=1e-2, eps=1e-3, clip_grad=0.05)  # the gradient is clipped in every step
CASE = Case()
ATTENTION = ("q_proj", "v_proj")
ARGUMENTS: dict[str, Any] = {"temperature": TEMPERATURE, "calculate_entropy": True}


def engine_of(path: str, case: Case = CASE, targets: tuple[str, ...] = ("all-linear",), rank: int = 3) -> FSDPEngine:
    model = {"lora_rank": rank, "lora_alpha": 6, "target_modules": list(targets)}
    return build_engine(path, case, OPTIM, model=model)


def base_of(path: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path)


def gathered(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Copies of what learns, whole, by name."""
    return {name: value.full_tensor().detach().clone() for name, value in engine.trained.items()}


def train(engine: FSDPEngine, case: Case, steps: int = 1) -> None:
    data, _ = planned(ragged_batch(BATCH), case, mini_batch_size=4)
    for _ in range(steps):
        engine.train(data, loss_fn, **ARGUMENTS)


def log_probs(engine: FSDPEngine) -> torch.Tensor:
    return engine.infer(planned(ragged_batch(BATCH), Case())[0], temperature=1.0, calculate_entropy=False)["log_probs"]


def trained_adapter(path: str, case: Case, steps: int, save: str = "") -> dict[str, Any]:
    """On each rank: what learns after some steps, and the merged weights."""
    engine = engine_of(path, case)
    start = {name: value.numpy() for name, value in gathered(engine).items()}
    train(engine, case, steps)
    if save:
        engine.save(save)
    return {
        "start": start,
        "adapter": {name: value.numpy() for name, value in gathered(engine).items()},
        "merged": {name: value.clone().numpy() for name, value in engine.full_params(bucket_bytes=5000)},
    }


@pytest.mark.parametrize("packed", [True, False])
def test_at_first_the_policy_is_the_base_exactly(path: str, tied_path: str, packed: bool) -> None:
    for model in (path, tied_path):
        engine, base = engine_of(model, Case(packed=packed)), build_engine(model, Case(packed=packed))
        assert torch.equal(log_probs(engine), log_probs(base))
        plain = dict(base.full_params())
        found = dict(engine.full_params())
        assert list(found) == list(plain) and all(torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize("targets", [("all-linear",), ATTENTION])
def test_gradients_and_steps_equal_those_of_plain_peft(path: str, targets: tuple[str, ...]) -> None:
    """Two optimizer steps of clipped AdamW on the same adapter; the frozen layers must not enter the norm."""
    engine = engine_of(path, targets=targets)
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules="all-linear" if targets == ("all-linear",) else list(targets),
        task_type="CAUSAL_LM",
    )  # fmt: skip
    plain = peft.get_peft_model(base_of(path), config)
    weights = {name.removeprefix("base_model.model."): value for name, value in plain.named_parameters()}
    learnt = {name: value for name, value in weights.items() if value.requires_grad}
    assert learnt.keys() == engine.trained.keys()
    with torch.no_grad():
        for name, value in gathered(engine).items():
            learnt[name].copy_(value)
    optimizer = torch.optim.AdamW(learnt.values(), lr=1e-2, eps=1e-3, weight_decay=0.01, betas=(0.9, 0.999))
    data, _ = planned(ragged_batch(BATCH), Case())
    whole = ragged_batch(BATCH)
    whole.meta_info |= {"num_tokens": int(whole.batch["response_mask"].sum()), "num_sequences": 8}
    for _ in range(2):
        engine.train(data, loss_fn, **ARGUMENTS)
        optimizer.zero_grad()
        loss_fn(whole, plain_outputs(plain, POLICY, whole))[0].backward()
        torch.nn.utils.clip_grad_norm_(learnt.values(), 0.05)
        optimizer.step()
        assert_close(
            {name: value.numpy() for name, value in gathered(engine).items()},
            {name: value.detach().numpy() for name, value in learnt.items()},
            1e-6,
        )


@pytest.mark.slow
def test_two_ranks_equal_one_and_the_base_never_changes(path: str, tied_path: str, two_ranks: OnRanks) -> None:
    cut = (Case(max_token_len=30, checkpointing=True), Case(fsdp_size=1, min_num_params=10**9))
    for model, cases in ((path, cut), (tied_path, (Case(),))):
        alone = trained_adapter(model, Case(), steps=3)
        base = {name: value.detach().numpy() for name, value in base_of(model).named_parameters()}
        assert max(np.abs(alone["adapter"][name] - value).max() for name, value in alone["start"].items()) > 1e-2
        adapted = {f"{name.split('.lora_')[0]}.weight" for name in alone["adapter"]}
        assert alone["merged"].keys() == base.keys() and len(adapted) == 2 * 7
        for name, value in base.items():
            assert (np.abs(alone["merged"][name] - value).max() > 1e-3) == (name in adapted), name
            assert name in adapted or np.array_equal(alone["merged"][name], value), name
        for case in cases:
            for result in two_ranks(trained_adapter, model, case, 3):
                assert_close(result["start"], alone["start"], 0.0)
                assert_close(result["adapter"], alone["adapter"], 2e-6)
                assert_close(result["merged"], alone["merged"], 2e-6)


def test_in_bf16_the_base_takes_half_and_the_adapter_stays_fp32(path: str) -> None:
    precision = MixedPrecisionConfig(param_dtype="bf16")
    engine = build_engine(path, CASE, OPTIM, model={"lora_rank": 3}, mixed_precision=precision, param_offload=True)
    dtypes = {name: value.dtype for name, value in engine.parameters.items()}
    assert {dtypes[name] for name in engine.trained} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if name not in engine.trained} == {torch.bfloat16}
    with engine.adapter_off():
        base = log_probs(engine)
    assert torch.equal(log_probs(engine), base)
    engine.move_out()
    engine.move_in()
    before = gathered(engine)
    train(engine, CASE)
    assert all((value != before[name]).any() for name, value in gathered(engine).items())
    assert {value.dtype for _, value in engine.full_params()} == {torch.bfloat16}
    with engine.adapter_off():
        assert torch.equal(log_probs(engine), base)


def test_switched_off_it_is_the_base_before_and_after_training(path: str) -> None:
    engine = engine_of(path, Case(checkpointing=True))
    with engine.adapter_off():  # the engine's first forward: FSDP2 must still learn what will have gradients
        before = log_probs(engine)
    train(engine, Case(checkpointing=True), steps=2)
    after = log_probs(engine)
    with engine.adapter_off():
        assert torch.equal(log_probs(engine), before)
    assert torch.equal(before, log_probs(build_engine(path, Case())))
    assert torch.equal(log_probs(engine), after) and (after - before).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("name", "tied"), [("hf", False), pytest.param("vllm", True, marks=[pytest.mark.slow, vllm_missing])]
)
def test_the_rollout_engine_really_uses_the_adapter(name: str, tied: bool, tmp_path: Path) -> None:
    """The log-probs of what it generates are the trainer's, and not those of the base."""
    model = tiny_qwen2(tmp_path, heads=4, hidden=128, kv_heads=2, tie_word_embeddings=tied)
    engine = engine_of(model)
    train(engine, Case(), steps=2)
    options = RolloutConfig(kv_cache_memory_mb=32, max_num_seqs=16, max_num_batched_tokens=512)
    rollout = build_rollout_engine(name, model, options, max_model_len=64, device=CPU, dtype=torch.float32, seed=0)
    prompts = ragged_batch(Batch(rows=6)).batch
    names = {"uid": np.arange(6).astype(object), "sample": np.zeros(6, dtype=int)}
    try:
        sync_weights(engine, rollout, version=1, bucket_mb=1)
        asked = {"prompts": prompts["prompts"], "prompt_mask": prompts["attention_mask"][:, :PROMPT]}
        rows = answer(rollout, DataProto.from_dict(asked, names), SamplingParams(max_tokens=RESPONSE), RESPONSE)
    finally:
        rollout.close()
    data, plan = planned(rows, Case())
    generated = rows.batch["rollout_log_probs"][plan.order]
    trainers = engine.infer(data, temperature=1.0, calculate_entropy=False)["log_probs"]
    with engine.adapter_off():
        base = engine.infer(data, temperature=1.0, calculate_entropy=False)["log_probs"]
    assert (generated - trainers).abs().max() < 1e-4
    assert (generated - base).abs().max() > 1e-2


def test_checkpoints_hold_the_adapter_alone(path: str, tmp_path: Path) -> None:
    """test_checkpoint_ranks.py goes on from them."""
    adapter = trained_adapter(path, Case(), steps=1, save=str(tmp_path))["adapter"]
    entries = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    kinds = [f"{kind}.{name}" for kind in ("model", "exp_avg", "exp_avg_sq") for name in adapter]
    assert set(entries) == {*kinds, "steps_taken", "scheduler_step"}
    learnt = sum(value.size for value in adapter.values())
    assert count_trained(ModelConfig(path=path, lora_rank=3)) == learnt
    assert count_trained(ModelConfig(path=path)) == count_parameters(ModelConfig(path=path)) > 5 * learnt


def test_a_checkpoint_of_another_adapter_is_refused(path: str, tmp_path: Path) -> None:
    engine_of(path).save(str(tmp_path / "adapter"))
    build_engine(path, Case()).save(str(tmp_path / "whole"))
    with pytest.raises(UserError, match=r"has other parameters: .*\(model.lora_rank=3\)"):
        engine_of(path, rank=5).load(str(tmp_path / "adapter"))
    for engine, folder in ((build_engine(path, Case()), "adapter"), (engine_of(path), "whole")):
        with pytest.raises(UserError, match=r"has other parameters: .*\(model.lora_rank=[03]\)"):
            engine.load(str(tmp_path / folder))
    with pytest.raises(UserError, match="all parameters were trained"):
        export_adapter(str(tmp_path / "whole"), str(tmp_path / "out"))


def test_exports_have_the_logits_of_the_model_in_memory(
    path: str, tied_path: str, two_ranks: OnRanks, tmp_path: Path
) -> None:
    """Merged, and as an adapter beside the base; against peft's own forward on the trained adapter."""
    tokens = torch.tensor([[3, 9, 30, 11]])
    for name, model in (("plain", path), ("tied", tied_path)):
        folder = str(tmp_path / name)
        result = two_ranks(trained_adapter, model, Case(), 2, folder)[0]
        in_memory = peft.get_peft_model(
            base_of(model), peft.LoraConfig(r=3, lora_alpha=6, target_modules="all-linear", task_type="CAUSAL_LM")
        )
        for key, value in result["adapter"].items():
            in_memory.get_parameter(f"base_model.model.{key}").data = torch.from_numpy(value)
        export(folder, f"{folder}_hf")
        export_adapter(folder, f"{folder}_peft")
        beside = peft.PeftModel.from_pretrained(base_of(model), f"{folder}_peft")
        with torch.no_grad():
            expected = in_memory(tokens).logits
            assert (base_of(model)(tokens).logits - expected).abs().max() > 1e-2
            assert (base_of(f"{folder}_hf")(tokens).logits - expected).abs().max() < 1e-5
            assert torch.equal(beside(tokens).logits, expected)
        assert beside.peft_config["default"].lora_alpha == 6
        assert len(load_file(f"{folder}_peft/adapter_model.safetensors")) == 2 * 14
        assert not (Path(f"{folder}_hf") / "adapter_config.json").exists()


def started_from(path: str, adapter: str, folder: str = "") -> dict[str, np.ndarray]:
    """On each rank: the adapter of a new engine that starts from a saved one, or that then loads a checkpoint."""
    model = {"lora_rank": 3, "lora_alpha": 6, "lora_adapter_path": adapter}
    engine = build_engine(path, CASE, OPTIM, model=model)
    if folder:
        engine.load(folder)
    return {name: value.numpy() for name, value in gathered(engine).items()}


def test_a_run_starts_from_a_saved_adapter_and_a_checkpoint_has_priority(
    path: str, two_ranks: OnRanks, tmp_path: Path
) -> None:
    early, late = (trained_adapter(path, CASE, steps, str(tmp_path / f"{steps}"))["adapter"] for steps in (1, 2))
    export_adapter(str(tmp_path / "1"), saved := str(tmp_path / "saved"))
    for found in (started_from(path, saved), *two_ranks(started_from, path, saved)):
        assert all(np.array_equal(found[name], value) for name, value in early.items()) and len(found) == len(early)
    assert any(value.any() for name, value in early.items() if "lora_B" in name), "a new adapter has zeros there"
    resumed = started_from(path, saved, str(tmp_path / "2"))
    assert all(np.array_equal(resumed[name], value) for name, value in late.items())
    assert any(not np.array_equal(early[name], value) for name, value in late.items())


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"lora_rank": 4}, r"model.lora_rank=4: the adapter of .*/saved has 3; set model.lora_rank=3"),
        ({"lora_alpha": 5}, r"model.lora_alpha=5: .* has 6; set model.lora_alpha=6"),
        ({"target_modules": ["q_proj"]}, r"target_modules=\['q_proj'\]: .* Set model.target_modules=\[down_proj,gate_"),
        ({"exclude_modules": ["q_proj"]}, r"q_proj.lora_A.weight is only in the adapter"),
        ({"lora_adapter_path": "/none"}, r"lora_adapter_path=/none cannot be read .*adapter_model.safetensors, as"),
        (
            {"path": "wide"},
            r"an adapter of another model: .*, and .*wide has .* there. Set model.path=",
        ),
        ({"path": "short"}, r"another model: .*layers.1.*short has no such layer. Set model.path="),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_before_a_run_starts(
    options: dict[str, Any], refusal: str, path: str, tmp_path: Path
) -> None:
    engine_of(path).save(str(tmp_path / "checkpoint"))
    export_adapter(str(tmp_path / "checkpoint"), str(tmp_path / "saved"))
    sizes = {"wide": {"hidden": 64}, "short": {"hidden": 32, "layers": 1}}.get(options.get("path", ""))
    if sizes is not None:
        options = options | {"path": tiny_qwen2(tmp_path / options["path"], heads=4, kv_heads=2, **sizes)}
    given = {"path": path, "lora_rank": 3, "lora_alpha": 6, "lora_adapter_path": str(tmp_path / "saved")} | options
    with pytest.raises(UserError, match=refusal):
        count_trained(ModelConfig(**given))


def test_an_adapter_of_a_model_of_another_name_is_noted(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "Qwen/Qwen3-8B"}')
    saved = {"lora_rank": 3, "lora_adapter_path": str(tmp_path)}
    assert "trained on Qwen/Qwen3-8B, and model.path=/b/Qwen3-4B" in base_note(ModelConfig(path="/b/Qwen3-4B", **saved))
    assert base_note(ModelConfig(path="/models/Qwen3-8B", **saved)) == "" == base_note(ModelConfig(path="/b/Qwen3-4B"))


def test_a_base_that_is_gone_is_one_sentence_and_the_adapter_can_still_be_had(tmp_path: Path) -> None:
    engine_of(tiny_qwen2(tmp_path / "base", hidden=32, heads=4)).save(str(tmp_path / "checkpoint"))
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="its adapter cannot be loaded"):
        export(str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    export_adapter(str(tmp_path / "checkpoint"), str(tmp_path / "adapter"))
    peft.PeftModel.from_pretrained(base_of(str(tmp_path / "elsewhere")), str(tmp_path / "adapter"))


def test_a_base_at_a_relative_path_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(tiny_qwen2(tmp_path / "base", hidden=32, heads=4))
    monkeypatch.chdir(tmp_path)
    engine_of("base").save(str(tmp_path / "checkpoint"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    export(str(tmp_path / "checkpoint"), str(tmp_path / "out"))
    export_adapter(str(tmp_path / "checkpoint"), str(tmp_path / "adapter"))
    assert peft.PeftConfig.from_pretrained(str(tmp_path / "adapter")).base_model_name_or_path == str(base)


def test_layers_are_named_as_they_are(path: str) -> None:
    with pytest.raises(
        UserError, match=r"model.target_modules: query matches no linear layer of Qwen2ForCausalLM.*q_proj"
    ):
        engine_of(path, targets=("q_proj", "query"))
    for head in ("lm_head", "embed_tokens"):
        with pytest.raises(UserError, match=f"target_modules: {head} matches no linear layer"):
            engine_of(path, targets=(head,))
    engine = build_engine(path, Case(), OPTIM, model={"lora_rank": 2, "exclude_modules": ["mlp.up_proj", "o_proj"]})
    assert {name.split(".lora_")[0].split(".")[-1] for name in engine.trained} == {
        "q_proj", "k_proj", "v_proj", "gate_proj", "down_proj",
    }  # fmt: skip
    with pytest.raises(UserError, match="model.target_modules: typo"):
        count_trained(ModelConfig(path=path, lora_rank=2, target_modules=["typo"]))

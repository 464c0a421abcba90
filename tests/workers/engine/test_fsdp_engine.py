"""The training engine: log-probs are those of transformers, ranks equal one process. Checkpoints: a file beside."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.workers.engine_cases import (
    BATCH,
    CPU,
    Case,
    assert_close,
    build_engine,
    in_order,
    log_probs,
    loss_fn,
    parts_of,
    planned,
    ragged_batch,
    trained,
)
from tests.workers.invariance import POLICY, plain_outputs
from tests.workers.ranks import OnRanks, Ranks
from verl_lite.config import FSDPConfig, ModelConfig, OptimConfig
from verl_lite.errors import UserError
from verl_lite.metrics import combine
from workers.engine.fsdp import FSDPEngine
from workers.policy.causal_lm import causal_lm
from workers.policy.export import export
from workers.policy.loading import load_model_config, token_network


def plain_log_probs(path: str) -> dict[str, np.ndarray]:
    """log_probs and entropys (B, R) by transformers in fp64, a row at a time."""
    data = ragged_batch(BATCH)
    with torch.no_grad():
        outputs = plain_outputs(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64), POLICY, data)
    return {name: (values * data.batch["response_mask"]).numpy() for name, values in outputs.items()}


@pytest.mark.parametrize(
    ("world", "case"),
    [(1, Case(max_token_len=20)), (1, Case(packed=False, chunk_tokens=3)), (2, Case(max_token_len=25))],
)
def test_infer_equals_transformers(path: str, ranks: Ranks, world: int, case: Case) -> None:
    results = ranks.run(log_probs, path, BATCH, case, size=world)
    plan = parts_of(ragged_batch(BATCH), case, world)[1]
    for name, expected in plain_log_probs(path).items():
        found = in_order(np.concatenate([result[name] for result in results]), plan)
        assert np.abs(found - expected).max() < 1e-5


@pytest.mark.slow
def test_training_on_two_ranks_equals_one(path: str, tied_path: str, two_ranks: OnRanks) -> None:
    """Six optimizer steps with lr 1e-3 move parameters by up to 6e-3; ranks agree within 2e-6."""
    for model in (path, tied_path):
        alone = trained(model, BATCH, Case(), steps=3)
        start = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
        moved = max(np.abs(value - start[name].detach().numpy()).max() for name, value in alone["parameters"].items())
        assert moved > 1e-3
        for case in (Case(), Case(max_token_len=30, checkpointing=True), Case(fsdp_size=1, min_num_params=10**9)):
            for result in two_ranks(trained, model, BATCH, case, 3):
                assert_close(result["parameters"], alone["parameters"], 2e-6)


def test_shuffled_epochs_on_two_ranks_equal_one(path: str, two_ranks: OnRanks) -> None:
    case = Case(epochs=3, shuffle_seed=5, max_token_len=20)
    alone = trained(path, BATCH, case, steps=1)["parameters"]
    for result in two_ranks(trained, path, BATCH, case, 1):
        assert_close(result["parameters"], alone, 2e-6)
    with pytest.raises(AssertionError):
        assert_close(trained(path, BATCH, Case(epochs=3), steps=1)["parameters"], alone, 2e-6)


def test_metrics_of_a_training_call(path: str) -> None:
    engine = build_engine(path, Case(), OptimConfig(lr=1e-3, lr_warmup_steps=2))
    data, _ = planned(ragged_batch(BATCH), Case(max_token_len=20), mini_batch_size=4)
    mask = ragged_batch(BATCH).batch["response_mask"]
    for lr in (5e-4, 1e-3, 1e-3):
        metrics = combine([engine.train(data, loss_fn, temperature=1.0, calculate_entropy=True)])
        assert metrics["lr"].value == lr
        assert metrics["tokens"].value == mask.sum()
        assert metrics["grad_norm"].count == 3 and metrics["grad_norm"].value > 0


def test_full_params_are_those_of_the_folder(path: str, tied_path: str, two_ranks: OnRanks) -> None:
    for model in (path, tied_path):
        expected = {
            name: value.detach() for name, value in AutoModelForCausalLM.from_pretrained(model).named_parameters()
        }
        for bucket_bytes in (1, 5000, 1 << 30):
            engine = build_engine(model, Case())
            found = dict(engine.full_params(bucket_bytes))
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            assert not any(tensor.requires_grad for tensor in found.values())
        for result in two_ranks(trained, model, BATCH, Case(), 0):  # buckets of 40 kB
            assert_close(result["parameters"], {k: v.numpy() for k, v in expected.items()}, 0.0)


def test_export_is_a_hugging_face_folder(path: str, tied_path: str, two_ranks: OnRanks, tmp_path: Path) -> None:
    tokens = torch.tensor([[3, 9, 30, 11]])
    for name, model in (("plain", path), ("tied", tied_path)):
        result = two_ranks(trained, model, BATCH, Case(), 1, str(tmp_path / name))[0]
        export(str(tmp_path / name), str(tmp_path / f"{name}_exported"))
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / f"{name}_exported")
        reference = AutoModelForCausalLM.from_pretrained(model)
        with torch.no_grad():
            before = reference(tokens).logits
            for parameter_name, parameter in reference.named_parameters():
                parameter.copy_(torch.from_numpy(result["parameters"][parameter_name]))
            assert torch.equal(exported(tokens).logits, reference(tokens).logits)
            assert (before - reference(tokens).logits).abs().max() > 1e-4
        assert AutoTokenizer.from_pretrained(tmp_path / f"{name}_exported").encode("12 a")
        assert GenerationConfig.from_pretrained(tmp_path / f"{name}_exported").eos_token_id == [2, 0]
    export(str(tmp_path / "plain"), str(tmp_path / "half"), dtype="bf16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half").dtype == torch.bfloat16


def test_moments_come_to_the_device_for_training_and_saving_alone_and_random_states_come_back(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(path, Case(), OptimConfig(lr=1e-3), optimizer_offload=True)
    data, _ = planned(ragged_batch(BATCH), Case())
    came: list[str] = []
    monkeypatch.setattr(engine.optimizer, "to", lambda device: came.append(device.type))
    engine.move_in()
    engine.infer(data, temperature=1.0, calculate_entropy=False)
    assert came == []
    engine.train(data, loss_fn, temperature=1.0, calculate_entropy=True)
    engine.save(str(tmp_path))
    drawn = torch.rand(3)
    engine.load(str(tmp_path))
    assert came == ["cpu"] * 3 and torch.equal(torch.rand(3), drawn)
    engine.move_out()
    engine.fsdp_config.optimizer_offload = False
    engine.move_out()
    assert came == ["cpu"] * 4, "moments leave the device where optimizer_offload says so"


def test_a_save_in_the_background_that_fails_says_so_when_it_is_waited_for(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed: Future[None] = Future()
    failed.set_exception(OSError("disk on fire"))
    monkeypatch.setattr("workers.engine.checkpoint.save", lambda *arguments: failed)
    engine = build_engine(path, Case())
    engine.save(str(tmp_path), background=True)
    with pytest.raises(OSError, match="disk on fire"):
        engine.finish_save()
    engine.finish_save()  # said once


def test_forward_only_engine(path: str) -> None:
    engine = FSDPEngine(
        token_network(ModelConfig(path=path), causal_lm(16)),
        FSDPConfig(),
        None,
        device=CPU,
        total_training_steps=0,
        seed=0,
    )
    data, plan = planned(ragged_batch(BATCH), Case())
    outputs = engine.infer(data, temperature=0.7, calculate_entropy=False)
    assert outputs.keys() == {"log_probs"}
    assert np.abs(in_order(outputs["log_probs"].numpy(), plan) - plain_log_probs(path)["log_probs"]).max() < 1e-5
    assert not any(parameter.requires_grad for parameter in engine.policy.parameters())
    with pytest.raises(ValueError, match="without an optimizer"):
        engine.train(data, loss_fn, temperature=1.0, calculate_entropy=False)


def test_wrong_input_is_one_sentence(path: str, tmp_path: Path) -> None:
    engine = build_engine(path, Case())
    with pytest.raises(UserError, match="checkpoint"):
        engine.load(str(tmp_path))
    with pytest.raises(UserError, match="checkpoint"):
        export(str(tmp_path), str(tmp_path / "out"))
    with pytest.raises(UserError, match="model.path"):
        build_engine(str(tmp_path / "missing"), Case())
    with pytest.raises(UserError, match="override_config.hiden_size"):
        load_model_config(ModelConfig(path=path, override_config={"hiden_size": 3}))

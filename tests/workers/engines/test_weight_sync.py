"""Weight updates within a process: one copy of all tensors after the first, and an adapter with or without its base."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny_model import tiny_qwen2
from tests.trainer import tiny_run
from tests.workers.engine_cases import CPU, Case, build_engine
from verl_lite.config import MixedPrecisionConfig, ModelConfig, PPOConfig, RolloutConfig
from workers.engine import fsdp
from workers.engine.fsdp import FSDPEngine
from workers.engine.lora import is_adapter_parameter
from workers.engines import hf_engine
from workers.engines.hf_engine import HFEngine
from workers.policy.adapter import KeptBase, sends_adapter
from workers.roles.actor_rollout import sync_weights

BF16 = MixedPrecisionConfig(param_dtype="bf16")


def rollout_of(path: str, dtype: torch.dtype = torch.float32) -> HFEngine:
    options = RolloutConfig(kv_cache_memory_mb=32, max_num_seqs=4)
    more: dict[str, Any] = {"override_config": {}, "trust_remote_code": False}
    return HFEngine(path, options, max_model_len=32, device=CPU, dtype=dtype, seed=0, **more)


def perturb(engine: FSDPEngine) -> None:
    """Changes every trained parameter in place, as an optimizer does."""
    for parameter in engine.trained.values():
        local = parameter.to_local().detach()
        local.add_(torch.randn(local.shape) / 50)


def expect_loaded(engine: FSDPEngine, rollout: HFEngine) -> None:
    """The weights of `rollout` are bitwise those that each parameter gives by itself."""
    found = rollout._model.state_dict()
    for name, parameter in engine.parameters.items():
        assert torch.equal(found[name], parameter.to_local().to(engine.param_dtype).to(found[name].dtype)), name


@pytest.fixture
def names_checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of names in each check of a weight update, which loops over all of them."""
    checked: list[int] = []
    monkeypatch.setattr(hf_engine, "check_names", lambda given, expected: checked.append(len(given)))
    return checked


@pytest.mark.parametrize("tied", [True, False])
def test_later_updates_are_one_copy(tied: bool, tmp_path: Path, names_checked: list[int]) -> None:
    path = str(tiny_qwen2(tmp_path / "model", tie_word_embeddings=tied))
    engine, rollout = build_engine(path, Case()), rollout_of(path)
    for version in range(3):
        perturb(engine)
        metrics = sync_weights(engine, rollout, version, 512)
        expect_loaded(engine, rollout)
    tensors = dict(engine.full_params())
    assert names_checked == [len(tensors)], "only the first update looks at names"
    size = sum(tensor.nbytes for tensor in tensors.values())
    assert metrics["weight_sync/megabytes"].value == pytest.approx(size / 1e6)
    assert all(torch.equal(tensors[name], tensor) for name, tensor in engine.whole_params() or ())
    old = weakref.ref(engine.whole_params())
    engine.parameters = engine._sharded_parameters()  # as after a move to the host and back
    assert old() is None, "the rollout engine does not keep tensors that the trainer has moved"
    perturb(engine)
    sync_weights(engine, rollout, 4, 512)
    expect_loaded(engine, rollout)
    assert len(names_checked) == 2


def test_after_sleep_and_after_a_resume(tmp_path: Path, names_checked: list[int]) -> None:
    path = str(tiny_qwen2(tmp_path / "model"))
    engine, rollout = build_engine(path, Case()), rollout_of(path)
    sync_weights(engine, rollout, 1, 512)
    engine.save(str(tmp_path / "saved"))
    rollout._device = torch.device("cuda")
    rollout.sleep()
    rollout._device = CPU
    assert not any(tensor.untyped_storage().size() for tensor in rollout._model.parameters())
    rollout.wake()
    perturb(engine)
    sync_weights(engine, rollout, 2, 512)
    expect_loaded(engine, rollout)
    engine.load(str(tmp_path / "saved"))
    sync_weights(engine, rollout, 3, 512)
    expect_loaded(engine, rollout)
    assert len(names_checked) == 1


@pytest.mark.parametrize(("dtype", "copies"), [(torch.bfloat16, 1), (torch.float32, 2)])
def test_parameters_are_rounded_as_one_by_one(
    dtype: torch.dtype, copies: int, tmp_path: Path, names_checked: list[int]
) -> None:
    """A trainer that computes in bf16 rounds its fp32 parameters, also for an engine in fp32."""
    path = str(tiny_qwen2(tmp_path / "model"))
    engine, rollout = build_engine(path, Case(), mixed_precision=BF16), rollout_of(path, dtype)
    for version in range(2):
        perturb(engine)
        sync_weights(engine, rollout, version, 512)
        expect_loaded(engine, rollout)
    assert (len(names_checked) == 1) is (copies == 1)


def test_a_missing_parameter_is_an_error(tmp_path: Path) -> None:
    path = str(tiny_qwen2(tmp_path / "model"))
    engine, rollout = build_engine(path, Case()), rollout_of(path)
    engine.parameters.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"1 of .* parameters are missing, for example 'model.norm.weight'"):
        sync_weights(engine, rollout, 1, 512)
    assert not rollout.has_weights


def test_an_adapter_alone_gives_the_merged_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lora = str(tiny_qwen2(tmp_path / "model")), {"lora_rank": 3, "lora_alpha": 5}
    engine = build_engine(path, Case(), model=lora)
    merged, alone, kept = rollout_of(path), rollout_of(path), KeptBase(ModelConfig(path=path, **lora))
    gathered: list[str] = []
    gather = fsdp.gather_full

    def noting(parameters: Any, *arguments: Any) -> Any:
        gathered.extend(parameters)
        return gather(parameters, *arguments)

    for version in range(3):
        perturb(engine)
        sync_weights(engine, merged, version, 512)
        monkeypatch.setattr(fsdp, "gather_full", noting)
        sent = sync_weights(engine, alone, version, 512, kept)["weight_sync/megabytes"].value
        monkeypatch.setattr(fsdp, "gather_full", gather)
        found, expected = alone._model.state_dict(), merged._model.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert all(map(is_adapter_parameter, gathered)) is (version > 0), "the base model is gathered once"
        gathered.clear()
    assert sent == pytest.approx(sum(value.numel() * 4 for value in engine.trained.values()) / 1e6)


@pytest.mark.parametrize(
    ("rank", "shared", "option", "expected"),
    [(0, True, "adapter", False), (2, True, None, False), (2, False, None, True),
     (2, True, "adapter", True), (2, False, "merged", False)],
)  # fmt: skip
def test_what_is_sent_by_default(rank: int, shared: bool, option: str | None, expected: bool) -> None:
    config = PPOConfig(hybrid_engine=shared)
    config.model.lora_rank, config.rollout.lora_sync = rank, option
    assert sends_adapter(config) is expected


def test_a_run_is_the_same_with_both(tmp_path: Path) -> None:
    tiny_run.write_files(tmp_path, ["a", "b", "c", "d"])
    options, sizes = ["model.lora_rank=2", "trainer.total_training_steps=3", "actor.optim.lr=0.01"], []
    for kind in ("adapter", "merged"):
        rows = tiny_run.run(tmp_path, kind, *options, f"rollout.lora_sync={kind}")
        sizes.append(rows[-1]["weight_sync/megabytes"])
    assert tiny_run.samples(tmp_path, "adapter", 3) == tiny_run.samples(tmp_path, "merged", 3)
    assert sizes[0] < sizes[1] / 2

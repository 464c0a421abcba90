"""Seeds, and how an engine is found by its name."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from tests.tiny_model import tiny_qwen2
from verl_lite.config import ModelConfig, RolloutConfig
from workers.engines import base
from workers.engines.base import build_rollout_engine, choose_engine, derive_seed, resolve_engine_name, vllm_problem
from workers.policy import loading as loading  # imported before the tests replace find_spec


def test_derived_seed_is_a_fixed_function() -> None:
    # equal on every machine and in every release, or resumed runs would draw other samples
    digest = hashlib.blake2b(b"1\x1f7\x1fa\x1f3", digest_size=8).hexdigest()
    assert derive_seed(1, 7, "a", 3) == int(digest, 16) // 2 == 1708663157056481212
    assert derive_seed(1, 7, 12, 3) == derive_seed(1, 7, "12", 3)


def test_auto_takes_vllm_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: None)
    assert resolve_engine_name("auto") == "hf"
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: object() if name == "vllm" else None)
    assert resolve_engine_name("auto") == "vllm"
    assert resolve_engine_name("mine") == "mine"


def test_why_vllm_cannot_run_a_model_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, rollout = ModelConfig(path=tiny_qwen2(tmp_path, hidden=32, heads=2)), RolloutConfig()
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: object())
    assert "heads of 16" in (vllm_problem(model, rollout, "cpu") or "") and vllm_problem(model, rollout, "cuda") is None
    model.override_config = {"num_attention_heads": 1}
    assert vllm_problem(model, rollout, "cpu") is None
    monkeypatch.setattr(base, "HF_ONLY_ON_CPU", ("qwen2",))
    assert "a qwen2 model" in (vllm_problem(model, rollout, "cpu") or "")
    assert "GPU" in (vllm_problem(model, RolloutConfig(router_replay=True), "cpu") or "")
    monkeypatch.setattr(base.importlib.util, "find_spec", lambda name: None)
    assert vllm_problem(model, rollout, "cuda") == "vLLM is not installed"


def test_auto_prefers_the_hf_engine_on_a_cpu_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "vllm_problem", lambda *_: None)
    model = ModelConfig(path=tiny_qwen2(tmp_path))
    assert choose_engine(model, RolloutConfig(), 16, "cpu") == ("hf", "it is faster than vLLM on a CPU")
    assert choose_engine(model, RolloutConfig(), 16, "cuda")[0] == "vllm"
    for options in ({"tensor_model_parallel_size": 2}, {"engine_kwargs": {"vllm": {"block_size": 16}}}):
        name, reason = choose_engine(model, RolloutConfig(**options), 16, "cpu")
        assert name == "vllm" and f"rollout.{next(iter(options))}" in reason
    model.override_config = {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}
    assert "its window is 8" in choose_engine(model, RolloutConfig(), 16, "cpu")[1]
    assert choose_engine(model, RolloutConfig(), 8, "cpu")[0] == "hf"
    monkeypatch.setattr(base, "vllm_problem", lambda *_: "none here")
    assert choose_engine(model, RolloutConfig(), 16, "cpu") == ("hf", "none here")


def test_registered_engine_gets_all_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(base.ROLLOUT_ENGINES, "recorder", lambda *args, **kwargs: (args, kwargs))
    how = {"max_model_len": 8, "device": torch.device("cpu"), "dtype": torch.float32, "seed": 0}
    (path, config), kwargs = build_rollout_engine("recorder", "somewhere", RolloutConfig(), **how)
    assert path == "somewhere" and isinstance(config, RolloutConfig)
    assert set(kwargs) == {"max_model_len", "device", "dtype", "seed", "override_config", "trust_remote_code"}

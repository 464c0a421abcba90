"""Experts are one tensor of three dimensions a layer: sharded, trained, saved, exported, adapted, and synced by name.

Two families: one whose experts have other names in files, one with biases of the router that are saved without being
parameters.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_experts import tiny_experts
from tests.workers.engine_cases import Batch, Case, assert_close, build_engine, trained
from tests.workers.engines.test_engines import expect_plain, make_engine, run, vllm_missing
from tests.workers.ranks import Ranks
from verl_lite.errors import UserError
from workers.engines.base import Request, SamplingParams
from workers.policy.export import export
from workers.roles.actor_rollout import sync_weights

FAMILIES: dict[str, dict[str, Any]] = {"mixtral": {}, "glm4_moe": {"first_k_dense_replace": 0}}
BIAS = "model.layers.0.mlp.gate.e_score_correction_bias"
BATCH = Batch(rows=8, shared_prompts=4)
CASE = Case(max_token_len=60)


def write(folder: Path, family: str, seed: int = 0) -> str:
    return tiny_experts(folder / f"{family}{seed}", family, seed, **FAMILIES[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_train_save_and_export_what_one_does(family: str, tmp_path: Path, ranks: Ranks) -> None:
    path, folder = write(tmp_path, family), str(tmp_path / "checkpoint")
    before = AutoModelForCausalLM.from_pretrained(path).state_dict()
    alone = trained(path, BATCH, CASE, 2)["parameters"]
    for found in ranks.run(trained, path, BATCH, CASE, 2, folder, size=2):
        assert_close(found["parameters"], alone, 2e-6)
    assert alone.keys() == before.keys()
    assert all(
        bool((before[name] != torch.from_numpy(value)).any()) != (BIAS[-10:] in name) for name, value in alone.items()
    )
    other = write(tmp_path, family, seed=1)  # whatever it starts from, a checkpoint is loaded whole
    loaded = trained(other, BATCH, CASE, 0, load=folder)["parameters"]
    export(folder, str(tmp_path / "exported"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported").state_dict()
    for name, value in found["parameters"].items():
        assert np.array_equal(loaded[name], value) and np.array_equal(exported[name], value), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["hf", pytest.param("vllm", marks=[pytest.mark.slow, pytest.mark.long, vllm_missing])])
def test_what_is_sampled_after_an_update_is_what_is_trained(name: str, family: str, tmp_path: Path) -> None:
    paths = [write(tmp_path, family, seed) for seed in (0, 1)]
    engine = make_engine(name, paths[0], 64)
    for version, path in enumerate(paths):  # twice: a first update may differ from those after it
        sync_weights(build_engine(path, Case()), engine, version, 512)
        request = Request("r", tuple(range(3, 23)), SamplingParams(max_tokens=12, seed=1, ignore_eos=True))
        expect_plain(run(engine, [request]), AutoModelForCausalLM.from_pretrained(path), [request])
    engine.close()


def test_an_adapter_leaves_experts_and_routers_as_they_are(tmp_path: Path) -> None:
    """They are no linear layers: all-linear means the others, and by name they are refused."""
    path = write(tmp_path, "glm4_moe")
    engine = build_engine(path, Case(), model={"lora_rank": 2})
    assert {name.split(".")[3] for name in engine.trained} == {"self_attn", "mlp"}
    assert not any(".experts." in name or ".mlp.gate." in name for name in engine.trained)
    assert dict(engine.full_params()).keys() == AutoModelForCausalLM.from_pretrained(path).state_dict().keys()
    with pytest.raises(UserError, match="target_modules: gate_up_proj matches no linear layer"):
        build_engine(path, Case(), model={"lora_rank": 2, "target_modules": ["gate_up_proj"]})

"""Episodes over the real engines: what is trained on is what was sampled, at the places where it was sampled."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_model import tiny_qwen2, tiny_tokenizer
from tests.workers.rollout.scripted import END, ScriptedPool, spec, template
from verl_lite.config import RolloutConfig
from verl_lite.protocol import DataProto
from workers.rollout.base import RolloutEngine, SamplingParams, build_rollout_engine
from workers.rollout.episodes import EpisodeRunner, TokenLimits, Trajectory
from workers.rollout.trajectories import trajectory_rows

LIMITS = TokenLimits(max_prompt_length=80, max_response_length=150, max_model_len=230)
TEMPERATURE = 0.8
vllm_missing = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    root: Path = tmp_path_factory.mktemp("model")
    return tiny_qwen2(root, seed=0)


@pytest.fixture(scope="module")
def model(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(params=["hf", pytest.param("vllm", marks=[pytest.mark.slow, vllm_missing])])
def engine(request: pytest.FixtureRequest, folder: str, model: Any) -> Iterator[RolloutEngine]:
    engine = build_rollout_engine(
        request.param,
        folder,
        RolloutConfig(kv_cache_memory_mb=32, max_num_seqs=8, max_num_batched_tokens=2048),
        max_model_len=LIMITS.max_model_len,
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=0,
    )
    engine.load_weights(iter(model.named_parameters()), 1)
    engine.reset_cache()
    yield engine
    engine.close()


def reacting(seed: int, actions: list[str]) -> dict[str, Any]:
    rng = random.Random(f"{seed} {actions}")
    return {"observation": "abcdef"[: rng.randrange(1, 6)], "reward": rng.random(), "terminated": rng.random() < 0.1}


def run(engine: RolloutEngine, *, max_live: int, latency: tuple[int, int], by: str) -> tuple[list[Trajectory], Any]:
    pool = ScriptedPool(reacting, latency=latency)
    entry = template(max_steps=4, max_tokens_per_step=12, env_manager_cls=by, agent_template="{observation} go")
    runner = EpisodeRunner(
        engine, pool, tiny_tokenizer(), {"t": entry}, LIMITS, seed=5, stop_token_ids=(0, END), max_live=max_live
    )
    specs = [spec(f"g{group}_{member}", seed=group, group_size=2) for group in range(4) for member in range(2)]
    runner.begin(specs, SamplingParams(temperature=TEMPERATURE, max_tokens=150))
    while runner.unfinished(0):
        runner.advance(wait_s=1.0)
    assert engine.unfinished == 0
    trajectories = runner.take(0)
    data = trajectory_rows(
        trajectories,
        pad_token_id=0,
        prompt_length=LIMITS.max_prompt_length,
        response_length=LIMITS.max_response_length,
    )
    return trajectories, data


@torch.no_grad()
def plain_log_probs(model: Any, data: DataProto) -> torch.Tensor:
    """(B, R) of the responses, by one forward over the padded rows as a trainer sees them."""
    batch = data.batch
    logits = model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]
    ).logits
    width = batch["responses"].shape[1]
    log_probs = torch.log_softmax(logits[:, -width - 1 : -1].float() / TEMPERATURE, dim=-1)
    return log_probs.gather(-1, batch["responses"][..., None])[..., 0]


@pytest.mark.parametrize("by", ["trajectory", "step"])
def test_rollout_log_probs_are_those_of_a_plain_forward_over_the_rows(
    engine: RolloutEngine, model: Any, by: str
) -> None:
    trajectories, data = run(engine, max_live=5, latency=(0, 4), by=by)
    mask = data.batch["response_mask"].bool()
    assert max(len(one.turns) for one in trajectories) == 4
    assert {turn.finish_reason for one in trajectories for turn in one.turns} == {"stop", "length"}
    assert mask.any(-1).all() and (~mask & (data.batch["rollout_log_probs"] != 0)).sum() == 0
    expected = plain_log_probs(model, data)
    torch.testing.assert_close(data.batch["rollout_log_probs"][mask], expected[mask], atol=1e-4, rtol=0)
    # one place further it is another token: the comparison sees a shift
    assert (data.batch["rollout_log_probs"].roll(1, -1)[mask] - expected[mask]).abs().mean() > 0.3


def test_the_same_trajectories_in_any_company(engine: RolloutEngine) -> None:
    expected, _ = run(engine, max_live=100, latency=(0, 0), by="trajectory")
    for max_live in (1, 3):
        found, _ = run(engine, max_live=max_live, latency=(0, 6), by="trajectory")
        for one, other in zip(found, expected, strict=True):
            assert [turn.response_ids for turn in one.turns] == [turn.response_ids for turn in other.turns]
            assert one.score == other.score and one.messages == other.messages

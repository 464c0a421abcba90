"""Routing replay: the experts that sampled a token are those that train it, however the router has moved since."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.tiny_experts import tiny_experts
from tests.workers.engine_cases import Case, build_engine, gradient_of
from tests.workers.engines.test_engines import ask, episodes, make_engine, run
from tests.workers.policy.test_router import FAMILIES, watch_experts
from tests.workers.rollout.scripted import answer
from verl_lite.config import ActorConfig
from verl_lite.protocol import DataProto
from workers.agents.trajectories import trajectory_rows
from workers.engine.fsdp import FSDPEngine
from workers.engines.base import RolloutEngine, SamplingParams
from workers.losses import actor_loss
from workers.policy.causal_lm import causal_lm
from workers.policy.router import ROUTED_EXPERTS, Routers, find_routers
from workers.rollout.runner import Runner

CASES = [
    Case(),
    Case(micro_batch_size=1),
    Case(packed=False, micro_batch_size=3),
    Case(checkpointing=True, max_token_len=45),
    Case(checkpointing=True, max_token_len=45, recomputed=1, offload=True),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_experts(tmp_path_factory.mktemp("experts"), norm_topk_prob=True)


@pytest.fixture(scope="module")
def noisy_path(path: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model with noise on its routers."""
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(1)
        for router in find_routers(model):
            router.weight += 0.1 * torch.randn_like(router.weight)
    folder = tmp_path_factory.mktemp("noisy")
    model.save_pretrained(folder)
    return str(folder)


def engine_of(path: str, max_model_len: int = 64) -> RolloutEngine:
    """With few slots, so that sequences wait, move and leave."""
    engine = make_engine("hf", path, max_model_len, max_num_seqs=4, router_replay=True)
    engine.load_weights(AutoModelForCausalLM.from_pretrained(path).state_dict().items(), 0)
    return engine


@torch.no_grad()
def plain_experts(model: Any, ids: tuple[int, ...]) -> torch.Tensor:
    """(T, layers, k) by one ordinary forward, sorted."""
    with Routers(model).watched() as routes:
        model(torch.tensor([ids]))
    return torch.stack([layer.experts for layer in routes], dim=1).sort(-1).values


def test_the_engine_keeps_the_experts_of_each_token(path: str) -> None:
    """Of equal prompts, of others, and of a prompt that goes on from a request that ended."""
    engine = engine_of(path)
    prompts = [tuple(range(3, 3 + length)) for length in (5, 5, 1, 9, 12, 12, 7)]
    for _ in range(2):
        done = run(
            engine,
            [
                ask(number, ids, max_tokens=4 + number, seed=number, ignore_eos=True)
                for number, ids in enumerate(prompts)
            ],
        )
        for number, ids in enumerate(prompts):
            found, whole = done[str(number)].extra[ROUTED_EXPERTS], (*ids, *done[str(number)].token_ids)
            assert found.dtype == torch.int16
            expected = plain_experts(AutoModelForCausalLM.from_pretrained(path), whole[:-1])
            assert torch.equal(found.sort(-1).values.long(), expected)
            prompts[number] = (*whole, 7, 8)


@pytest.mark.parametrize("by", ["trajectory", "step"])
def test_the_turns_of_an_episode_keep_their_experts(path: str, by: str) -> None:
    """Also of what the environment said between them; not of a trajectory that failed."""
    engine, model = engine_of(path, 230), AutoModelForCausalLM.from_pretrained(path)
    found = episodes(Runner(engine), max_live=5, latency=(0, 4), by=by)
    failed = replace(found.pop(), stop="failed")
    batch = trajectory_rows(
        [*found, failed], pad_token_id=0, prompt_length=80, response_length=150, extra_outputs={ROUTED_EXPERTS: (2, 2)}
    ).batch
    assert max(len(one.turns) for one in found) > 2
    for ids, mask, routed in zip(batch["input_ids"], batch["attention_mask"], batch["routed_experts"], strict=True):
        [places] = mask.nonzero(as_tuple=True)
        expected = torch.full_like(routed, -1)
        if mask[80:].any():
            expected[places[:-1]] = plain_experts(model, tuple(ids[places].tolist()))[:-1].to(torch.int16)
        assert torch.equal(routed.sort(-1).values, expected)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_experts_that_are_given_are_taken(family: str, tmp_path: Path) -> None:
    """A router's own choice, given back, changes no bit; another is taken, with scores that are not zero."""
    model = AutoModelForCausalLM.from_pretrained(tiny_experts(tmp_path, family, **FAMILIES[family]))
    routers, ids = Routers(model), torch.arange(3, 14)[None]
    with routers.watched() as routes:
        expected = model(ids).logits
    own = torch.stack([layer.experts for layer in routes], dim=1)
    with routers.watched(own) as routes:
        assert torch.equal(model(ids).logits, expected) and not any(layer.changed.any() for layer in routes)
    other, given = (own + 1) % 8, watch_experts(model)
    with routers.watched(other) as routes:
        model(ids)
    for layer, (one, two) in enumerate(given):
        indices, weights = (one, two) if not one.is_floating_point() else (two, one)
        assert torch.equal(indices.view(-1, routers.top_k), other[:, layer]) and (weights > 0).all()
    moved = (other[:, 0].sort(-1).values != own[:, 0].sort(-1).values).any(-1)
    assert torch.equal(routes[0].changed, moved), "the first router sees what it saw before"


@pytest.fixture(scope="module")
def sampled(path: str) -> DataProto:
    """Answers of several lengths, three to each of three prompts, with the experts that sampled them."""
    lengths, prompts, mask = (4, 7, 8), torch.zeros(9, 8, dtype=torch.long), torch.zeros(9, 8, dtype=torch.long)
    for row in range(9):
        tokens = torch.arange(5, 5 + lengths[row // 3]) * (row // 3 + 1)
        prompts[row, 8 - len(tokens) :], mask[row, 8 - len(tokens) :] = tokens, 1
    names = {"uid": np.repeat(np.array(["a", "b", "c"], dtype=object), 3), "sample": np.tile(np.arange(3), 3)}
    rows = DataProto.from_dict({"prompts": prompts, "prompt_mask": mask}, names)
    sampling = SamplingParams(temperature=2.0, max_tokens=10, stop_token_ids=tuple(range(30, 40)))
    data = answer(engine_of(path), rows, sampling, 10)
    advantages = torch.randn(9, 10, generator=torch.Generator().manual_seed(0))
    kept = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask", "routed_experts")
    return DataProto.from_dict({name: data.batch[name] for name in kept} | {"advantages": advantages})


def update_engine(path: str, case: Case) -> FSDPEngine:
    return build_engine(path, case, build_policy=causal_lm(16, with_routers=True))


def share_of_other_experts(path: str, data: DataProto, routed: torch.Tensor, packed: bool) -> tuple[float, float]:
    """Of pairs of token and layer: those that others than the rollout's experts compute, and what is reported."""
    engine, found, total = update_engine(path, Case(packed=packed)), 0, 0
    given = watch_experts(engine.policy)
    inputs, _ = engine.policy.prepare_inputs(data, torch.device("cpu"))
    replayed = "routed_experts" in data.batch.keys()
    outputs = engine.policy(inputs, temperature=1.0, calculate_entropy=False, count_router_replay=replayed)
    rows, columns = (inputs.token_index >= 0).nonzero(as_tuple=True)
    for layer, (experts, _) in enumerate(given):
        taken = experts[inputs.token_index[rows, columns]].sort(-1).values
        expected = routed[rows, columns, layer].sort(-1).values
        found, total = found + int((taken != expected).any(-1).sum()), total + len(rows)
    changed, pairs = outputs["router_replay"].sum(0).tolist() if replayed else (0.0, 1.0)
    return found / total, changed / pairs


@pytest.mark.parametrize("packed", [True, False])
def test_with_noise_on_the_routers_the_experts_are_the_rollouts(
    packed: bool, path: str, noisy_path: str, sampled: DataProto
) -> None:
    routed = sampled.batch["routed_experts"]
    free = sampled.select(batch_keys=[name for name in sampled.batch.keys() if name != "routed_experts"])
    moved, _ = share_of_other_experts(noisy_path, free, routed, packed)
    assert moved > 0.1, "without replay the routers choose others"
    assert share_of_other_experts(path, sampled, routed, packed) == (0.0, 0.0)
    taken, reported = share_of_other_experts(noisy_path, sampled, routed, packed)
    assert taken == 0.0 and reported > 0.1


def test_routers_learn_and_the_gradient_does_not_depend_on_the_cut(noisy_path: str, sampled: DataProto) -> None:
    def loss(data: DataProto, outputs: dict[str, torch.Tensor]) -> Any:
        return actor_loss(data, outputs, ActorConfig())

    found = []
    for case in CASES:
        engine = update_engine(noisy_path, case)
        found.append(gradient_of(engine, sampled, case, loss, temperature=1.0, calculate_entropy=False))
    routers = [name for name in found[0] if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2 and all(np.abs(found[0][name]).max() > 1e-4 for name in routers)
    for other in found[1:]:
        for name, value in found[0].items():
            assert np.abs(other[name] - value).max() < 1e-5 * np.abs(value).max(), name


def test_tokens_without_experts_are_an_error(path: str, sampled: DataProto) -> None:
    lacking = replace(sampled, batch=sampled.batch.clone())
    lacking.batch["routed_experts"][3] = -1
    with pytest.raises(ValueError, match="column 'routed_experts' has no value for a token"):
        update_engine(path, Case()).policy.prepare_inputs(lacking, torch.device("cpu"))
